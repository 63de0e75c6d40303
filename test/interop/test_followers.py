"""The recipes, run as programs, log a run's metrics with the real packages of MLflow and Weights & Biases."""
import json
import os
import signal
import struct
import subprocess
import sys
import time

from mlflow.tracking import MlflowClient
from trainer import ENVIRONMENT, ROOT, TrainerTest
from wandb.proto import wandb_internal_pb2

REQUIREMENTS = [["mlflow-skinny", "wandb"]]

SHORT = {"train_max_steps": 12, "eval_every_steps": 3, "eval_batches": 1, "log_norms_every_steps": 4}


def wandb_records(data):
    """Yields an offline run's records: LevelDB's log format (32 KiB blocks; checksum, length, kind) after 7 bytes."""
    place, pieces = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        pieces += data[place + 7:place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record or its last fragment
            record = wandb_internal_pb2.Record()
            record.ParseFromString(pieces)
            yield record
            pieces = b""


class Followers(TrainerTest):
    def follow(self, script, until, **environment):
        follower = subprocess.Popen([sys.executable, ROOT / "scripts" / script, "run"], cwd=self.dir,
                                    env={**ENVIRONMENT, **environment}, stdout=subprocess.DEVNULL,
                                    # As on a terminal: background programs of a shell ignore Ctrl-C.
                                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        begin = time.monotonic()
        while not until():
            self.assertLess(time.monotonic() - begin, 180)
            self.assertIsNone(follower.poll())
            time.sleep(0.5)
        follower.send_signal(signal.SIGINT)
        follower.wait(60)

    def test_mlflow_in_a_file_store(self):
        self.train(**SHORT)
        store = f"file://{self.dir}/mlruns"
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # required since version 3.7

        def history():
            runs = MlflowClient(store).search_runs(["0"]) if (self.dir / "mlruns").exists() else []
            return runs and MlflowClient(store).get_metric_history(runs[0].info.run_id, "train/loss")
        self.follow("follow_mlflow.py", lambda: len(history()) == 12, MLFLOW_TRACKING_URI=store,
                    MLFLOW_ALLOW_FILE_STORE="true")
        self.assertEqual([(point.step, point.value) for point in history()],
                         [(record["step"], record["loss"]) for record in self.records(kind="train")])
        self.assertEqual(MlflowClient(store).search_runs(["0"])[0].data.params["train.max_steps"], "12")

    def test_wandb_offline(self):
        self.train(**SHORT)

        def logged():
            records = [record for path in (self.dir / "wandb").glob("offline-run-*/*.wandb")
                       for record in wandb_records(path.read_bytes())]
            return [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                    for record in records if record.WhichOneof("record_type") == "history"]
        begin = time.monotonic()
        self.follow("follow_wandb.py", lambda: time.monotonic() - begin > 30, WANDB_MODE="offline",
                    WANDB_SILENT="true")
        losses = {row["_step"]: row["train/loss"] for row in logged() if "train/loss" in row}
        self.assertEqual(losses, {record["step"]: record["loss"] for record in self.records(kind="train")})
