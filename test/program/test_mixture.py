"""Training on a weighted mixture of data sets."""
import json
import shutil

from trainer import TrainerTest


def parts(first, second):
    return [{"path": "data/train_*.bin", "weight": first}, {"path": "more/train_*.bin", "weight": second}]


class Mixture(TrainerTest):
    def setUp(self):
        super().setUp()
        (self.dir / "more.txt").write_text("0123456789\n" * 100)
        self.run_trainer("prepare", "--tokenizer", "bytes", "--minutes", "0", "more.txt", "--out", "more")

    def test_a_mixture_resumes_bit_for_bit_and_its_weights_are_part_of_the_run(self):
        mixed = {"data_train": parts(3, 1), "checkpoint_every_steps": 10, "checkpoint_keep": 5}
        said = self.train(**mixed)
        self.assertIn("train_000000.bin (75 %), train_000000.bin (25 %)", said)
        shutil.copytree(self.dir / "run", self.dir / "cut")
        shutil.rmtree(self.step_dir(20, "cut"))
        self.train("--resume", run_dir="cut", **mixed)
        self.assertEqual(self.records("cut"), self.records("run"))
        self.assertEqual(self.weights(20, "cut"), self.weights(20, "run"))
        # The effective configuration is valid input.
        self.assertEqual(json.loads((self.dir / "run/config.json").read_text())["data"]["train"], parts(3, 1))
        # On two ranks, sums differ in the last bits; the samples are the same.
        self.train("--nproc", "2", run_dir="two", **mixed)
        for one, two in zip(self.losses(), self.losses("two"), strict=True):
            self.assertAlmostEqual(one, two, delta=1e-4)

        refused = self.train("--resume", expect=78, **{**mixed, "data_train": parts(1, 1)})
        self.assertIn("data.train: the files or weights differ", refused)
        self.train("--resume", **{**mixed, "data_train": parts(6, 2)})  # the same shares

    def test_a_weight_moves_the_loss(self):
        # Digits are easier to predict than text, so more digits lower the loss.
        last = []
        for name, weights in (("text", parts(99, 1)), ("digits", parts(1, 99))):
            self.train(run_dir=name, data_train=weights)
            last.append(self.losses(name)[-1])
        self.assertLess(last[1], last[0])

    def test_set_takes_a_list_and_a_pattern(self):
        config = self.write_config()
        self.run_trainer(config, "--set", f"data.train={json.dumps(parts(1, 1))}", "--set", "train.max_steps=2",
                         "--set", "schedule.warmup_steps=1")
        self.run_trainer(config, "--fresh", "--set", f"data.train={json.dumps(parts(1, 1))}", "--set",
                         "data.train=more/train_*.bin", "--set", "train.max_steps=2", "--set",
                         "schedule.warmup_steps=1")

    def test_every_data_set_must_have_the_tokenizer(self):
        self.run_trainer("prepare", "--tokenizer", "bpe", "--vocab-size", 300, "--force", "more.txt", "--out", "more")
        said = self.train(expect=78, data_train=parts(1, 1), model_vocab_size=300)
        self.assertIn("is not the tokenizer that more/train_000000.bin was made with", said)

    def test_invalid_mixtures_are_refused(self):
        for value in ([], [{"path": "data/train_*.bin"}], [{"path": "", "weight": 1}],
                      [{"path": "data/train_*.bin", "weight": 0}], [{"path": "data/train_*.bin", "weight": "1"}],
                      [{"path": "data/train_*.bin", "weight": 1, "name": "x"}], {"path": "x", "weight": 1}, 7):
            with self.subTest(value):
                said = self.train(expect=78, data_train=value)
                self.assertIn("data.train must be text without NUL, 1 to 4096 bytes, or a list", said)
        self.assertIn("nowhere/*.bin", self.train(expect=66, data_train=[*parts(1, 1),
                                                                       {"path": "nowhere/*.bin", "weight": 1}]))
