#!/usr/bin/env python3
"""Compares the step times that `plan` predicts with those of CPU ranks on this machine.

    dev/validate_plan.py constants MACHINE.json            measures the machine's constants, with other models
    dev/validate_plan.py predict MACHINE.json              prints the predictions
    dev/validate_plan.py measure MACHINE.json [--rounds 3] prints them next to measured medians

The constants come from one rank, two at a time, and 2 and 4 ranks that divide the layers of other models, one thread
each. Needs idle cores: without them, ranks compete with other processes. Run `measure` repeatedly with --rounds 1 and
--append FILE.json to spread the rounds over time.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile
from pathlib import Path

from exposed_communication import TRAINER, write_tokens

B, T, VOCABULARY = 2, 128, 256
LAYOUTS = [  # ranks, micro-steps, the parallel section
    (1, 4, {}),
    *((2, 4, {"zero_stage": stage}) for stage in range(4)),
    (2, 4, {"tensor": 2}),
    (2, 2, {"pipeline": 2}),
    (2, 8, {"pipeline": 2}),
    (2, 4, {"pipeline": 2, "pipeline_schedule": "gpipe"}),
    (2, 4, {"pipeline": 2, "pipeline_schedule": "interleaved"}),
    (2, 4, {"pipeline": 2, "pipeline_schedule": "zero_bubble"}),
    (4, 4, {"zero_stage": 1}),
    (4, 4, {"tensor": 2}),
    (4, 4, {"pipeline": 2}),
    (4, 4, {"tensor": 2, "pipeline": 2}),
    (4, 4, {"tensor": 4}),
    (4, 8, {"pipeline": 4}),
]


def config_of(layers, channels, micro_steps, ranks, parallel, batch=B, steps=7):
    data = ranks // (parallel.get("tensor", 1) * parallel.get("pipeline", 1))
    return {"run": {"dir": "run"}, "data": {"train": "tokens.bin", "val": ""},
            "model": {"n_layer": layers, "n_head": 4, "n_embd": channels, "n_positions": T, "vocab_size": VOCABULARY},
            "train": {"max_steps": steps, "batch_size": batch, "seq_len": T, "precision": "fp32",
                      "total_batch_tokens": batch * T * micro_steps * data},
            "schedule": {"warmup_steps": 1}, "eval": {"every_steps": 0}, "checkpoint": {"every_steps": 0},
            "log": {"norms_every_steps": 0, "tensorboard": False}, "parallel": parallel}


def folder_with_tokens():
    folder = tempfile.TemporaryDirectory()
    write_tokens(Path(folder.name) / "tokens.bin", 400_000, VOCABULARY)
    return folder


def start(folder, name, config, ranks):
    run = Path(folder) / name
    run.mkdir(exist_ok=True)
    config["data"]["train"] = str(Path(folder) / "tokens.bin")
    (run / "config.json").write_text(json.dumps(config))
    command = [TRAINER, *(["--nproc", str(ranks)] if ranks > 1 else []), "config.json", "--fresh"]
    return run, subprocess.Popen(command, cwd=run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                 env={**os.environ, "OMP_NUM_THREADS": "1"})


def medians(run, process, keys):
    if process.wait() != 0:
        raise SystemExit(f"{run} failed")
    lines = [json.loads(line) for line in (run / "run/metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] == "train"][2:]
    return [statistics.median(line[key] for line in lines) / 1000 for key in keys]


def constants(path):
    """6 layers of 192 channels for the rates, 2 layers for messages; none of them is in LAYOUTS."""
    layers, channels, micro_steps = 6, 192, 4
    parameters = 12 * layers * channels**2 + (VOCABULARY + T) * channels
    flops = (6 * parameters + 6 * layers * channels * T) * B * T * micro_steps
    with folder_with_tokens() as folder:
        alone, two, updates = [], [], []
        for _ in range(3):
            config = config_of(layers, channels, micro_steps, 1, {})
            step, update = medians(*start(folder, "a", config, 1), ("step_ms", "optimizer_ms"))
            alone.append(step - update)
            updates.append(update)
            pair = [start(folder, name, config, 1) for name in "ab"]
            two += [step - update for step, update in (medians(*p, ("step_ms", "optimizer_ms")) for p in pair)]
        contention = max(0, statistics.median(two) / statistics.median(alone) - 1)

        def collective_s(ranks, batch):
            times = []
            for _ in range(3):
                config = config_of(2, channels, 8, ranks, {"tensor": ranks}, batch)
                times += medians(*start(folder, "a", config, ranks), ("comm_ms",))
            # 10 per layer, the embedding's and the head's; ranks on shared cores are slower.
            return statistics.median(times) / (8 * (10 * 2 + 4)) / ((1 + contention) * max(1, ranks / cores))
        cores = len(os.sched_getaffinity(0))
        small, large, four = collective_s(2, 1), collective_s(2, 4), collective_s(4, 1)
    row_bytes = T * channels * 4
    link = 3 * row_bytes / 2 / (large - small)
    start_s = small - row_bytes / 2 / link
    hop = max(0, (four - row_bytes * 3 / 4 / link - start_s) / 3)
    machine = {"flops_per_s": flops / statistics.median(alone), "link_bytes_per_s": link,
               "start_s": max(0, start_s), "hop_s": hop, "overlap_slowdown": 1, "cores": cores,
               "contention": contention, "update_s_per_element": statistics.median(updates) / parameters}
    path.write_text(json.dumps(machine, indent=1))
    print(path.read_text())


def name_of(ranks, micro_steps, parallel):
    return f"{ranks} ranks, {micro_steps} micro-steps" + "".join(f", {key} {value}" for key, value in parallel.items())


def predicted_ms(folder, machine, ranks, micro_steps, parallel):
    path = Path(folder) / "plan.json"
    path.write_text(json.dumps(config_of(4, 192, micro_steps, ranks, parallel)))
    said = subprocess.run([TRAINER, "plan", path, "--gpus", str(ranks), "--gpu", machine.resolve()], cwd=folder,
                          check=True, capture_output=True, text=True).stdout
    grid = [ranks // (parallel.get("tensor", 1) * parallel.get("pipeline", 1)), parallel.get("pipeline", 1), 1,
            parallel.get("tensor", 1), parallel.get("zero_stage", 0)]
    row = re.search(r"^ *" + r" +".join(map(str, grid)) + r" +([\d. ]+) %  configured$", said, re.M)
    return float(row[1].split()[6])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["constants", "predict", "measure"])
    parser.add_argument("machine", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--append", type=Path, help="measured times of earlier calls; this call's are added")
    options = parser.parse_args()
    if options.what == "constants":
        return constants(options.machine)
    times = [[] for _ in LAYOUTS]
    if options.append and options.append.exists():
        times = json.loads(options.append.read_text())
    with folder_with_tokens() as folder:
        for _ in range(options.rounds if options.what == "measure" else 0):
            for layout, measured in zip(LAYOUTS, times):
                ranks, micro_steps, parallel = layout
                config = config_of(4, 192, micro_steps, ranks, parallel)
                measured += medians(*start(folder, "run", config, ranks), ("step_ms",))
        if options.append:
            options.append.write_text(json.dumps(times))
        print("| layout | predicted ms | measured ms | difference |\n|---|---|---|---|")
        for layout, measured in zip(LAYOUTS, times):
            predicted = predicted_ms(folder, options.machine, *layout)
            ms = statistics.median(measured) * 1e3 if measured else 0
            print(f"| {name_of(*layout)} | {predicted:.1f} | " +
                  (f"{ms:.1f} | {100 * (predicted / ms - 1):+.0f} % |" if measured else " | |"))


if __name__ == "__main__":
    main()
