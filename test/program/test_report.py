"""train_gpt report: the table and the curves say what metrics.jsonl says."""
import json
import re
import unittest
from xml.etree import ElementTree

from trainer import TrainerTest

SVG = "{http://www.w3.org/2000/svg}"


def train(step, loss, **more):
    return {"kind": "train", "step": step, "loss": loss, "tokens_per_s": 1000.0 + step, **more}


def val(step, loss):
    return {"kind": "val", "step": step, "loss": loss, "bits_per_byte": None}


class Report(TrainerTest):
    def write_run(self, name, *records):
        """A run directory whose metrics have these records; a string stands as it is."""
        (self.dir / name).mkdir(exist_ok=True)
        (self.dir / name / "metrics.jsonl").write_text("".join(
            record if isinstance(record, str) else json.dumps(record) + "\n" for record in records))
        return name

    def curves(self, *runs):
        """The points of each curve, read from the picture by the labels of its axes: (class, stroke) -> [(x, y)]."""
        self.run_trainer("report", *runs, "--out", "loss.svg")
        root = ElementTree.parse(self.dir / "loss.svg").getroot()
        self.assertNotIn("http", re.sub(r'xmlns="[^"]*"', "", (self.dir / "loss.svg").read_text()))
        texts = list(root.iter(SVG + "text"))
        self.legend = [text.text for text in texts if text.get("class") == "legend"]

        def scale(name, offset):
            ticks = [(float(text.get(name)) + offset, float(text.text)) for text in texts if text.get("class") == name]
            self.assertTrue(2 <= len(ticks) <= 9, ticks)
            (first_px, first), (last_px, last) = ticks[0], ticks[-1]
            gaps = [(after - before) / (last - first) for (_, before), (_, after) in zip(ticks, ticks[1:])]
            self.assertLess(max(gaps) - min(gaps), 1e-4)
            self.ends = {**getattr(self, "ends", {}), name: (first, last)}
            return lambda px: first + (px - first_px) / (last_px - first_px) * (last - first)
        x, y = scale("x", 0), scale("y", -4)
        return {(line.get("class"), line.get("stroke")):
                [(x(float(px)), y(float(py))) for px, py in (pair.split(",") for pair in line.get("points").split())]
                for line in root.iter(SVG + "polyline")}

    def check_points(self, curve, expected):
        self.assertEqual(len(curve), len(expected))
        for (x, y), (step, loss) in zip(curve, expected):
            self.assertAlmostEqual(x, step, delta=0.01 * max(1, self.ends["x"][1]) / 10)
            self.assertAlmostEqual(y, loss, delta=0.01 * (self.ends["y"][1] - self.ends["y"][0]) / 10)

    def test_values_become_coordinates(self):
        losses = [(1, 10.5), (2, 7.25), (3, 4.0), (17, 3.5), (42, 3.125)]
        curves = self.curves(self.write_run("run", *(train(*pair) for pair in losses), val(17, 3.75), val(42, 3.25)))
        training, validation = curves.values()
        self.check_points(training, losses)
        self.check_points(validation, [(17, 3.75), (42, 3.25)])
        self.assertEqual((self.ends["x"], self.ends["y"]), ((0, 50), (2, 12)))
        self.assertEqual(self.legend, ["run, training", "run, validation"])

    def test_several_runs(self):
        names = [self.write_run(name, train(1, first), train(2, first - 1)) for name, first in (("a<b&c", 5), ("d", 4))]
        curves = self.curves(*names)
        self.assertEqual(len({stroke for _, stroke in curves}), 2)
        self.assertEqual(self.legend, ["a<b&c, training", "d, training"])
        for curve, first in zip(curves.values(), (5, 4)):
            self.check_points(curve, [(1, first), (2, first - 1)])

    def test_the_table(self):
        self.write_run("one", train(1, 5.0), val(1, 4.5), train(2, 4.0), val(2, 3.5), train(3, 4.25, skipped="wte"),
                       val(3, 3.75))
        self.write_run("two", train(1, 6.0))
        lines = self.run_trainer("report", "one", "two").splitlines()
        self.assertEqual([line.split() for line in lines[1:]],
                         [["one", "3", "4.2500", "3.7500", "3.5000", "2", "1002", "1"],
                          ["two", "1", "6.0000", "-", "-", "-", "1001", "0"]])

    def test_steps_without_a_loss_and_repeated_steps(self):
        run = self.write_run("run", train(1, 5.0), train(2, "nan", skipped="wte"), train(3, None), train(4, "-inf"),
                             {"kind": "train", "step": 5}, train(6, 4.0), train(7, 9.0), train(6, 3.0), val(6, None),
                             {"kind": "of a newer program", "step": 6}, '{"kind":"train","step":7,"lo')
        self.assertIn(" 1\n", self.run_trainer("report", run))
        (training,) = self.curves(run).values()
        self.check_points(training, [(1, 5), (6, 3)])

    def test_a_single_validation_is_a_dot(self):
        validation = list(self.curves(self.write_run("run", train(1, 5.0), train(9, 4.0), val(9, 4.5))).values())[1]
        self.check_points(validation, [(9, 4.5), (9, 4.5)])

    def test_a_long_run_is_thinned_to_means(self):
        (training,) = self.curves(self.write_run("run", *(train(step, step % 2) for step in range(1, 4001)))).values()
        self.check_points(training, [(2.5 + 4 * i, 0.5) for i in range(1000)])

    def test_flat_and_extreme_losses(self):
        for loss in (0, 2.5, -3, 1e13, 1e-9, -1e13):
            with self.subTest(loss=loss):
                self.curves(self.write_run("run", train(1, loss), train(1000000, loss)))

    def test_a_real_run_that_was_resumed(self):
        self.train(train_max_steps=6, eval_every_steps=3, checkpoint_every_steps=3)
        self.train("--resume", "--accept-changes", train_max_steps=9, eval_every_steps=3)
        training, validation = self.curves("run").values()
        self.check_points(training, [(r["step"], r["loss"]) for r in self.records(kind="train")])
        self.check_points(validation, [(r["step"], r["loss"]) for r in self.records(kind="val")])

    def test_damaged_and_missing_input(self):
        good = json.dumps(train(1, 5.0)) + "\n"
        for bad in ("{\n", "\n", "[1]\n", "3\n", '{"kind":"train"}\n', '{"kind":"train","step":-1,"loss":1}\n',
                    '{"step":2,"loss":1}\n', '{"kind":"train","step":"2"}\n', "\0\n",
                    '{"kind":"train","step":1e999}\n'):
            with self.subTest(bad):
                said = self.run_trainer("report", self.write_run("run", good, good, bad, good), "--out", "loss.svg",
                                        expect=65)
                self.assertIn("line 3 of run/metrics.jsonl", said)
                self.assertFalse((self.dir / "loss.svg").exists())
        for empty in ("", good[:-1], json.dumps(val(1, 2.0)) + "\n"):
            said = self.run_trainer("report", self.write_run("run", empty), expect=65)
            self.assertIn("run/metrics.jsonl has no training step with a finite loss", said)
        self.assertIn("nothing/metrics.jsonl", self.run_trainer("report", "nothing", expect=66))
        self.run_trainer("report", expect=64)
        self.run_trainer("report", self.write_run("run", good), "--out", "no/folder.svg", expect=73)


if __name__ == "__main__":
    unittest.main()
