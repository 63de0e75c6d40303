"""Models of each family in transformers: an exported model opens there and computes the same; a model that
transformers saves is imported with the same bits."""
import unittest
import warnings

from test_families import FAMILIES
from trainer import TrainerTest

REQUIREMENTS = [["transformers==4.*", "torch", "numpy"], ["transformers==5.*", "torch", "numpy"]]
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


class Families(TrainerTest):
    def setUp(self):
        super().setUp()
        warnings.simplefilter("ignore")

    def test_round_trip(self):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        for name, kind in CLASSES.items():
            with self.subTest(name):
                changes = FAMILIES[name]
                self.train(run_dir=name, train_max_steps=30, **changes)
                self.run_trainer("export", "--hf", name, f"{name}_hf")
                model = AutoModelForCausalLM.from_pretrained(self.dir / f"{name}_hf", dtype=torch.float32)
                self.assertEqual(type(model).__name__, kind)
                tokenizer = AutoTokenizer.from_pretrained(self.dir / f"{name}_hf")
                prompt = tokenizer("<|endoftext|>The", return_tensors="pt")
                self.assertEqual(prompt["input_ids"][0, 0], 256)
                prompt.pop("token_type_ids", None)
                made = model.generate(**prompt, do_sample=False, max_new_tokens=18)
                ours = self.run_trainer("sample", name, "--prompt", "The", "--temperature", 0, "--tokens", 18)
                self.assertEqual(tokenizer.decode(made[0], skip_special_tokens=True), ours.removesuffix("\n"))
                model.save_pretrained(self.dir / f"{name}_saved", max_shard_size="100KB")
                self.assertTrue((self.dir / f"{name}_saved/model.safetensors.index.json").exists())
                still = dict(changes, train_max_steps=1, optim_learning_rate=0)
                self.train(run_dir=f"{name}_one", model_init_from=name, **still)
                self.train(run_dir=f"{name}_two", model_init_from=f"{name}_saved", **still)
                self.assertEqual(self.weights(1, f"{name}_one"), self.weights(1, f"{name}_two"))

    def test_exports_in_16_bits(self):
        import torch
        from transformers import AutoModelForCausalLM
        self.train(train_max_steps=3, **FAMILIES["qwen3"])
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            with self.subTest(name):
                self.run_trainer("export", "--hf", "run", name, "--dtype", name)
                model = AutoModelForCausalLM.from_pretrained(self.dir / name, dtype="auto")
                self.assertEqual(model.dtype, dtype)

    def test_the_loss_is_the_same(self):
        import torch
        from transformers import AutoModelForCausalLM
        for name in CLASSES:
            with self.subTest(name):
                self.train(run_dir=name, train_max_steps=10, eval_every_steps=10, eval_batches=0, **FAMILIES[name])
                self.run_trainer("export", "--hf", name, f"{name}_hf")
                model = AutoModelForCausalLM.from_pretrained(self.dir / f"{name}_hf", dtype=torch.float32)
                shard = (self.dir / "data/val_000000.bin").read_bytes()[1024:]
                ids = [int.from_bytes(shard[i:i + 2], "little") for i in range(0, len(shard), 2)]
                total = count = 0
                for begin in range(0, len(ids) - 1, 20):
                    window = torch.tensor([ids[begin:begin + 21]])
                    with torch.no_grad():
                        logits = model(window[:, :-1]).logits[0].double()
                    total += torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum").item()
                    count += window.shape[1] - 1
                self.assertAlmostEqual(self.records(name, "val")[-1]["loss"] / (total / count), 1, delta=1e-5)


if __name__ == "__main__":
    unittest.main()
