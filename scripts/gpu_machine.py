"""Queries the machine for gpu_check.py: its GPU, the versions of the CUDA libraries, the programs."""
import os
import platform
import re
import shutil
import sys
from pathlib import Path

import cuda_libraries
import gpu_process

QUERY = "name,driver_version,memory.total,compute_cap,power.limit"
QUERY_S = 30  # the driver may take seconds to wake the GPU
START_S = 60  # for a program to start and to print its help
# Program -> arguments with which it only starts and succeeds, even without a GPU.
PROGRAMS = {
    "train_gpt": ["--version"],
    "train_gpt_cpu": ["--version"],
    "test_cuda": ["--help"],
    "bench_cuda": ["--help"],
    "bench_matmul_cuda": ["--help"],
    "ptx_probe_cuda": ["--list"],
    "ptx_probe_simt": ["--list"],
}
VERSIONS = """
import ctypes, sys
runtime, version = ctypes.CDLL(sys.argv[1]), ctypes.c_int()
if runtime.cudaRuntimeGetVersion(ctypes.byref(version)) == 0: print("cuda", version.value)
lt = ctypes.CDLL(sys.argv[2]).cublasLtGetVersion
lt.restype = ctypes.c_size_t
print("cublas_lt", lt())
"""


def output_of(command, seconds, environment=None):
    """Returns (exit code, output); the exit code is None if the program cannot start or takes too long."""
    log = gpu_process.Log(1 << 16)
    outcome = gpu_process.run(command, seconds, log, environment=environment)
    return (None if outcome.timed_out else outcome.code), outcome.error or log.text().strip()


def query_gpu():
    """The properties of GPU 0 by name. Raises LookupError with the reason if there is no GPU."""
    if not shutil.which("nvidia-smi"):
        raise LookupError("nvidia-smi is not installed")
    code, text = output_of(["nvidia-smi", "-i", "0", f"--query-gpu={QUERY}", "--format=csv,noheader"], QUERY_S)
    if code is None:
        raise LookupError(f"nvidia-smi did not respond within {QUERY_S} s")
    values = [value.strip() for value in text.split("\n")[0].split(",")]
    if code != 0 or len(values) != len(QUERY.split(",")):
        raise LookupError(f"nvidia-smi found no GPU: {' '.join(text.split())[:200]}")
    return dict(zip(("name", "driver", "memory", "capability", "power_limit"), values))


def gpu_problem():
    """Why there is no GPU, or None."""
    try:
        query_gpu()
    except LookupError as problem:
        return str(problem)
    return None


def dotted(name, number):
    """CUDA's 13010 is 13.1, cuBLASLt's 130100 is 13.1.0."""
    if name == "cuda":
        return f"{number // 1000}.{number % 1000 // 10}"
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def library_versions(libraries):
    """Versions of the CUDA runtime and cuBLASLt, if they can be loaded. Loads them in a separate process."""
    paths = [libraries.paths.get(name, "") for name in cuda_libraries.NEEDED]
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries.ld_library_path}
    _, text = output_of([sys.executable, "-c", VERSIONS, *paths], QUERY_S, environment)
    return {name: dotted(name, int(number)) for name, number in re.findall(r"^(cuda|cublas_lt) (\d+)$", text, re.M)}


def revision(place):
    """The revision of the trainer, from its output."""
    _, text = output_of([place.program("train_gpt"), "--version"], START_S, place.environment())
    found = re.search(r"^train_gpt (.+)$", text, re.M)
    return found[1] if found else "unknown"


def describe(place, gpu):
    """The head of check.json."""
    return {"gpu": gpu, "libraries": {**library_versions(place.libraries), "paths": place.libraries.paths},
            "revision": revision(place), "cpus": os.cpu_count(), "python": platform.python_version(),
            "kernel": platform.release()}


def program_problem(place, name):
    """Why a program does not start; None if it does."""
    path = Path(place.program(name))
    if not os.access(path, os.X_OK):
        return f"{name} is not in {place.programs}"
    code, text = output_of([path, *PROGRAMS[name]], START_S, place.environment())
    if code == 0:
        return None
    if code is None:
        return f"{name} did not start within {START_S} s"
    return f"{name} does not start: {' '.join(text.split())[-300:] or f'exit code {code}'}"


def problems(place):
    """Problems other than a missing GPU, a sentence each."""
    found = list(place.libraries.missing)
    found += [problem for problem in (program_problem(place, name) for name in PROGRAMS) if problem]
    needed = ["test/program/gpu_trainer.py", "test/recorded/torch/heads_2x64/config.json", "configs/gpt2_124M.json",
              "dev/peer_torch.py"]
    found += [f"{path} is not in {place.root}" for path in needed if not (place.root / path).exists()]
    return found
