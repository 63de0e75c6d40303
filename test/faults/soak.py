#!/usr/bin/env python3
"""Soak test: three ranks on a faulty file system, with a random fault every few seconds: python3 test/faults/soak.py

A new checkpoint must follow each fault within two minutes, and the run must end with the same log and weights, bit for
bit, as a run without faults. Then another run with another seed begins, until the time is up. --supervise restarts the
run; this program does so if the whole trainer was killed. A final exit code that the last fault does not explain fails
the soak. Prints a table of the faults in Markdown.
"""
import argparse
import collections
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from campaign import NANO, Campaign, have_private_mounts, supervised
from faulty_fs import FaultyFs, why_not
from test_ranks import MPI_ENVIRONMENT, is_gone
from test_scripts import exit_codes
from trainer import TRAINER, small_data, trainers_in

RANKS = 3
# No norms: they depend on which samples rank 0 has.
RUN = {**NANO, "model_n_layer": 2, "model_n_embd": 32, "checkpoint_every_steps": 40, "checkpoint_keep": 3,
       "eval_every_steps": 500, "sample_every_steps": 500, "log_norms_every_steps": 0, "parallel_silence_s": 4,
       "parallel_step_timeout_s": 20, "parallel_start_timeout_s": 40}  # mpirun may hang if a rank dies in MPI_Init
RESTART = {code for code, (_, policy, _) in exit_codes().items() if policy != "final"}
EXPLAINED = {"flipped byte": {65, 78}, "signal": {130, 143}}  # final exit codes; 78: the data changed
CRASHES = {128 + number for number in (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV)}
PROGRESS_S = 120
LEAST_AN_HOUR = 50  # faults of each class


class Failure(Exception):
    """A requirement was violated."""


def listening_ports(pids):
    """Returns the TCP ports on which the processes listen."""
    sockets = set()
    for pid in pids:
        try:
            sockets |= {os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()}
        except OSError:  # it has exited
            pass
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    return {int(place.rpartition(":")[2], 16) for table in tables for _, place, _, state, *_, inode in
            (line.split()[:10] for line in table) if state == "0A" and f"socket:[{inode}]" in sockets}


class Soak:
    def __init__(self, folder, seed, steps):
        self.folder = Path(folder)
        self.draws = random.Random(seed)
        self.steps = steps
        self.disk = FaultyFs(folder)
        self.results = Campaign()  # reads the files of runs
        self.results.dir = self.disk.backing
        shutil.copytree(small_data().name, self.disk.backing, dirs_exist_ok=True)
        keys = subprocess.run([TRAINER, "--help-config"], capture_output=True, text=True, check=True).stdout
        start_up = {"parallel_start_timeout_s": 20} if "parallel.start_timeout_s" in keys else {}
        self.results.write_config(**{**RUN, **start_up, "train_max_steps": steps})
        self.segments = self.folder / "segments"  # shared memory that killed ranks leave
        self.segments.mkdir()
        self.environment = {**MPI_ENVIRONMENT, "OMPI_MCA_btl_vader_backing_directory": str(self.segments)}
        self.seed = 0
        self.process = None
        self.faults = collections.Counter()  # by class
        self.ends = collections.defaultdict(collections.Counter)  # class -> exit codes that followed
        self.went_on = collections.Counter()
        self.said = {}  # class -> a message that followed
        self.runs = self.missed = 0
        self.fault = self.fault_before = "none"
        self.classes = {"kill": self.kill, "stop": self.stop, "EIO": self.fail_with_eio, "ENOSPC": self.fill_disk,
                        "short write": self.shorten, "stalled read": self.stall, "flipped byte": self.flip,
                        "moved directory": self.move, "signal": self.send_signal, "junk on ports": self.send_junk}

    # ---- the run ----------------------------------------------------------------------------------------------------

    @property
    def run(self):
        return f"run_{self.seed}"

    def begin_run(self):
        """Starts a run with the next seed, after a reference run on one rank without faults, which has equal bits."""
        self.seed += 1
        command = [TRAINER, "config.json", *self.settings(f"whole_{self.seed}")]
        subprocess.run(command, cwd=self.disk.backing, check=True, stdout=subprocess.DEVNULL, env=MPI_ENVIRONMENT)
        self.log = (self.folder / f"{self.run}.said").open("w")
        self.said_so_far = open(self.log.name, errors="replace")
        self.start()

    def settings(self, run):
        return ["--set", f"run.dir={run}", "--set", f"run.seed={self.seed}"]

    def start(self):
        command = [*supervised(RANKS), "config.json", "--auto", *self.settings(self.run)]
        self.sentences = []  # messages of the trainer since this start
        self.process = subprocess.Popen(command, cwd=self.disk.at, stdout=self.log, stderr=self.log,
                                        env=self.environment, start_new_session=True)

    def ranks(self):
        return [pid for pid in trainers_in(self.disk.at) if pid != self.process.pid]

    def wait_for_ranks(self):
        deadline = time.monotonic() + PROGRESS_S
        while len(ranks := self.ranks()) < RANKS or not (self.disk.backing / self.run).exists():
            self.look_after()
            if time.monotonic() > deadline:
                raise Failure(f"{len(ranks)} of {RANKS} ranks after {PROGRESS_S} s")
            time.sleep(0.05)
        return ranks

    def look_after(self):
        """Restarts the run if it has ended with a code that allows it. Returns true if the run was complete."""
        code = self.process.poll()
        said = self.said_so_far.read()
        new = [line for line in said.splitlines() if line.startswith("train_gpt: ")]
        self.sentences += new
        if new:
            self.said.setdefault(self.fault, new[0])
        if "internal error" in said:
            raise Failure(f"an internal error after {self.fault}: {self.sentences}")
        # The supervisor logs the exit codes of the runs that it restarts.
        codes = list(map(int, re.findall(r"ended with exit code (\d+).*restarting", said)))
        codes += [] if code is None else [code]
        self.ends[self.fault].update(codes)
        if CRASHES & set(codes) and self.fault not in ("kill", "stop"):  # MPI may abort if ranks die
            raise Failure(f"the trainer crashed with exit code {codes} after {self.fault}")
        if code is None:
            return False
        if code == 0:
            self.check_result()
            return True
        was_killed = code < 0 or (code > 128 and code not in (130, 143))
        # Damaged tokens may have been prefetched, so that the next fault has begun when they are used.
        explained = EXPLAINED.get(self.fault, set()) | EXPLAINED.get(self.fault_before, set())
        if not was_killed and code not in RESTART | explained:
            raise Failure(f"exit code {code} after {self.fault}: {self.sentences}")
        if code == 65 and not any("data/" in sentence for sentence in self.sentences):  # tokens are read only once
            raise Failure(f"exit code 65 after {self.fault}: {self.sentences}")
        if not was_killed and not self.sentences and code not in (75, 130, 143):
            raise Failure(f"exit code {code} without a message after {self.fault}")
        self.wait_until_gone(self.ranks())  # ranks of a killed launcher
        self.start()
        return False

    def wait_until_gone(self, pids):
        deadline = time.monotonic() + PROGRESS_S
        while not all(map(is_gone, pids)):
            if time.monotonic() > deadline:
                raise Failure(f"ranks are left {PROGRESS_S} s after {self.fault}")
            time.sleep(0.05)

    def check_result(self):
        whole = f"whole_{self.seed}"
        if self.results.records(self.run) != self.results.records(whole):
            raise Failure(f"the log of {self.run} differs from the log of the run without faults")
        if self.results.logical_state(self.steps, self.run) != self.results.logical_state(self.steps, whole):
            raise Failure(f"the weights of {self.run} differ from the weights of the run without faults")
        self.runs += 1
        print(f"so far {self.summary()}", flush=True)
        for run in (self.run, whole):
            shutil.rmtree(self.disk.backing / run)
        self.begin_run()

    # ---- the faults -------------------------------------------------------------------------------------------------

    # Each function takes the ranks and returns the ranks that must end because of the fault.

    def kill(self, ranks):
        victims = self.draws.choice([[self.draws.choice(ranks)], [self.draws.choice(ranks)], ranks, [self.process.pid]])
        for victim in victims:
            self.send(victim, signal.SIGKILL)
        return ranks

    def stop(self, ranks):
        self.send(self.draws.choice(ranks), signal.SIGSTOP)
        return ranks

    def send_signal(self, ranks):
        number = self.draws.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
        victim = self.process.pid if number == signal.SIGUSR1 else self.draws.choice(ranks)  # mpirun forwards SIGUSR1
        self.send(victim, number)
        return ranks if number != signal.SIGHUP else []

    def send(self, pid, number):
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # it has exited meanwhile
            pass

    def send_junk(self, ranks):
        for port in listening_ports(ranks):
            for _ in range(5):
                with socket.socket() as connection:
                    connection.settimeout(1)
                    try:
                        connection.connect(("127.0.0.1", port))
                        connection.sendall(self.draws.randbytes(self.draws.choice([1, 8, 100, 5000])))
                    except OSError:
                        pass

    def has_begun(self):
        """Returns whether a rank holds the run's lock. A start without a directory correctly begins a new run."""
        try:
            lock = (self.disk.backing / self.run / "lock").read_text()
        except OSError:
            return False
        return any(f"pid {pid}," in lock for pid in self.ranks())

    def move(self, _):
        deadline = time.monotonic() + PROGRESS_S
        while not self.has_begun():
            self.look_after()
            if time.monotonic() > deadline:
                raise Failure(f"{self.run} did not begin within {PROGRESS_S} s")
            time.sleep(0.05)
        run, elsewhere = self.disk.at / self.run, self.disk.at / "elsewhere"
        run.rename(elsewhere)
        time.sleep(0.3)
        if run.exists():
            raise Failure(f"{self.run} was recreated while it was moved away")
        elsewhere.rename(run)

    def inject(self, action, calls, paths, times=1):
        """Makes one of the calls on one of the paths fail soon."""
        self.disk.inject(f"call={self.draws.choice(calls)},path={self.draws.choice(paths)},"
                         f"nth={self.draws.randint(1, 3)},times={times},action={action}")

    def fail_with_eio(self, _):
        self.inject("EIO", ["read", "write", "fsync", "open", "rename", "write|fsync"],
                    ["/run_*", "*/checkpoints*", "*.jsonl", "/data/*.bin"], self.draws.randint(1, 3))

    def fill_disk(self, _):
        self.inject("ENOSPC", ["write", "fallocate", "mkdir", "write|fallocate"],
                    ["/run_*", "*/checkpoints*", "*/metrics.jsonl"], self.draws.randint(1, 3))

    def shorten(self, _):
        self.inject("short", ["write"], ["/run_*", "*/shard_*"], self.draws.randint(1, 5))

    def stall(self, _):
        self.inject(f"hang:{self.draws.uniform(0.2, 3):.2f}", ["read"], ["/run_*", "*", "/data/*"])

    def flip(self, _):
        """Flips a bit in a file that a hash protects; logs have none."""
        kind = self.draws.choice([("write", "*/tmp.*/shard_*"), ("write", "*/tmp.*/MANIFEST*"),
                                  ("read", "*/step_*/*"), ("read", "/data/*.bin")])
        self.inject("flip", [kind[0]], [kind[1]])

    def newest_commit(self):
        """Returns when the newest checkpoint was committed."""
        times = [0]
        for path in self.disk.backing.glob("run_*/checkpoints/step_*/COMMIT"):
            try:
                times.append(path.stat().st_mtime)
            except FileNotFoundError:  # it has just been deleted
                pass
        return max(times)

    def inject_one(self, name):
        """Injects one fault, ends it, and requires a new checkpoint."""
        ranks = self.wait_for_ranks()
        for segment in self.segments.iterdir():
            if time.time() - segment.stat().st_mtime > 60:  # all ranks that need it have opened it
                segment.unlink()
        self.fault_before, self.fault = self.fault, name
        run, begin = self.seed, time.time()
        victims = self.classes[name](ranks) or []
        self.wait_until_gone(victims)
        begin = time.time() if victims else begin
        deadline = time.monotonic() + PROGRESS_S
        while self.newest_commit() <= begin and not self.look_after() and self.seed == run:
            if time.monotonic() > deadline:
                raise Failure(f"no new checkpoint within {PROGRESS_S} s after {name}")
            time.sleep(0.05)
        has_rules = bool((self.disk.at / ".faults").read_text())
        if has_rules:
            time.sleep(self.draws.uniform(0, 1))
        injected = not has_rules or self.disk.injected() > 0
        self.disk.inject()
        if injected:
            self.faults[name] += 1
            self.went_on[name] += not any(map(is_gone, ranks))
        else:
            self.missed += 1

    def soak(self, minutes, every_s, most):
        self.begin_run()
        begin = time.monotonic()
        number, spread = 0, 2 if most > len(self.classes) else 0
        while time.monotonic() - begin < 60 * minutes and sum(self.faults.values()) < most:
            fewest = min(self.faults[name] for name in self.classes)
            name = self.draws.choice([name for name in self.classes if self.faults[name] <= fewest + spread])
            time.sleep(max(0, begin + number * every_s - time.monotonic()))
            self.inject_one(name)
            number += 1
        for name in self.classes:
            if most > len(self.classes) and self.faults[name] < int(LEAST_AN_HOUR * minutes / 60):
                raise Failure(f"only {self.faults[name]} faults of class {name}")
        # Let the last run finish.
        self.fault_before, self.fault = self.fault, "none"
        run, deadline = self.seed, time.monotonic() + 600
        while self.seed == run:
            self.look_after()
            if time.monotonic() > deadline:
                raise Failure("the last run did not end")
            time.sleep(0.1)

    def end(self):
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in trainers_in(self.disk.at):
            self.send(pid, signal.SIGKILL)
        self.disk.unmount()

    def summary(self):
        how = "--supervise" if "--supervise" in supervised(RANKS) else "started again by the soak"
        return f"{sum(self.faults.values())} faults, {self.missed} not triggered, {self.runs} runs of " \
               f"{self.steps} steps by {RANKS} ranks ({how}) with the same bits as without faults"

    def table(self):
        lines = ["| class | faults | run continued | exit codes | example message |", "|---|---|---|---|---|"]
        for name in [*self.classes, "none"]:
            codes = ", ".join(f"{code}: {count}" for code, count in sorted(self.ends[name].items()))
            said = self.said.get(name, "").replace("|", "\\|").removeprefix("train_gpt: ")
            lines.append(f"| {name} | {self.faults[name]} | {self.went_on[name]} | {codes} | {said[:160]} |")
        lines.append(f"| all | {sum(self.faults.values())} | {sum(self.went_on.values())} | | |")
        return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--faults", type=int, default=10**9, metavar="N", help="maximum number of faults")
    parser.add_argument("--steps", type=int, default=6000, help="of a run")
    parser.add_argument("--every", type=float, default=2, metavar="S", help="seconds between faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", metavar="CLASS", help="only this class of faults; repeatable")
    parser.add_argument("--out", type=Path, help="file for the table")
    arguments = parser.parse_args()
    have_private_mounts()
    if why_not():
        sys.exit(f"soak: {why_not()}")
    memory = "/dev/shm" if shutil.disk_usage("/dev/shm").free > 2**30 else None
    folder = tempfile.mkdtemp(prefix="soak_", dir=memory)
    soak = Soak(folder, arguments.seed, arguments.steps)
    soak.classes = {name: inject for name, inject in soak.classes.items() if name in (arguments.only or [name])}
    failure = None
    begin = time.monotonic()
    try:
        soak.soak(arguments.minutes, arguments.every, arguments.faults)
    except Failure as broken:
        failure = broken
    finally:
        soak.end()
    text = f"{(time.monotonic() - begin) / 60:.1f} minutes, seed {arguments.seed}: {soak.summary()}\n\n{soak.table()}\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(text)
    if failure:
        sys.exit(f"soak: FAILED: {failure}; see {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
