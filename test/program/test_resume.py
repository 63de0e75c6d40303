"""A run that was stopped and resumed equals an uninterrupted run, bit for bit."""
import json
import shutil
import signal
import subprocess

from trainer import ENVIRONMENT, TRAINER, TrainerTest, wait_until

FP16 = {"train_precision": "fp16", "loss_scale_dynamic": True, "loss_scale_growth_interval": 3,
        "loss_scale_initial": 2.0**24, "loss_scale_hysteresis": 1}


class Resume(TrainerTest):
    def cut(self, to, step):
        """Copies run/ in the state after a crash past `step`: logs with later lines, but no later checkpoints."""
        shutil.copytree(self.dir / "run", self.dir / to)
        for later in range(step + 1, 21):
            shutil.rmtree(self.step_dir(later, to))

    def check_every_cut(self, steps, **changes):
        self.train(checkpoint_every_steps=1, checkpoint_keep=30, eval_every_steps=4, **changes)
        skipped = [record["step"] for record in self.records(kind="train") if "skipped" in record]
        for step in range(1, 21):
            manifest = self.manifest(step)
            self.assertEqual(manifest["parent_step"], step - 1 if step > 1 else -1)
            self.assertEqual(manifest["state"]["updates"], step - sum(other <= step for other in skipped))
        for step in steps:
            with self.subTest(step=step):
                cut = f"cut_{step}"
                self.cut(cut, step)
                self.train("--resume", run_dir=cut, checkpoint_every_steps=0, eval_every_steps=4, **changes)
                self.assertEqual(self.records(cut), self.records("run"))
                self.assertEqual(self.weights(20, cut), self.weights(20, "run"))
                self.assertEqual(self.manifest(20, cut)["parent_step"], min(step, 19))

    def test_resume_at_each_step(self):
        self.check_every_cut(range(1, 21))

    def test_resume_with_a_moving_loss_scale(self):
        self.check_every_cut([1, 2, 3, 5, 8, 13, 19], model_dropout=0.1, **FP16)
        scales = [record["loss_scale"] for record in self.records(kind="train")]
        self.assertTrue(any(b > a for a, b in zip(scales, scales[1:])), scales)
        self.assertTrue(any(b < a for a, b in zip(scales, scales[1:])), scales)

    # 1 micro-step per step, then 4, then 2. Sequences of 5 tokens, then 10, then 20.
    SEQ_RAMP = [{"until_step": 2, "seq_len": 5}, {"until_step": 6, "seq_len": 10}]
    RAMP = [{"until_step": 3, "total_batch_tokens": 60}, {"until_step": 8, "total_batch_tokens": 240}]

    def test_resume_within_and_after_ramps(self):
        self.check_every_cut([1, 2, 3, 4, 6, 7, 8, 9, 19], model_dropout=0.1, train_batch_ramp=self.RAMP,
                             train_seq_ramp=self.SEQ_RAMP)
        tokens = [min(step, 3) * 60 + min(max(step - 3, 0), 5) * 240 + max(step - 8, 0) * 120 for step in range(1, 21)]
        self.assertEqual([record["tokens"] for record in self.records(kind="train")], tokens)
        self.assertEqual([self.manifest(step)["state"]["cursor"] for step in range(1, 21)],
                         [count // 20 for count in tokens])

    def test_a_batch_ramp_equals_changes_of_the_batch_by_hand(self):
        every = dict(checkpoint_every_steps=1, checkpoint_keep=30, model_dropout=0.1)
        self.train(run_dir="ramped", train_batch_ramp=self.RAMP, **every)
        self.train(train_total_batch_tokens=60, **every)
        self.cut("first", 3)
        self.train("--resume", "--accept-changes", run_dir="first", train_total_batch_tokens=240, **every)
        for step in range(9, 21):
            shutil.rmtree(self.step_dir(step, "first"))
        self.train("--resume", "--accept-changes", run_dir="first", **every)
        self.assertEqual([record | {"tokens": 0} for record in self.records("first", "train")],
                         [record | {"tokens": 0} for record in self.records("ramped", "train")])
        self.assertEqual(self.weights(20, "first"), self.weights(20, "ramped"))

    def test_resume_of_sgd_in_bf16(self):
        self.check_every_cut([1, 7, 19], optim_name="sgd", train_precision="bf16", train_recompute="block",
                             model_dropout=0.2)

    def test_resume_of_an_average(self):
        self.check_every_cut([7, 19], average_kind="tail", average_tail_fraction=0.5)

    def test_resume_of_each_optimizer(self):
        for optimizer in ("adam", "lion", "rmsprop", "adagrad", "lamb", "lars", "adafactor", "muon", "normuon", "soap",
                          "soap_muon"):
            with self.subTest(optimizer=optimizer):
                self.check_every_cut([7], optim_name=optimizer, optim_learning_rate=1e-3)
                shutil.rmtree(self.dir / "run")
                shutil.rmtree(self.dir / "cut_7")

    def test_resume_of_state_in_bf16(self):
        for optimizer in ("adamw", "normuon", "lars"):
            with self.subTest(optimizer=optimizer):
                self.check_every_cut([7], optim_name=optimizer, optim_learning_rate=1e-3, optim_state_dtype="bf16")
                shutil.rmtree(self.dir / "run")
                shutil.rmtree(self.dir / "cut_7")

    def test_resume_of_masters_in_bf16(self):
        for optimizer in ("adamw", "soap", "lamb"):
            with self.subTest(optimizer=optimizer):
                self.check_every_cut([7], optim_name=optimizer, optim_learning_rate=1e-3, optim_master_dtype="bf16",
                                     train_precision="bf16", average_kind="tail", average_tail_fraction=0.5)
                shutil.rmtree(self.dir / "run")
                shutil.rmtree(self.dir / "cut_7")

    def test_a_resume_does_not_convert_the_state(self):
        self.train(train_max_steps=5, schedule_name="constant", optim_state_dtype="bf16")
        before = self.contents("run/checkpoints")
        more = dict(train_max_steps=6, schedule_name="constant", optim_state_dtype="fp32")
        said = self.train("--resume", expect=78, **more)
        self.assertIn('optim.state_dtype: "bf16" -> "fp32"', said)
        said = self.train("--resume", "--accept-changes", expect=65, **more)
        self.assertRegex(said, r"step_0*5: tensor m\.\S+ is bf16 .*, must be fp32")
        self.assertEqual(self.contents("run/checkpoints"), before)

    def test_schedules_of_groups(self):
        """Groups of all tensors with one schedule train like a run with that schedule, also after a resume."""
        other = {"warmup_steps": 3, "final_lr_fraction": 0.5, "cooldown_power": 1}
        groups = [{"tensors": role, **other} for role in ("matrix", "embedding", "vector")]
        groups.insert(0, {"tensors": "*"})  # every tensor is in a later group
        self.check_every_cut([7], schedule_name="wsd", schedule_cooldown_fraction=0.5, optim_groups=groups)
        self.train(run_dir="all", schedule_name="wsd", schedule_cooldown_fraction=0.5, checkpoint_every_steps=1,
                   eval_every_steps=4, **{f"schedule_{key}": value for key, value in other.items()})
        self.assertEqual(self.weights(20, "all"), self.weights(20, "run"))
        self.assertNotEqual([record["lr"] for record in self.records("all", "train")],
                            [record["lr"] for record in self.records("run", "train")])

    def stop_with(self, signals, until_saved=False, **changes):
        """Starts a long run and sends the signals after its first steps or checkpoint; returns its exit code."""
        config = self.write_config(train_max_steps=100000, **changes)
        process = subprocess.Popen([TRAINER, config], cwd=self.dir, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                   env=ENVIRONMENT)
        self.wait_for_steps(process)
        if until_saved:
            wait_until(lambda: list(self.dir.glob("run/checkpoints/step_*")), "nothing was saved")
        for number in signals:
            process.send_signal(number)
        process.communicate(timeout=120)
        return process.returncode

    def test_a_signal_saves_and_requests_a_requeue(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            with self.subTest(number):
                shutil.rmtree(self.dir / "run", ignore_errors=True)
                self.assertEqual(self.stop_with([number], schedule_name="constant"), 75)
                stopped_at = len(self.records())
                self.assertTrue((self.step_dir(stopped_at) / "COMMIT").exists())
                self.train("--resume", "--accept-changes", train_max_steps=stopped_at + 10, schedule_name="constant")
                self.train("--fresh", run_dir="whole", train_max_steps=stopped_at + 10, schedule_name="constant")
                self.assertEqual(self.records("run"), self.records("whole"))
                self.assertEqual(self.weights(stopped_at + 10, "run"), self.weights(stopped_at + 10, "whole"))

    def test_a_killed_run_resumes(self):
        changes = {"schedule_name": "constant", "schedule_warmup_steps": 2, "model_dropout": 0.1}
        self.assertEqual(self.stop_with([signal.SIGKILL], True, checkpoint_every_steps=2, **changes), -signal.SIGKILL)
        changes["train_max_steps"] = len(self.records()) + 5
        self.train("--resume", "--accept-changes", **changes)
        self.train(run_dir="whole", **changes)
        self.assertEqual(self.records("run"), self.records("whole"))

    def test_a_closed_terminal_does_not_stop_a_run(self):
        self.assertEqual(self.stop_with([signal.SIGHUP, signal.SIGTERM]), 75)

    def test_a_signal_during_the_last_step_requests_no_restart(self):
        config = self.write_config(train_max_steps=2, train_total_batch_tokens=60 * 8000)
        process = subprocess.Popen([TRAINER, config], cwd=self.dir, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                   env=ENVIRONMENT)
        metrics = self.dir / "run/metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.read_text(), "no step was made")
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=120)[1]
        self.assertIn(b"stopping after this step", said)
        self.assertEqual(process.returncode, 0, said)
        self.assertTrue(self.step_dir(2).exists())

    def test_a_run_resumes_after_a_hundred_million_steps(self):
        changes = {"schedule_name": "constant"}
        self.train(train_max_steps=4, **changes)
        many = 10**8
        self.change_manifest(4, lambda manifest: manifest.update(step=many))
        self.step_dir(4).rename(self.step_dir(many))
        self.train("--resume", "--accept-changes", train_max_steps=many + 2, **changes)
        last = self.records(kind="train")[-1]
        self.assertEqual((last["step"], last["tokens"]), (many + 2, 120 * (many + 2)))
        self.assertTrue(self.step_dir(many + 2).exists())

    def test_a_checkpoint_with_energy_and_cost(self):
        """Earlier versions stored the joules of a run, and its configuration had prices."""
        def add_cost(config):
            return json.dumps({**json.loads(config), "cost": {"price_per_hour": 2.5, "co2_g_per_kwh": 300.0}})

        def make_old(manifest):
            manifest["state"]["energy"] = {"joules": 1.5, "steps": 8}
            manifest["config"] = add_cost(manifest["config"])

        self.train(checkpoint_every_steps=1, checkpoint_keep=30)
        self.cut("old", 8)
        self.change_manifest(8, make_old, "old")
        for name in (self.write_config("old.json", run_dir="old"), "old/config.json"):
            (self.dir / name).write_text(add_cost((self.dir / name).read_text()))
        self.run_trainer("inspect", "old")
        self.run_trainer("old.json", "--resume")
        self.assertEqual(self.records("old"), self.records())
        self.assertEqual(self.weights(20, "old"), self.weights())
        self.assertNotIn("energy", self.manifest(20, "old")["state"])
        self.assertNotIn("cost", json.loads(self.manifest(20, "old")["config"]))

    def test_a_finished_run_has_nothing_to_do(self):
        self.train()
        before = self.records()
        self.train("--resume")
        self.assertEqual(self.records(), before)

    def test_a_damaged_checkpoint_falls_back_to_the_older_one(self):
        self.train(checkpoint_every_steps=8, checkpoint_keep=5)
        whole = self.records()
        for step in (16, 20):
            shard = next(self.step_dir(step).glob("shard_*.bin"))
            damaged = bytearray(shard.read_bytes())
            damaged[len(damaged) // 2] ^= 1
            shard.write_bytes(damaged)
        said = self.train("--resume", checkpoint_every_steps=8, checkpoint_keep=5)
        self.assertIn(str(self.step_dir(16).relative_to(self.dir)), said)
        self.assertEqual(self.records(), whole)

    def test_auto_does_not_start_over_damaged_checkpoints(self):
        self.train(train_max_steps=4)
        for shard in self.dir.glob("run/checkpoints/step_*/shard_*.bin"):
            shard.write_bytes(shard.read_bytes()[:-1])
        for _ in range(2):  # the second time, they are already set aside
            self.assertIn("checkpoints", self.train("--auto", expect=66, train_max_steps=4))

    def test_settings_that_would_change_the_run_are_refused(self):
        self.train(train_max_steps=5)
        before = self.contents("run")
        said = self.train("--resume", expect=78, train_max_steps=5, optim_learning_rate=3e-3)
        self.assertIn("optim.learning_rate: 0.01 -> 0.003", said)
        self.assertEqual(self.contents("run"), before)
