"""Slow ranks and stages of real runs under mpirun are named, and a pipeline is balanced by measured times."""
import os
import re
import shutil
import signal
import subprocess
import threading
import unittest
from pathlib import Path

from test_ranks import MPI_ENVIRONMENT, mpirun
from trainer import TrainerTest, trainers_in, wait_until

# Steps of some 50 ms. The monitor compares a window of 20 * 250 ms.
SHAPE = dict(train_batch_size=4, model_n_layer=6, model_n_embd=96, log_every_steps=10000, schedule_name="constant",
             train_max_steps=100000)
LIMIT = 90  # seconds, on a busy machine


def rank_of(pid):
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(int(value.split(b"=")[1]) for value in variables if value.startswith(b"OMPI_COMM_WORLD_RANK="))


class Slowed:
    """While it lasts, a process runs for a quarter of the time."""

    def __init__(self, pid):
        self.pid, self.ends = pid, threading.Event()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        while not self.ends.is_set():
            os.kill(self.pid, signal.SIGSTOP)
            self.ends.wait(0.03)
            os.kill(self.pid, signal.SIGCONT)
            self.ends.wait(0.01)

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.ends.set()
        self.thread.join()
        os.kill(self.pid, signal.SIGCONT)


@unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
class Stragglers(TrainerTest):
    def start(self, ranks, **changes):
        changes = {**SHAPE, "train_total_batch_tokens": 4 * 20 * 2 * ranks, **changes}
        self.output = self.dir / "output.txt"
        with open(self.output, "w") as output:
            process = subprocess.Popen(mpirun(ranks, self.write_config(**changes)), cwd=self.dir, stdout=output,
                                       stderr=subprocess.STDOUT, env=MPI_ENVIRONMENT)
        self.addCleanup(process.wait)
        self.addCleanup(process.terminate)
        self.wait_for_steps(process)
        return process

    def said(self):
        return re.findall(r"step \d+ \| (?:warning: )?(.* slow: .*)", self.output.read_text())

    def wait_for_records(self, count):
        """Waits for as many windows of steps; returns their records."""
        wait_until(lambda: len(self.records(kind="ranks", without=())) >= count, f"no {count} windows", LIMIT)
        return self.records(kind="ranks", without=())

    def test_a_slow_rank_is_named_and_recovers(self):
        process = self.start(2)
        pid = next(pid for pid in trainers_in(self.dir) if rank_of(pid) == 0)
        is_named = re.compile(rf"rank 0 on \S+ \(pid {pid}\) is slow: it computed (\d+\.\d+) times as long as the "
                              r"median of the other ranks in steps \d+ to \d+$")
        with Slowed(pid):
            wait_until(lambda: any(is_named.match(line) for line in self.said()), "rank 0 is not named", LIMIT)
            record = self.wait_for_records(len(self.wait_for_records(1)) + 1)[-1]
        named = [float(is_named.match(line)[1]) for line in self.said() if is_named.match(line)]
        self.assertGreater(named[0], 1.2)
        self.assertEqual(record["slowest_rank"], 0)
        self.assertGreater(record["slowest_multiple"], 1.2)
        self.assertEqual(record["stage_0/layers"], 6)
        wait_until(lambda: re.search("rank 0 on .* is no longer slow: ", self.output.read_text()), "rank 0 stays slow",
                   LIMIT)
        process.terminate()

    def test_an_uneven_pipeline_is_named_and_balanced(self):
        layers = dict(parallel_pipeline=2, parallel_pipeline_layers=[1, 5], train_total_batch_tokens=4 * 20 * 4)
        process = self.start(2, **layers)
        self.wait_for_records(2)
        process.terminate()
        process.wait()
        named = re.search(r"pipeline stage 1 \(rank 1 \(data 0, pipeline 1\) on \S+ \(pid \d+\)\) is slow: it computed "
                          r"(\d+\.\d+) times as long as the median of the other stages in steps \d+ to \d+; `train_gpt "
                          r"plan CONFIG --measured RUN` balances parallel.pipeline_layers", self.said()[0])
        self.assertGreater(float(named[1]), 1.5)
        plan = self.run_trainer("plan", "run/config.json", "--measured", "run")
        before, after, proposed = re.search(r"slowest stage takes ([\d.]+) ms, and predicted ([\d.]+) ms with\n"
                                            r"parallel.pipeline_layers: \[(\d, \d)\]\n", plan).groups()
        first, second = map(int, proposed.split(", "))
        self.assertEqual(first + second, 6)
        self.assertIn(first, (2, 3, 4))
        # Layers dominate this model's time: five take 5/3 as long as three.
        self.assertLess(float(after), 0.85 * float(before))
        times = self.records(kind="ranks", without=())[-1]
        self.assertEqual((times["stage_0/layers"], times["stage_1/layers"]), (1, 5))
        self.assertGreater(times["stage_1/compute_ms"], 1.5 * times["stage_0/compute_ms"])
        # The run has no times of other layers, and none of a pipeline of another size.
        for changes, code, words in ((["parallel.pipeline_layers=[3,3]"], 65, ["run/metrics.jsonl", "[3, 3] layers"]),
                                     (["parallel.pipeline=1", "parallel.pipeline_layers=[]"], 78, ["--measured"]),
                                     (["parallel.pipeline=3", "parallel.pipeline_layers=[2,2,2]"], 65, ["[2, 2, 2]"])):
            said = self.run_trainer("plan", "run/config.json", "--measured", "run",
                                    *[word for change in changes for word in ("--set", change)], expect=code)
            for word in words:
                self.assertIn(word, said)
        self.assertIn("nothing", self.run_trainer("plan", "run/config.json", "--measured", "nothing", expect=66))

