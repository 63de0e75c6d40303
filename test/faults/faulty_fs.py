"""build/faulty_fs, mounted: a directory whose operations fail according to rules."""
import os
import shutil
import subprocess
from pathlib import Path

from campaign import BUILD, have_private_mounts
from trainer import wait_until

PROGRAM = BUILD / "faulty_fs"


def why_not():
    """Returns the reason why the file system cannot be mounted here, or an empty string."""
    if not PROGRAM.exists():
        return "build/faulty_fs was not built: libfuse3 is missing"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be used here"
    if not have_private_mounts() and not shutil.which("fusermount3"):
        return "mounting is not permitted here"
    return ""


class FaultyFs:
    """The file system, mounted at `at` below `folder`; `backing` has the same files without faults."""

    def __init__(self, folder):
        self.backing, self.at = Path(folder, "backing"), Path(folder, "faulty")
        self.backing.mkdir(exist_ok=True)
        self.at.mkdir()
        with Path(folder, "faulty_fs.log").open("w") as log:
            self.process = subprocess.Popen([PROGRAM, self.backing, self.at], stdout=log, stderr=log)
        wait_until(lambda: (self.at / ".faults").exists(), "the file system was not mounted")

    def inject(self, rules=""):
        """Replaces the rules."""
        with open(self.at / ".faults", "wb", buffering=0) as control:
            control.write(rules.encode() or b" ")

    def injected(self):
        """Returns the number of faults that the rules have caused."""
        return sum(int(line.split()[1]) for line in (self.at / ".faults").read_text().splitlines())

    def unmount(self):
        self.process.terminate()
        self.process.wait(30)
