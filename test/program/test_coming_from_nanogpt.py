"""docs/coming_from_nanogpt.md: its commands run unchanged, and its options exist."""
import array
import json
import re
import shlex
import shutil

from trainer import ROOT, TrainerTest, generated_text

PAGE = (ROOT / "docs/coming_from_nanogpt.md").read_text("utf-8")


class ComingFromNanoGpt(TrainerTest):
    def setUp(self):
        super().setUp()
        # The files of data/get.sh and of nanoGPT's prepare.py, whose ids number the characters in order of their codes.
        text = generated_text(700)
        self.characters = sorted(set(text))
        ids = array.array("H", map(self.characters.index, text))
        end = len(ids) * 9 // 10
        for folder, names in (("datasets/text/tinyshakespeare", ["input.txt"]),
                              ("data/shakespeare_char", ["input.txt", "train.bin", "val.bin"]),
                              ("data/openwebtext", ["train.bin", "val.bin"])):
            (self.dir / folder).mkdir(parents=True)
            for name in names:
                (self.dir / folder / name).write_bytes(
                    {"input.txt": text.encode(), "train.bin": ids[:end], "val.bin": ids[end:]}[name])
        shutil.copytree(ROOT / "configs", self.dir / "configs")

    def commands(self):
        """Returns the page's commands in order, without those for GPUs, with shortened training."""
        for block in re.findall(r"^```sh(?! needs=gpu)[^\n]*\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                program, *words = shlex.split(line)
                if program == "data/get.sh":
                    self.assertEqual(words, ["tinyshakespeare"])
                    continue
                self.assertEqual(program, "build/train_gpt_cpu")
                if words[0] == "prepare" and words[1:3] != ["--tokenizer", "gpt2"]:
                    words += ["--minutes", "0"]
                if words[0].endswith(".json"):
                    words += ["--set", "train.max_steps=20", "--set", "schedule.warmup_steps=2"]
                yield words

    def ids(self, folder, split):
        found = array.array("H")
        found.frombytes((self.dir / f"datasets/{folder}/{split}_000000.bin").read_bytes()[1024:])
        return found.tolist()

    def test_commands(self):
        ran = [*self.commands()]
        said = {}
        for words in ran:
            with self.subTest(" ".join(words)):
                said[words[0]] = self.run_trainer(*words)
        self.assertGreater(len(ran), 7)
        made = json.loads((self.dir / "datasets/shakespeare_char/dataset.json").read_text())
        self.assertEqual(made["tokenizer"]["vocab_size"], len(self.characters) + 1)
        self.assertTrue(said["sample"].startswith("ROMEO:"))
        # Both ways give nanoGPT's ids.
        theirs = array.array("H", (self.dir / "data/shakespeare_char/train.bin").read_bytes()).tolist()
        self.assertEqual(self.ids("ids", "train"), theirs)
        self.assertEqual(self.ids("char", "train"), theirs)
        for folder in ("ids", "char"):
            self.assertIn("val: ", self.run_trainer("inspect", f"datasets/{folder}"))
        made = self.ids("shakespeare_char", "train")
        self.assertEqual(made[0], len(self.characters))
        self.assertEqual(made[1:1 + 1000], theirs[:1000])
        made = json.loads((self.dir / "datasets/owt/dataset.json").read_text())
        self.assertEqual(made["tokenizer"]["vocab_size"], 50257)
        self.assertIn("total", self.run_trainer("plan", "datasets/owt/config.json"))

    def test_a_run_of_converted_characters_prints_text(self):
        self.run_trainer("prepare", "--tokenizer", "chars", "data/shakespeare_char/input.txt", "--minutes", 0,
                         "--out", "chars")
        said = self.run_trainer("prepare", "--tokenizer", "chars/tokenizer.json", "data/shakespeare_char/train.bin",
                                "data/shakespeare_char/val.bin", "--minutes", 0.02, "--out", "text")
        self.assertIn("next: ", said)
        self.run_trainer("text/config.json")
        text = self.run_trainer("sample", "runs/text", "--prompt", "The", "--tokens", 30)
        self.assertTrue(text.startswith("The"))
        self.assertLessEqual(set(text.replace("<|endoftext|>", "")), set(self.characters))

    def test_options_exist(self):
        keys = set(re.findall(r"^\s*(\w+\.\w+)", self.run_trainer("--help-config"), re.MULTILINE))
        sections = {key.split(".")[0] for key in keys}
        named = [name for name in re.findall(r"`(\w+\.\w+)`", PAGE)
                 if name.split(".")[0] in sections and not name.endswith((".bin", ".dir"))]
        self.assertGreater(len(named), 20)
        for name in named:
            self.assertIn(name, keys)
        help_of = {command: self.run_trainer(command, "--help") for command in ("sample", "prepare", "eval", "export")}
        everything = self.run_trainer("--help") + "".join(help_of.values())
        ours = re.sub(r"^\| [^|]* \|", "", PAGE, flags=re.MULTILINE)  # without nanoGPT's column
        options = [option for code in re.findall(r"`([^`\n]+)`", ours) for option in re.findall(r"--[a-z-]+", code)]
        self.assertGreater(len(options), 10)
        for option in options:
            self.assertIn(option, everything)


if __name__ == "__main__":
    import unittest
    unittest.main()
