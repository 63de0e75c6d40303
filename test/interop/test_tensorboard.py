"""The real TensorBoard shows the contents of metrics.jsonl and samples.jsonl, by its readers and over HTTP."""
import json
import re
import struct
import subprocess
import sys
import time
import urllib.parse
import urllib.request

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util
from trainer import TrainerTest

REQUIREMENTS = [["tensorboard"]]

MONITORED = {"train_max_steps": 12, "eval_every_steps": 3, "eval_batches": 1, "sample_every_steps": 5,
             "sample_tokens": 8, "sample_prompt": "The ", "log_norms_every_steps": 4, "checkpoint_every_steps": 5,
             "checkpoint_keep": 9, "schedule_name": "constant"}
EVERYTHING = {"scalars": 0, "tensors": 0, "histograms": 0}


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
            for name, value in record["grad_norms"].items():
                if not name.startswith("h."):
                    expected.setdefault(f"grad_norms/{name}", []).append((record["step"], float32(value)))
            last = record["activation_rms"]["residual_f"]
            expected.setdefault("activation_rms/residual_f", []).append((record["step"], float32(last)))
        return expected

    def check_accumulator(self, run="run"):
        accumulator = EventAccumulator(str(self.dir / run / "tensorboard"), size_guidance=EVERYTHING).Reload()
        tags = accumulator.Tags()
        self.assertEqual({tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
                          for tag in tags["scalars"]}, self.scalars(run))
        samples = [json.loads(line) for line in (self.dir / run / "samples.jsonl").read_text().splitlines()]
        texts = [(event.step, tensor_util.make_ndarray(event.tensor_proto).item().decode())
                 for event in accumulator.Tensors("sample")]
        self.assertEqual([step for step, _ in texts], [sample["step"] for sample in samples])
        for (_, text), sample in zip(texts, samples):
            self.assertEqual(text.replace("\n    ", "\n")[4:][:4], sample["text"][:4])
        norms = self.records(run, "norms")
        histograms = accumulator.Tensors("grad_norms/qkv.weight")
        self.assertEqual([event.step for event in histograms], [record["step"] for record in norms])
        for event, record in zip(histograms, norms):
            buckets = tensor_util.make_ndarray(event.tensor_proto)
            values = [record["grad_norms"][f"h.{layer}.qkv.weight"] for layer in range(2)]
            self.assertEqual(buckets.shape, (30, 3))
            self.assertEqual((buckets[0, 0], buckets[-1, 1], buckets[:, 2].sum()), (min(values), max(values), 2))

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
        sample, = [s for s in map(json.loads, (self.dir / "run/samples.jsonl").read_text().splitlines())
                   if s["step"] == 5]
        texts = get("plugin/text/text", run=run, tag="sample")
        self.assertEqual([text["step"] for text in texts], [5, 10])
        self.assertIn("<code>" + sample["text"][:4], texts[0]["text"])
        configuration, = get("plugin/text/text", run=run, tag="configuration")
        self.assertIn("norms_every_steps", configuration["text"])
        histograms = get("plugin/histograms/histograms", run=run, tag="activation_rms/residual_mid")
        self.assertEqual([step for _, step, _ in histograms], [4, 8, 12])
        self.assertEqual({sum(count for _, _, count in buckets) for _, _, buckets in histograms}, {2})
