"""train_gpt report: the table and the page say what the files of a run say, and the page needs nothing else."""
import json
import os
import re
import statistics
import subprocess
import unittest
from html.parser import HTMLParser

from trainer import ENVIRONMENT, TRAINER, TrainerTest

MOST_POINTS = 4000  # a longer run is thinned
HOSTILE = "</script><script>document.title = 'taken'</script><!--<img src=x onerror=alert(1)> & \"'"


def train(step, loss, **more):
    return {"kind": "train", "step": step, "loss": loss, "tokens_per_s": 1000.0 + step, **more}


def val(step, loss):
    return {"kind": "val", "step": step, "loss": loss, "bits_per_byte": None}


def seven_digits(value):
    return value if value == int(value) else float(f"{value:.7g}")  # whole numbers are exact


class Page(HTMLParser):
    """What a browser would find in the page: its elements, its texts, and the data."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.styles, self.inside = [], [], [], None
        self.feed(text)
        self.close()
        self.data = json.loads(self.scripts[[attributes.get("id") for tag, attributes in self.elements
                                             if tag == "script"].index("data")])
        self.runs = self.data["runs"]

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.inside = {"script": self.scripts, "style": self.styles}.get(tag)
        if self.inside is not None:
            self.inside.append("")

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, text):
        if self.inside is not None:
            self.inside[-1] += text

    def column(self, name, kind="train", run=0):
        """[(step, value)] of a column that is not thinned; a column of equal values is one number."""
        table = self.runs[run]["tables"][kind]
        values = table["columns"][name]
        values = values if isinstance(values, list) else [values] * len(table["steps"])
        assert table["group"] == 1 and len(values) == len(table["steps"]) == table["count"], table["count"]
        return list(zip(table["steps"], values))


class Report(TrainerTest):
    def write_run(self, name, *records, samples=()):
        """A run directory whose metrics have these records; a string stands as it is."""
        (self.dir / name).mkdir(exist_ok=True)
        for file, lines in (("metrics.jsonl", records), ("samples.jsonl", samples)):
            if lines or file == "metrics.jsonl":
                (self.dir / name / file).write_text("".join(
                    line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
        return name

    def page(self, *runs):
        self.said = self.run_trainer("report", *runs, "--out", "page.html")
        return Page((self.dir / "page.html").read_text("utf-8"))

    def test_values_are_those_of_the_file(self):
        records = [(1, 10.5), (2, 7.25), (3, 4.123456789012), (17, 3e-9), (42, 3.125)]
        run = self.write_run("run", *(train(*pair, time=1.7e9 + pair[0]) for pair in records), val(17, 3.75),
                             val(42, 3.25))
        page = self.page(run)
        self.assertEqual(page.column("loss"), [(step, seven_digits(loss)) for step, loss in records])
        self.assertEqual(page.column("loss", "val"), [(17, 3.75), (42, 3.25)])
        self.assertNotIn("bits_per_byte", page.runs[0]["tables"]["val"]["columns"])
        summary = page.runs[0]["summary"]
        self.assertEqual(summary, {"step": 42, "loss": 3.125, "val_loss": 3.25, "best_val_loss": 3.25,
                                   "best_val_step": 42, "tokens_per_s": 1003, "skipped": 0})

    def test_power(self):
        run = self.write_run("run", train(1, 3.0), train(2, 2.5, power_w=100, throttle="hw_thermal"),
                             train(3, 2.0, power_w=50))
        self.assertEqual(self.page(run).column("power_w")[1:], [(2, 100), (3, 50)])

    def test_a_real_run_that_was_resumed(self):
        self.train(train_max_steps=6, eval_every_steps=3, checkpoint_every_steps=3)
        self.train("--resume", "--accept-changes", train_max_steps=9, eval_every_steps=3)
        page = self.page("run/")
        for kind in ("train", "val"):
            records = self.records(kind=kind, without=())
            for name in {key for record in records for key, value in record.items() if type(value) in (int, float)}:
                if name != "step":
                    expected = [(r["step"], seven_digits(r[name])) for r in records]
                    self.assertEqual(page.column(name, kind), expected, name)
        run, records = page.runs[0], self.records(kind="train", without=())
        self.assertEqual((run["dir"], run["notes"]), ("run", []))
        self.assertAlmostEqual(run["summary"]["step_s"], sum(r["step_ms"] for r in records) / 1000)
        self.assertEqual(run["summary"]["tokens_per_s"], sorted(r["tokens_per_s"] for r in records)[len(records) // 2])
        self.assertEqual(run["config"], json.loads((self.dir / "run/config.json").read_text()))
        self.assertEqual((run["config"]["train"]["max_steps"], page.data["defaults"]["train"]["max_steps"]), (9, 19073))

        # Where it ran: run.json has each start.
        first, second = run["starts"]
        self.assertEqual((first["step"], second["step"], second["ranks"]), (0, 6, 1))
        self.assertEqual(second["host"], os.uname().nodename)
        self.assertEqual(second["revision"] + "\n", (self.dir / "run/revision.txt").read_text())
        self.assertLess(abs(second["time"] - (self.dir / "run/run.json").stat().st_mtime), 60)
        plan = self.run_trainer("plan", "config.json")
        planned = re.findall(r"^(\S.*?) +(\d+) bytes", plan, re.M)
        self.assertEqual({**second["memory_bytes"], "total": sum(second["memory_bytes"].values())},
                         {name: int(count) for name, count in planned
                          if name not in ("program and buffers", "copy for checkpoints")})
        self.assertEqual(second["parameters"], int(re.search(r"^parameters +(\d+)", plan, re.M)[1]))

    def test_a_damaged_run_file_stops_no_run(self):
        (self.dir / "run").mkdir()
        for content in ("{", "[]", '{"starts": 3}', '{"starts": [1]}'):
            (self.dir / "run/run.json").write_text(content)
            self.train("--fresh", train_max_steps=1)
            (self.dir / "run/run.json").write_text(content)
            self.train("--resume", "--accept-changes", train_max_steps=2)
            self.assertEqual(json.loads((self.dir / "run/run.json").read_text())["starts"][-1]["step"], 1)

    def test_a_long_run_is_thinned_to_means_and_extremes(self):
        count = 2 * MOST_POINTS + 1001
        losses = [5 + (step * 7919 % 1000) / 1000 for step in range(1, count + 1)]
        losses[1234] = 99.5
        losses[2345] = -1.0
        records = [train(step, loss, lr=0.5) for step, loss in enumerate(losses, 1)]
        records[7000]["loss"] = "nan"
        losses[7000] = None
        page = self.page(self.write_run("run", *records))
        table, = (run["tables"]["train"] for run in page.runs)
        group = -(-count // (MOST_POINTS // 2))
        groups = [range(begin, min(begin + group, count)) for begin in range(0, count, group)]
        self.assertEqual((table["group"], table["count"], len(table["steps"])), (group, count, len(groups)))
        for place, step, *values in zip(groups, table["steps"], *(table["columns"]["loss"][key]
                                                                  for key in ("mean", "min", "max"))):
            finite = [losses[i] for i in place if losses[i] is not None]
            self.assertIn(step - 1, place)
            for value, expected in zip(values, (statistics.fmean(finite), min(finite), max(finite))):
                self.assertAlmostEqual(value, expected, delta=1e-6 * abs(expected))
        self.assertEqual(table["columns"]["lr"], 0.5)  # what never changes is one number
        self.assertEqual(page.runs[0]["summary"]["step"], count)
        self.assertLess((self.dir / "page.html").stat().st_size, 1_000_000)

    def test_several_runs_and_the_table(self):
        self.write_run("one", train(1, 5.0), val(1, 4.5), train(2, 4.0), val(2, 3.5), train(3, 4.25, skipped="wte"),
                       val(3, 3.75))
        self.write_run("two", train(1, 6.0))
        page = self.page("one", "two")
        expected = [["one", "3", "4.2500", "3.7500", "3.5000", "2", "1002", "1"],
                    ["two", "1", "6.0000", "-", "-", "-", "1001", "0"]]
        self.assertEqual([line.split() for line in self.said.splitlines()[1:3]], expected)
        self.assertEqual([run["dir"] for run in page.runs], ["one", "two"])
        self.assertEqual(page.runs[0]["skipped"], [[3, "wte"]])
        self.assertEqual(page.column("loss", run=1), [(1, 6.0)])
        (self.dir / "page.html").unlink()
        self.assertEqual([line.split() for line in self.run_trainer("report", "one", "two", "--text").splitlines()[1:]],
                         expected)
        self.assertEqual(list(self.dir.glob("*.html")), [])
        self.run_trainer("report", "one")
        self.assertTrue((self.dir / "report.html").exists())

    def test_steps_without_a_loss_and_repeated_steps(self):
        run = self.write_run("run", train(1, 5.0), train(2, "nan", skipped="wte"), train(3, None), train(4, "-inf"),
                             {"kind": "train", "step": 5}, train(6, 4.0), train(7, 9.0, skipped="wpe"), train(6, 8.0),
                             train(6, 3.0), val(6, None),
                             {"kind": "of a newer program", "step": 6, "score": 0.25, "list": [{"a": 1}]})
        page = self.page(run)
        self.assertEqual(page.column("loss"), [(1, 5), (2, None), (3, None), (4, None), (5, None), (6, 3)])
        self.assertEqual(page.runs[0]["skipped"], [[2, "wte"]])
        self.assertEqual(page.column("score", "of a newer program"), [(6, 0.25)])
        self.assertEqual(self.said.splitlines()[1].split(), ["run", "6", "3.0000", "-", "-", "-", "1003", "1"])

    def test_samples(self):
        samples = [{"step": step, "time": 1.7e9 + step, "prompt": "And", "text": f"And {step}"}
                   for step in range(1, 501)]
        page = self.page(self.write_run("run", train(1, 5.0), samples=[*samples, {"step": 500}, '{"step":501,"te']))
        run, = page.runs
        self.assertEqual(len(run["samples"]), 100)
        self.assertEqual([run["samples"][0], run["samples"][-1]],
                         [{"step": 1, "text": "And 1"}, {"step": 500, "text": "And 500"}])
        gaps = {after["step"] - before["step"] for before, after in zip(run["samples"], run["samples"][1:])}
        self.assertEqual(gaps, {5, 6})
        self.assertEqual(run["notes"][:2], ["line 501 of run/samples.jsonl is damaged and was skipped",
                                            "the last line of run/samples.jsonl is incomplete and was skipped"])
        page = self.page(self.write_run("run", train(1, 5.0), samples=[samples[1], samples[2], samples[0]]))
        self.assertEqual([sample["step"] for sample in page.runs[0]["samples"]], [1])  # resumed before the others

    def test_the_page_is_one_file_that_loads_nothing(self):
        page = self.page(self.write_run("run", train(1, 5.0)))
        for tag, attributes in page.elements:
            self.assertNotIn(tag, ("link", "img", "iframe", "object", "embed", "base", "form"))
            self.assertFalse(set(attributes) & {"src", "srcset", "action", "data"}, attributes)
            self.assertTrue(attributes.get("href", "#").startswith("#"), attributes)
        policy, = (attributes["content"] for tag, attributes in page.elements
                   if attributes.get("http-equiv") == "Content-Security-Policy")
        self.assertIn("default-src 'none'", policy)
        self.assertFalse(re.search(r"url\(|@import", "".join(page.styles)))
        self.assertFalse(re.search(r"\b(fetch|XMLHttpRequest|WebSocket|import)\b *\(", "".join(page.scripts)))
        self.assertNotIn("{{", (self.dir / "page.html").read_text("utf-8").replace(page.scripts[0], ""))
        self.assertIn("Permission is hereby granted", "".join(page.scripts))  # uPlot's license travels with it

    def test_what_files_say_is_no_markup(self):
        harmless = self.page(self.write_run("run", train(1, 5.0)))
        name = HOSTILE.replace("/", "")
        sample = {"step": 1, "time": 1, "prompt": HOSTILE, "text": HOSTILE + "\u2028\u2029\x01 {{data}} é"}
        self.write_run(name, train(1, 5.0, skipped=HOSTILE, **{HOSTILE: 3}), {"kind": HOSTILE, "step": 1, "x": 1},
                       samples=[sample])
        (self.dir / name / "config.json").write_text(json.dumps({"run": {HOSTILE: HOSTILE}}))
        (self.dir / name / "run.json").write_text(json.dumps({"starts": [{"host": HOSTILE, "step": 0}]}))
        page = self.page(name)
        self.assertEqual(page.elements, harmless.elements)
        run, = page.runs
        del sample["time"], sample["prompt"]
        self.assertEqual((run["dir"], run["samples"], run["skipped"]), (name, [sample], [[1, HOSTILE]]))
        self.assertEqual((run["config"], run["starts"][0]["host"]), ({"run": {HOSTILE: HOSTILE}}, HOSTILE))
        self.assertEqual(run["tables"]["train"]["columns"][HOSTILE], 3)
        self.assertEqual(run["tables"][HOSTILE]["columns"], {"x": 1})

    def test_bytes_that_are_not_utf8(self):
        self.write_run("run", train(1, 5.0))
        with open(self.dir / "run/samples.jsonl", "wb") as file:
            file.write(b'{"step":1,"text":"caf\xe9"}\n')
        os.mkdir(os.fsencode(self.dir) + b"/caf\xe9")
        with open(os.fsencode(self.dir) + b"/caf\xe9/metrics.jsonl", "w") as file:
            file.write(json.dumps(train(1, 5.0)) + "\n")
        subprocess.run([TRAINER, "report", "run", b"caf\xe9", "--out", "page.html"], cwd=self.dir, check=True,
                       capture_output=True, env=ENVIRONMENT)
        page = Page((self.dir / "page.html").read_text("utf-8"))
        self.assertEqual(page.runs[1]["dir"], "caf\ufffd")

    def test_damaged_lines_are_skipped(self):
        good = json.dumps(train(1, 5.0)) + "\n"
        for bad in ("{\n", "\n", "[1]\n", "3\n", "\0\n", '{"kind":"train"}\n', '{"kind":"train","step":-1,"loss":1}\n',
                    '{"step":2,"loss":1}\n', '{"kind":"train","step":"2"}\n', '{"kind":"train","step":1e999}\n',
                    '{"kind":"train","step":2,"loss":1\n', '[{"kind":"train","step":2,"loss":1}]\n'):
            with self.subTest(bad):
                page = self.page(self.write_run("run", good, bad, json.dumps(train(3, 4.0)) + "\n"))
                self.assertEqual(page.column("loss"), [(1, 5), (3, 4)])
                self.assertIn("line 2 of run/metrics.jsonl is damaged and was skipped", page.runs[0]["notes"])
                self.assertIn("line 2 of run/metrics.jsonl is damaged and was skipped", self.said)
        page = self.page(self.write_run("run", good, "x\n", "y\n", '{"kind":"train","step":7,"lo'))
        self.assertEqual(page.runs[0]["notes"][:2], [
            "2 lines of run/metrics.jsonl are damaged and were skipped, beginning with line 2",
            "the last line of run/metrics.jsonl is incomplete and was skipped"])
        for file, content in (("config.json", "{"), ("run.json", "3")):
            (self.dir / "run" / file).write_text(content)
            self.assertIn(f"run/{file} is damaged", self.page("run").runs[0]["notes"])
            (self.dir / "run" / file).unlink()

    def test_missing_and_empty_input(self):
        good = json.dumps(train(1, 5.0)) + "\n"
        for empty in ("", good[:-1], json.dumps(val(1, 2.0)) + "\n"):
            said = self.run_trainer("report", self.write_run("run", empty), "--out", "page.html", expect=65)
            self.assertIn("run/metrics.jsonl has no training step", said)
        (self.dir / "bare").mkdir()
        self.assertIn("bare/metrics.jsonl is missing", self.run_trainer("report", "bare", expect=66))
        self.assertIn("nothing is not a run directory", self.run_trainer("report", "nothing", expect=66))
        self.run_trainer("report", expect=64)
        self.assertIn("must end in .html", self.run_trainer("report", self.write_run("run", good), "--out", "x.svg",
                                                            expect=64))
        self.run_trainer("report", "run", "--text", "--out", "page.html", expect=64)
        self.run_trainer("report", "run", "--out", "no/folder.html", expect=73)
        self.assertEqual(list(self.dir.glob("*.html")), [])


if __name__ == "__main__":
    unittest.main()
