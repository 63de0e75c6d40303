"""Token shards that change or fail during a run: it saves, exits with a message and resumes bit for bit."""
import functools
import json
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

from test_ranks import MPI_ENVIRONMENT, mpirun
from trainer import ENVIRONMENT, ROOT, TRAINER, TrainerTest, generated_text


@functools.lru_cache(maxsize=None)
def fault_library():
    """Compiles file_faults.cpp; returns the folder."""
    folder = tempfile.TemporaryDirectory()
    subprocess.run(["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-o", f"{folder.name}/file_faults.so",
                    ROOT / "test/program/file_faults.cpp"], check=True)
    return folder  # is kept while the cache exists


def with_fault(kind, file, call=1, count=1, rank=""):
    """Returns the environment variables that inject this fault; see file_faults.cpp."""
    return {"LD_PRELOAD": f"{fault_library().name}/file_faults.so", "FAULT_KIND": kind, "FAULT_FILE": file,
            "FAULT_CALL": str(call), "FAULT_COUNT": str(count), "FAULT_RANK": str(rank)}


class DataFaults(TrainerTest):
    SHARD = "data/train_000000.bin"
    EVERY = {"train_max_steps": 12, "train_total_batch_tokens": 360, "checkpoint_every_steps": 0}

    def run_ranks(self, ranks, *args, expect=0, **environment):
        """Runs the trainer on one rank, or on several under mpirun; returns its output."""
        command = [TRAINER, *args] if ranks == 1 else mpirun(ranks, *args)
        result = subprocess.run(command, cwd=self.dir, capture_output=True, text=True, timeout=120,
                                env={**(ENVIRONMENT if ranks == 1 else MPI_ENVIRONMENT), **environment})
        self.assertEqual(result.returncode, expect, result.stdout + result.stderr)
        return result.stdout + result.stderr

    def test_a_run_saves_when_a_shard_changes_or_fails_and_can_be_resumed(self):
        shard = self.dir / self.SHARD
        whole = shard.read_bytes()
        cases = [("read truncates", 65, "it has 1100 bytes, it had"),
                 ("read overwrites", 65, "has been written to while it was in use"),
                 ("read replaces", 65, "has been replaced by another file"),
                 ("read removes", 66, "No such file"),
                 ("read fails", 74, "Input/output error")]
        for ranks in [1] + [3] * bool(shutil.which("mpirun")):
            config = self.write_config(run_dir="whole", **self.EVERY)
            self.run_ranks(ranks, config)
            for kind, code, message in cases:
                with self.subTest(kind=kind, ranks=ranks):
                    shutil.copy(shard, f"{shard}.new")
                    config = self.write_config(**self.EVERY)
                    # Reads: header, block, digest, then the windows, 6 per step with three ranks and 18 with one.
                    fault = with_fault(kind, self.SHARD, call=2 + 54 // ranks + 1, rank=ranks - 1)
                    try:
                        said = self.run_ranks(ranks, config, expect=code, **fault)
                    finally:
                        shard.write_bytes(whole)
                    # The first rank that detected it; a read fails on one rank only.
                    rank = "" if ranks == 1 else "rank 2: " if kind == "read fails" else "rank .: "
                    self.assertRegex(said, f"train_gpt: {rank}.*{self.SHARD}")
                    self.assertRegex(said, message + "|ends at offset")
                    steps = len(self.records(kind="train"))
                    self.assertTrue(0 < steps < 12, steps)
                    self.assertTrue(self.step_dir(steps).exists(), said)
                    self.run_ranks(ranks, config, "--resume")
                    self.assertEqual(self.records(), self.records("whole"))
                    self.assertEqual(self.weights(12), self.weights(12, "whole"))
                    shutil.rmtree(self.dir / "run")
            shutil.rmtree(self.dir / "whole")

    def test_a_validation_read_error_on_one_rank_ends_all_with_a_checkpoint(self):
        changes = {"eval_every_steps": 4, "parallel_zero_stage": 3, **self.EVERY}
        for ranks in [1] + [3] * bool(shutil.which("mpirun")):
            with self.subTest(ranks=ranks):
                self.run_ranks(ranks, self.write_config(run_dir="whole", **changes))
                config = self.write_config(**changes)
                # A rank reads the header, a block and its 5 or 3 windows, and at step 4 these again.
                fault = with_fault("read fails", "data/val_000000.bin", 10 if ranks == 1 else 7, count=1000, rank=0)
                said = self.run_ranks(ranks, config, expect=74, **fault)
                self.assertIn("Input/output error", said)
                self.assertEqual(len(self.records(kind="train")), 4)
                self.assertTrue(self.step_dir(4).exists(), said)
                self.run_ranks(ranks, config, "--resume")
                self.assertEqual(self.records(kind="train"), self.records("whole", "train"))
                self.assertEqual(self.weights(12), self.weights(12, "whole"))
            for run in ("run", "whole"):
                shutil.rmtree(self.dir / run, ignore_errors=True)

    def test_read_errors_in_unused_tokens_are_harmless(self):
        config = self.write_config(**self.EVERY)
        # The header, a block, the digest and the windows of 12 steps succeed; the prefetch after them fails.
        self.run_ranks(1, config, **with_fault("read fails", self.SHARD, call=3 + 12 * 18 + 1, count=1000))
        self.assertEqual(len(self.records(kind="train")), 12)
        shutil.rmtree(self.dir / "run")
        self.run_ranks(1, config, expect=74, **with_fault("read fails", self.SHARD, call=3 + 12 * 18, count=1000))

    def test_an_error_in_the_tokens_of_the_first_step_ends_the_run_before_it(self):
        said = self.run_ranks(1, self.write_config(), expect=74, **with_fault("read fails", self.SHARD, call=4))
        self.assertIn("Input/output error", said)
        self.assertEqual((self.dir / "run/metrics.jsonl").read_text(), "")


class Checksums(TrainerTest):
    """A shard of 8 MiB; in its middle, the digest reads every other block of 64 KiB."""

    def setUp(self):
        super().setUp()
        (self.dir / "long.txt").write_text(generated_text(6000) * 17)
        self.run_trainer("prepare", "--tokenizer", "bytes", "--minutes", "0", "long.txt", "--out", "long")
        self.shard = self.dir / "long/train_000000.bin"
        self.long = {"data_train": "long/train_*.bin", "data_val": "", "data_tokenizer": "long/tokenizer.json"}

    def flip(self, offset):
        with open(self.shard, "r+b") as file:
            file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 4]))

    def test_a_flipped_bit_ends_the_run_before_the_step_that_would_read_it(self):
        self.train(run_dir="whole", **self.long)
        self.assertGreater(self.shard.stat().st_size, 8e6)
        config = self.write_config(**self.long)
        at_start = in_training = 0
        for block in range(30, 100):
            offset = 1024 + 65536 * block
            self.flip(offset + 777)
            result = subprocess.run([TRAINER, config], cwd=self.dir, capture_output=True, text=True, timeout=120,
                                    env=ENVIRONMENT)
            self.flip(offset + 777)
            if result.returncode == 0:  # no step reads this block
                self.assertEqual(self.records(), self.records("whole"))
            else:
                self.assertEqual(result.returncode, 65, result.stderr)
                self.assertRegex(result.stderr, rf"train_gpt: long/train_000000.bin: damaged in the 65536 bytes from "
                                                rf"offset {offset}: their CRC32C is \w+, dataset.json records \w+")
                at_start += not (self.dir / "run").exists()
                if (self.dir / "run/checkpoints").exists():
                    in_training += 1
                    self.train("--resume", **self.long)
                    self.assertEqual(self.records(), self.records("whole"))
                    self.assertEqual(self.weights(), self.weights(run="whole"))
            shutil.rmtree(self.dir / "run", ignore_errors=True)
            if at_start and in_training == 2:
                return
        self.fail(f"{at_start} found by the digest, {in_training} in training")

    def test_inspect_compares_every_block(self):
        self.assertIn("all blocks of 64 KiB match the CRC32C", self.run_trainer("inspect", "long/train_000000.bin"))
        self.flip(-1)
        for path in ("long/train_000000.bin", "long"):
            self.assertIn("long/train_000000.bin: damaged in the", self.run_trainer("inspect", path, expect=65))

    def test_a_data_set_without_checksums_is_read_as_it_is(self):
        path = self.dir / "long/dataset.json"
        dataset = json.loads(path.read_text())
        for split in dataset["splits"].values():
            del split["crc32c_of_each_64_kib"]
        path.write_text(json.dumps(dataset))
        self.flip(-2)
        self.assertIn("no checksums are recorded", self.run_trainer("inspect", "long"))
        self.train(train_max_steps=2, **self.long)

    def test_more_shards_than_the_limit_of_open_files(self):
        self.run_trainer("prepare", "--tokenizer", "bytes", "--minutes", "0", "long.txt", "--out", "many",
                         "--shard-tokens", "40000")
        shards = len(list((self.dir / "many").glob("train_*.bin")))
        self.assertGreater(shards, 64)
        config = self.write_config(train_max_steps=2, **{**self.long, "data_train": "many/train_*.bin"})
        subprocess.run(["prlimit", "--nofile=64:4096", TRAINER, config], cwd=self.dir, check=True, timeout=120,
                       env=ENVIRONMENT, stdout=subprocess.DEVNULL)
