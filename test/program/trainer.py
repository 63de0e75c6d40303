"""Common code of these tests: running the trainer, a small data set, configurations, and the files of a run."""
import copy
import ctypes
import functools
import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAINER = ROOT / os.environ.get("TRAINER", "build/train_gpt_cpu")  # tests another binary: TRAINER=build/train_gpt

# Two layers, odd sizes, two micro-steps per step; 20 steps are more than one epoch.
TINY = {
    "run": {"dir": "run", "seed": 7},
    "model": {"n_layer": 2, "n_head": 3, "n_embd": 48, "n_positions": 24, "vocab_size": 257},
    "data": {"train": "data/train_*.bin", "val": "data/val_*.bin", "tokenizer": "data/tokenizer.json"},
    "train": {"max_steps": 20, "batch_size": 3, "seq_len": 20, "total_batch_tokens": 120, "precision": "fp32"},
    "optim": {"learning_rate": 1e-2},
    "schedule": {"warmup_steps": 5},
    "checkpoint": {"every_steps": 0},
    "eval": {"every_steps": 0, "batches": 0},
}
OTHER_SECTIONS = ["average", "sample", "log", "loss_scale", "offload", "parallel", "device"]
# Runs of Open MPI that start and end at the same time fail if they share a folder: one removes what the other made.
SESSIONS = tempfile.TemporaryDirectory()
os.environ["OMPI_MCA_orte_tmpdir_base"] = SESSIONS.name
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # faster if other programs run; changes no bit
# For Popen: a process group leader, which Ctrl-C reaches; background processes may ignore SIGINT.
FROM_TERMINAL = {"start_new_session": True, "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
TIMES = ("time", "resident_bytes", "step_ms", "tokens_per_s", "mfu", "compute_ms", "comm_ms", "data_ms",
         "optimizer_ms", "comm_bytes", "power_w", "gpu_temperature_c", "sm_clock_mhz", "throttle")


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Hash(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


def xxh3_128(text):
    """Returns the hash in COMMIT as hexadecimal digits."""
    library = ctypes.CDLL("libxxhash.so.0")
    library.XXH3_128bits.restype, library.XXH3_128bits.argtypes = Hash, [ctypes.c_char_p, ctypes.c_size_t]
    value = library.XXH3_128bits(text, len(text))
    return f"{value.high:016x}{value.low:016x}"


def generated_text(lines, seed=1):
    """Returns English-like lines, the same for every call."""
    words = random.Random(seed)
    vocabulary = ["".join(words.choices("etaoinshrdlu", k=words.randint(1, 8))) for _ in range(300)]
    return "".join(" ".join(words.choices(vocabulary, k=8)).capitalize() + ".\n" for _ in range(lines))


def wait_until(holds, what, seconds=120):
    """Waits until holds() is true; fails with the message `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what} after {seconds} s"
        time.sleep(0.01)


def written_by(process):
    """Returns what a process has written to its stderr so far, if that is a pipe."""
    if not process.stderr:
        return ""
    os.set_blocking(process.stderr.fileno(), False)
    try:
        return os.read(process.stderr.fileno(), 1 << 16).decode(errors="replace")
    except BlockingIOError:
        return ""


@functools.lru_cache(maxsize=None)
def small_data():
    """Returns a folder with text.txt and data/, which prepare made from 2 kB of text with the bytes tokenizer."""
    folder = tempfile.TemporaryDirectory()
    Path(folder.name, "text.txt").write_text(generated_text(50))
    subprocess.run([TRAINER, "prepare", "--tokenizer", "bytes", "--minutes", "0", "text.txt", "--out",
                    "data"], cwd=folder.name, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    return folder  # is kept while the cache exists


def trainers_in(folder, program=TRAINER):
    """Returns the pids of the ranks that run in a folder, in any namespace, without their launchers."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            starts_ranks = b"--nproc" in command or b"--supervise" in command
            is_here = os.path.samefile(process / "cwd", folder)  # names differ between mount namespaces
            if command[0] == bytes(program) and is_here and not starts_ranks:
                found.append(int(process.name))
        except OSError:  # it has exited meanwhile
            pass
    return sorted(found)


class TrainerTest(unittest.TestCase):
    """A test in its own temporary directory with the small data set."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.dir = Path(temporary.name)
        shutil.copytree(small_data().name, self.dir, dirs_exist_ok=True)

    def run_trainer(self, *args, expect=0, **environment):
        """Runs the trainer in the test's directory and checks its exit code; returns its output."""
        result = subprocess.run([TRAINER, *map(str, args)], cwd=self.dir, capture_output=True, text=True, timeout=120,
                                errors="replace", env={**ENVIRONMENT, **environment})
        said = f"{' '.join(map(str, args))}\n{result.stdout}{result.stderr}"
        self.assertEqual(result.returncode, expect, said)
        return result.stdout + result.stderr

    def write_config(self, name="config.json", **changes):
        """Writes TINY with changes such as run_dir="x"; returns the file's name. Short runs have a shorter warm-up."""
        config = copy.deepcopy(TINY)
        for key, value in changes.items():
            section = max((s for s in [*TINY, *OTHER_SECTIONS] if key.startswith(s + "_")), key=len)
            config.setdefault(section, {})[key[len(section) + 1:]] = value
        config["schedule"]["warmup_steps"] = min(config["schedule"]["warmup_steps"], config["train"]["max_steps"] // 2)
        (self.dir / name).write_text(json.dumps(config))
        return name

    def train(self, *flags, expect=0, threads=2, **changes):
        """Trains TINY with changes; returns the output."""
        return self.run_trainer(self.write_config(**changes), *flags, expect=expect, OMP_NUM_THREADS=str(threads))

    def wait_for_steps(self, *processes):
        """Waits until the run of these processes has logged a few steps; fails with their output if none is logged."""
        metrics = self.dir / "run" / "metrics.jsonl"

        def has_steps():
            assert all(process.poll() is None for process in processes), "a process has ended"
            return metrics.exists() and metrics.read_text().count("\n") > 3

        try:
            wait_until(has_steps, "no step was made")
        except AssertionError as error:
            self.fail(f"{error}: {[(process.returncode, written_by(process)) for process in processes]}")

    def records(self, run="run", kind=None, without=TIMES):
        """Returns the records of metrics.jsonl without fields that depend on the clock, and without slow ranks."""
        lines = [json.loads(line) for line in (self.dir / run / "metrics.jsonl").read_text().splitlines()]
        return [{key: value for key, value in line.items() if key not in without} for line in lines
                if line["kind"] == kind or kind is None and line["kind"] != "ranks"]

    def losses(self, run="run"):
        return [record["loss"] for record in self.records(run, "train")]

    def step_dir(self, step, run="run"):
        return self.dir / run / "checkpoints" / f"step_{step:08d}"

    def copy_run(self, source, step=0):
        """Copies a run to `to`, without its checkpoint of the step."""
        shutil.rmtree(self.dir / "to", ignore_errors=True)
        shutil.copytree(self.dir / source, self.dir / "to")
        if step:
            shutil.rmtree(self.step_dir(step, "to"))

    def manifest(self, step, run="run"):
        return json.loads((self.step_dir(step, run) / "MANIFEST.json").read_text())

    def change_manifest(self, step, change, run="run"):
        """Applies change(manifest) to a checkpoint and keeps it valid."""
        manifest = self.manifest(step, run)
        change(manifest)
        text = json.dumps(manifest).encode()
        (self.step_dir(step, run) / "MANIFEST.json").write_bytes(text)
        (self.step_dir(step, run) / "COMMIT").write_text(f"{len(text)} {xxh3_128(text)}\n")

    def weights(self, step=20, run="run"):
        """Returns a digest of a checkpoint's tensors: weights and optimizer state."""
        shards = sorted(self.step_dir(step, run).glob("shard_*.bin"))
        self.assertTrue(shards, f"{run} has no step {step}")
        return [digest(shard) for shard in shards]

    def logical_values(self, step, run):
        """Returns the bytes of every tensor, assembled from the shards by the manifest's offsets and boxes."""
        directory, manifest = self.step_dir(step, run), self.manifest(step, run)
        shards = {shard["name"]: (directory / shard["name"]).read_bytes() for shard in manifest["shards"]}
        tensors = {tensor["name"]: tensor for tensor in manifest["tensors"]}
        bytes_of = {name: 4 if tensor["dtype"] == "fp32" else 2 for name, tensor in tensors.items()}
        values = {name: bytearray(b"?" * (bytes_of[name] * math.prod(tensor["shape"])))
                  for name, tensor in tensors.items()}
        for shard in manifest["shards"]:
            for piece in shard["pieces"]:
                name, done = piece["tensor"], 0
                cols = math.prod(tensors[name]["shape"][1:])
                box = piece.get("box") or {"row": 0, "rows": (tensors[name]["shape"] or [1])[0], "col": 0, "cols": cols}
                while done < piece["count"]:  # a row of the box, or the whole piece if rows are adjacent
                    row, col = divmod(piece["first"] + done, box["cols"])
                    count = piece["count"] - done if box["cols"] == cols else min(piece["count"] - done,
                                                                                  box["cols"] - col)
                    to = ((box["row"] + row) * cols + box["col"] + col) * bytes_of[name]
                    begin, size = piece["file_offset"] + done * bytes_of[name], count * bytes_of[name]
                    values[name][to:to + size] = shards[shard["name"]][begin:begin + size]
                    done += count
        return values

    def logical_state(self, step, run):
        """Returns a digest of every tensor, because printing a difference of the bytes would take minutes."""
        return {name: hashlib.sha256(array).hexdigest() for name, array in self.logical_values(step, run).items()}

    def contents(self, path="."):
        """Returns a digest of every file below `path` except the lock, to check that no file changed."""
        return {str(file.relative_to(self.dir)): digest(file) for file in sorted((self.dir / path).rglob("*"))
                if file.is_file() and file.name != "lock"}
