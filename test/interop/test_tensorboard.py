"""The real TensorBoard shows the numbers of metrics.jsonl, by its readers and over HTTP."""
import json
import re
import struct
import subprocess
import sys
import time
import urllib.parse
import urllib.request

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trainer import TrainerTest

REQUIREMENTS = [["tensorboard"]]

MONITORED = {"train_max_steps": 12, "eval_every_steps": 3, "eval_batches": 1, "log_norms_every_steps": 4,
             "checkpoint_every_steps": 5, "checkpoint_keep": 9, "schedule_name": "constant"}
EVERYTHING = {"scalars": 0}


def float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


class TensorBoard(TrainerTest):
    def scalars(self, run="run"):
        """Returns tag -> [(step, value)] of metrics.jsonl."""
        expected = {}
        for record in self.records(run, without=("time",)):
            for key, value in record.items():
                if isinstance(value, (int, float)) and key != "step":
                    expected.setdefault(f"{record['kind']}/{key}", []).append((record["step"], float32(value)))
        for record in self.records(run, "norms"):
            for group in ("grad_norms", "activation_rms"):
                for name, value in record[group].items():
                    expected.setdefault(f"{group}/{name}", []).append((record["step"], float32(value)))
        return expected

    def check_accumulator(self, run="run"):
        accumulator = EventAccumulator(str(self.dir / run / "tensorboard"), size_guidance=EVERYTHING).Reload()
        self.assertEqual({tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
                          for tag in accumulator.Tags()["scalars"]}, self.scalars(run))

    def back_to(self, step):
        """Restores the state of a run that was killed just before a later checkpoint."""
        for directory in (self.dir / "run/checkpoints").iterdir():
            if int(directory.name.removeprefix("step_")) > step:
                for path in directory.iterdir():
                    path.unlink()
                directory.rmdir()

    def test_the_reader_of_event_files(self):
        self.train(**MONITORED)
        self.check_accumulator()

    def test_after_a_resume(self):
        self.train(**MONITORED)
        self.back_to(5)
        self.train("--resume", **MONITORED)
        self.assertEqual(len(list((self.dir / "run/tensorboard").iterdir())), 2)
        self.check_accumulator()

    def test_a_reader_that_has_already_read_the_repeated_steps(self):
        self.train(**MONITORED)
        accumulator = EventAccumulator(str(self.dir / "run/tensorboard"), size_guidance=EVERYTHING).Reload()
        self.assertEqual(len(accumulator.Scalars("train/loss")), 12)
        self.back_to(5)
        self.train("--resume", "--accept-changes", **dict(MONITORED, optim_learning_rate=1e-3))
        accumulator.Reload()
        losses = [(event.step, event.value) for event in accumulator.Scalars("train/loss")]
        self.assertEqual(losses, self.scalars()["train/loss"])

    def test_over_http(self):
        self.train(**MONITORED)
        self.back_to(5)
        self.train("--resume", **MONITORED)
        for fast in ("true", "false"):
            with self.subTest(load_fast=fast):
                self.check_http(fast)

    def check_http(self, fast):
        with (self.dir / "log").open("w") as log:
            server = subprocess.Popen([sys.executable, "-m", "tensorboard.main", "--logdir", self.dir, "--port", "0",
                                       "--load_fast", fast], stdout=log, stderr=log)
        self.addCleanup(server.wait)
        self.addCleanup(server.kill)
        begin = time.monotonic()
        while not (match := re.search(r"http://\S*?:(\d+)/", (self.dir / "log").read_text())):
            self.assertLess(time.monotonic() - begin, 120, (self.dir / "log").read_text())
            time.sleep(0.2)

        def get(path, **query):
            url = f"http://localhost:{match[1]}/data/{path}?{urllib.parse.urlencode(query)}"
            with urllib.request.urlopen(url, timeout=60) as answer:
                return json.loads(answer.read())

        run = "run/tensorboard"
        while "train/loss" not in get("plugin/scalars/tags").get(run, {}):
            self.assertLess(time.monotonic() - begin, 120, "TensorBoard does not list the run")
            time.sleep(0.2)
        for tag, expected in self.scalars().items():
            found = [(step, value) for _, step, value in get("plugin/scalars/scalars", run=run, tag=tag)]
            self.assertEqual(found, expected, tag)
