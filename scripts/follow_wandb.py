#!/usr/bin/env python3
"""Follows a run in Weights & Biases until Ctrl-C (pip install wandb): scripts/follow_wandb.py runs/mine"""
import contextlib, json, os, sys, time
import wandb
run, done, place, inode = sys.argv[1], {}, 0, None
config = json.load(open(f"{run}/config.json"))
wandb.init(project="train_gpt", name=os.path.basename(os.path.normpath(run)), config=config)
with contextlib.suppress(KeyboardInterrupt):
    while True:
        with open(f"{run}/metrics.jsonl") as file:
            if inode != (inode := os.fstat(file.fileno()).st_ino): place = 0  # a resumed run has replaced the file
            file.seek(place)
            while (line := file.readline()).endswith("\n"):  # else it is still being written
                place, record = file.tell(), json.loads(line)
                kind, step, _ = [record.pop(key, None) for key in ("kind", "step", "time")]
                if step <= done.get(kind, 0): continue  # a resumed run repeats its steps bit for bit
                done[kind] = step
                numbers = {f"{kind}/{k}": v for k, v in record.items() if isinstance(v, (int, float))}
                wandb.log(numbers, step=step)
        time.sleep(5)
