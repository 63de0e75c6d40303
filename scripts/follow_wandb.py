#!/usr/bin/env python3
"""Follows a run in Weights & Biases until Ctrl-C (pip install wandb): scripts/follow_wandb.py runs/mine"""
import json, os, sys, time
import wandb

run, done, place, inode = sys.argv[1], {}, 0, None
config = json.load(open(f"{run}/config.json"))
wandb.init(project="train_gpt", name=os.path.basename(os.path.normpath(run)), config=config)
while True:
    with open(f"{run}/metrics.jsonl") as file:
        if inode != (inode := os.fstat(file.fileno()).st_ino): place = 0  # a resumed run has replaced the file
        file.seek(place)
        while (line := file.readline()).endswith("\n"):  # else it is still being written
            place, record = file.tell(), json.loads(line)
            kind, step = record["kind"], record.pop("step")
            if step <= done.get(kind, 0): continue  # a resumed run repeats its steps bit for bit
            done[kind] = step
            values = {k: v for k, v in record.items() if isinstance(v, (int, float)) and k != "time"}
            wandb.log({f"{kind}/{key}": value for key, value in values.items()}, step=step)
    time.sleep(5)
