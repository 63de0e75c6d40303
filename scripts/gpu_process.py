"""Processes for gpu_check.py: runs a program in its own process group, with limits on time and on stored output, and
ends it with all its children. A thread samples the GPU's clocks.
"""
import contextlib
import os
import select
import signal
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 5  # from SIGTERM to SIGKILL

# Bits of nvidia-smi's clocks_event_reasons.active, without idle and clocks set by the user.
SLOWDOWNS = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "thermal", 0x40: "hardware thermal", 0x80: "power brake"}
CLOCK_FIELDS = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
REASON_FIELDS = (",clocks_event_reasons.active", ",clocks_throttle_reasons.active", "")  # newer and older drivers
MAX_FAILED_SAMPLES = 3


class Log:
    """Keeps the first and the last `half` bytes of a program's output."""

    def __init__(self, half):
        self.half, self.head, self.tail, self.dropped = half, bytearray(), bytearray(), 0

    def add(self, data):
        room = self.half - len(self.head)
        self.head += data[:room]
        self.tail += data[room:]
        if len(self.tail) > 2 * self.half:
            self.cut()

    def cut(self):
        excess = max(0, len(self.tail) - self.half)
        self.dropped += excess
        del self.tail[:excess]

    def content(self):
        self.cut()
        note = f"\n[... {self.dropped} bytes are left out ...]\n".encode() if self.dropped else b""
        return bytes(self.head) + note + bytes(self.tail)

    def text(self):
        return self.content().decode(errors="replace")


@dataclass
class Outcome:
    """How a process ended. `code` is subprocess's returncode; None if it could not start or did not end."""
    code: object
    seconds: float
    timed_out: bool = False
    interrupted: bool = False
    error: str = ""  # why it was not started


def send(group, number):
    """Sends a signal to a process group; ignores a group that no longer exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def kill_marked(mark):
    """Kills every process with this entry in its environment, even outside the process group."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)


def wait(process, seconds):
    """Returns whether the process ended within `seconds`."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0, seconds))
    return process.returncode is not None


def read_into(log, pipe, done):
    """Copies a pipe into a log until its end, or until it is empty once `done` is set: an escaped process may keep the
    pipe open forever."""
    while True:
        ready = select.select([pipe], [], [], 0 if done.is_set() else 0.2)[0]
        data = os.read(pipe, 1 << 16) if ready else b""
        if (ready and not data) or (not ready and done.is_set()):
            return
        log.add(data)


def run(command, seconds, log, stop=None, environment=None, folder=None, search=True):
    """Runs a command for at most `seconds` with output to `log`, then ends its process group (SIGTERM, SIGKILL after
    GRACE_S) and, with `search`, all other processes that it started. Setting the event `stop` ends it early. Never
    raises because of the command."""
    start = time.monotonic()
    mark = f"GPU_CHECK_PROCESS={os.getpid()}.{threading.get_ident()}.{start}"
    variables = dict(os.environ if environment is None else environment)
    variables.update([mark.split("=")])
    read_end, write_end = os.pipe()
    try:
        process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=write_end,
                                   stderr=subprocess.STDOUT, cwd=folder, env=variables, start_new_session=True)
    except OSError as error:
        os.close(read_end)
        return Outcome(None, 0, error=str(error))
    finally:
        os.close(write_end)
    done = threading.Event()
    reader = threading.Thread(target=read_into, args=(log, read_end, done), daemon=True)
    reader.start()
    while not wait(process, min(0.1, start + seconds - time.monotonic())):
        if (stop and stop.is_set()) or time.monotonic() >= start + seconds:
            break
    ended = process.returncode is not None
    if not ended:
        send(process.pid, signal.SIGTERM)
        wait(process, GRACE_S)
    send(process.pid, signal.SIGKILL)
    if search:
        kill_marked(mark)
    wait(process, GRACE_S)  # bounded: a process can be stuck in the driver
    done.set()
    reader.join()
    os.close(read_end)
    interrupted = not ended and stop is not None and stop.is_set()
    return Outcome(process.returncode, time.monotonic() - start, not ended and not interrupted, interrupted)


def number(text):
    """The number in a field of nvidia-smi; None for N/A."""
    try:
        return float(int(text, 16)) if text.startswith("0x") else float(text)
    except ValueError:
        return None


class Sampler(threading.Thread):
    """Samples clocks, power and temperature of GPU 0 every second until stop(). Gives up after several failures."""

    def __init__(self, every_s=1.0):
        super().__init__(daemon=True)
        self.every_s, self.ended = every_s, threading.Event()
        self.samples = []  # (time.monotonic(), SM MHz, memory MHz, W, degrees C, reasons), None where N/A
        self.reasons, self.failed = 0, 0

    def run(self):
        while not self.ended.is_set() and self.failed < MAX_FAILED_SAMPLES:
            self.take()
            self.ended.wait(self.every_s)

    def take(self):
        log = Log(1 << 12)
        fields = CLOCK_FIELDS + REASON_FIELDS[self.reasons]
        outcome = run(["nvidia-smi", "-i", "0", f"--query-gpu={fields}", "--format=csv,noheader,nounits"], GRACE_S, log,
                      self.ended, search=False)
        values = [number(field.strip()) for field in log.text().strip().split("\n")[0].split(",")]
        if outcome.code == 0 and len(values) == len(fields.split(",")):
            self.failed = 0
            self.samples.append((time.monotonic(), *(values + [None])[:5]))
        elif outcome.code and self.reasons + 1 < len(REASON_FIELDS):
            self.reasons += 1
        else:
            self.failed += 1

    def stop(self):
        self.ended.set()
        self.join(2 * GRACE_S)

    def between(self, start, end):
        """Summary between two times: min, median and max of the SM clock in MHz; median and max of the power in W; the
        highest temperature in C; slowdowns. Omits values that nvidia-smi did not report."""
        samples = [sample for sample in list(self.samples) if start <= sample[0] <= end]
        if not samples:
            return {}
        _, sm, memory, watts, celsius, reasons = ([value for value in column if value is not None]
                                                  for column in zip(*samples))
        clocks = {"samples": len(samples)}
        if sm:
            clocks["sm_mhz"] = [min(sm), statistics.median(sm), max(sm)]
        if memory:
            clocks["memory_mhz"] = statistics.median(memory)
        if watts:
            clocks["watts"] = [statistics.median(watts), max(watts)]
        if celsius:
            clocks["celsius"] = max(celsius)
        seen = 0
        for mask in reasons:
            seen |= int(mask)
        clocks["slowdowns"] = [name for bit, name in SLOWDOWNS.items() if seen & bit]
        return clocks

    def csv(self):
        lines = ["seconds,sm_mhz,memory_mhz,watts,celsius,reasons"]
        first = self.samples[0][0] if self.samples else 0
        lines += [",".join("" if value is None else f"{value:g}" for value in (when - first, *values))
                  for when, *values in list(self.samples)]
        return "\n".join(lines) + "\n"
