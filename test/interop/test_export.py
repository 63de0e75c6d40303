"""An exported directory in transformers: the tokenizer, its limits, generation, and importing it again."""
import json
import re
import subprocess
import sys
import unittest
import warnings

from trainer import TrainerTest, generated_text

REQUIREMENTS = [["transformers==4.*", "torch", "numpy"], ["transformers==5.*", "torch", "numpy"]]
POSITIONS, VOCABULARY, END_OF_TEXT = 24, 300, 299


class Export(TrainerTest):
    def setUp(self):
        super().setUp()
        warnings.simplefilter("ignore")
        self.text = generated_text(200) + "Zwölf Boxkämpfer 123  über\tden\n\n  Zaun!\r\n"
        (self.dir / "book.txt").write_bytes(self.text.encode())
        self.run_trainer("prepare", "book.txt", "--tokenizer", "bpe", "--vocab-size", VOCABULARY, "--val-fraction", 0,
                         "--out", "book")
        self.book = dict(data_train="book/train_*.bin", data_val="", data_tokenizer="book/tokenizer.json",
                         model_vocab_size=VOCABULARY)
        self.train(**self.book)
        self.run_trainer("export", "--hf", "run", "hf")

    def test_the_tokenizer(self):
        from transformers import AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained(self.dir / "hf")
        self.assertEqual(tokenizer.model_max_length, POSITIONS)
        for token in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id):
            self.assertEqual(token, END_OF_TEXT)
        self.assertEqual(len(tokenizer), VOCABULARY)
        shard = (self.dir / "book/train_000000.bin").read_bytes()[1024:]
        ids = [int.from_bytes(shard[i:i + 2], "little") for i in range(0, len(shard), 2)]
        self.assertEqual(tokenizer(self.text)["input_ids"], ids[1:])
        self.assertEqual(tokenizer.decode(ids[1:]), self.text)
        self.assertEqual(tokenizer.decode(ids, skip_special_tokens=True), self.text)
        self.assertEqual(tokenizer("Hello <|endoftext|> x")["input_ids"].count(END_OF_TEXT), 1)
        self.assertEqual(len(tokenizer(self.text, truncation=True)["input_ids"]), POSITIONS)

    def test_the_code_in_the_model_card_runs_without_warnings(self):
        code = re.search(r"```python\n(.*?)```", (self.dir / "hf/README.md").read_text(), re.DOTALL)[1]
        result = subprocess.run([sys.executable, "-c", code], cwd=self.dir / "hf", capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertTrue(result.stdout.startswith("The"), result.stdout)
        self.assertNotIn("max_", result.stderr)

    def test_a_pipeline_stays_within_the_positions(self):
        from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
        generation = AutoModelForCausalLM.from_pretrained(self.dir / "hf").generation_config
        self.assertEqual(generation.eos_token_id, END_OF_TEXT)
        generate = pipeline("text-generation", model=str(self.dir / "hf"), device="cpu")
        tokenizer = AutoTokenizer.from_pretrained(self.dir / "hf")
        # Longer than the model can read: the pipeline drops the beginning, so that new tokens fit.
        made = generate(self.text, handle_long_generation="hole", max_new_tokens=8, return_full_text=False)
        self.assertLessEqual(len(tokenizer(made[0]["generated_text"])["input_ids"]), 8)

    def test_greedy_text_is_the_same(self):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained(self.dir / "hf")
        model = AutoModelForCausalLM.from_pretrained(self.dir / "hf")
        prompt = tokenizer("<|endoftext|>The", return_tensors="pt")
        made = model.generate(**prompt, do_sample=False, max_new_tokens=12)
        ours = self.run_trainer("sample", "run", "--prompt", "The", "--temperature", 0, "--tokens", 12)
        self.assertEqual(tokenizer.decode(made[0], skip_special_tokens=True), ours.removesuffix("\n"))

    def test_models_saved_by_transformers_are_accepted(self):
        import torch
        from transformers import GPT2LMHeadModel
        steps = dict(self.book, train_max_steps=1, optim_learning_rate=0)
        self.train(**steps, run_dir="expected", model_init_from="run")
        for name, dtype in (("float32", torch.float32), ("float64", torch.float64)):
            with self.subTest(name):
                model = GPT2LMHeadModel.from_pretrained(self.dir / "hf").to(dtype)
                model.config.activation_function = "gelu_pytorch_tanh"
                model.save_pretrained(self.dir / name)
                config = json.loads((self.dir / name / "config.json").read_text())
                self.assertEqual(config["activation_function"], "gelu_pytorch_tanh")
                self.train(**steps, run_dir=f"from_{name}", model_init_from=name)
                self.assertEqual(self.weights(1, f"from_{name}"), self.weights(1, "expected"))


if __name__ == "__main__":
    unittest.main()
