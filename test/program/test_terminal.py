"""The trainer on a terminal: lines of progress, progress within a step, and Ctrl-C."""
import os
import pty
import re
import select
import signal
import time

from trainer import ENVIRONMENT, TRAINER, TrainerTest

# A step with a million micro-steps, which outlasts the test.
ENDLESS = {"train_total_batch_tokens": 60 * 1_000_000, "schedule_warmup_steps": 0}


class OnTerminal:
    """A program in the foreground of a separate terminal."""

    def __init__(self, command, folder):
        self.text = ""
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.chdir(folder)
            os.execve(command[0], [str(part) for part in command], {**ENVIRONMENT, "OMP_NUM_THREADS": "2"})

    def type(self, text):
        os.write(self.master, text.encode())

    def read(self, seconds):
        """Reads output for up to `seconds`; returns False once the program has ended."""
        if not select.select([self.master], [], [], seconds)[0]:
            return True
        try:
            self.text += os.read(self.master, 65536).decode(errors="replace")
        except OSError:
            return False
        return True

    def wait_for(self, pattern, seconds=60):
        """Waits until the program has printed the pattern; returns the seconds it took."""
        begin = time.monotonic()
        while not re.search(pattern, self.text):
            assert time.monotonic() - begin < seconds, f"no {pattern!r} after {seconds} s:\n{self.text}"
            assert self.read(0.1), f"no {pattern!r} before the end:\n{self.text}"
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


class Terminal(TrainerTest):
    def start(self, **changes):
        terminal = OnTerminal([TRAINER, self.write_config(**changes)], self.dir)
        self.addCleanup(terminal.end)
        return terminal

    def test_lines(self):
        terminal = self.start(train_max_steps=200, log_every_steps=50, eval_every_steps=50, eval_batches=1,
                              sample_every_steps=100, sample_tokens=5, sample_prompt="The ")
        self.assertEqual(terminal.finish(), 0)
        self.assertTrue(terminal.text.replace("\r\n", "").isprintable(), terminal.text)
        text = terminal.text.replace("\r\n", "\n")
        for step in (50, 100, 150, 200):
            self.assertEqual(len(re.findall(rf"^step {step} \| validation loss \d", text, re.M)), 1, text)
        self.assertEqual(re.findall(r"^step (\d+) \| sample\nThe ", text, re.M), ["100", "200"])
        self.assertEqual(re.findall(r"^step (\d+)/200", text, re.M), ["1", "50", "100", "150", "200"])
        self.assertRegex(text, rf"\nstep 200/200 \| loss {self.losses('run')[-1]:.4f} \| lr \S+ \| norm \S+ "
                               r"\| [\d,]+ tokens/s \| \d+ ms \| 0 s left\n")
        self.assertRegex(text, r"\ntrained  200 steps, [\s\S]*\nnext: .*\n$")

    def test_ctrl_c_answers_within_a_long_step(self):
        terminal = self.start(**ENDLESS)
        terminal.wait_for(r"\nrun +")
        for _ in range(10):  # the first step has begun
            terminal.read(0.1)
        terminal.type("\x03")
        self.assertLess(terminal.wait_for("stopping after this step; press again to stop now"), 2)
        terminal.type("\x03")
        self.assertEqual(terminal.finish(), 128 + signal.SIGINT)
