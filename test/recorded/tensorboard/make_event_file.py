#!/usr/bin/env python3
"""Writes tensorboard.events with TensorBoard's writer, and the same content as tensorboard.json.

    pip install tensorboard==2.21.0 numpy && python3 test/recorded/tensorboard/make_event_file.py
"""
import json
import math
import tempfile
from pathlib import Path

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

DATA = Path(__file__).parent
SCALARS = {"train/loss": 10.82421875, "train/lr": 0.0006, "train/tokens": 12345678.0, "val/loss": -math.inf}


def main():
    with tempfile.TemporaryDirectory() as folder:
        writer = EventFileWriter(folder)
        when = 1_700_000_000.125
        scalars = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, simple_value=value)
                                             for tag, value in SCALARS.items()])
        writer.add_event(event_pb2.Event(wall_time=when, step=2**40, summary=scalars))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        writer.add_event(event_pb2.Event(wall_time=when, step=7, session_log=start))
        writer.close()
        file, = Path(folder).glob("events.out.tfevents.*")
        (DATA / "tensorboard.events").write_bytes(file.read_bytes())
    expected = {"scalars": {tag: repr(float(np.float32(value))) for tag, value in SCALARS.items()}, "time": when}
    (DATA / "tensorboard.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
