"""llm.c's file formats: import, model.init_from and inspect, with the files in test/recorded/llmc."""
import shutil
import struct

import llmc_file
from trainer import ROOT, TrainerTest

FILES = ROOT / "test/recorded/llmc"
STAND_STILL = {"optim_learning_rate": 0, "optim_weight_decay": 0, "train_max_steps": 1}


class Llmc(TrainerTest):
    def setUp(self):
        super().setUp()
        for file in FILES.iterdir():
            shutil.copy(file, self.dir)

    def same(self, first, second):
        self.assertTrue((self.dir / first).read_bytes() == (self.dir / second).read_bytes(), f"{first} {second}")


class ComesIn(Llmc):
    def test_the_weights_of_a_run_survive_a_round_trip(self):
        self.train(train_max_steps=3)
        self.run_trainer("export", "--hf", "run", "hf")
        llmc_file.write_model(self.dir / "hf", self.dir / "out.bin")
        llmc_file.write_byte_tokenizer(self.dir / "out_tokenizer.bin")
        said = self.train(run_dir="again", model_init_from="out.bin", **STAND_STILL)
        self.assertIn("model.init_from=\"out.bin\"", said)
        self.run_trainer("export", "--hf", "again", "again_hf")
        self.same("hf/model.safetensors", "again_hf/model.safetensors")

        self.run_trainer("import", "out.bin", "from_llmc", "--tokenizer", "out_tokenizer.bin")
        self.run_trainer("import", "hf", "from_hf")
        self.assertEqual(self.weights(0, "from_llmc"), self.weights(0, "from_hf"))
        self.same("from_llmc/tokenizer.json", "data/tokenizer.json")
        self.same("from_hf/tokenizer.json", "data/tokenizer.json")
        loss = self.run_trainer("eval", "from_llmc", "--data", "data/val_*.bin")
        self.assertRegex(loss, r"loss \d\.\d+, \d\.\d+ bits per byte")
        self.assertEqual(loss, self.run_trainer("eval", "from_hf", "--data", "data/val_*.bin"))
        of_run, of_import = (self.run_trainer("sample", run, "--prompt", "The", "--tokens", 12, "--temperature", 0)
                             for run in ("run", "from_llmc"))
        self.assertEqual(of_run, of_import)

    def test_a_foreign_model_has_its_bits(self):
        shutil.copy(self.dir / "tokenizer.bin", self.dir / "gpt2_tokenizer.bin")
        for dtype, name in (("fp32", "model.bin"), ("bf16", "model_bf16.bin")):
            with self.subTest(dtype):
                self.run_trainer("import", name, dtype)  # it finds gpt2_tokenizer.bin
                self.run_trainer("export", "--hf", dtype, f"{dtype}_hf", "--dtype", dtype)
                llmc_file.write_model(self.dir / f"{dtype}_hf", self.dir / "again.bin")
                self.same(name, "again.bin")
                self.assertIn("checkpoint of step 0", self.run_trainer("inspect", dtype))
        self.run_trainer("export", "--hf", "fp32", "rounded", "--dtype", "bf16")
        llmc_file.write_model(self.dir / "rounded", self.dir / "rounded.bin")
        self.same("rounded.bin", "model_bf16.bin")

    def test_errors(self):
        (self.dir / "full").mkdir()
        (self.dir / "full" / "thesis.txt").write_text("do not touch")
        (self.dir / "llama.bin").write_bytes(struct.pack("<256i", 20240803, 3, *[0] * 254))
        self.run_trainer("import", "model.bin", "imported")
        before = self.contents()
        for args, code, *words in [
                (["import", "model.bin", "full"], 73, "full is not empty"),
                (["import", "nowhere.bin", "new"], 66, "nowhere.bin"),
                (["import", "tokenizer.bin", "new"], 65, "tokenizer.bin: not a model of llm.c"),
                (["import", "llama.bin", "new"], 65, "llama.bin", "Llama 3"),
                (["import", "model.bin", "new", "--tokenizer", "gpt2"], 78, "50257", "269"),
                (["import", "model.bin", "new", "--tokenizer", "model.bin"], 65, "model.bin", "not a tokenizer"),
                (["inspect", "llama.bin"], 65, "llama.bin", "Llama 3"),
                (["inspect", "debug_state.bin"], 65, "debug_state.bin", "looks like an llm.c debug state"),
                (["export", "imported", "new"], 64, "--hf")]:
            with self.subTest(" ".join(args)):
                said = self.run_trainer(*args, expect=code)
                for word in words:
                    self.assertIn(word, said)
        self.assertEqual(self.contents(), before)
        said = self.train(model_init_from="model.bin", expect=78)
        self.assertRegex(said, "model.bin: n_embd is 12, but this run needs 48")
        self.assertFalse((self.dir / "run").exists() and list((self.dir / "run").glob("checkpoints/*")))


class Inspect(Llmc):
    def test_file_types(self):
        for name, *words in [
                ("model.bin", "llm.c GPT-2 model, fp32, valid", "2 layers, 3 heads, 12 channels, 10 positions, "
                 "vocabulary 269 padded to 384"),
                ("model_bf16.bin", "llm.c GPT-2 model, bf16, valid"),
                ("tokenizer.bin", "269 tokens, 12 merges, <|endoftext|> is 268")]:
            with self.subTest(name):
                said = self.run_trainer("inspect", name)
                for word in (name, *words):
                    self.assertIn(word, said)
        (self.dir / "model.bin").write_bytes((self.dir / "model.bin").read_bytes()[:-4])
        self.assertRegex(self.run_trainer("inspect", "model.bin", expect=65), "model.bin.*truncated")
