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
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

DATA = Path(__file__).parent
SCALARS = {"train/loss": 10.82421875, "train/lr": 0.0006, "train/tokens": 12345678.0, "val/loss": -math.inf}
TEXT = "In the beginning\n\tGod \u00e9\u20ac\U0001f600"
VALUES = [0.5, 1.0, 1.0, 2.5, 4.0]


def main():
    with tempfile.TemporaryDirectory() as folder:
        writer = EventFileWriter(folder)
        when = 1_700_000_000.125
        scalars = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, simple_value=value)
                                             for tag, value in SCALARS.items()])
        writer.add_event(event_pb2.Event(wall_time=when, step=3, summary=scalars))
        writer.add_event(event_pb2.Event(wall_time=when, step=300, summary=text_pb("sample", [TEXT])))
        histogram = histogram_pb("norms", np.array(VALUES))
        writer.add_event(event_pb2.Event(wall_time=when, step=2**40, summary=histogram))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        writer.add_event(event_pb2.Event(wall_time=when, step=7, session_log=start))
        writer.close()
        file, = Path(folder).glob("events.out.tfevents.*")
        (DATA / "tensorboard.events").write_bytes(file.read_bytes())
    expected = {"scalars": {tag: repr(float(np.float32(value))) for tag, value in SCALARS.items()}, "text": TEXT,
                "values": VALUES, "time": when}
    (DATA / "tensorboard.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
