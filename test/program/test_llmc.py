"""llm.c's file formats: export, import, model.init_from and inspect, with the files in test/recorded/llmc."""
import array
import re
import shutil
import struct

from trainer import ROOT, TrainerTest

FILES = ROOT / "test/recorded/llmc"
VOCAB, PADDED, LAYERS, CHANNELS, POSITIONS = 269, 384, 2, 12, 10
SIZES = {"model_n_layer": LAYERS, "model_n_head": 3, "model_n_embd": CHANNELS, "model_n_positions": POSITIONS,
         "model_vocab_size": VOCAB, "train_seq_len": 10}
STAND_STILL = {"optim_learning_rate": 0, "optim_weight_decay": 0, "train_max_steps": 1}
# The first element of each tensor, and its number of elements per layer.
COUNTS = {"wte": PADDED * 12, "wpe": 120, "ln1w": 12, "ln1b": 12, "qkvw": 432, "qkvb": 36, "attprojw": 144,
          "attprojb": 12, "ln2w": 12, "ln2b": 12, "fcw": 576, "fcb": 48, "fcprojw": 576, "fcprojb": 12, "lnfw": 12,
          "lnfb": 12}


def places():
    begin, found = 0, {}
    for name, count in COUNTS.items():
        layers = 1 if name in ("wte", "wpe", "lnfw", "lnfb") else LAYERS
        found[name] = [begin + layer * count for layer in range(layers)]
        begin += layers * count
    return found


class Llmc(TrainerTest):
    def setUp(self):
        super().setUp()
        for file in FILES.iterdir():
            shutil.copy(file, self.dir)

    def same(self, first, second):
        self.assertTrue((self.dir / first).read_bytes() == (self.dir / second).read_bytes(), f"{first} {second}")

    def write_model(self, change, name="changed.bin"):
        """Writes model.bin with its elements changed; returns the file's name."""
        content = (self.dir / "model.bin").read_bytes()
        values = array.array("f", content[1024:])
        change(values)
        (self.dir / name).write_bytes(content[:1024] + values.tobytes())
        return name


class InAndOut(Llmc):
    def test_the_weights_of_a_run_survive_a_round_trip(self):
        self.train(train_max_steps=3)
        said = self.run_trainer("export", "--llmc", "run", "out.bin", "--tokenizer", "out_tokenizer.bin")
        self.assertIn("wrote out.bin: llm.c model, fp32", said)
        header = struct.unpack("<8i", (self.dir / "out.bin").read_bytes()[:32])
        self.assertEqual(header, (20240326, 3, 24, 257, 2, 3, 48, 384))
        said = self.train(run_dir="again", model_init_from="out.bin", **STAND_STILL)
        self.assertIn("model.init_from=\"out.bin\"", said)
        self.run_trainer("export", "--llmc", "again", "again.bin")
        self.same("out.bin", "again.bin")

        self.run_trainer("export", "--hf", "run", "hf")
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
        self.run_trainer("export", "--llmc", "from_hf", "from_hf.bin")
        self.same("out.bin", "from_hf.bin")

    def test_a_foreign_model_is_imported_and_exported(self):
        shutil.copy(self.dir / "tokenizer.bin", self.dir / "gpt2_tokenizer.bin")
        for dtype, name in (("fp32", "model.bin"), ("bf16", "model_bf16.bin")):
            with self.subTest(dtype):
                self.run_trainer("import", name, dtype)  # it finds gpt2_tokenizer.bin
                self.run_trainer("export", "--llmc", dtype, f"{dtype}.bin", "--dtype", dtype, "--tokenizer",
                                 f"{dtype}_tokenizer.bin")
                self.same(name, f"{dtype}.bin")
                self.same("tokenizer.bin", f"{dtype}_tokenizer.bin")
                self.assertIn("checkpoint of step 0", self.run_trainer("inspect", dtype))
        self.run_trainer("export", "--llmc", "fp32", "rounded.bin", "--dtype", "bf16")
        self.same("rounded.bin", "model_bf16.bin")

    def test_errors(self):
        (self.dir / "full").mkdir()
        (self.dir / "full" / "thesis.txt").write_text("do not touch")
        (self.dir / "llama.bin").write_bytes(struct.pack("<256i", 20240803, 3, *[0] * 254))
        self.run_trainer("import", "model.bin", "imported")
        self.run_trainer("import", "model.bin", "imported_too", "--tokenizer", "tokenizer.bin")
        before = self.contents()
        for args, code, *words in [
                (["import", "model.bin", "full"], 73, "full is not empty"),
                (["import", "nowhere.bin", "new"], 66, "nowhere.bin"),
                (["import", "tokenizer.bin", "new"], 65, "tokenizer.bin: not a model of llm.c"),
                (["import", "llama.bin", "new"], 65, "llama.bin", "Llama 3"),
                (["import", "model.bin", "new", "--tokenizer", "gpt2"], 78, "50257", "269"),
                (["import", "model.bin", "new", "--tokenizer", "model.bin"], 65, "model.bin", "not a tokenizer"),
                (["inspect", "llama.bin"], 65, "llama.bin", "Llama 3"),
                (["inspect", "--model", "model.bin", "eval.bin"], 65, "eval.bin: not a debug state"),
                (["inspect", "--model", "nowhere.bin", "debug_state.bin"], 66, "nowhere.bin"),
                (["export", "--llmc", "imported", "model.bin"], 73, "model.bin exists"),
                (["export", "--llmc", "imported", "new.bin", "--tokenizer", "new"], 66, "imported", "tokenizer.json"),
                (["export", "--llmc", "imported_too", "new.bin", "--tokenizer", "new.bin"], 64, "same file, new.bin"),
                (["export", "--llmc", "imported", "new.bin", "--dtype", "fp16"], 64, "fp16", "bf16"),
                (["export", "--llmc", "imported", "new.bin", "--max-shard-bytes", "5"], 64, "--max-shard-bytes"),
                (["export", "--hf", "--llmc", "imported", "new"], 64, "--hf", "--llmc"),
                (["export", "imported", "new"], 64, "--hf", "--llmc")]:
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
        state = struct.pack("<256i", 20240527, 1, 8, 3, 1, 0, *[0] * 4, 700, *[0] * 245) + bytes(3 * 4 * 50)
        (self.dir / "state.bin").write_bytes(state)
        for name, *words in [
                ("model.bin", "llm.c GPT-2 model, version 3 (fp32), valid", "2 layers, 3 heads, 12 channels, 10 "
                 "positions, vocabulary 269 padded to 384: 8520 parameters"),
                ("model_bf16.bin", "version 5 (bf16), valid"),
                ("debug_state.bin", "llm.c debug state: 2 sequences of 7 tokens"),
                ("tokenizer.bin", "269 tokens, 12 merges, <|endoftext|> is 268"),
                ("eval.bin", "5 multiple-choice questions, valid", "5 questions with 4 completions", "0, 3, 0, 2",
                 "ids up to 167", "10 tokens"),
                ("state.bin", "llm.c optimizer state, step 700, rank 3 of 8", "master weights", "50 parameters")]:
            with self.subTest(name):
                said = self.run_trainer("inspect", name)
                for word in (name, *words):
                    self.assertIn(word, said)
        for name, content, *words in [("state.bin", state[:-4], "truncated"),
                                      ("state.bin", state[:12] + struct.pack("<i", 8) + state[16:], "are 8 and 8"),
                                      ("state.bin", state[:600], "1024"),
                                      ("state.bin", state[:4] + struct.pack("<i", 2) + state[8:], "version 2"),
                                      ("eval.bin", (self.dir / "eval.bin").read_bytes()[:-2], "question 4"),
                                      ("model.bin", (self.dir / "model.bin").read_bytes()[:-4], "truncated")]:
            with self.subTest(words):
                (self.dir / name).write_bytes(content)
                said = self.run_trainer("inspect", name, expect=65)
                for word in (name, *words):
                    self.assertIn(word, said)

    def test_values_that_are_not_finite_and_padding_that_is_not_zero(self):
        def poison(values):
            values[5000] = float("nan")

        def fill(values):
            values[269 * 12:384 * 12] = array.array("f", [1]) * (115 * 12)
        self.assertIn("element 5000 of 8520 is nan", self.run_trainer("inspect", self.write_model(poison), expect=65))
        self.assertIn("1380 padding values are not zero", self.run_trainer("inspect", self.write_model(fill)))
        self.run_trainer("inspect", "--model", "changed.bin", "debug_state.bin")  # makes no difference

    def test_the_eval_file_with_a_tokenizer(self):
        self.run_trainer("import", "model.bin", "run", "--tokenizer", "tokenizer.bin")
        shutil.copy(self.dir / "run/tokenizer.json", self.dir)
        self.assertIn('first question: "', self.run_trainer("inspect", "eval.bin"))
        content = bytearray((self.dir / "eval.bin").read_bytes())
        content[1024 + 12:1024 + 14] = struct.pack("<H", 269)
        (self.dir / "eval.bin").write_bytes(content)
        self.assertIn("question 0 has the token 269", self.run_trainer("inspect", "eval.bin", expect=65))


class Compare(Llmc):
    """Compares logits, loss and gradients with PyTorch's in debug_state.bin."""

    def compare(self, model="model.bin", state="debug_state.bin", expect=0):
        """Returns the arrays that differ, such as "qkvw 1" for layer 1, and the output."""
        said = self.run_trainer("inspect", "--model", model, state, expect=expect)
        rows = re.findall(r"^(?:gradient of )?(\w+) +(\d?) +(?:\S+ +){4}(ok|differs)$", said, re.M)
        self.assertEqual([name for name, _, _ in rows], ["logits", "loss", *COUNTS], said)
        return [f"{name} {layer}".strip() for name, layer, verdict in rows if verdict == "differs"], said

    def test_agrees(self):
        for model in ("model.bin", "model_bf16.bin"):
            with self.subTest(model):
                differing, said = self.compare(model)
                self.assertEqual(differing, [])
                self.assertIn("debug_state.bin: matches", said)

    def test_wrong_weights(self):
        at = places()

        def swap_q_and_k(values):
            begin = at["qkvw"][1]
            values[begin:begin + 144], values[begin + 144:begin + 288] = (values[begin + 144:begin + 288],
                                                                          values[begin:begin + 144])

        def transpose(values):
            begin = at["attprojw"][0]
            old = values[begin:begin + 144]
            values[begin:begin + 144] = array.array("f", [old[12 * col + row] for row in range(12)
                                                          for col in range(12)])

        def swap_layers(values):
            for begin, count in [(at["fcb"], 48)]:
                values[begin[0]:begin[0] + count], values[begin[1]:begin[1] + count] = (
                    values[begin[1]:begin[1] + count], values[begin[0]:begin[0] + count])

        def pad_in_front(values):
            """Puts the padding before the vocabulary."""
            values[:PADDED * 12] = values[VOCAB * 12:PADDED * 12] + values[:VOCAB * 12]

        def change_one(values):
            values[at["fcprojw"][1] + 77] += 0.01
        for change in (swap_q_and_k, transpose, swap_layers, pad_in_front, change_one):
            with self.subTest(change.__name__):
                differing, said = self.compare(self.write_model(change), expect=65)
                self.assertIn("logits", differing)
                self.assertRegex(said, r"\d+ of 30 arrays differ")

    def test_wrong_results(self):
        content = (self.dir / "debug_state.bin").read_bytes()
        at = places()
        logits = 1024 + 2 * 4 * 14
        loss = logits + 4 * 14 * VOCAB
        gradients = loss + 4
        for offset, name in [(logits + 4 * 1000, "logits"), (loss, "loss"),
                             (gradients + 4 * 100, "wte"),
                             (gradients + 4 * (at["qkvb"][1] + 30), "qkvb 1"),
                             (gradients + 4 * (at["lnfb"][0] + 11), "lnfb")]:
            for change in (lambda value: value * 1.001 + 0.001, lambda value: float("nan")):
                with self.subTest(name=name):
                    value, = struct.unpack_from("<f", content, offset)
                    changed = bytearray(content)
                    struct.pack_into("<f", changed, offset, change(value))
                    (self.dir / "changed_state.bin").write_bytes(changed)
                    self.assertEqual(self.compare(state="changed_state.bin", expect=65)[0], [name])
