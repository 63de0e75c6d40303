"""Averages of the weights in training, evaluation and checkpoints."""
import re
import shutil

from trainer import TrainerTest

EIGHT = dict(train_batch_size=1, train_total_batch_tokens=8 * 20, parallel_deterministic_reduce=True)


class Average(TrainerTest):
    def test_evaluation_uses_the_average_and_training_does_not(self):
        changes = dict(train_max_steps=20, eval_every_steps=10, checkpoint_every_steps=10, optim_learning_rate=1e-2)
        self.train(run_dir="plain", **changes)
        for settings in (dict(average_kind="exponential", average_decay=0.9),
                         dict(average_kind="tail", average_tail_fraction=0.75)):
            with self.subTest(**settings):
                run = settings["average_kind"]
                self.train(run_dir=run, **changes, **settings)
                self.assertEqual(self.records(run, "train"), self.records("plain", "train"))
                losses = [[record["loss"] for record in self.records(name, "val")] for name in (run, "plain")]
                self.assertEqual(len(losses[0]), 2)
                for averaged, last in zip(*losses):
                    self.assertNotEqual(averaged, last)
                # The command reads the average from the checkpoint.
                said = self.run_trainer("eval", run)
                self.assertAlmostEqual(float(re.search(r"loss +([\d.]+)", said)[1]), losses[0][1], delta=1e-4)
                state, plain = self.logical_state(20, run), self.logical_state(20, "plain")
                for name, digest in plain.items():
                    self.assertEqual(state[name], digest)
                self.assertNotEqual(state["average.wte"], state["master.wte"])

    def test_the_same_bits_on_ranks_and_after_a_resume(self):
        changes = dict(train_max_steps=8, eval_every_steps=4, checkpoint_every_steps=4, checkpoint_keep=9,
                       average_kind="exponential", average_decay=0.75, **EIGHT)
        self.train(run_dir="one", **changes)
        for ranks, stage in ((2, 0), (2, 3), (4, 1)):
            with self.subTest(ranks=ranks, stage=stage):
                run = f"run_{ranks}_{stage}"
                self.run_trainer(self.write_config(run_dir=run, parallel_zero_stage=stage, **changes), "--nproc", ranks)
                self.assertEqual(self.records(run), self.records("one"))
                self.assertEqual(self.logical_state(8, run), self.logical_state(8, "one"))
                shutil.rmtree(self.step_dir(8, run))
                self.train("--resume", run_dir=run, **changes)  # on one rank
                self.assertEqual(self.logical_state(8, run), self.logical_state(8, "one"))

    def test_a_tail_needs_a_known_end(self):
        said = self.train(expect=78, average_kind="tail", train_max_steps=0, train_max_minutes=1,
                          schedule_name="constant")
        self.assertIn('average.kind "tail" needs train.max_steps', said)
