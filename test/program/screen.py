"""A trainer on a pseudo-terminal, and the screen that a user sees."""
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time

ERASE = "\x1b[K"  # from the cursor to the end of the line


class Screen:
    """The lines of a terminal. Supports the one escape that TrainingProgress sends; any other one is an error."""

    def __init__(self, columns):
        self.columns = columns
        self.lines, self.column = [""], 0
        self.widest = 0

    def put(self, character):
        if self.column >= self.columns:
            self.feed("\r\n")
        line = self.lines[-1].ljust(self.column)
        self.lines[-1] = line[:self.column] + character + line[self.column + 1:]
        self.column += 1
        self.widest = max(self.widest, self.column)

    def feed(self, text):
        place = 0
        while place < len(text):
            if text.startswith(ERASE, place):
                self.lines[-1] = self.lines[-1][:self.column]
                place += len(ERASE)
                continue
            character = text[place]
            if character == "\r":
                self.column = 0
            elif character == "\n":
                self.lines.append("")
            else:
                assert character.isprintable(), repr(character)
                self.put(character)
            place += 1

    def text(self):
        return "\n".join(line.rstrip() for line in self.lines)


class OnTerminal:
    """A program in the foreground of its own terminal."""

    def __init__(self, command, folder, environment, columns=90, rows=24):
        self.screen, self.raw, self.pending = Screen(columns), "", b""
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.chdir(folder)
            os.execve(command[0], [str(part) for part in command], environment)
        self.resize(columns, rows)

    def resize(self, columns, rows=24):
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.screen.columns, self.screen.widest = columns, 0

    def type(self, text):
        os.write(self.master, text.encode())

    def read(self, seconds):
        """Reads output for up to `seconds`; returns False once the program has ended."""
        if not select.select([self.master], [], [], seconds)[0]:
            return True
        try:
            self.pending += os.read(self.master, 65536)
        except OSError:
            return False
        # A character or an escape may be incomplete. The echo of ^C can split a character permanently.
        cut = re.search(rb"(\x1b(\[\d*)?|[\xc0-\xff][\x80-\xbf]{0,2})$", self.pending)
        end = len(self.pending)
        if cut and not re.fullmatch(rb"[\xc0-\xdf].|[\xe0-\xef]..", cut[0], re.S):
            end = cut.start()
        text, self.pending = self.pending[:end].decode(errors="replace"), self.pending[end:]
        self.raw += text
        self.screen.feed(text)
        return True

    def wait_for(self, pattern, seconds=60):
        """Waits until the screen shows the pattern; returns the seconds it took."""
        begin = time.monotonic()
        while not re.search(pattern, self.screen.text()):
            assert time.monotonic() - begin < seconds, f"no {pattern!r} after {seconds} s:\n{self.screen.text()}"
            assert self.read(0.1), f"no {pattern!r} before the end:\n{self.screen.text()}"
        return time.monotonic() - begin

    def finish(self):
        """Reads until the program ends; returns its exit code, or minus its signal."""
        while self.read(60):
            pass
        return self.reap()

    def reap(self):
        status = os.waitpid(self.pid, 0)[1]
        self.pid = 0
        os.close(self.master)
        return os.waitstatus_to_exitcode(status)

    def end(self):
        """Cleans up after a failed test."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self.reap()
