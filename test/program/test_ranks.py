"""Several ranks of the CPU trainer under mpirun: the same run as on one rank, at every ZeRO stage."""
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
import unittest
from pathlib import Path

from trainer import ENVIRONMENT, TRAINER, TrainerTest, trainers_in, wait_until

STAGES = range(4)
# By default, Open MPI refuses root and more ranks than cores. Ranks that share cores must not spin.
MPI_ENVIRONMENT = {**ENVIRONMENT, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                   "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none",
                   "OMPI_MCA_mpi_yield_when_idle": "1", "OMP_NUM_THREADS": "1"}
EIGHT = {"train_batch_size": 2, "train_seq_len": 20, "train_total_batch_tokens": 2 * 20 * 8}
TWELVE = {"train_batch_size": 1, "train_seq_len": 20, "train_total_batch_tokens": 20 * 12}


def is_gone(pid):
    """Returns whether a process does not exist or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended between open and read
        return True


def mpirun(ranks, *args):
    return ["mpirun", "-np", str(ranks), TRAINER, *map(str, args)]


@unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
class Ranks(TrainerTest):
    def train_on(self, ranks, *flags, expect=0, stage=0, **changes):
        """Trains TINY with changes on that many ranks; returns the output."""
        config = self.write_config(parallel_zero_stage=stage, **changes)
        command = mpirun(ranks, config, *flags) if ranks > 1 else [TRAINER, config, *flags]
        result = subprocess.run(command, cwd=self.dir, capture_output=True, text=True, timeout=120,
                                env=MPI_ENVIRONMENT)
        self.assertEqual(result.returncode, expect, f"{command}\n{result.stdout}{result.stderr}")
        return result.stdout + result.stderr

    def test_losses_match_one_rank(self):
        changes = dict(TWELVE, train_max_steps=50, optim_learning_rate=1e-3)
        self.train_on(1, run_dir="one", **changes)
        expected = self.losses("one")
        for ranks, stage in itertools.product((1, 2, 3, 4), STAGES):
            with self.subTest(ranks=ranks, stage=stage):
                run = f"run_{ranks}_{stage}"
                self.train_on(ranks, stage=stage, run_dir=run, **changes)
                losses = self.losses(run)
                self.assertEqual(len(losses), 50)
                for loss, one in zip(losses, expected):
                    self.assertTrue(abs(loss - one) <= 1e-6 * one, f"{loss} instead of {one}")

    def test_the_same_bits_for_any_number_of_ranks_and_micro_steps(self):
        changes = dict(EIGHT, parallel_deterministic_reduce=True, train_max_steps=50, eval_every_steps=10,
                       eval_batches=3, model_dropout=0.1)
        self.train_on(1, run_dir="one", **changes)
        for ranks, stage in [*itertools.product((2, 4), STAGES), (8, 1), (8, 3)]:
            with self.subTest(ranks=ranks, stage=stage):
                run = f"run_{ranks}_{stage}"
                self.train_on(ranks, stage=stage, run_dir=run, **changes)
                self.assertEqual(self.records(run), self.records("one"))
                self.assertEqual(self.logical_state(50, run), self.logical_state(50, "one"))

    # 4 micro-batches per step, then 16, then 8. Sequences of 5 tokens, then 10, then 20.
    RAMPS = {"train_batch_ramp": [{"until_step": 2, "total_batch_tokens": 160},
                                  {"until_step": 4, "total_batch_tokens": 640}],
             "train_seq_ramp": [{"until_step": 1, "seq_len": 5}, {"until_step": 5, "seq_len": 10}]}

    def test_ramps_have_the_same_bits_for_any_number_of_ranks(self):
        changes = dict(EIGHT, parallel_deterministic_reduce=True, train_max_steps=8, eval_every_steps=2, eval_batches=3,
                       model_dropout=0.1, **self.RAMPS)
        self.train_on(1, run_dir="one", **changes)
        for ranks, stage in itertools.product((2, 4), STAGES):
            with self.subTest(ranks=ranks, stage=stage):
                run = f"run_{ranks}_{stage}"
                self.train_on(ranks, stage=stage, run_dir=run, **changes)
                self.assertEqual(self.records(run), self.records("one"))
                self.assertEqual(self.logical_state(8, run), self.logical_state(8, "one"))

    def test_ramps_continue_on_any_number_of_ranks(self):
        self.check_reshards([(1, 0), (2, 0), (2, 2), (4, 1), (4, 3)], **self.RAMPS, **EIGHT)

    def test_each_optimizer_has_the_same_bits_for_any_number_of_ranks(self):
        groups = [{"tensors": "embedding", "lr_scale": 0.5}, {"tensors": "h.*.fc.weight", "weight_decay": 0}]
        for optimizer in ("adam", "sgd", "lion", "rmsprop", "adagrad"):
            changes = dict(EIGHT, parallel_deterministic_reduce=True, train_max_steps=6, optim_name=optimizer,
                           optim_learning_rate=1e-3, optim_groups=groups)
            one = f"{optimizer}_one"
            self.train_on(1, run_dir=one, **changes)
            for ranks, stage in ((2, 0), (2, 2), (4, 1), (4, 3)):
                with self.subTest(optimizer=optimizer, ranks=ranks, stage=stage):
                    run = f"{optimizer}_{ranks}_{stage}"
                    self.train_on(ranks, stage=stage, run_dir=run, **changes)
                    self.assertEqual(self.records(run), self.records(one))
                    self.assertEqual(self.logical_state(6, run), self.logical_state(6, one))

    def check_optimizer(self, optimizer, layouts, **more):
        """On each layout (ranks, stage): 30 steps, and 15 of them after a resume on another layout. With buckets of a
        layer, an optimizer of matrices has several groups."""
        changes = dict(parallel_deterministic_reduce=True, parallel_bucket_mb=0, train_max_steps=30,
                       checkpoint_every_steps=15, checkpoint_keep=9, optim_name=optimizer, optim_learning_rate=3e-3,
                       train_check_replicas_every=10, **more)
        # The fixed tree of 12 micro-batches is the same on 1 and 3 ranks, of 8 on 1, 2 and 4.
        for batches, counts in ((EIGHT, (2, 4)), (TWELVE, (3,))):
            one = f"{optimizer}_one_{counts[0]}"
            self.train_on(1, run_dir=one, **changes, **batches)
            for ranks, stage in ((ranks, stage) for ranks, stage in layouts if ranks in counts):
                with self.subTest(optimizer=optimizer, ranks=ranks, stage=stage):
                    run = f"{optimizer}_{ranks}_{stage}"
                    self.train_on(ranks, stage=stage, run_dir=run, **changes, **batches)
                    self.assertEqual(self.records(run), self.records(one))
                    self.assertEqual(self.logical_state(30, run), self.logical_state(30, one))
                    shutil.rmtree(self.step_dir(30, run))
                    # Continues on another layout from step 15.
                    self.train_on(1 if ranks == 3 else 6 - ranks, "--resume", stage=3 - stage, run_dir=run, **changes,
                                  **batches)
                    self.assertEqual(self.logical_state(30, run), self.logical_state(30, one))

    def test_muon_has_the_same_bits_for_any_number_of_ranks_at_every_stage(self):
        self.check_optimizer("muon", list(itertools.product((2, 3, 4), STAGES)))

    def test_normuon_has_the_same_bits_for_any_number_of_ranks(self):
        self.check_optimizer("normuon", [(2, 0), (3, 3), (4, 1)])

    def test_soap_has_the_same_bits_for_any_number_of_ranks(self):
        self.check_optimizer("soap", [(2, 0), (3, 3), (4, 1)])

    def test_soap_muon_has_the_same_bits_for_any_number_of_ranks(self):
        self.check_optimizer("soap_muon", [(2, 0), (3, 3), (4, 1)])

    def test_lamb_and_lars_have_the_same_bits_for_any_number_of_ranks(self):
        self.check_optimizer("lamb", [(2, 0), (2, 3), (3, 2), (4, 1)])
        self.check_optimizer("lars", [(3, 0), (2, 1)])

    def test_adafactor_has_the_same_bits_for_any_number_of_ranks(self):
        self.check_optimizer("adafactor", [(2, 0), (2, 3), (3, 2), (4, 1)])

    def test_state_in_bf16_has_the_same_bits_for_any_number_of_ranks(self):
        for optimizer, layouts in (("adamw", [(2, 0), (2, 3), (3, 2), (4, 1)]), ("muon", [(2, 3), (4, 0)]),
                                   ("lamb", [(2, 2)])):
            self.check_optimizer(optimizer, layouts, optim_state_dtype="bf16")

    def test_masters_in_bf16_have_the_same_bits_for_any_number_of_ranks(self):
        for optimizer, layouts in (("adamw", [(2, 0), (2, 3), (3, 2), (4, 1)]), ("muon", [(2, 3), (4, 0)]),
                                   ("adafactor", [(2, 2)])):
            self.check_optimizer(optimizer, layouts, optim_master_dtype="bf16", train_precision="bf16",
                                 average_kind="tail", average_tail_fraction=0.5)

    def test_muon_exchanges_at_most_4_bytes_per_parameter_and_soap_8(self):
        sent = {}
        for optimizer, stage in itertools.product(("adamw", "soap", "muon"), (0, 1, 3)):
            run = f"{optimizer}_{stage}"
            said = self.train_on(2, stage=stage, run_dir=run, train_max_steps=3, optim_name=optimizer, **EIGHT)
            matrices = int(re.search(r"muon of (\d+) tensors", said)[1]) if optimizer == "muon" else 0
            sent[optimizer, stage] = self.records(run, "train", without=())[-1]["comm_bytes"]
        self.assertGreater(matrices, 0)
        plan = self.run_trainer("plan", self.write_config(optim_name="muon", **EIGHT))
        parameters = int(re.search(r"muon +rate .* tensors, (\d+) parameters", plan)[1])
        for stage in (0, 1, 3):  # rank 0 sends about half of what both send
            self.assertGreater(sent["muon", stage], sent["adamw", stage])
            self.assertLessEqual(sent["muon", stage] - sent["adamw", stage], 4 * parameters)
            self.assertEqual(sent["soap", stage] - sent["adamw", stage],
                             2 * (sent["muon", stage] - sent["adamw", stage]))

    def test_16_bits_loss_scale_and_recomputation(self):
        changes = dict(EIGHT, parallel_deterministic_reduce=True, train_precision="fp16", train_recompute="block",
                       loss_scale_dynamic=True, loss_scale_initial=2.0**24, loss_scale_growth_interval=3,
                       model_dropout=0.2)
        self.train_on(1, run_dir="one", **changes)
        self.assertTrue(any("skipped" in record for record in self.records("one", "train")))
        for ranks, stage in ((2, 3), (4, 2), (4, 0)):
            with self.subTest(ranks=ranks, stage=stage):
                run = f"run_{ranks}_{stage}"
                self.train_on(ranks, stage=stage, run_dir=run, **changes)
                self.assertEqual(self.records(run), self.records("one"))

    HALF_WAY = dict(parallel_deterministic_reduce=True, train_max_steps=6, checkpoint_every_steps=3, checkpoint_keep=9)

    def continued(self, run, ranks, stage, **changes):
        """Repeats the last three steps of a run on another layout; returns the final state and all records."""
        shutil.rmtree(self.dir / "to", ignore_errors=True)
        shutil.copytree(self.dir / run, self.dir / "to")
        self.train_on(ranks, "--resume", stage=stage, run_dir="to", **changes)
        return self.logical_state(6, "to"), self.records("to")

    def check_reshards(self, layouts, **changes):
        """From each layout to each other: three more steps after three steps give the same result as on one rank."""
        changes |= self.HALF_WAY
        self.train_on(1, run_dir="one", **changes)
        expected = self.logical_state(6, "one"), self.records("one")
        for ranks, stage in layouts:
            run = f"from_{ranks}_{stage}"
            self.train_on(ranks, stage=stage, run_dir=run, **changes)
            self.assertEqual(self.logical_state(3, run), self.logical_state(3, "one"))
            shutil.rmtree(self.step_dir(6, run))
        for source, target in itertools.product(layouts, layouts):
            with self.subTest(source=source, target=target):
                self.assertEqual(self.continued(f"from_{source[0]}_{source[1]}", *target, **changes), expected)

    def test_a_checkpoint_loads_on_1_2_or_4_ranks_at_any_stage(self):
        self.check_reshards([(1, 0), *itertools.product((2, 4), STAGES)], **EIGHT)

    def test_a_checkpoint_loads_on_1_or_3_ranks_at_any_stage(self):
        self.check_reshards([(1, 0), *itertools.product((3,), STAGES)], **TWELVE)

    def test_a_checkpoint_of_3_ranks_loads_on_2_or_4_and_back(self):
        """3 ranks cannot have the bits of 2 or 4, but each pair of rank counts has the same bits at any stage."""
        changes = TWELVE | self.HALF_WAY
        self.train_on(1, run_dir="one", **changes)
        for ranks, stage in itertools.product((2, 3, 4), STAGES):
            run = f"from_{ranks}_{stage}"
            self.train_on(ranks, stage=stage, run_dir=run, **changes)
            self.assertEqual(self.logical_state(3, run), self.logical_state(3, f"from_{ranks}_0"))
            shutil.rmtree(self.step_dir(6, run))
        for source, target in ((2, 3), (3, 2), (3, 4), (4, 3)):
            expected = self.continued(f"from_{source}_0", target, 0, **changes)
            for loss, one in zip(self.losses("to"), self.losses("one"), strict=True):
                self.assertTrue(abs(loss - one) <= 1e-6 * one, f"{loss} instead of {one}")
            for from_stage, to_stage in itertools.product(STAGES, STAGES):
                with self.subTest(source=(source, from_stage), target=(target, to_stage)):
                    self.assertEqual(self.continued(f"from_{source}_{from_stage}", target, to_stage, **changes),
                                     expected)

    def test_memory_and_traffic_follow_the_zero_stage(self):
        """Traffic: 2 (W - 1) / W of all parameters at stages 0 to 2, plus repeated gathers at 3. Memory: as planned."""
        layers, cell = 4, 1 << 14
        for ranks, stage in itertools.product((2, 3), STAGES):
            with self.subTest(ranks=ranks, stage=stage):
                run = f"run_{ranks}_{stage}"
                said = self.train_on(ranks, stage=stage, run_dir=run, train_max_steps=2, model_n_layer=layers,
                                     train_total_batch_tokens=60 * ranks, model_n_embd=96, parallel_bucket_mb=0)
                plan = self.run_trainer("plan", "config.json", "--gpus", ranks)
                regions = {name: int(size) for name, size in re.findall(r"^ +(\w+) +(\d+) bytes", plan, re.M)}
                total = int(re.search(r"^total +(\d+) bytes", plan, re.M)[1])
                self.assertIn(f"{total / 2**20:.1f} MiB", said)
                # Elements of the tensors outside blocks and of one block, padded to whole cells per rank.
                outer, block = (-(-count // (ranks * cell)) * ranks * cell for count in
                                (384 * 96 + 24 * 96 + 2 * 128, 12 * 96 * 96 + 13 * 96 + 7 * 32))
                whole = 4 * (outer + layers * block)
                self.assertEqual(regions["master"], whole // ranks if stage else regions["grad"])
                gathers = whole if stage < 3 else 4 * (outer + (2 * layers - 2) * block)
                sent = [json.loads(line)["comm_bytes"] for line in
                        (self.dir / run / "metrics.jsonl").read_text().splitlines()]
                self.assertEqual(sent[1], (whole + gathers) * (ranks - 1) // ranks)

    def start(self, ranks, **changes):
        """Starts an endless run on that many ranks; returns mpirun's process and the ranks' pids after some steps."""
        config = self.write_config(train_max_steps=100000, train_total_batch_tokens=60 * ranks, **changes)
        process = subprocess.Popen(mpirun(ranks, config), cwd=self.dir, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.PIPE, text=True, env=MPI_ENVIRONMENT)
        self.addCleanup(process.kill)
        self.wait_for_steps(process)
        pids = trainers_in(self.dir)
        self.assertEqual(len(pids), ranks)
        return process, pids

    def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(self):
        process, pids = self.start(2, parallel_zero_stage=1)
        os.kill(pids[1], signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, 75, said)
        self.assertTrue(self.step_dir(len(self.records(kind="train"))).exists())

    def test_mpirun_forwards_a_stop_signal(self):
        process, _ = self.start(2)
        process.send_signal(signal.SIGUSR1)
        said = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, 75, said)
        self.assertTrue(self.step_dir(len(self.records(kind="train"))).exists())

    def check_end(self, process, pids, victim, limit_s, code, words):
        """Requires that the other ranks exit in time with this code and these words, and that no process is left."""
        started = time.monotonic()
        said = process.communicate(timeout=60)[1]
        self.assertLess(time.monotonic() - started, limit_s, said)
        sentences = [line for line in said.splitlines() if line.startswith("train_gpt:")]
        self.assertTrue(any(f"pid {victim}" in line and words in line for line in sentences), said)
        self.assertIn("collective", sentences[0])
        for pid in pids:  # mpirun does not wait for the ranks that it kills
            wait_until(lambda: is_gone(pid), f"{pid} is left", 10)
        self.assertIn(process.returncode, code, said)

    def test_a_killed_rank_ends_the_others_and_is_reported(self):
        for stage in (0, 3):
            with self.subTest(stage=stage):
                shutil.rmtree(self.dir / "run", ignore_errors=True)
                process, pids = self.start(3, parallel_zero_stage=stage)
                os.kill(pids[stage % 2], signal.SIGKILL)
                self.check_end(process, pids, pids[stage % 2], 15, (76, 128 + 9), "died")

    def test_a_hanging_rank_ends_the_others_and_is_reported(self):
        process, pids = self.start(3, parallel_silence_s=3)
        os.kill(pids[1], signal.SIGSTOP)
        self.check_end(process, pids, pids[1], 30, (76, 80, 128 + 9), "rank 1")

    def test_ranks_with_different_configurations_are_reported(self):
        """Starts two applications with different seeds in one MPI world."""
        config = self.write_config()
        other = self.write_config("other.json", run_seed=8)
        command = ["mpirun", "-np", "1", TRAINER, config, ":", "-np", "1", TRAINER, other]
        result = subprocess.run(command, cwd=self.dir, capture_output=True, text=True, timeout=60, env=MPI_ENVIRONMENT)
        self.assertEqual(result.returncode, 78, result.stderr)
        self.assertRegex(result.stderr, "rank 1 .*configuration|configuration.* rank 1")
        self.assertFalse((self.dir / "run").exists())

    def test_ranks_with_different_data_are_reported(self):
        shutil.copytree(self.dir / "data", self.dir / "elsewhere/data")
        config = self.write_config()
        shutil.copy(self.dir / config, self.dir / "elsewhere")
        (self.dir / "other.txt").write_text("another text\n" * 100)
        self.run_trainer("prepare", "--tokenizer", "bytes", "--minutes", 0, "other.txt", "--force", "--out",
                         "elsewhere/data")
        command = ["mpirun", "-np", "1", TRAINER, config, ":", "-np", "1", "-wdir", self.dir / "elsewhere", TRAINER,
                   config]
        result = subprocess.run(command, cwd=self.dir, capture_output=True, text=True, timeout=60, env=MPI_ENVIRONMENT)
        self.assertEqual(result.returncode, 78, result.stderr)
        self.assertIn("the digest of data.train differs between ranks", result.stderr)
        self.assertFalse((self.dir / "run").exists())

    def test_ranks_with_different_checkpoints_are_reported(self):
        """The newest checkpoint of the first rank's run is one step ahead."""
        self.run_trainer(self.write_config(train_max_steps=2, checkpoint_every_steps=1, checkpoint_keep=2))
        shutil.copytree(self.dir / "run", self.dir / "elsewhere/run")
        shutil.rmtree(self.step_dir(2, "elsewhere/run"))
        for name in ("sample", "eval"):
            options = ["-np", "1", TRAINER, name, "run"]
            command = ["mpirun", *options, ":", "-wdir", self.dir / "elsewhere", *options]
            result = subprocess.run(command, cwd=self.dir, capture_output=True, text=True, timeout=60,
                                    env=MPI_ENVIRONMENT)
            self.assertEqual(result.returncode, 78, result.stderr)
            self.assertRegex(result.stderr, r"the checkpoint differs between ranks: .*step [12] of .*step [12] of run")

    def test_ranks_that_mpi_treats_as_single_processes(self):
        """Ranks started by torchrun, or by srun without PMI, report the correct way to start them."""
        torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
        srun = {"SLURM_JOB_ID": "1000", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1",
                "SLURM_NODEID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost"}
        config = self.write_config()
        for variables, expected in ((torchrun, "this process is rank 0 of 2, but MPI says rank 0 of 1: start it with"),
                                    (srun, "srun started rank 1 without PMI, .*; use srun --mpi=pmix, or mpirun")):
            with self.subTest(expected):
                result = subprocess.run([TRAINER, config], cwd=self.dir, capture_output=True, text=True, timeout=60,
                                        env={**MPI_ENVIRONMENT, **variables})
                self.assertRegex(result.stderr, "^train_gpt: " + expected)
                self.assertEqual(result.returncode, 78, result.stderr)

    def test_nproc_starts_the_ranks_itself(self):
        config = self.write_config(parallel_deterministic_reduce=True, **EIGHT)
        self.run_trainer(config)
        self.run_trainer("--nproc", 2, config, "--set", "run.dir=two")
        self.assertEqual(self.records("two"), self.records("run"))

    def test_a_rank_that_cannot_open_run_dir_ends_all(self):
        (self.dir / "run").write_text("a file")
        started = time.monotonic()
        self.assertIn("rank 1 ends because rank 0 could not open run.dir", self.train_on(2, expect=73))
        self.assertLess(time.monotonic() - started, 30)
