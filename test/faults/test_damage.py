"""Damaged files in the newest checkpoint: the run falls back to the older checkpoint and ends with the same result.

test/runtime/checkpoint/test_checkpoint_damage.cpp damages every bit of a small checkpoint in one process. These tests
start the trainer on checkpoints with each kind of damage.
"""
import random
import shutil

from campaign import FOREGROUND, OPTIONS, Campaign

FILES = ["shard_0000.bin", "MANIFEST.json", "COMMIT"]


def flip_a_bit(draws, file, _):
    content = bytearray(file.read_bytes())
    content[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
    file.write_bytes(content)


def cut(draws, file, _):
    file.write_bytes(file.read_bytes()[:draws.randrange(file.stat().st_size)])


def extend(draws, file, _):
    file.write_bytes(file.read_bytes() + bytes(draws.randint(1, 4096)))


def wipe_a_block(draws, file, _):
    content = bytearray(file.read_bytes())
    begin = draws.randrange(len(content))
    end = min(begin + 512, len(content))
    content[begin:end] = bytes([0 if any(content[begin:end]) else 255]) * (end - begin)
    file.write_bytes(content)


def remove(_draws, file, _):
    file.unlink()


def take_the_older_one(_draws, file, older):
    shutil.copy(older / file.name, file)


def make_a_directory(_draws, file, _):
    file.unlink()
    file.mkdir()


DAMAGES = [flip_a_bit, flip_a_bit, cut, extend, wipe_a_block, remove, take_the_older_one, make_a_directory]


class Damage(Campaign):
    def test_a_damaged_checkpoint_of_any_kind_falls_back_to_the_older_one(self):
        self.start("whole")
        whole = self.result("whole")
        rules = f"call=pwrite,path={self.dir}/half/metrics.jsonl,nth=10,action=kill"
        outcome = self.start("half", *FOREGROUND, faults=rules)
        self.assertEqual(outcome.reported_step(), 6, outcome)
        for trial in range(3000 if OPTIONS["long"] else 48):
            draws = random.Random(f"{OPTIONS['seed']} {trial}")
            name, damage = FILES[trial % len(FILES)], DAMAGES[trial // len(FILES) % len(DAMAGES)]
            with self.subTest(trial=trial, name=name, damage=damage.__name__):
                self.drop("case")
                shutil.copytree(self.dir / "half", self.dir / "case")
                damage(draws, self.step_dir(6, "case") / name, self.step_dir(3, "case"))
                outcome = self.start("case", "--auto")
                self.assertEqual(outcome.code, 0, outcome)
                self.assertEqual(outcome.first_step(), 4, outcome)
                self.assertIn(f"damaged.step_00000006.1: {self.step_dir(6, 'case').relative_to(self.dir)}",
                              outcome.error.replace("cannot open ", "").replace("cannot read ", ""))
                self.check_same("case", whole, damage.__name__)
