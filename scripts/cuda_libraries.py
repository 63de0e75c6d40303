#!/usr/bin/env python3
"""Finds the CUDA libraries that the programs load: cuBLASLt, the CUDA runtime, and NCCL for several ranks.

    scripts/cuda_libraries.py [PROGRAM]     (default: build/train_gpt, if it exists)

Prints the path of each library and the LD_LIBRARY_PATH that the programs need. Searches, in this order, the folders of
LD_LIBRARY_PATH, CUDA toolkits (CUDA_HOME, CUDA_PATH, the nvcc on PATH, /usr/local/cuda*), the system's library cache
(ldconfig -p), and NVIDIA's pip packages: nvidia/*/lib in the site-packages of this interpreter and of every python3 on
PATH. Exit codes: 0; 69 a required library is missing.

As a module: find(). Requires Python 3.9 or later and only the standard library.
"""
import glob
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

NEEDED = ("libcudart.so.13", "libcublasLt.so.13")
OPTIONAL = ("libnccl.so.2",)
EXIT_UNAVAILABLE = 69

LOCAL_TOOLKITS = "/usr/local/cuda*"
TOOLKIT_FOLDERS = ("lib64", "targets/x86_64-linux/lib")
# soname without its version -> common name, pip package
NAMES = {
    "libcudart": ("the CUDA runtime", "nvidia-cuda-runtime"),
    "libcublasLt": ("cuBLASLt", "nvidia-cublas"),
    "libnccl": ("NCCL", "nvidia-nccl"),
}
ASK_INTERPRETER = ("import json, site, sys; print(json.dumps(sys.path + "
                   "getattr(site, 'getsitepackages', list)() + [site.getusersitepackages()]))")


@dataclass
class Libraries:
    """Result of find(). A program that is started with `ld_library_path` loads the files in `paths`."""
    paths: dict = field(default_factory=dict)  # soname -> path of the file
    missing: list = field(default_factory=list)  # a sentence for each missing required library
    optional_missing: list = field(default_factory=list)  # a sentence for each missing optional library
    ld_library_path: str = ""


# ---- ELF files ------------------------------------------------------------------------------------------------------

def dynamic_section(path):
    """Returns (soname or None, [DT_NEEDED]) of an x86-64 ELF file. Raises ValueError with the reason if invalid."""
    with open(path, "rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:4] != b"\x7fELF":
            raise ValueError("is not an ELF file")
        if head[4:6] != b"\x02\x01" or struct.unpack_from("<H", head, 18)[0] != 62:
            raise ValueError("is not an x86-64 file")
        offset, size, count = struct.unpack_from("<Q", head, 32) + struct.unpack_from("<HH", head, 54)
        segments = []  # (type, offset in the file, address, bytes in the file)
        for i in range(count):
            file.seek(offset + i * size)
            segment = file.read(56)
            if len(segment) < 56:
                raise ValueError("is cut off")
            kind, _, start, address, _, length = struct.unpack_from("<IIQQQQ", segment)
            segments.append((kind, start, address, length))
        entries = []
        for kind, start, _, length in segments:
            if kind == 2:  # PT_DYNAMIC
                file.seek(start)
                table = file.read(length)
                entries = [struct.unpack_from("<qQ", table, i) for i in range(0, len(table) - 15, 16)]
        tags = dict(entries)
        strings = tags.get(5)  # DT_STRTAB, an address
        for kind, start, address, length in segments:
            if kind == 1 and strings is not None and address <= strings < address + length:  # PT_LOAD
                file.seek(start + strings - address)
                text = file.read(tags.get(10, 0))  # DT_STRSZ
                break
        else:
            raise ValueError("has no dynamic section")

    def string(at):
        return text[at:text.find(b"\0", at)].decode(errors="replace")

    soname = string(tags[14]) if 14 in tags else None
    return soname, [string(value) for tag, value in entries if tag == 1]


def needed_by(program):
    """The sonames of the CUDA libraries that a program and the libraries in lib/ next to it are linked with."""
    found, files = [], [Path(program)]
    for file in files:
        for name in dynamic_section(file)[1]:
            own = Path(program).parent / "lib" / name
            if name.split(".")[0] in NAMES and name not in found:
                found.append(name)
            elif own.exists() and own not in files:
                files.append(own)
    return tuple(found)


def problem_of(path, soname):
    """Why this file is unusable as `soname`, or None."""
    if "stubs" in Path(path).resolve().parts:
        return "is a stub for the linker"
    try:
        found, _ = dynamic_section(path)
    except (OSError, ValueError) as error:
        return str(error)
    return None if found == soname else f"is {found or 'a library without a name'}, not {soname}"


# ---- places ---------------------------------------------------------------------------------------------------------

def toolkit_roots():
    roots = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvcc = shutil.which("nvcc")
    if nvcc:
        roots.append(str(Path(nvcc).resolve().parents[1]))
    roots += sorted(glob.glob(LOCAL_TOOLKITS), key=lambda root: [int(n) for n in re.findall(r"\d+", root)],
                    reverse=True)
    return list(dict.fromkeys(roots))


def library_cache():
    """soname -> paths, from ldconfig -p, for x86-64."""
    search = os.pathsep.join([os.environ.get("PATH", ""), "/sbin", "/usr/sbin"])
    command = shutil.which("ldconfig", path=search)
    if not command:
        return {}
    try:
        text = subprocess.run([command, "-p"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return {}
    cache = {}
    for name, path in re.findall(r"^\s*(\S+) \(.*x86-64.*\) => (\S+)$", text, re.M):
        cache.setdefault(name, []).append(path)
    return cache


def interpreters():
    """Every python3 on PATH."""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    found = [os.path.join(folder, "python3") for folder in folders if folder]
    return [path for path in dict.fromkeys(found) if os.access(path, os.X_OK) and os.path.isfile(path)]


def site_packages():
    """The package folders of this interpreter and of every python3 on PATH."""
    found = [path for path in sys.path if path]
    for python in [sys.executable, *interpreters()]:
        try:
            answer = subprocess.run([python, "-c", ASK_INTERPRETER], capture_output=True, text=True, timeout=30,
                                    check=True, cwd="/").stdout
            found += [path for path in json.loads(answer) if path]
        except (OSError, ValueError, subprocess.SubprocessError):
            pass  # an interpreter that cannot start is ignored
    return [path for path in dict.fromkeys(found) if os.path.isdir(path)]


def package_folders():
    """nvidia/cublas/lib, nvidia/cu13/lib (shared by the packages of CUDA 13) and so on."""
    return [folder for site in site_packages() for folder in sorted(glob.glob(os.path.join(site, "nvidia/*/lib")))]


def advice(soname):
    """(name, pip requirement). From CUDA 13 on, package names do not contain the CUDA version; the version does."""
    stem, version = soname.split(".so.")
    name, package = NAMES.get(stem, (stem, None))
    if package is None:
        return name, None
    if stem == "libnccl":
        return name, f"{package}-cu{NEEDED[0].split('.so.')[1]}"
    return name, f"'{package}=={version}.*'" if int(version) >= 13 else f"{package}-cu{version}"


def sentence(soname, rejected):
    """An error message: the missing library, the searched places, and what to do."""
    name, package = advice(soname)
    where = [
        f"LD_LIBRARY_PATH ({os.environ.get('LD_LIBRARY_PATH') or 'not set'})",
        f"CUDA toolkits ({', '.join(toolkit_roots()) or 'none in CUDA_HOME, on PATH and in ' + LOCAL_TOOLKITS})",
        "the system's library cache (ldconfig -p)",
        f"pip's packages (nvidia/*/lib for {', '.join(dict.fromkeys([sys.executable, *interpreters()]))})",
    ]
    text = f"{soname} ({name}) was not found in {'; '.join(where)}"
    if rejected:
        text += "; not usable: " + ", ".join(f"{path} {why}" for path, why in rejected)
    if package:
        text += f"; install it, for example with: python3 -m pip install {package}"
    return text


def candidates(soname, folders, cache, packages):
    """Candidate paths of the library, best first."""
    yield from (os.path.join(folder, soname) for folder in folders)
    yield from cache.get(soname, [])
    yield from (os.path.join(folder, soname) for folder in packages)


def find(needed=NEEDED, optional=OPTIONAL):
    """Looks for libraries by soname; nothing is loaded.

    `missing` and `optional_missing` have a full sentence for each library that no place has: where it was looked for,
    which files of its name are not usable and why, and what to install. `ld_library_path` has the folders of what was
    found, then those that LD_LIBRARY_PATH had. It is for the programs of build/ only: PyTorch brings its own libraries.
    """
    inherited = [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    folders = inherited + [os.path.join(root, folder) for root in toolkit_roots() for folder in TOOLKIT_FOLDERS]
    cache, packages = library_cache(), package_folders()
    result = Libraries()
    for soname in dict.fromkeys([*needed, *optional]):
        rejected = []
        for path in dict.fromkeys(candidates(soname, folders, cache, packages)):
            if not os.path.exists(path):
                continue
            why = problem_of(path, soname)
            if why is None:
                result.paths[soname] = path
                break
            rejected.append((path, why))
        else:
            (result.missing if soname in needed else result.optional_missing).append(sentence(soname, rejected))
    found = [os.path.dirname(os.path.abspath(path)) for path in result.paths.values()]
    result.ld_library_path = os.pathsep.join(dict.fromkeys(found + inherited))
    return result


def main():
    program = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "build/train_gpt"
    needed = NEEDED
    if len(sys.argv) > 1 or program.exists():
        try:
            needed = needed_by(program)
        except (OSError, ValueError) as error:
            print(f"cuda_libraries: {program}: {error}", file=sys.stderr)
            return 66
    libraries = find(needed)
    for soname, path in libraries.paths.items():
        print(f"{soname}: {path}")
    print(f"LD_LIBRARY_PATH={libraries.ld_library_path}")
    for text in libraries.missing + libraries.optional_missing:
        print(f"cuda_libraries: {text}", file=sys.stderr)
    return EXIT_UNAVAILABLE if libraries.missing else 0


if __name__ == "__main__":
    sys.exit(main())
