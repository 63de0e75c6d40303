"""The commands follow --help and the documentation, from preparing text to generating it."""
import array
import json
import math
import re
import shutil
import struct
import subprocess
import unittest

from trainer import ROOT, TRAINER, TrainerTest, generated_text


class FromTextToText(TrainerTest):
    def test_the_quickstart_with_a_small_model(self):
        (self.dir / "book.txt").write_text(generated_text(1500))
        said = self.run_trainer("prepare", "--tokenizer", "bpe", "--vocab-size", "400", "book.txt", "--out", "book")
        self.assertIn("400", said)
        dataset = json.loads((self.dir / "book" / "dataset.json").read_text())
        size = (self.dir / "book.txt").stat().st_size
        held_out = size - dataset["val_begin"]
        self.assertEqual(dataset["splits"]["val"]["text_bytes"], held_out)
        self.assertTrue(0.04 * size < held_out <= 0.05 * size)

        said = self.train(data_train="book/train_*.bin", data_val="book/val_*.bin",
                          data_tokenizer="book/tokenizer.json", model_vocab_size=400, train_max_steps=100,
                          eval_every_steps=50, checkpoint_every_steps=40, checkpoint_keep=2, sample_every_steps=50,
                          sample_tokens=20)
        self.assertIn("step 100/100", said)
        self.assertEqual([record["step"] for record in self.records("run", "train")], list(range(1, 101)))
        first, last = self.records("run", "val")
        self.assertEqual([first["step"], last["step"]], [50, 100])
        self.assertLess(last["loss"], first["loss"])
        self.assertLess(last["bits_per_byte"], 4)
        self.assertEqual([path.name for path in sorted((self.dir / "run/checkpoints").iterdir())],
                         ["step_00000080", "step_00000100"])
        for name in ("config.json", "tokenizer.json", "main.log"):
            self.assertTrue((self.dir / "run" / name).exists(), name)
        self.assertRegex((self.dir / "run" / "main.log").read_text(), r"\As:1 trl:\d\.\d+ lr:[\d.]+ norm:[\d.]+\n")

        result = self.run_trainer("eval", "run")
        self.assertIn(f"{last['loss']:.4f}"[:5], result)
        one, again, other = (self.run_trainer("sample", "run", "--prompt", "The ", "--tokens", "30", "--seed", seed)
                             for seed in (1, 1, 2))
        self.assertTrue(one.startswith("The "))
        self.assertEqual(one, again)
        self.assertNotEqual(one, other)
        greedy = {self.run_trainer("sample", "run", "--temperature", "0", "--seed", seed) for seed in (1, 2)}
        self.assertEqual(len(greedy), 1)

    def test_several_prompts_stop_strings_and_restricted_sampling(self):
        self.train(train_max_steps=60)
        (self.dir / "prompts.txt").write_text("Second, much longer prompt\n\nThe", encoding="utf-8")

        def sample(*options, tokens=30):
            return self.run_trainer("sample", "run", "--tokens", tokens, *options)

        prompts = ("And", "Second, much longer prompt", "", "The")
        alone = [sample("--prompt", prompt) for prompt in prompts]
        self.assertEqual(len(set(alone)), 4)
        for prompt, text in zip(prompts, alone):
            self.assertTrue(text.startswith(prompt) and text.endswith("\n"))
        self.assertEqual(sample("--prompt", "And", "--prompts", "prompts.txt"), "".join(alone))
        self.assertEqual(sample("--prompt", "And", "--prompt", "The"), alone[0] + alone[3])

        # A stop string ends the text however its tokens spell it; the prompt itself does not count.
        rest = alone[1][len(prompts[1]):-1]
        for begin, length in ((10, 1), (12, 5), (4, 9)):
            stop = rest[begin:begin + length]
            self.assertEqual(sample("--prompt", prompts[1], "--stop", "Second", "--stop", stop),
                             prompts[1] + rest[:rest.index(stop)] + "\n")
        self.assertEqual(sample("--prompt", "And", "--stop", "never\x01"), alone[0])

        # If only the most probable token is kept, all seeds generate the same text.
        greedy = sample("--temperature", "0", "--prompt", "The")
        self.assertNotEqual(greedy, alone[3])
        for options in (("--top-p", 0), ("--min-p", 1), ("--top-k", 1)):
            self.assertEqual(sample(*options, "--prompt", "The", "--seed", 5), greedy)
        self.assertEqual(sample("--top-p", 1, "--min-p", 0, "--prompt", "The"), alone[3])

    def test_the_effective_configuration_makes_the_same_run(self):
        self.train()
        (self.dir / "run/config.json").rename(self.dir / "effective.json")
        self.run_trainer("effective.json", "--set", "run.dir=again")
        self.assertEqual(self.records("again"), self.records("run"))

    def test_the_command_line_wins_over_the_file(self):
        self.train("--set", "train.max_steps=4", "--set", "schedule.warmup_steps=2", "--set=run.dir=other")
        self.assertEqual(len(self.records("other")), 4)

    def test_auto_starts_and_resumes(self):
        self.train("--auto", train_max_steps=4, schedule_name="constant")
        self.train("--auto", "--accept-changes", train_max_steps=8, schedule_name="constant")
        self.assertEqual(len(self.records()), 8)

    def test_inspect(self):
        self.train()
        self.assertIn("257", self.run_trainer("inspect", "data/tokenizer.json"))
        shard = self.dir / "data/train_000000.bin"
        self.assertIn(str((shard.stat().st_size - 1024) // 2), self.run_trainer("inspect", shard).replace(",", ""))
        self.assertIn("20", self.run_trainer("inspect", "run"))
        self.assertIn("20", self.run_trainer("inspect", self.step_dir(20)))
        self.run_trainer("export", "--hf", "run", "hf")
        self.assertIn("48", self.run_trainer("inspect", "hf/model.safetensors"))
        weights = next(self.step_dir(20).glob("shard_*.bin"))
        weights.write_bytes(weights.read_bytes()[:-1])
        self.assertIn(weights.name, self.run_trainer("inspect", self.step_dir(20), expect=65))

    def test_inspect_directories(self):
        self.train(train_max_steps=2)
        self.run_trainer("export", "--hf", "run", "hf")
        dataset = json.loads((self.dir / "data/dataset.json").read_text())
        said = self.run_trainer("inspect", "data")
        for words in ("data: data set, tokenizer bytes with 257 tokens", dataset["tokenizer"]["xxh3"],
                      *(f"{name}: {split['tokens']} tokens in 1 shard(s), from {split['text_bytes']} bytes"
                        for name, split in dataset["splits"].items())):
            self.assertIn(words, said)
        said = self.run_trainer("inspect", "run")
        for words in ("run: run, 1 checkpoint(s)", "2 layers, 3 heads, 48 channels, vocabulary 257, fp32, ",
                      "257 tokens, 0 merges",
                      "checkpoint of step 2, run "):
            self.assertIn(words, said)
        said = self.run_trainer("inspect", "hf")
        for words in ("hf: Hugging Face directory; gpt2, 2 layers, 3 heads, 48 channels, 24 positions, vocabulary 257; "
                      "usable as model.init_from", "safetensors, 28 tensors", "F32 (48, 144)\n", "257 tokens"):
            self.assertIn(words, said)
        config = json.loads((self.dir / "hf/config.json").read_text())
        (self.dir / "hf/config.json").write_text(json.dumps({**config, "activation_function": "relu"}))
        self.assertIn('not usable as model.init_from: hf/config.json: activation_function is "relu"',
                      self.run_trainer("inspect", "hf"))

        for path in ("run/checkpoints", "."):
            self.assertIn("is not a checkpoint, a run, a data set", self.run_trainer("inspect", path, expect=66))
        shard = self.dir / "data/train_000000.bin"
        whole = shard.read_bytes()
        for content, word in ((whole[:-2], "cut short"), (whole[:-1] + b"\x40", "dataset.json records"),
                              (struct.pack("<3i", 20240520, 1, len(whole) // 2 - 513) + whole[12:-2], "recorded")):
            shard.write_bytes(content)
            self.assertIn(word, self.run_trainer("inspect", "data", expect=65))
        shard.unlink()
        self.assertIn("train_000000.bin", self.run_trainer("inspect", "data", expect=66))
        shard.write_bytes(whole)
        self.run_trainer("prepare", "text.txt", "--tokenizer", "bpe", "--vocab-size", "280", "--out", "bpe")
        shutil.copy(self.dir / "bpe/tokenizer.json", self.dir / "data")
        self.assertIn("dataset.json records", self.run_trainer("inspect", "data", expect=65))

    def test_a_validation_of_a_part_of_the_split_says_so(self):
        tokens = ((self.dir / "data/val_000000.bin").stat().st_size - 1024) // 2
        batches = math.ceil(math.ceil((tokens - 1) / 20) / 3)
        for ranks in (1, 2):
            for read, part in ((1, rf" \(1 of {batches} batches\)"), (0, ""), (batches, "")):
                said = self.train("--nproc", ranks, "--fresh", train_max_steps=1, eval_every_steps=1, eval_batches=read)
                self.assertRegex(said, rf"step 1 \| validation loss \d\.\d{{4}}{part} \| \d")
                self.assertEqual(set(self.records(kind="val")[0]), {"kind", "step", "loss", "bits_per_byte"})

    def test_export_records_the_limits_for_other_programs(self):
        self.train(train_max_steps=1)
        self.run_trainer("export", "--hf", "run", "hf")
        read = lambda name: json.loads((self.dir / "hf" / name).read_text())
        tokenizer, generation = read("tokenizer_config.json"), read("generation_config.json")
        self.assertEqual(tokenizer["model_max_length"], 24)
        self.assertEqual({tokenizer[f"{kind}_token"] for kind in ("bos", "eos", "unk")}, {"<|endoftext|>"})
        self.assertEqual(tokenizer["added_tokens_decoder"]["256"]["content"], "<|endoftext|>")
        self.assertEqual((tokenizer["clean_up_tokenization_spaces"], tokenizer["add_prefix_space"]), (False, False))
        self.assertEqual(generation, {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256})
        self.assertIn("do_sample=True, max_length=24)\n", (self.dir / "hf/README.md").read_text())

    def test_import_accepts_both_names_of_gelu_and_doubles(self):
        self.train(train_max_steps=3)
        self.run_trainer("export", "--hf", "run", "hf")
        content = (self.dir / "hf/model.safetensors").read_bytes()
        size = struct.unpack("<Q", content[:8])[0]
        header, data = json.loads(content[8:8 + size]), array.array("f", content[8 + size:])
        for tensor in header.values():
            if "dtype" in tensor:
                tensor.update(dtype="F64", data_offsets=[2 * offset for offset in tensor["data_offsets"]])
        text = json.dumps(header).encode()
        # Offset by a quarter of the distance to the next float: rounding once restores the value.
        doubles = array.array("d", (value * (1 + 2.0**-26) for value in data))
        (self.dir / "hf/model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + doubles.tobytes())
        config = json.loads((self.dir / "hf/config.json").read_text())
        (self.dir / "hf/config.json").write_text(json.dumps({**config, "activation_function": "gelu_pytorch_tanh"}))
        changes = dict(train_max_steps=1, optim_learning_rate=0)
        self.train(run_dir="new", model_init_from="hf", **changes)
        self.train(run_dir="same", model_init_from="run", **changes)
        self.assertEqual(self.weights(1, "new"), self.weights(1, "same"))

    def test_masters_in_bf16_are_exported_exactly_and_converted_by_init_from(self):
        narrow = dict(train_precision="bf16", optim_master_dtype="bf16")
        still = dict(train_max_steps=1, optim_learning_rate=0)
        self.train(train_max_steps=3, **narrow)
        self.run_trainer("export", "--hf", "run", "hf")
        for source in ("run", "hf"):  # BF16 to FP32 is exact, so going back to BF16 is, too
            self.train(run_dir=f"wide_{source}", model_init_from=source, **still)
            self.train(run_dir=f"narrow_{source}", model_init_from=f"wide_{source}", **still, **narrow)
        self.assertEqual(self.masters(1, "wide_run"), self.masters(1, "wide_hf"))
        for source in ("run", "hf"):
            self.assertEqual(self.masters(1, f"narrow_{source}"), self.masters(3, "run"))
        self.assertNotEqual(self.masters(1, "wide_run"), self.masters(3, "run"))
        # FP32 to BF16 rounds to nearest, as export does.
        self.train(run_dir="fine", train_max_steps=3)
        self.run_trainer("export", "--hf", "--dtype", "bf16", "fine", "rounded")
        self.train(run_dir="from_fp32", model_init_from="fine", **still, **narrow)
        self.train(run_dir="from_bf16", model_init_from="rounded", **still, **narrow)
        self.assertEqual(self.masters(1, "from_fp32"), self.masters(1, "from_bf16"))

    def masters(self, step, run):
        return {name: sha for name, sha in self.logical_state(step, run).items() if name.startswith("master.")}

    def test_plan_and_initial_weights_check_the_tokenizer(self):
        self.train(train_max_steps=1)
        self.run_trainer("export", "--hf", "run", "hf")
        self.run_trainer("prepare", "text.txt", "--tokenizer", "bpe", "--vocab-size", "257", "--out", "bpe")
        bpe = dict(data_train="bpe/train_*.bin", data_val="", data_tokenizer="bpe/tokenizer.json", run_dir="new")
        for words, changes in [
                (["data/tokenizer.json", "257", "256"], dict(model_vocab_size=256)),
                (["bpe/tokenizer.json", "data/train_000000.bin"], dict(data_tokenizer="bpe/tokenizer.json")),
                (["run/checkpoints/step_00000001", "257", "300"], dict(model_init_from="run", model_vocab_size=300)),
                (["hf/tokenizer.json", "prepare the data with --tokenizer"], dict(bpe, model_init_from="hf")),
                (["run/tokenizer.json"], dict(bpe, model_init_from="run")),
                (["run/tokenizer.json"], dict(bpe, model_init_from="run/checkpoints/step_00000001")),
                (["run/tokenizer.json"], dict(bpe, model_init_from="run", data_tokenizer=""))]:
            config = self.write_config(**changes)
            for command in (["plan", config], [config, "--set", "run.dir=new"]):
                with self.subTest(changes, command=command[0]):
                    said = self.run_trainer(*command, expect=78)
                    for word in words:
                        self.assertIn(word, said)
        self.assertFalse((self.dir / "new").exists())
        self.run_trainer("plan", self.write_config(model_init_from="run"))
        self.train(run_dir="new", model_init_from="hf", train_max_steps=1)

    def test_inspect_a_shard_and_a_tokenizer(self):
        text = "".join(f"line {i} of these 400 lines\n" for i in range(400)) + "zyx wvu tsr qpo\n" * 40
        (self.dir / "lines.txt").write_text(text)
        self.run_trainer("prepare", "lines.txt", "--vocab-size", "300", "--val-fraction", "0.1", "--shard-tokens",
                         "1000", "--out", "out")
        shard = (self.dir / "out/val_000000.bin").read_bytes()
        said = self.run_trainer("inspect", "out/val_000000.bin")
        for words in ("llm.c token shard (GPT-2)", f"{(len(shard) - 1024) // 2} tokens of 2 bytes",
                      "1 x <|endoftext|>"):
            self.assertIn(words, said)
        tokenizer = (self.dir / "out/tokenizer.json").read_bytes()
        self.assertIn("300 tokens, 43 merges, <|endoftext|> is 299", self.run_trainer("inspect", "out/tokenizer.json"))
        for path in ("out/dataset.json", "lines.txt"):
            self.assertIn("not a checkpoint, a run, a token shard", self.run_trainer("inspect", path, expect=65))

        def refused(path, content, *words):
            (self.dir / path).write_bytes(content)
            said = self.run_trainer("inspect", path, expect=65)
            for word in (path, *words):
                self.assertIn(word, said)
        refused("cut.bin", shard[:-1], "cut short")
        refused("out/val_000000.bin", shard[:-1] + b"\x20", "dataset.json records")
        (self.dir / "out/dataset.json").unlink()  # it has the checksums
        refused("out/val_000000.bin", shard[:-1] + b"\x20", "tokenizer.json", "300 tokens")
        refused("tokenizer.json", tokenizer[:3000], "line")

    def test_prepare_with_the_vocabulary_of_gpt2(self):
        cases = json.loads((ROOT / "test/recorded/tokenizers/gpt2_reference.json").read_text())
        (self.dir / "texts.jsonl").write_text("".join(json.dumps({"text": case["text"]}) + "\n" for case in cases))
        ids = [id for case in cases for id in (50256, *case["ids"])]
        command = ["prepare", "--tokenizer", "gpt2", "--val-fraction", "0", "texts.jsonl", "--force", "--out", "gpt2"]
        self.run_trainer(*command)
        shard = (self.dir / "gpt2/train_000000.bin").read_bytes()
        self.assertEqual(struct.unpack("<3i", shard[:12]), (20240520, 1, len(ids)))
        self.assertEqual(array.array("H", shard[1024:]).tolist(), ids)
        said = self.run_trainer("inspect", "gpt2/train_000000.bin")
        self.assertIn(f"{len(ids)} tokens of 2 bytes", said)
        self.assertIn(f"{len(cases)} x <|endoftext|>", said)
        self.assertIn("50257 tokens, 50000 merges", self.run_trainer("inspect", "gpt2/tokenizer.json"))
        self.assertIn("gpt2", self.run_trainer("prepare", "--help"))

        small = {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 16}
        sets = {**{f"model.{key}": value for key, value in small.items()}, "run.dir": "run", "data.val": "",
                "data.train": "gpt2/train_*.bin", "data.tokenizer": "gpt2/tokenizer.json", "train.max_steps": 1,
                "train.batch_size": 1, "train.seq_len": 16, "train.total_batch_tokens": 16, "schedule.warmup_steps": 0}
        said = self.run_trainer(ROOT / "configs/gpt2_124M.json",
                                *[arg for key, value in sets.items() for arg in ("--set", f"{key}={value}")])
        self.assertIn("step 1/1", said)

        (self.dir / "bin").mkdir()
        moved = shutil.copy(TRAINER, self.dir / "bin")
        result = subprocess.run([moved, *command], cwd=self.dir, capture_output=True, text=True)
        self.assertEqual(result.returncode, 66, result.stderr)
        self.assertIn(f"{self.dir}/data/gpt2", result.stderr)
        shutil.copytree(ROOT / "data/gpt2", self.dir / "data/gpt2")
        subprocess.run([moved, *command], cwd=self.dir, check=True, stdout=subprocess.DEVNULL)
        self.assertEqual((self.dir / "gpt2/train_000000.bin").read_bytes(), shard)

    def test_versions_and_help(self):
        self.assertIn("train_gpt", self.run_trainer("--version"))
        overview = self.run_trainer("--help")
        for command in ("plan", "prepare", "sample", "eval", "inspect", "export", "report", "lr-range", "tune",
                        "check-kernels"):
            self.assertIn(command, overview)
            self.assertIn("--help", self.run_trainer(command, "--help"))
        for flag in ("--set", "--resume", "--auto", "--fresh"):
            self.assertIn(flag, overview)


class Documentation(unittest.TestCase):
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

    def printed(self, *args):
        return subprocess.run([TRAINER, *args], capture_output=True, text=True, check=True).stdout

    def test_every_key_is_in_the_table(self):
        page, table = (ROOT / "docs/configuration.md").read_text("utf-8"), self.printed("--markdown-config")
        self.assertEqual(page[page.index("| key |"):], table, "docs/configuration.md says how to generate its table")
        keys = set(re.findall(r"^\s*(\w+\.\w+)", self.printed("--help-config"), re.M))
        self.assertGreater(len(keys), 30)
        for key in keys:
            self.assertIn(f"| `{key}` |", table)

    def test_configurations_are_valid(self):
        for path in sorted((ROOT / "configs").glob("*.json")):
            with self.subTest(path.name):
                self.assertIn("total", self.printed("plan", path))

    def test_all_names_exist(self):
        folders = "scripts|configs|commands|kernels|model|runtime|data|docs|test|dev"
        for page in self.pages:
            for name in re.findall(rf"`((?:{folders})/[\w./*]*)`", page.read_text("utf-8")):
                with self.subTest(f"{page.name}: {name}"):
                    if name != "configs/mine.json":  # used in an example
                        self.assertTrue((ROOT / name).exists() or list(ROOT.glob(name)))
