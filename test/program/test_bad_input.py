"""Invalid user input: the program exits within a second with the documented exit code and one message that names
file, key and numbers, and changes no file."""
import json
import math
import os
import resource
import shutil
import struct
import subprocess
import time
import unittest
import zipfile

import llmc_file
from trainer import ENVIRONMENT, TRAINER, TrainerTest

USAGE, DATA, NO_INPUT, CANNOT_CREATE, PERMISSION, CONFIG = 64, 65, 66, 73, 77, 78

CONFIG_TEXTS = [  # content of config.json, exit code, parts of the message
    ("", CONFIG, "config.json", "empty"),
    ("{", CONFIG, "config.json", "line 1"),
    ('{"run": {"dir": "a",\n  "dir": "b"}}', CONFIG, "config.json", "line 2", "dir"),
    ("[]", CONFIG, "config.json", "object"),
    ('{"optim": {"learning_rate": 1e999}}', CONFIG, "config.json", "line 1"),
    ('{"optim": {"learning_rate": NaN}}', CONFIG, "config.json", "line 1"),
    ('{"optim": {"learning_rat": 1}}', CONFIG, "config.json", "learning_rat", 'did you mean "optim.learning_rate"'),
    ('{"optim": {"name": "adafactor", "state_dtype": "bf16"}}', CONFIG, "optim.state_dtype", "adafactor"),
    ('{"train": {"precision": "fp32"}, "optim": {"master_dtype": "bf16"}}', CONFIG, "optim.master_dtype",
     "train.precision"),
    ('{"optim": {"name": "soap", "state_dtype": "bf16"}}', CONFIG, "optim.state_dtype", "soap"),
    ('{"optim": {"name": "muon", "scalar_name": "adafactor", "state_dtype": "bf16"}}', CONFIG, "optim.state_dtype",
     "adafactor"),
    ('{"optimizer": {"name": "adamw"}}', CONFIG, "config.json", "optimizer", "optim"),
    ('{"train": 5}', CONFIG, "config.json", "train", "5"),
    ('{"run": {"dir": "a\\u0000b"}}', CONFIG, "config.json", "run.dir"),
    ('{"run": {"dir": "\xff"}}'.encode("latin-1"), CONFIG, "config.json"),
    ('{"train": {"seq_len": 20,\n  "batch_size": 4,\n }\n}', CONFIG, 'line 2, column 18: unexpected comma before "}"'),
    ('{"data": {"train": ["a", ]}}', CONFIG, 'line 1, column 24: unexpected comma before "]"'),
]
SETTINGS = [  # --set, exit code, parts of the message
    ("nonsense", USAGE, "nonsense", "section.key=value, such as train.batch_size=4"),
    ("train.max_step=5", CONFIG, "train.max_step", "train.max_steps"),
    ("train.max_steps=many", CONFIG, "train.max_steps", "many"),
    ("train.max_steps=1.5", CONFIG, "train.max_steps", "1.5"),
    ("train.max_steps=0", CONFIG, "train.max_steps", "0"),
    ("train.max_steps=-3", CONFIG, "train.max_steps", "-3"),
    ("train.max_steps=99999999999999999999", CONFIG, "train.max_steps", "1e+20"),
    ("optim.learning_rate=nan", CONFIG, "optim.learning_rate", "nan"),
    ("optim.learning_rate=-1", CONFIG, "optim.learning_rate", "-1"),
    ("optim.beta1=1", CONFIG, "optim.beta1", "1"),
    ("optim.master_dtype=fp16", CONFIG, "optim.master_dtype", "fp32|bf16", "fp16"),
    ("optim.state_dtype=fp16", CONFIG, "optim.state_dtype", "fp32|bf16", "fp16"),
    ("loss_scale.dynamic=1", CONFIG, "loss_scale.dynamic", "true"),
    ("train.precision=int8", CONFIG, "train.precision", "int8", "bf16"),
    ("train.precision=fp16", CONFIG, "fp16", "loss_scale.dynamic"),
    ("sample.top_k=258", CONFIG, "sample.top_k", "258", "model.vocab_size", "257"),
    ("train.total_batch_tokens=121", CONFIG, "train.total_batch_tokens", "121", "120", "180"),
    ('train.batch_ramp=[{"until_step": 4, "total_batch_tokens": 100}]', CONFIG, "train.batch_ramp", "step 4 (100)",
     "train.batch_size (3)", "train.seq_len (20)", "60 and 120"),
    ('train.batch_ramp=[{"until_step": 20, "total_batch_tokens": 60}]', CONFIG,
     "train.batch_ramp: until_step 20", "previous one (0)", "train.max_steps (20)"),
    ('train.batch_ramp=[{"until_step": 4, "total_batch_tokens": 60}, {"until_step": 4, "total_batch_tokens": 180}]',
     CONFIG, "train.batch_ramp: until_step 4 must be above the previous one (4)", "train.max_steps (20)"),
    ('train.seq_ramp=[{"until_step": 4, "seq_len": 8}]', CONFIG, "train.seq_ramp", "step 4 (8)", "train.seq_len (20)"),
    ('train.seq_ramp=[{"until_step": 25, "seq_len": 10}]', CONFIG, "train.seq_ramp: until_step 25",
     "train.max_steps (20)"),
    ("train.seq_len=25", CONFIG, "train.seq_len", "25", "model.n_positions", "24"),
    ("model.n_head=5", CONFIG, "model.n_embd (48)", "model.n_head (5); the nearest valid n_head is 4 or 6\n"),
    ("model.n_head=50", CONFIG, "model.n_embd (48)", "model.n_head (50); the nearest valid n_head is 48\n"),
    ("model.vocab_size=256", CONFIG, "data/tokenizer.json", "257", "256"),
    ("model.init_from=nowhere", NO_INPUT, "model.init_from", "nowhere"),
    ("data.train=nothing_*.bin", NO_INPUT, "data.train", "nothing_*.bin"),
    ("data.val=nothing_*.bin", NO_INPUT, "data.val", "nothing_*.bin"),
    ("data.tokenizer=nothing.json", NO_INPUT, "nothing.json"),
    ("data.tokenizer=text.txt", DATA, "text.txt", "plain text"),
    ("data.train=text.txt", DATA, "text.txt", "plain text", "prepare"),
    ("data.train=data", NO_INPUT, "data is a directory"),
    ("run.dir=text.txt", CANNOT_CREATE, "text.txt", "not a directory"),
    ("run.dir=text.txt/run", CANNOT_CREATE, "text.txt/run"),
]


def shard(tokens, magic=20240520, version=1, count=None):
    header = [magic, version, len(tokens) if count is None else count]
    return struct.pack("<256i", *header, *[0] * 253) + struct.pack(f"<{len(tokens)}H", *tokens)


SHARDS = [  # bytes of data.train, exit code, parts of the message
    (b"", DATA, "empty"),
    (b"<!DOCTYPE html><html>", DATA, "HTML page\n"),
    (struct.pack("<100H", *range(100)), DATA, "unknown binary data", "prepare", "nanoGPT's .bin"),
    (b"version https://git-lfs.github.com/spec/v1\n", DATA, "Git LFS"),
    (shard([1] * 1000)[:1500], DATA, "1500", "3024"),
    (shard([1] * 1000) + b"x", DATA, "3025", "3024"),
    (shard([1] * 1000, magic=20240521), DATA),
    (shard([1] * 1000, version=3), DATA, "3"),
    (shard([1] * 1000, count=-5), DATA, "-5"),
    (shard([1] * 1000, count=2**31 - 1), DATA, "3024", str(2 * (2**31 - 1) + 1024)),
    (shard([1] * 60), CONFIG, "60", "20", "3"),
    (shard([]), CONFIG, "0"),
]


class BadInput(TrainerTest):
    def refused(self, args, code, words):
        """The trainer exits with `code` and a message with these parts, uses little CPU time, and changes no file."""
        before, children = self.contents(), resource.getrusage(resource.RUSAGE_CHILDREN)
        said = self.run_trainer(*args, expect=code)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.assertLess(after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime, 1.0)
        for word in words:
            self.assertIn(word, said)
        self.assertRegex(said, r"\Atrain_gpt: [^\n]{10,600}\n(  [^\n]*\n|\([^\n]*\)\n)*\Z")
        self.assertEqual(self.contents(), before)

    def test_configurations(self):
        for text, code, *words in CONFIG_TEXTS:
            with self.subTest(text):
                (self.dir / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
                self.refused(["config.json"], code, words)

    def test_settings(self):
        self.write_config()
        for setting, code, *words in SETTINGS:
            with self.subTest(setting):
                self.refused(["config.json", "--set", setting], code, words)

    def test_refused_settings_do_not_move_an_earlier_run(self):
        self.train(train_max_steps=1)
        self.write_config()
        for setting, code, *words in SETTINGS[1:-2]:
            with self.subTest(setting):
                self.refused(["config.json", "--fresh", "--set", setting], code, words)

    def test_shards(self):
        self.write_config(data_train="shard.bin", data_tokenizer="", data_val="")
        for number, (content, code, *words) in enumerate(SHARDS):
            with self.subTest(number):
                (self.dir / "shard.bin").write_bytes(content)
                self.refused(["config.json"], code, ["shard.bin", *words])

    def test_a_token_beyond_the_vocabulary(self):
        (self.dir / "shard.bin").write_bytes(shard([1] * 500 + [257] + [1] * 499))
        said = self.train(data_train="shard.bin", data_tokenizer="", expect=DATA)
        self.assertIn("train_gpt: shard.bin: token 500 is 257", said)
        self.assertFalse((self.dir / "run/checkpoints").exists())

    def test_a_tokenizer_that_did_not_make_the_shards(self):
        self.run_trainer("prepare", "--tokenizer", "bpe", "--vocab-size", "300", "text.txt", "--out", "bpe")
        self.write_config(data_tokenizer="bpe/tokenizer.json", model_vocab_size=300)
        self.refused(["config.json"], CONFIG, ["bpe/tokenizer.json", "data/"])

    def test_run_directories(self):
        self.write_config()
        self.refused(["config.json", "--resume"], NO_INPUT, ["run.dir", "does not exist"])
        self.refused(["missing.json"], NO_INPUT, ["missing.json"])
        self.refused(["resume", "run"], USAGE, ['"resume"', "train_gpt RUN/config.json --resume"])
        for start in ([], ["--auto"], ["--resume"], ["--fresh"]):
            self.refused(["config.json", "--set", f"run.dir={256 * 'n'}", *start], CANNOT_CREATE,
                         ["run.dir", "File name too long"])
        (self.dir / "run").mkdir()
        self.refused(["config.json", "--resume"], NO_INPUT, ["run.dir", "is empty"])
        (self.dir / "run" / "thesis.txt").write_text("do not touch")
        self.refused(["config.json"], USAGE, ["run.dir", "--resume", "--auto", "--fresh"])
        self.refused(["config.json", "--resume"], NO_INPUT, ["no checkpoint"])
        self.refused(["config.json", "--resume", "--fresh"], USAGE, ["--resume", "--fresh"])
        shutil.copy(self.dir / "config.json", self.dir / "run")
        for args in (["run"], ["run", "--resume"], ["--nproc", "2", "run"], ["plan", "run"]):
            self.refused(args, NO_INPUT, ["run is a directory: use run/config.json, with --resume to continue"])

    @unittest.skipUnless(shutil.which("setpriv"), "setpriv is not installed")
    def test_a_data_folder_that_may_not_be_read(self):
        self.write_config()
        (self.dir / "data").chmod(0o300)  # files in it can be opened by name
        self.addCleanup((self.dir / "data").chmod, 0o700)
        plain = [] if os.geteuid() else ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
        for arguments, key in ((["config.json"], "data.train: "), (["prepare", "data", "--out", "new"], "")):
            result = subprocess.run([*plain, TRAINER, *arguments], cwd=self.dir, env=ENVIRONMENT, capture_output=True,
                                    text=True, timeout=60)
            self.assertEqual(result.returncode, PERMISSION, result.stderr)
            self.assertEqual(result.stderr, f"train_gpt: {key}cannot list the directory data: Permission denied\n")

    def test_fresh_moves_aside_and_deletes_nothing(self):
        self.train(train_max_steps=2)
        first = self.contents("run")
        self.train("--fresh", train_max_steps=2, run_seed=8)
        second = self.contents("run")
        self.train("--fresh", train_max_steps=1)
        self.assertEqual(sorted(self.contents("run.old-1").values()), sorted(first.values()))
        self.assertEqual(sorted(self.contents("run.old-2").values()), sorted(second.values()))

    def test_only_damaged_checkpoints(self):
        self.train(train_max_steps=2)
        (self.step_dir(2) / "COMMIT").write_text("nonsense")
        said = self.train("--resume", expect=NO_INPUT, train_max_steps=2)
        self.assertIn("COMMIT", said)

    def test_two_runs_in_one_directory(self):
        config = self.write_config(train_max_steps=100000)
        first = subprocess.Popen([TRAINER, config], cwd=self.dir, stdout=subprocess.DEVNULL,
                                 env=ENVIRONMENT)
        try:
            while not (self.dir / "run" / "metrics.jsonl").exists():
                time.sleep(0.01)
            for flag in ("--auto", "--fresh"):
                said = self.run_trainer(config, flag, expect=CANNOT_CREATE)
                self.assertIn("in use", said)
                self.assertIn(str(first.pid), said)
        finally:
            first.kill()
            first.wait()

    def test_other_commands(self):
        self.train(train_max_steps=1)
        (self.dir / "binary").write_bytes(bytes(range(256)) * 10)
        (self.dir / "bad.jsonl").write_text('{"text": "fine"}\n{"texts": "no"}\n' + '{"text": "fine"}\n' * 99)
        (self.dir / "empty.txt").write_text("")
        (self.dir / "line.txt").write_text("a single line")
        self.run_trainer("export", "--hf", "run", "hf")
        with zipfile.ZipFile(self.dir / "ckpt.pt", "w") as file:  # as torch.save writes it
            file.writestr("ckpt/data.pkl", b"\x80\2}.")
        (self.dir / "old.pt").write_bytes(b"\x80\2\x8a\nl\xfc")
        pytorch = ["convert it to a Hugging Face directory", "docs/coming_from_nanogpt.md#weights"]
        for args, code, *words in [
            (["sample", "nowhere"], NO_INPUT, "nowhere does not exist"),
            (["export", "--hf", "runs/nope", "out"], NO_INPUT, "runs/nope does not exist"),
            (["import", "ckpt.pt", "out"], DATA, "ckpt.pt", "a PyTorch file", *pytorch),
            (["import", "old.pt", "out"], DATA, "old.pt", "a Python pickle", *pytorch),
            (["sample", "ckpt.pt"], DATA, "a PyTorch file", *pytorch),
            (["import", "hf/model.safetensors", "out"], DATA, "a safetensors file; give its directory, hf\n"),
            (["sample", "data"], NO_INPUT, "data"),
            (["sample", "run", "--temperature", "-1"], USAGE, "--temperature"),
            (["sample", "run", "--tokens", "0"], USAGE, "--tokens"),
            (["sample", "run", "--stop", ""], USAGE, "--stop"),
            (["sample", "run", "--stop", "\udce2\udc82"], USAGE, "--stop"),
            (["sample", "run", "--prompts", "absent.txt"], NO_INPUT, "absent.txt"),
            (["inspect", "nowhere"], NO_INPUT, "nowhere"),
            (["inspect", "text.txt"], DATA, "text.txt", "text"),
            (["export", "--hf", "run", "data"], CANNOT_CREATE, "data", "not empty"),
            (["export", "run", "out"], USAGE, "--hf"),
            (["plan", "missing.json"], NO_INPUT, "missing.json"),
            (["--nproc", "2", "--node", "2/2", "--master", "a:1", "config.json"], USAGE, "2/2", "from 0", "0/2"),
            (["--nproc", "2", "--node", "0/2", "--master", "a", "config.json"], USAGE, '"a"', "node0:29500"),
            (["--nproc", "2", "--node", "0/2", "config.json"], USAGE, "--node", "--master"),
            (["--nproc", "2", "--node", "0/2", "--master", "a:1", "config.json"], USAGE, "--node 0/2", "mpirun"),
            (["plan"], USAGE, "CONFIG"),
            (["plan", "config.json", "--gpus", "0"], USAGE, "--gpus", "0"),
            (["plan", "config.json", "--gpus", "many"], USAGE, "--gpus", "many"),
            (["plan", "config.json", "--gpus", "12"], USAGE, "--gpus 12", "--gpus-per-node 8"),
            (["plan", "config.json", "--gpus", "8", "--gpus-per-node", "0"], USAGE, "--gpus-per-node", "0"),
            (["plan", "config.json", "--gpus", "8", "--gpu", "h10"], USAGE, "h10", "did you mean h100?"),
            (["plan", "config.json", "--gpus", "8", "--gpu", "voodoo"], USAGE, "voodoo", "h100, h200", "rtx4090"),
            (["plan", "config.json", "--gpus", "8", "--nvlink", "450GB"], USAGE, "--nvlink", "450GB", "450GB/s"),
            (["plan", "config.json", "--gpus", "8", "--net", "-1"], USAGE, "--net", "-1"),
            (["plan", "config.json", "--net", "50GB/s"], USAGE, "--net", "--gpus"),
            (["plan", "config.json", "--gpu", "h200"], USAGE, "--gpu", "--gpus"),
            (["eval", "run", "--data", "none_*"], NO_INPUT, "--data", "none_*"),
            (["prepare", "--tokenizer", "bytes", "missing.txt", "--out", "out"], NO_INPUT, "missing.txt"),
            (["prepare", "--tokenizer", "bytes", "--out", "out"], USAGE, "INPUT"),
            (["prepare", "--tokenizer", "bytes", "text.txt"], USAGE, "--out"),
            (["prepare", "--tokenizer", "bytes", "text.txt", "--out", "data"], CANNOT_CREATE, "data", "--force"),
            (["prepare", "text.txt", "--out", "text.txt"], CANNOT_CREATE, "text.txt"),
            (["prepare", "line.txt", "--out", "out"], DATA, "--val-fraction 0"),
            (["prepare", "--vocab-size", "100", "text.txt", "--out", "out"], USAGE, "100"),
            (["prepare", "--vocab-size", "-1", "text.txt", "--out", "out"], USAGE, "--vocab-size", "-1", "integer in"),
            (["prepare", "--shard-tokens", "-1", "text.txt", "--out", "out"], USAGE, "--shard-tokens", "-1"),
            (["prepare", "--tokenizer", "bytes", "text.txt", "--out", "run"], CANNOT_CREATE, "run"),
            (["prepare", "--tokenizer", "bytes", "binary", "--out", "out"], DATA, "binary"),
            (["prepare", "--tokenizer", "bytes", "bad.jsonl", "--out", "out"], DATA, "bad.jsonl", "2", "text"),
            (["prepare", "--tokenizer", "bytes", "empty.txt", "--out", "out"], DATA, "0 bytes"),
            (["prepare", "--tokenizer", "bytes", "--val-fraction", "1", "text.txt", "--out", "out"], USAGE, "fraction"),
            (["nonsense.json", "extra"], USAGE, "extra"),
            ([], USAGE, "--help"),
            (["--unknown"], USAGE, "--unknown"),
        ]:
            with self.subTest(" ".join(args)):
                self.refused(args, code, words)
                self.assertFalse((self.dir / "out" / "tokenizer.json").exists())

    def test_deeply_nested_json(self):
        self.train(train_max_steps=1)
        for name, text in (("config.json", '{"a":%s}'), ("run.json", '{"starts":%s}')):
            (self.dir / "run" / name).write_text(text % ("[" * 200_000 + "]" * 200_000))
        self.assertIn("wrote page.html", self.run_trainer("report", "run", "--out", "page.html"))
        self.train("--resume", train_max_steps=1)
        self.assertEqual(len(json.loads((self.dir / "run/run.json").read_text())["starts"]), 1)
        setting = "train.max_steps=" + "[" * 60_000 + "]" * 60_000
        self.refused(["config.json", "--set", setting], CONFIG, ["train.max_steps must be an integer"])

    def test_a_split_with_a_tilde_in_its_name(self):
        path = self.dir / "data/dataset.json"
        dataset = json.loads(path.read_text())
        path.write_text(json.dumps({**dataset, "splits": {"a~b": {}}}))
        self.assertIn('dataset.json: splits is {"a~b":{}}', self.run_trainer("inspect", "data", expect=DATA))

    def test_names_with_control_characters(self):
        said = self.run_trainer("a\x1b[31m\x9b.json", expect=NO_INPUT)
        self.assertIn(r"a\x1b[31m\x9b.json", said)

    def test_initial_weights_that_are_not_finite(self):
        self.train(train_max_steps=1)
        self.run_trainer("export", "--hf", "run", "hf")
        llmc_file.write_model(self.dir / "hf", self.dir / "model.bin")
        model = bytearray((self.dir / "model.bin").read_bytes())
        struct.pack_into("<f", model, 1024 + 4 * (48 + 5), math.nan)  # row 1, column 5 of wte
        (self.dir / "model.bin").write_bytes(model)
        self.write_config(run_dir="new", model_init_from="model.bin")
        for arguments in (["config.json"], ["import", "model.bin", "imported"]):
            self.refused(arguments, DATA, ["model.bin: element 53 of wte is nan, but weights must be finite"])

    def test_hugging_face_directories(self):
        self.train(train_max_steps=1)
        self.run_trainer("export", "--hf", "run", "hf")
        weights = (self.dir / "hf" / "model.safetensors").read_bytes()
        header_bytes = struct.unpack("<Q", weights[:8])[0]
        header = json.loads(weights[8:8 + header_bytes])

        def renamed(old, new):
            text = json.dumps({new if name == old else name: value for name, value in header.items()}).encode()
            return struct.pack("<Q", len(text)) + text + weights[8 + header_bytes:]

        name = next(name for name in header if name.endswith("h.1.ln_2.weight"))
        for content, *words in [
            (weights[:-1], "model.safetensors"),
            (weights + b"x", "model.safetensors"),
            (struct.pack("<Q", 2**62) + weights[8:], "model.safetensors"),
            (renamed(name, name + "s"), "model.safetensors", name),
            (b"<html>", "model.safetensors"),
            (weights[:-4] + struct.pack("<f", math.nan), "bad: element ", "is nan, but weights must be finite"),
            (weights[:-8] + struct.pack("<2f", -math.inf, 1), "bad: element ", "is -inf, but weights must be finite"),
        ]:
            with self.subTest(words=words, size=len(content)):
                shutil.copytree(self.dir / "hf", self.dir / "bad", dirs_exist_ok=True)
                (self.dir / "bad" / "model.safetensors").write_bytes(content)
                self.write_config(run_dir="new", model_init_from="bad")
                self.refused(["config.json"], DATA, words)
