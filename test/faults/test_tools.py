"""The injector and the faulty file system follow their rules, so that no campaign passes for lack of faults."""
import os
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from campaign import INJECTOR
from faulty_fs import FaultyFs, why_not

CONTENT = b"0123456789" * 100
FLIPPED = CONTENT[:500] + b"1" + CONTENT[501:]


class Folder(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.dir = Path(temporary.name)


class Injector(Folder):
    def copy(self, faults, code=0):
        """Copies a file with dd in blocks of 1000 bytes; returns the copy."""
        (self.dir / "from").write_bytes(CONTENT)
        (self.dir / "to").unlink(missing_ok=True)
        environment = {"LC_ALL": "C", "LD_PRELOAD": INJECTOR, "FAULTS": faults, "FAULTS_LOG": self.dir / "log"}
        result = subprocess.run(["dd", "if=from", "of=to", "bs=1000", "iflag=fullblock", "conv=fsync"], cwd=self.dir,
                                capture_output=True, text=True, env={**os.environ, **environment})
        self.assertEqual(result.returncode, code, f"{faults}: {result.stderr}")
        self.said = result.stderr
        return (self.dir / "to").read_bytes() if (self.dir / "to").exists() else None

    def test_errors(self):
        for call, error, sentence in (("read", "EIO", "Input/output error"), ("fsync", "ENOSPC", "No space left"),
                                      ("open", "EACCES", "Permission denied")):
            self.copy(f"call={call},path={self.dir}/*,action={error}", code=1)
            self.assertIn(sentence, self.said)

    def test_only_what_the_rule_names(self):
        for rule in ("call=fdatasync,action=EIO", "path=/nowhere/*,action=EIO", "call=fsync,nth=2,action=EIO",
                     "rank=1,action=EIO"):
            self.assertEqual(self.copy(rule), CONTENT)

    def test_transfers(self):
        for rule in (f"call=read,path={self.dir}/*,action=flip", f"call=write,path={self.dir}/*,action=flip"):
            self.assertEqual(self.copy(rule), FLIPPED)
        self.assertEqual(self.copy(f"call=write,path={self.dir}/to,action=short"), CONTENT)  # dd writes the rest
        self.assertEqual(self.copy(f"call=read|write,path={self.dir}/*,times=all,action=log"), CONTENT)
        log = [line.split("\t") for line in (self.dir / "log").read_text().splitlines()]
        self.assertEqual([line[:2] for line in log[:2]], [["read", f"{self.dir}/from"], ["write", f"{self.dir}/to"]])
        self.assertEqual(bytes.fromhex(log[1][4]), CONTENT)

    def test_kills_and_hangs(self):
        self.assertEqual(self.copy(f"call=write,path={self.dir}/to,action=kill", code=-9), b"")
        self.assertEqual(self.copy(f"call=write,path={self.dir}/to,action=kill_after", code=-9), CONTENT)
        begin = time.monotonic()
        self.copy(f"call=fsync,path={self.dir}/to,action=hang:0.5")
        self.assertGreaterEqual(time.monotonic() - begin, 0.5)

    def test_an_invalid_rule(self):
        self.copy("call=read,action=ENOTHING", code=99)
        self.assertIn("unknown action ENOTHING", self.said)


@unittest.skipIf(why_not(), why_not())
class FileSystem(Folder):
    def setUp(self):
        super().setUp()
        self.disk = FaultyFs(self.dir)
        self.addCleanup(self.disk.unmount)
        (self.disk.at / "file").write_bytes(CONTENT)

    def test_reads_and_writes(self):
        file, kept = self.disk.at / "file", self.disk.backing / "file"
        self.assertEqual(kept.read_bytes(), CONTENT)
        self.disk.inject("call=read,path=/file,action=flip")
        self.assertEqual(file.read_bytes(), FLIPPED)
        self.assertEqual(file.read_bytes(), CONTENT)
        self.assertEqual(self.disk.injected(), 1)
        self.disk.inject("call=write,path=/file,action=flip")
        file.write_bytes(CONTENT)
        self.assertEqual(kept.read_bytes(), FLIPPED)
        self.disk.inject("call=write,path=/file,times=all,action=ENOSPC")
        with self.assertRaisesRegex(OSError, "No space left"):
            file.write_bytes(CONTENT)
        self.disk.inject("call=write,path=/other,action=short")
        with open(self.disk.at / "other", "wb", buffering=0) as other:
            self.assertEqual(other.write(CONTENT), 500)

    def test_names_and_syncs(self):
        for rule, operation in (("call=rename", lambda: (self.disk.at / "file").rename(self.disk.at / "b")),
                                ("call=mkdir", lambda: (self.disk.at / "folder").mkdir()),
                                ("call=unlink", lambda: (self.disk.at / "file").unlink()),
                                ("call=stat,path=/file", lambda: (self.disk.at / "file").stat()),
                                ("call=open", lambda: (self.disk.at / "file").read_bytes()),
                                ("call=readdir", lambda: list(self.disk.at.iterdir())),
                                ("call=fsync", self.sync_directory)):
            with self.subTest(rule):
                (self.disk.backing / "file").write_bytes(CONTENT)
                self.disk.inject(f"{rule},action=EIO")
                with self.assertRaisesRegex(OSError, "Input/output"):
                    operation()
                operation()

    def sync_directory(self):
        (self.disk.at / "file").touch()
        directory = os.open(self.disk.at, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def test_a_stall(self):
        self.disk.inject("call=read,path=/file,action=hang:0.5")
        begin = time.monotonic()
        self.assertEqual((self.disk.at / "file").read_bytes(), CONTENT)
        self.assertGreaterEqual(time.monotonic() - begin, 0.5)
