"""Logs on a disk with temporary faults: the run continues, with the records of a run without faults."""
from test_data_faults import with_fault
from trainer import TrainerTest


class LogFaults(TrainerTest):
    def test_a_record_that_could_not_be_written_is_written_later(self):
        self.train(run_dir="whole")
        for name, count in (("metrics.jsonl", 1), ("metrics.jsonl", 9), ("main.log", 5), ("samples.jsonl", 3)):
            with self.subTest(name=name, count=count):
                config = self.write_config(sample_every_steps=2, sample_tokens=4)
                said = self.run_trainer(config, "--fresh", **with_fault("write fails", "run/" + name, 2, count + 1))
                self.assertIn("warning: cannot write ", said)
                self.assertRegex(said, rf"run/{name}: No space left on device; the records are kept in memory")
                self.assertEqual(said.count("warning"), 1)
                self.assertIn("writing the log works again; no records were lost", said)
                self.assertEqual(self.records(), self.records("whole"))
                self.assertEqual(self.weights(), self.weights(run="whole"))
                self.assertEqual((self.dir / "run/main.log").read_text(), (self.dir / "whole/main.log").read_text())

    def test_a_failed_sync_fails_a_save_but_loses_no_line(self):
        self.train(run_dir="whole", checkpoint_every_steps=5)
        config = self.write_config(checkpoint_every_steps=5)
        # The first sync is of the empty file.
        said = self.run_trainer(config, **with_fault("sync loses", "run/metrics.jsonl", 2))
        self.assertRegex(said, r"step 5 \| save failed 1 of 3 times: cannot sync .*metrics.jsonl")
        self.assertNotIn("\0", (self.dir / "run/metrics.jsonl").read_text())
        self.assertEqual(self.records(), self.records("whole"))

    def test_a_hundred_failed_steps_end_the_run_with_a_checkpoint(self):
        for flags in ([], ["--nproc", "2"]):
            with self.subTest(flags=flags):
                config = self.write_config(train_max_steps=150)
                said = self.run_trainer(config, "--fresh", *flags, expect=74,
                                        **with_fault("write fails", "run/metrics.jsonl", 20, 10000))
                self.assertIn("giving up after 100 steps of retries", said)
                steps = sorted(int(path.name[5:]) for path in (self.dir / "run/checkpoints").glob("step_*"))
                self.assertTrue(steps and 110 < steps[-1] < 130, said)

    def test_a_log_in_an_unknown_state_is_not_replaced(self):
        self.train(train_max_steps=20, checkpoint_every_steps=10)
        before = {name: (self.dir / "run" / name).read_text() for name in ("metrics.jsonl", "main.log")}
        for name in before:
            with self.subTest(name=name):
                config = self.write_config(checkpoint_every_steps=10)
                said = self.run_trainer(config, "--resume", expect=74, **with_fault("look fails", "run/" + name))
                self.assertIn("Input/output error", said)
                for other, text in before.items():
                    self.assertEqual((self.dir / "run" / other).read_text(), text)
