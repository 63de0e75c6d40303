"""Several ranks of the trainer on simulated GPUs, with comm_nccl.cu and a stand-in for NCCL: the same run as on one
rank. If a call of the library fails, hangs or differs between ranks, the run ends in time and reports the cause."""
import math
import os
import re
import shutil
import signal
import subprocess
import time
import unittest

from test_context import DIVISIONS, Layout
from test_grid import LONG
from test_simulated import SIMULATED, tolerance
from test_supervise import Supervised
from trainer import ENVIRONMENT, TrainerTest, trainers_in, wait_until

FOUR = dict(train_batch_size=1, train_seq_len=20, train_total_batch_tokens=20 * 4, train_max_steps=5,
            model_n_layer=1, checkpoint_every_steps=0)
# Ranks of a grid and their changes of FOUR; with 4 ranks, two groups with different samples.
GRIDS = {"pipeline": (2, dict(model_n_layer=2)),
         "context": (4, dict(model_n_positions=64, train_seq_len=64, train_total_batch_tokens=64 * 2)),
         "tensor": (4, dict(model_n_head=4, train_total_batch_tokens=20 * 2))}
PORT = 20000 + os.getpid() % 10000  # for ranks started without one
LIMIT = 60  # seconds for a run of a few steps to start, fail and end on a busy machine


def host_names_are_allowed():
    command = ["unshare", "--uts", "hostname", "train-gpt-try"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True).returncode == 0


class SimulatedRanks(TrainerTest):
    def start(self, ranks, config, *flags, **environment):
        """Returns the exit code and output of a run."""
        many = ["--nproc", str(ranks)] if ranks > 1 else []
        result = subprocess.run([SIMULATED, *many, config, *flags], cwd=self.dir, capture_output=True, text=True,
                                timeout=1000 if LONG else 170,
                                env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", **environment})
        return result.returncode, result.stdout + result.stderr

    def train_on(self, ranks, run, **changes):
        config = self.write_config(run_dir=run, **{**FOUR, **changes})
        code, said = self.start(ranks, config)
        self.assertEqual(code, 0, said)
        return said

    def test_the_same_bits_at_every_stage(self):
        self.train_on(1, "one", parallel_deterministic_reduce=True)
        for stage in range(4):
            with self.subTest(stage=stage):
                run = f"stage_{stage}"
                said = self.train_on(2, run, parallel_deterministic_reduce=True, parallel_zero_stage=stage)
                self.assertIn("ranks    2 by NCCL 2.28.9", said)
                self.assertEqual(self.records(run), self.records("one"))

    def test_bf16_with_the_librarys_own_sum(self):
        self.train_on(1, "one", train_precision="bf16")
        self.train_on(2, "two", train_precision="bf16", parallel_zero_stage=2)
        for step, (one, two) in enumerate(zip(self.losses("one"), self.losses("two"), strict=True), 1):
            self.assertTrue(abs(one - two) <= tolerance("bf16", step), f"step {step}: {two} instead of {one}")

    def test_ranks_that_divide_the_layers(self):
        """Tensor parallelism with the library's own sum of FP32, with sums of bf16, and with sharded parameters and a
        key-value head that two ranks share."""
        shared = dict(model_family="llama", model_n_kv_head=1, model_head_size=16)
        for precision, ranks, stage, family in (("fp32", 2, 0, {}), ("bf16", 4, 3, shared)):
            with self.subTest(precision=precision, ranks=ranks):
                changes = dict(model_n_head=4, train_batch_size=2, train_total_batch_tokens=2 * 20 * 4,
                               train_precision=precision, model_dropout=0.1, **family)
                self.train_on(1, f"one_{precision}", **changes)
                self.train_on(ranks, f"grid_{precision}", parallel_tensor=2, parallel_zero_stage=stage, **changes)
                losses = zip(self.losses(f"one_{precision}"), self.losses(f"grid_{precision}"), strict=True)
                for step, (one, grid) in enumerate(losses, 1):
                    self.assertTrue(abs(one - grid) <= tolerance(precision, step), f"step {step}: {grid} for {one}")

    def test_grids_have_the_bits_of_one_rank(self):
        """LONG: every division of 2, 4 and 8 ranks."""
        length, layouts = (256, DIVISIONS) if LONG else (64, [Layout(context=2, tensor=2, zero=1)])
        heads = 8 if LONG else 4
        changes = dict(model_n_head=heads, model_n_positions=length, train_seq_len=length, train_batch_size=1,
                       train_max_steps=2 if LONG else 3, train_precision="bf16", model_dropout=0.1,
                       parallel_deterministic_reduce=True, parallel_terms=8, model_family="qwen3",
                       model_n_kv_head=heads, model_head_size=16, model_n_layer=8 if LONG else 1)
        for layout in layouts:
            samples = max(2, layout.data)  # a run on simulated GPUs takes about as long as its tokens
            changes["train_total_batch_tokens"] = samples * length
            if not (self.dir / f"one_{samples}").exists():
                self.train_on(1, f"one_{samples}", **changes)
            with self.subTest(layout=layout):
                shutil.rmtree(self.dir / "grid", ignore_errors=True)
                self.train_on(math.prod(layout[:4]), "grid", parallel_context=layout.context,
                              parallel_tensor=layout.tensor, parallel_pipeline=layout.stages,
                              parallel_zero_stage=layout.zero, **changes)
                self.assertEqual(self.records("grid"), self.records(f"one_{samples}"))
                steps = changes["train_max_steps"]
                self.assertEqual(self.logical_state(steps, "grid"), self.logical_state(steps, f"one_{samples}"))

    def test_groups_of_an_old_library(self):
        """NCCL before 2.18 has no ncclCommSplit: groups connect with ids."""
        config = self.write_config(**{**FOUR, "train_max_steps": 2}, model_n_head=4, parallel_tensor=2)
        for run, version in (("new", "21800"), ("old", "21700")):
            code, said = self.start(4, config, "--set", f"run.dir={run}", STAND_IN_NCCL_VERSION=version)
            self.assertEqual(code, 0, said)
            self.assertIn(f" by NCCL 2.{version[1:3]}.0", said)
        self.assertEqual(self.records("old"), self.records("new"))

    def test_matrices_of_ranks_that_divide_the_layers(self):
        changes = dict(optim_name="muon", optim_scalar_name="adafactor", model_n_head=4)
        self.train_on(1, "one", **changes)
        for stage in (0, 3):
            self.train_on(4, f"grid_{stage}", parallel_tensor=2, parallel_zero_stage=stage, **changes)
            for loss, one in zip(self.losses(f"grid_{stage}"), self.losses("one"), strict=True):
                self.assertLessEqual(abs(loss - one), 2e-6 * one)

    def test_ranks_that_have_different_layers(self):
        """Pipeline parallelism with messages of FP32, and of bf16 with data parallelism and several parts."""
        for precision, ranks, changes in (("fp32", 2, dict(model_n_layer=2)),
                                          ("bf16", 4, dict(model_n_layer=4, parallel_pipeline_schedule="interleaved",
                                                           parallel_zero_stage=2))):
            with self.subTest(precision=precision, ranks=ranks):
                changes.update(train_precision=precision, model_dropout=0.1)
                self.train_on(1, f"one_{precision}", **{**changes, "parallel_pipeline_schedule": "1f1b"})
                self.train_on(ranks, f"grid_{precision}", parallel_pipeline=2, **changes)
                losses = zip(self.losses(f"one_{precision}"), self.losses(f"grid_{precision}"), strict=True)
                for step, (one, grid) in enumerate(losses, 1):
                    self.assertTrue(abs(one - grid) <= tolerance(precision, step), f"step {step}: {grid} for {one}")

    def test_ranks_that_divide_the_sequences(self):
        """Rings of attention with FP32 and, with heads of 64 and documents, with tensor cores."""
        shape = dict(model_n_positions=64, train_seq_len=64, train_batch_size=2, data_document_mask=True,
                     data_document_token=10, model_dropout=0.1)
        for precision, changes in (("fp32", dict(model_n_layer=1)),
                                   ("bf16", dict(model_n_head=2, model_n_embd=128, model_n_layer=1))):
            with self.subTest(precision=precision):
                changes.update(shape, train_precision=precision, train_total_batch_tokens=2 * 64, train_max_steps=3)
                self.train_on(1, f"one_{precision}", **changes)
                self.train_on(2, f"ring_{precision}", parallel_context=2, parallel_zero_stage=2, **changes)
                losses = zip(self.losses(f"one_{precision}"), self.losses(f"ring_{precision}"), strict=True)
                for step, (one, ring) in enumerate(losses, 1):
                    self.assertTrue(abs(one - ring) <= tolerance(precision, step), f"step {step}: {ring} for {one}")

    def test_schedules_of_stages_have_the_bits_of_one_rank(self):
        """The passes for the weights alone, too, which zero_bubble defers."""
        for precision in ("fp32", "bf16"):
            changes = dict(model_n_layer=2, model_dropout=0.1, train_precision=precision, train_max_steps=3,
                           parallel_deterministic_reduce=True)
            self.train_on(1, f"one_{precision}", **changes)
            for schedule in ("1f1b", "zero_bubble"):
                with self.subTest(precision=precision, schedule=schedule):
                    run = f"{schedule}_{precision}"
                    self.train_on(2, run, parallel_pipeline=2, parallel_pipeline_schedule=schedule, **changes)
                    self.assertEqual(self.records(run), self.records(f"one_{precision}"))
                    self.assertEqual(self.logical_state(3, run), self.logical_state(3, f"one_{precision}"))

    def check_planned(self, action, call, rank, deterministic, codes, ranks=2, **changes):
        """Requires an end in time with one of these codes; returns the output and the called library function."""
        shutil.rmtree(self.dir / "run", ignore_errors=True)
        config = self.write_config(**{**FOUR, "parallel_zero_stage": 2 + call % 2, **changes},
                                   parallel_deterministic_reduce=deterministic)
        started = time.monotonic()
        code, said = self.start(ranks, config, STAND_IN_NCCL=f"{action} {call} {rank}")
        self.assertLess(time.monotonic() - started, LIMIT, said)
        wait_until(lambda: not trainers_in(self.dir, SIMULATED), "a rank is left", 10)
        planted = re.search(rf"stand-in for NCCL: {action} at call {call} of rank {rank}, (\w+)", said)
        self.assertTrue(planted, said)
        self.assertNotIn("in an open group", said)
        self.assertIn(code, codes, said)
        return said, planted[1]

    def test_every_failed_call_is_reported(self):
        functions = set()
        for call, rank, deterministic, action in [
                (1, 0, True, "fail"), (1, 1, True, "fail"), (2, 1, True, "late"), (2, 0, False, "remote"),
                (4, 1, False, "fail"), (6, 0, True, "fail"), (7, 1, True, "fail"), (8, 1, True, "fail"),
                (9, 0, True, "fail"), (10, 1, False, "late"), (12, 0, False, "remote"), (15, 1, True, "fail"),
                (16, 0, True, "fail"), (17, 0, True, "fail"), (17, 1, True, "fail")]:
            with self.subTest(call=call, rank=rank, action=action):
                said, function = self.check_planned(action, call, rank, deterministic, (70, 71, 76))
                functions.add(function)
                self.assertRegex(said, rf"train_gpt: (\S+: )*rank {rank}: {function} failed")
        self.assertLessEqual({"ncclSend", "ncclRecv", "ncclGroupStart", "ncclGroupEnd"}, functions)

    def test_a_hang_reports_the_rank_and_the_collective(self):
        # In the third step or later: the first step has the longer timeout of a start.
        for action, call in (("hang", 35), ("stall", 36)):
            with self.subTest(action=action):
                said, _ = self.check_planned(action, call, 1, False, (76, 80), parallel_step_timeout_s=15)
                self.assertRegex(said, r"rank \d on \S+ \(pid \d+\).* collective \d+ \(\w+\)")

    def test_calls_of_a_grid_that_fail_hang_or_differ(self):
        """In the third step or later, as above. All groups end, also those that the fault does not reach."""
        for kind, action, call, rank, called in (
                ("pipeline", "fail", 82, 0, "ncclRecv"), ("pipeline", "fail", 84, 1, "ncclSend"),
                ("pipeline", "stall", 79, 0, "ncclSend"), ("pipeline", "hang", 81, 1, "ncclRecv"),
                ("pipeline", "mismatch", 84, 1, "ncclSend"),
                ("context", "fail", 60, 3, "ncclSend"), ("context", "hang", 61, 3, "ncclRecv"),
                ("context", "mismatch", 61, 3, "ncclRecv"),
                ("tensor", "fail", 82, 3, "ncclReduceScatter"), ("tensor", "hang", 83, 3, "ncclAllGather"),
                ("tensor", "mismatch", 84, 3, "ncclAllGather")):
            ranks, changes = GRIDS[kind]
            with self.subTest(kind=kind, action=action, call=call, rank=rank):
                said, function = self.check_planned(action, call, rank, False, (71, 76, 80), ranks, **changes,
                                                    **{f"parallel_{kind}": 2}, parallel_zero_stage=0,
                                                    parallel_step_timeout_s=8)
                self.assertEqual(function, called)
                hangs = re.search(rf"rank (\d) \(data (\d), {kind} (\d)\) on \S+ \(pid \d+\) hangs: .* step \d, "
                                  r"last collective \d+ \(\w+\)", said)
                if action == "fail":
                    self.assertRegex(said, rf"train_gpt: (\S+: )*rank {rank}: {function} failed in \w+ \(collective ")
                elif action == "mismatch" and not hangs:  # the device reports it, or waits for ever
                    self.assertRegex(said, r"NCCL: .* (\d+) (elements )?of type .* (?!\1)\d+ (elements )?of type")
                else:
                    self.assertTrue(hangs, said)
                    self.assertEqual(int(hangs[1]), 2 * int(hangs[2]) + int(hangs[3]), said)
                    # Others are ahead of a host that stays in a call. Stages wait for each other's messages.
                    if action == "hang" and kind != "pipeline":
                        self.assertEqual(int(hangs[1]), rank, said)

    def test_a_split_that_fails(self):
        for action, call, rank in (("fail", 3, 1), ("late", 4, 0)):
            with self.subTest(action=action):
                said, function = self.check_planned(action, call, rank, False, (70, 71, 76), **GRIDS["pipeline"][1],
                                                    parallel_pipeline=2, parallel_zero_stage=0)
                self.assertEqual(function, "ncclCommSplit")
                self.assertRegex(said, rf"rank {rank}: ncclCommSplit failed in split")

    def test_ranks_that_call_different_collectives(self):
        said, function = self.check_planned("mismatch", 10, 1, False, range(1, 128))
        self.assertRegex(said, rf"NCCL: operation \d+ is {function} of \d+ .* on rank \d and {function} of \d+ ")

    def test_two_ranks_on_one_gpu(self):
        """Two ranks were started by hand with the same local rank on one host."""
        config = self.write_config(**FOUR)
        ranks = []
        for rank in range(2):
            place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2,
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": PORT}
            ranks.append(subprocess.Popen([SIMULATED, config], cwd=self.dir, stdout=subprocess.PIPE, text=True,
                                          stderr=subprocess.STDOUT,
                                          env={**ENVIRONMENT, **{key: str(value) for key, value in place.items()}}))
        said = "".join(rank.communicate(timeout=LIMIT)[0] for rank in ranks)
        self.assertRegex(said, r"ranks 0 and 1 on \S+ have the same GPU \(0000:11:00.0\)")
        self.assertEqual([rank.returncode for rank in ranks], [78, 78], said)
        self.assertFalse((self.dir / "run").exists())

    @unittest.skipUnless(host_names_are_allowed(), "changing the host name is not permitted here")
    def test_two_machines_without_a_launcher(self):
        changes = dict(parallel_deterministic_reduce=True, parallel_zero_stage=2)
        self.train_on(1, "one", **changes)
        config = self.write_config(run_dir="two", **FOUR, **changes)
        master = f"127.0.0.1:{PORT}"
        machines = [subprocess.Popen(["unshare", "--uts", "sh", "-c", f'hostname node{node} && exec "$@"', "sh",
                                      SIMULATED, "--nproc", "1", "--node", f"{node}/2", "--master", master, config],
                                     cwd=self.dir, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                     env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"}) for node in (0, 1)]
        said = "".join(machine.communicate(timeout=LIMIT)[0] for machine in machines)
        self.assertEqual([machine.returncode for machine in machines], [0, 0], said)
        self.assertEqual(self.records("two"), self.records("one"))

    def test_a_rank_without_a_gpu(self):
        code, said = self.start(9, self.write_config(**dict(FOUR, train_total_batch_tokens=180)))
        self.assertRegex(said, r"rank 8 on \S+ has no GPU: local rank 8 .* finds only 8 on")
        self.assertEqual(code, 71, said)
        self.assertFalse((self.dir / "run").exists())


class SupervisedRanks(Supervised):
    """Ranks that the program starts without mpirun, under its own supervisor."""
    program = SIMULATED

    def test_a_killed_rank_is_restarted_and_the_run_is_the_same(self):
        changes = dict(FOUR, train_max_steps=12, checkpoint_every_steps=2, parallel_deterministic_reduce=True,
                       parallel_zero_stage=2)
        self.ended(self.start(run_dir="one", **changes), 0)
        process = self.start("--supervise", "--nproc", 2, **changes)
        for victim, step in ((1, 2), (0, 6)):
            self.wait_for_commit(step - 1)
            os.kill(self.wait_for_ranks(2)[victim], signal.SIGKILL)
        said = self.ended(process, 0)
        self.assertEqual(said.count("restarting in 1 s"), 2, said)
        self.assertEqual(self.records("run"), self.records("one"))
