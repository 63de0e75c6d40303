#!/usr/bin/env python3
"""Packs the GPU kit: prebuilt programs and the files of gpu_check.py, for a machine without compiler, make and network.

    scripts/pack_gpu_kit.py BUILD ARCHIVE.tgz PROGRAM...     (make gpu-kit calls it)

The archive mirrors the repository: gpu_kit/build/PROGRAM, stripped; gpu_kit/build/lib with every library that they need
except those of glibc, CUDA and the driver; the files of FILES; REVISION. Fails if a program has an rpath other than
$ORIGIN/lib, or if the kit needs a newer glibc than that of Debian 12 or is larger than 40 MB. (Kernels keep their line
tables, for compute-sanitizer, and with them the names of the folders where they were compiled.)
Exit codes: 0; 1 one of these checks failed, with a message; 64 wrong arguments; 66 a file is missing.
"""
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from cuda_libraries import dynamic_section

ROOT = Path(__file__).resolve().parents[1]
# The other files of the kit.
FILES = ["LICENSE", "configs/*.json", "dev/peer_torch*.py", "scripts/cuda_libraries.py", "scripts/gpu_*.py",
         "test/program/__main__.py", "test/program/gpu_trainer.py", "test/program/trainer.py",
         "test/recorded/torch/**/*"]
# Libraries that a GPU machine has, or that cuda_libraries.py finds there.
NOT_BUNDLED = re.compile(r"(ld-linux-x86-64|lib(c|m|mvec|dl|rt|pthread|cudart|cublasLt|nccl|cuda))\.so\.\d+")
RPATH = "$ORIGIN/lib"
MAX_BYTES = 40_000_000
NEWEST_GLIBC = (2, 36)


class Refused(Exception):
    """The reason why the kit cannot be packed, as a sentence."""


def files_of(root):
    """The files of FILES, relative to the root. Raises FileNotFoundError for a pattern that matches nothing."""
    found = []
    for pattern in FILES:
        matches = sorted(path.relative_to(root) for path in root.glob(pattern) if path.is_file())
        if not matches:
            raise FileNotFoundError(f"{root / pattern}, a part of the kit, is missing")
        found += matches
    return found


def lines_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def bundled_libraries(program):
    """name -> path of the libraries that the kit must contain for a program, including indirect dependencies."""
    loaded = dict(re.findall(r"(\S+) => (/\S+)", "\n".join(lines_of("ldd", program))))
    found, names = {}, list(dynamic_section(program)[1])
    while names:
        name = names.pop()
        if name in found or NOT_BUNDLED.fullmatch(name):
            continue
        if name not in loaded:
            raise Refused(f"{program} needs {name}, which is not installed on this machine")
        found[name] = loaded[name]
        names += dynamic_section(loaded[name])[1]
    return found


def check_binary(path, rpath):
    """The newest glibc version that a file needs. Raises Refused if the rpath is wrong or the glibc too new."""
    found = [re.search(r"\[(.*)\]", line)[1] for line in lines_of("readelf", "-dW", path)
             if "(RPATH)" in line or "(RUNPATH)" in line]
    if found != rpath:
        raise Refused(f"{path.name} has the rpath {found or 'none'}, expected {rpath or 'none'}")
    versions = re.findall(r"GLIBC_(\d+)\.(\d+)", "\n".join(lines_of("objdump", "-T", path)))
    newest = max(((int(major), int(minor)) for major, minor in versions), default=(0, 0))
    if newest > NEWEST_GLIBC:
        raise Refused(f"{path.name} needs glibc {newest[0]}.{newest[1]}; the kit promises "
                      f"{NEWEST_GLIBC[0]}.{NEWEST_GLIBC[1]}")
    return newest


def gather(folder, build, programs, revision):
    """Copies the kit into a folder; prints its contents."""
    for name in files_of(ROOT):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "REVISION").write_text(revision + "\n")
    libraries = folder / "build/lib"
    libraries.mkdir(parents=True)
    bundled, newest = {}, (0, 0)
    for name in programs:
        program = folder / "build" / name
        subprocess.run(["strip", "-o", program, build / name], check=True)
        newest = max(newest, check_binary(program, [RPATH]))
        bundled.update(bundled_libraries(build / name))
        print(f"{program.stat().st_size:12,d}  {name}")
    for name, path in sorted(bundled.items()):
        library = libraries / name
        subprocess.run(["strip", "--strip-unneeded", "-o", library, os.path.realpath(path)], check=True)
        newest = max(newest, check_binary(library, []))
        print(f"{library.stat().st_size:12,d}  lib/{name}")
    print(f"needs glibc {newest[0]}.{newest[1]} or later")


def pack(build, archive, programs, revision, max_bytes=MAX_BYTES):
    """Writes the archive, with the single folder gpu_kit. Raises Refused if a check fails."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "gpu_kit")
        folder.mkdir()
        gather(folder, build, programs, revision)
        packed = Path(temporary, "gpu_kit.tgz")

        def without_owner(entry):
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = "root"
            return entry

        with tarfile.open(packed, "w:gz", compresslevel=9) as tar:
            tar.add(folder, "gpu_kit", filter=without_owner)
        size = packed.stat().st_size
        if size > max_bytes:
            raise Refused(f"the kit has {size:,d} bytes, more than {max_bytes:,d}")
        archive.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(packed, archive)
    print(f"{size:12,d}  {archive}")


def main():
    if len(sys.argv) < 4:
        print("usage: scripts/pack_gpu_kit.py BUILD ARCHIVE.tgz PROGRAM...", file=sys.stderr)
        return 64
    revision = lines_of("git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12")[0]
    try:
        pack(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:], revision)
    except (FileNotFoundError, Refused) as error:
        print(f"pack_gpu_kit: {error}", file=sys.stderr)
        return 66 if isinstance(error, FileNotFoundError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
