"""train_gpt lr-range: the rates, the losses of a run with the same rates, the table, and what stays untouched."""
import json
import math
import re

from trainer import TrainerTest

USAGE, NO_INPUT, CONFIG = 64, 66, 78
RANGE = "run.lr-range"


class LrRange(TrainerTest):
    def range_test(self, *args, expect=0, **changes):
        return self.run_trainer("lr-range", self.write_config(**changes), *args, expect=expect)

    def test_the_loss_falls_and_then_diverges(self):
        said = self.range_test("--from", 1e-4, "--to", 100, "--steps", 120, optim_grad_clip=0)
        records = self.records(RANGE, "train")
        for record in records:
            self.assertTrue(math.isclose(record["lr"], 1e-4 * 1e6 ** ((record["step"] - 1) / 119), rel_tol=1e-12))
        rates, losses = [r["lr"] for r in records], [r["loss"] for r in records]
        self.assertEqual(rates, sorted(set(rates)))
        best = losses.index(min(losses))
        self.assertLess(losses[best], 0.8 * losses[0])
        self.assertTrue(10 < best < len(losses) - 2, best)
        self.assertLess(len(losses), 120)
        self.assertIn(f"stopped at step {len(losses)}", said)

        # The table has the losses of the records, and the suggestions are rates of its steps.
        rows = re.findall(r"^ +(\d+) +(\S+) +(\S+) +(\S+)$", said, re.M)
        self.assertTrue(15 <= len(rows) <= 22, said)
        for step, rate, loss, _ in rows:
            self.assertEqual((rate, loss), (f"{rates[int(step) - 1]:.4e}", f"{losses[int(step) - 1]:.4f}"))
        steepest, tenth, lowest = (float(re.search(rf"{words} *(\S+?){end}", said, re.M)[1]) for words, end in (
            ("rate\n", "  steepest descent$"), ("^", "  a tenth of"), ("a tenth of", ", the rate")))
        self.assertTrue(rates[0] < steepest < lowest < rates[-1], said)
        self.assertLess(abs(tenth / lowest - 0.1), 0.002)
        self.assertLess(abs(math.log(lowest / rates[best])), math.log(1e6) / 119 * 7)

    def test_the_steps_are_those_of_a_training_run(self):
        """With one rate, the test has the bits of a run with a constant schedule."""
        same = {"train_max_steps": 12, "schedule_name": "constant", "schedule_warmup_steps": 0, "model_dropout": 0.1}
        for ranks in ([], ["--nproc", 2, "--set", "parallel.zero_stage=3"]):
            self.run_trainer(self.write_config(**same), *ranks, "--fresh")
            self.range_test("--from", 0.01, "--to", 0.01, "--steps", 12, *ranks, schedule_warmup_steps=5,
                            model_dropout=0.1, optim_learning_rate=3e-4)
            self.assertEqual(self.records(RANGE), self.records("run"))

    def test_an_existing_run_is_untouched(self):
        self.train(train_max_steps=3)
        before = self.contents("run")
        self.range_test("--steps", 10, "--set", "run.dir=run//")
        self.assertEqual(self.contents("run"), before)
        self.assertFalse((self.dir / RANGE / "checkpoints").exists())
        curve = (self.dir / RANGE / "metrics.jsonl").read_bytes()
        self.range_test("--steps", 11, "--to", 0.01)
        self.assertEqual((self.dir / f"{RANGE}.old-1/metrics.jsonl").read_bytes(), curve)
        self.assertEqual(len(self.losses(RANGE)), 11)

    def test_defaults_and_the_weights_of_another_run(self):
        self.train(train_max_steps=20)
        self.range_test("--steps", 10, model_init_from="run", optim_learning_rate=3e-4)
        records = self.records(RANGE, "train")
        self.assertTrue(math.isclose(records[0]["lr"], 3e-6) and math.isclose(records[9]["lr"], 3e-2))
        self.assertLess(records[0]["loss"], 0.9 * self.losses()[0])

    def test_report(self):
        self.range_test("--steps", 10)
        self.run_trainer("report", RANGE)
        page = (self.dir / "report.html").read_text()
        self.assertIn('<option value="lr">', page)
        config = json.loads((self.dir / RANGE / "config.json").read_text())
        self.assertEqual((config["schedule"]["name"], config["train"]["max_steps"]), ("constant", 10))

    def test_bad_arguments(self):
        for args, code, words in (
                (["--from", "0"], USAGE, "--from: must be a finite number in [1e-12, 1000], is \"0\""),
                (["--to", "nan"], USAGE, "--to: must be a finite number"),
                (["--steps", "9"], USAGE, "--steps: must be an integer in [10, 100000]"),
                (["--from", "0.1", "--to", "0.01"], USAGE, "the rate grows from 0.1 to 0.01"),
                (["--set", "optim.learning_rate=0"], USAGE, "--from must be positive"),
                (["--set", "train.seq_len=25"], CONFIG, "train.seq_len"),
                (["--resume"], USAGE, "--resume is an option of training, not of the command lr-range"),
                (["--set", "data.train=none_*"], NO_INPUT, "none_*")):
            with self.subTest(args):
                self.assertIn(words, self.range_test(*args, expect=code))
                self.assertEqual(list(self.dir.glob("run*")), [])
