"""model.dropout in the program: new masks in every step, none in validation; exports and imports."""
import json

from trainer import TrainerTest


class Dropout(TrainerTest):
    def test_each_step_has_its_own_masks_and_validation_has_none(self):
        """With equal windows and a learning rate of 0, only masks can make the losses of steps differ."""
        (self.dir / "text.txt").write_text("a" * 4000)
        self.run_trainer("prepare", "--tokenizer", "bytes", "--minutes", "0", "--val-fraction", "0", "text.txt",
                         "--out", "same")
        changes = dict(data_train="same/train_*.bin", train_max_steps=12, optim_learning_rate=0, eval_every_steps=4,
                       checkpoint_every_steps=6)
        self.train(**changes)
        self.train(run_dir="dropped", model_dropout=0.2, **changes)
        plain, dropped = self.losses("run"), self.losses("dropped")
        self.assertLessEqual(len(set(plain)), 2, plain)  # the window with the end-of-text token differs
        self.assertEqual(len(set(dropped)), 12, dropped)
        self.assertEqual(self.records("dropped", "val"), self.records("run", "val"))
        val_loss = self.records("dropped", "val")[-1]["loss"]
        self.assertIn(f"{val_loss:.6f}"[:6], self.run_trainer("eval", "dropped"))

    def test_a_rate_out_of_range_is_refused(self):
        for rate in (-0.1, 1, 1.5, "nan", 1e999):
            with self.subTest(rate=rate):
                said = self.run_trainer(self.write_config(), "--set", f"model.dropout={rate}", expect=78)
                self.assertIn("model.dropout must be a number in [0, 0.9999]", said)

    def test_exports_record_the_rate_and_imports_ignore_it(self):
        self.train(train_max_steps=1, model_dropout=0.25)
        self.run_trainer("export", "--hf", "run", "hf")
        path = self.dir / "hf/config.json"
        config = json.loads(path.read_text())
        rates = {key: value for key, value in config.items() if key.endswith("_pdrop")}
        self.assertEqual(rates, {"attn_pdrop": 0.25, "embd_pdrop": 0.25, "resid_pdrop": 0.25})
        self.run_trainer("import", "hf", "imported")
        self.assertEqual(json.loads((self.dir / "imported/config.json").read_text())["model"]["dropout"], 0)
