#!/usr/bin/env python3
"""train_gpt's entry to dev/contest.py.

    dev/contest_train_gpt.py train TRAIN_TEXT OUT SECONDS THREADS
    dev/contest_train_gpt.py score OUT HELD_OUT_TEXT THREADS

Needs build/train_gpt_cpu. The environment variable CONTEST_SETTINGS overrides SETTINGS: "optim.learning_rate=0.003
prepare.copies=4".
"""
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRAINER = str(ROOT / os.environ.get("TRAINER", "build/train_gpt_cpu"))
CONFIG = ROOT / "configs/quickstart.json"
END_S = 2  # from the planned end of the training to the exit: the last checkpoint
LATE_S = 1  # a run that is this late ends at once, with a higher learning rate than planned

# prepare.* are options of `prepare`; the other keys change configs/quickstart.json. Values are JSON.
SETTINGS = {
    "prepare.vocab_size": 4096,
    "prepare.copies": 11,
    "prepare.bpe_dropout": 0.03,
    "optim.weight_decay": 0.1,
}
# Only the time ends the run. It writes one checkpoint.
FIXED = {"train.max_steps": 0, "data.val": "", "eval.every_steps": 0, "sample.every_steps": 0,
         "checkpoint.every_steps": 0, "checkpoint.keep": 1}


def settings():
    changes = dict(word.split("=", 1) for word in shlex.split(os.environ.get("CONTEST_SETTINGS", "")))
    return {**{key: json.dumps(value) for key, value in SETTINGS.items()}, **changes}


def train(text, out, seconds):
    begin = time.monotonic()
    chosen = settings()
    options = {key.split(".")[1]: value for key, value in chosen.items() if key.startswith("prepare.")}
    subprocess.run([TRAINER, "prepare", text, "--out", f"{out}/data", "--tokenizer", "bpe", "--val-fraction", "0",
                    "--minutes", "0", *(word for key, value in options.items()
                                        for word in (f"--{key.replace('_', '-')}", value))], check=True)
    keys = {**{key: json.dumps(value) for key, value in FIXED.items()},
            "run.dir": f"{out}/run", "run.seed": os.environ.get("CONTEST_SEED", "1"),
            "data.train": f"{out}/data/train_*.bin", "data.tokenizer": f"{out}/data/tokenizer.json",
            "model.vocab_size": options["vocab_size"],
            **{key: value for key, value in chosen.items() if not key.startswith("prepare.")}}
    left = seconds - END_S - (time.monotonic() - begin)
    process = subprocess.Popen([TRAINER, CONFIG, "--fresh", "--set", f"train.max_minutes={left / 60}",
                                *(word for key, value in keys.items() for word in ("--set", f"{key}={value}"))])
    try:
        code = process.wait(left + LATE_S)
    except subprocess.TimeoutExpired:  # the pace fell after the schedule was decided
        process.send_signal(signal.SIGTERM)
        code = process.wait()
    sys.exit(0 if code == 75 else code)  # 75: stopped with a checkpoint


def score(out, text):
    said = subprocess.run([TRAINER, "eval", f"{out}/run", "--text", text], check=True, capture_output=True,
                          text=True).stdout
    tokens, loss = re.search(r"(\d+) tokens, loss ([\d.]+)", said).groups()
    print(Path(text).stat().st_size, int(tokens) * float(loss))


def main():
    if sys.argv[1] == "train":
        train(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    else:
        score(sys.argv[2], sys.argv[3])


if __name__ == "__main__":
    main()
