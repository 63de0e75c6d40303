"""scripts/gpu_runner.py and gpu_process.py: stages that hang, crash, flood the log, write wrong results or leave
processes affect no other stage. The programs are shell scripts."""
import contextlib
import io
import json
import os
import sys
import tarfile
import tempfile
import threading
import time
import unittest
from pathlib import Path
from unittest import mock

from trainer import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import cuda_libraries  # noqa: E402
import gpu_process  # noqa: E402
import gpu_runner  # noqa: E402
import gpu_stages  # noqa: E402
from gpu_stages import NotRun, Place, Reading, Stage, load_figures  # noqa: E402

HEAD = {"part": "measure", "gpu": {"name": "NVIDIA H200", "driver": "580.95", "memory": "143771 MiB",
                                   "capability": "9.0", "power_limit": "700.00 W"},
        "libraries": {"cuda": "13.0"}, "revision": "abc", "cpus": 16}
SMI = """#!/usr/bin/env bash
[[ $* != *%s* ]] || { echo "Field \\"x\\" is not a valid field to query."; exit 2; }
echo "%s"
"""


def gone(process):
    """Waits for a process to end; returns whether it has."""
    for _ in range(300):
        try:
            if open(f"/proc/{process}/stat").read().split(")")[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


class Folder(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.dir = Path(temporary.name)
        for name in ("work", "programs", "bin"):
            (self.dir / name).mkdir()
        self.place = Place(self.dir, self.dir / "programs", self.dir / "work", cuda_libraries.Libraries(), "9.0")
        path = mock.patch.dict(os.environ, PATH=f"{self.dir}/bin:{os.environ['PATH']}", HOME=str(self.dir))
        path.start()
        self.addCleanup(path.stop)

    def script(self, path, text):
        path = self.dir / path
        path.write_text(text)
        path.chmod(0o755)
        return path


class Stages(Folder):
    def setUp(self):
        super().setUp()
        self.script("bin/nvidia-smi", '#!/usr/bin/env bash\necho "NVIDIA H200, 580.95, 143771 MiB, 9.0, 700.00 W"\n')
        self.stop = threading.Event()
        self.out = self.dir / "out"

    def stage(self, name, script, share=100.0, read=lambda *_: Reading("fine"), **more):
        """Returns a stage that runs a shell script; $FIGURES is the file for its figures."""
        command = more.pop("command", lambda place, stage, seconds: ["bash", "-c", script])
        return Stage(name, share, more.pop("programs", ()), command, read,
                     {"FIGURES": str(self.dir / f"work/{name}.json")}, **more)

    def run_part(self, *stages, limit=600, spent=0.0):
        """Runs the stages; returns check.json's rows by name, its verdicts and the output."""
        self.results = gpu_runner.Results(self.out, HEAD, stages)
        self.results.begin()
        sampler = gpu_process.Sampler()  # not started
        said = io.StringIO()
        start = time.monotonic()
        with contextlib.redirect_stdout(said):
            gpu_runner.Part(self.place, stages, limit, self.results, sampler, self.stop).run(spent)
            self.results.save()
        self.seconds = time.monotonic() - start
        self.check = json.loads((self.out / "check.json").read_text())
        self.assertEqual(sorted(path.name for path in self.out.iterdir()), ["check.json", "check.txt", "logs.tgz"])
        self.assertLess((self.out / "logs.tgz").stat().st_size, 12_000_000)
        self.assertLessEqual(len((self.out / "check.txt").read_text()), 8000)
        rows = {row["name"]: row for row in self.check["stages"]}
        return rows, {name: row["verdict"] for name, row in rows.items()}, said.getvalue()

    def logs(self):
        with tarfile.open(self.out / "logs.tgz") as tar:
            return {name: tar.extractfile(name).read() for name in tar.getnames()}

    def test_a_failure_of_any_kind_affects_only_its_own_stage(self):
        """Shares give hanging stages a short time limit and all others minutes."""
        def broken(*_):
            raise KeyError("figures")

        def not_here(*_):
            raise NotRun("no such library")

        hang = '''trap "" TERM
                  setsid sleep 1000 & echo $! > "$HOME/session"
                  sleep 1000 & echo $! > "$HOME/grandchild"
                  echo $$ > "$HOME/pid"; echo '{"ms": 7}' > "$FIGURES"; while true; do sleep 1; done'''
        rows, verdicts, said = self.run_part(
            self.stage("hangs", hang, share=1, read=load_figures_of("what it had not measured yet")),
            self.stage("crashes", 'echo \'{"ms": 8}\' > "$FIGURES"; kill -SEGV $$', read=load_figures_of("ms")),
            self.stage("missing", "", programs=("test_cuda",)),
            self.stage("fails", "echo first; echo 'the \"reason\" is 3'; exit 3", read=broken),
            self.stage("floods", "head -c 50000000 /dev/urandom; head -c 50000000 /dev/zero; echo; echo the end"),
            self.stage("broken_json", 'echo "{\\"ms\\": 1" > "$FIGURES"', read=load_figures_of("ms")),
            self.stage("huge_json", 'head -c 2000000 /dev/zero > "$FIGURES"', read=load_figures_of("ms")),
            self.stage("deep_json", 'yes "[" | head -n 100000 > "$FIGURES"', read=load_figures_of("ms")),
            self.stage("no_json", "true", read=load_figures_of("ms")),
            self.stage("unreadable", "true", read=broken),
            self.stage("bad_command", "", command=broken),
            self.stage("not_a_program", "", command=lambda *_: ["/dev/null/nothing"]),
            self.stage("not_here", "", command=not_here),
            self.stage("not_good", "true", read=lambda *_: Reading("2 of 3", good=False)),
            self.stage("leaves", 'setsid sleep 1000 & sleep 1000 & echo $! > "$HOME/left"'),
            self.stage("nan", 'echo \'{"ms": NaN}\' > "$FIGURES"', read=load_figures_of("ms")),
            self.stage("peer", "exit 1", is_peer=True),
            self.stage("passes", 'cp "$HOME/out/check.json" "$HOME/earlier.json"'))
        self.assertEqual(verdicts, {
            "hangs": "timed out", "crashes": "crashed (SIGSEGV)", "missing": "missing", "fails": "failed",
            "floods": "passed", "broken_json": "failed", "huge_json": "failed", "deep_json": "failed",
            "no_json": "failed", "unreadable": "failed", "bad_command": "failed", "not_a_program": "failed",
            "not_here": "not run", "not_good": "failed", "leaves": "passed", "nan": "passed", "peer": "failed",
            "passes": "passed"})
        self.assertEqual((self.check["passed"], self.check["complete"]), (False, True))
        self.assertLess(rows["hangs"]["seconds"], 30)
        for name in ("pid", "grandchild", "session", "left"):
            self.assertTrue(gone(int((self.dir / name).read_text())), f"{name} is still there")
        # Partial results, reasons, and results that were on disk before later stages ran.
        self.assertEqual([rows[name]["figures"] for name in ("hangs", "crashes", "nan")],
                         [{"ms": 7}, {"ms": 8}, {"ms": None}])
        self.assertEqual(rows["fails"]["detail"], 'the "reason" is 3')
        self.assertIn("   | first\n", said)
        self.assertEqual(rows["unreadable"]["detail"], "cannot read the result: KeyError: 'figures'")
        self.assertEqual(rows["not_here"]["detail"], "no such library")
        self.assertIn("nothing", rows["not_a_program"]["detail"])
        earlier = json.loads((self.dir / "earlier.json").read_text())
        self.assertEqual([row["name"] for row in earlier["stages"]], list(rows)[:-1])
        self.assertEqual((earlier["passed"], earlier["complete"]), (None, False))
        flood = self.logs()["floods.log"]
        self.assertTrue(flood.endswith(b"the end\n"))
        self.assertIn(b"bytes are left out", flood)
        self.assertLess(len(flood), gpu_runner.LOGS_BYTES)
        table = (self.out / "check.txt").read_text()
        for name, verdict in verdicts.items():
            self.assertRegex(table, rf"(?m)^  {name} +{verdict.split(' (')[0]}")
        self.assertIn("NOT passed: 1 timed out, 1 crashed, 1 missing,", table)

    def test_everything_passes_or_cannot_run_or_is_a_peer(self):
        def not_here(*_):
            raise NotRun("no such library")
        self.run_part(self.stage("one", "true"), self.stage("two", "", command=not_here),
                      self.stage("three", "exit 1", is_peer=True))
        self.assertTrue(self.check["passed"])
        self.assertIn("passed: 1 passed, 1 not run, 1 failed;", (self.out / "check.txt").read_text())

    def test_no_time_is_left(self):
        """A stage that cannot be ended within its share uses up the next stage's."""
        _, verdicts, _ = self.run_part(self.stage("hangs", 'trap "" TERM; while true; do sleep 1; done'),
                                       self.stage("next", "true", share=1), limit=4)
        self.assertEqual(verdicts, {"hangs": "timed out", "next": "no time"})
        self.assertFalse(self.check["passed"])

    def test_unused_time_goes_to_later_stages(self):
        given = {}

        def note(place, stage, seconds):
            given[stage.name] = seconds
            return ["true"]
        self.run_part(*(self.stage(name, "", share=100, command=note, is_peer=name == "peer")
                        for name in ("first", "second", "third", "peer", "last")), limit=10012)
        for name, least, most in (("first", 1990, 2000), ("second", 3900, 4000), ("third", 3900, 4000),
                                  ("peer", 7800, 8000), ("last", 3900, 4000)):
            self.assertTrue(least <= given[name] <= most, given)

    def test_time_that_was_spent_before(self):
        """The time to inspect the machine counts against the limit."""
        rows, _, _ = self.run_part(self.stage("only", "true"), limit=1000, spent=400)
        self.assertTrue(580 <= rows["only"]["bound_s"] <= 588, rows["only"]["bound_s"])

    def test_a_stage_may_not_use_the_time_of_later_stages(self):
        rows, verdicts, _ = self.run_part(self.stage("hangs", "sleep 1000", share=2), self.stage("next", "true", 98))
        self.assertEqual(verdicts, {"hangs": "timed out", "next": "passed"})
        self.assertGreater(rows["next"]["bound_s"], 500)

    def test_a_gpu_that_is_lost_after_a_crash(self):
        self.script("bin/nvidia-smi", '#!/usr/bin/env bash\necho "Unable to determine the device handle"\nexit 15\n')
        _, verdicts, _ = self.run_part(self.stage("first", "true"), self.stage("crashes", "kill -ABRT $$"),
                                       self.stage("next", "true"))
        self.assertEqual(verdicts, {"first": "passed", "crashes": "crashed (SIGABRT)", "next": "no GPU"})

    def test_interrupted(self):
        threading.Timer(2, self.stop.set).start()
        _, verdicts, _ = self.run_part(self.stage("first", "true"), self.stage("hangs", "sleep 1000"),
                                       self.stage("next", "true"))
        self.assertEqual(list(verdicts.items())[-1], ("hangs", "interrupted"))
        self.assertEqual((self.check["passed"], self.check["complete"]), (False, False))

    def test_a_folder_that_cannot_be_written(self):
        """The table is still printed."""
        self.results = gpu_runner.Results(self.out, HEAD, [])
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            self.results.save()
        self.assertIn("cannot write the results", said.getvalue())
        self.assertIn("NVIDIA H200", self.results.table())

    def test_library_paths_of_a_peer_and_of_our_programs(self):
        self.place.libraries.ld_library_path = "/libraries"
        with mock.patch.dict(os.environ, LD_LIBRARY_PATH="/inherited"):
            self.run_part(self.stage("ours", "echo $LD_LIBRARY_PATH"),
                          self.stage("theirs", "echo $LD_LIBRARY_PATH", is_peer=True))
        self.assertEqual([self.logs()[name] for name in ("ours.log", "theirs.log")],
                         [b"/libraries\n", b"/inherited\n"])


def load_figures_of(key):
    def read(place, stage, output):
        figures = load_figures(place, stage)
        return Reading(f"{key} is {figures[key]}", figures)
    return read


class Matmuls(Folder):
    def reading(self, *products, **more):
        stage = Stage("matmul_124M", 40, (), None, None)
        rows = [{"epilogue": epilogue, "calls": 2, "chosen": ms and {"ms": ms, "mismatches": mismatches},
                 "fastest": ms and {"ms": ms / 1.25, "mismatches": 0}, "excluded": None, **more}
                for epilogue, ms, mismatches in products]
        self.place.figures(stage).write_text(json.dumps({"products": rows}))
        return gpu_stages.read_matmul(self.place, stage, "")

    def test_a_fused_epilogue_may_be_missing_and_a_plain_product_may_not(self):
        reading = self.reading(("plain", 1, 0), ("bias_gradient", None, 0))
        self.assertTrue(reading.good)
        self.assertIn("the fastest ones 1.250 times as fast", reading.detail)
        self.assertIn("no algorithm for 1", self.reading(("plain", 1, 0), ("dgelu", None, 0)).detail)
        self.assertFalse(self.reading(("bias", 1, 0), ("plain", None, 0)).good)
        self.assertFalse(self.reading(("plain", 1, 2)).good)
        self.assertFalse(self.reading().good)


class Clocks(Folder):
    def sample(self, until, text=None, refused="nothing"):
        """Runs a sampler until `until(sampler)` holds; returns its clocks and the sampler."""
        if text is not None:
            self.script("bin/nvidia-smi", SMI % (refused, text))
        sampler = gpu_process.Sampler(every_s=0.01)
        start = time.monotonic()
        sampler.start()
        while not until(sampler) and time.monotonic() < start + 60:
            time.sleep(0.02)
        sampler.stop()
        self.assertFalse(sampler.is_alive())
        return sampler.between(start, time.monotonic()), sampler

    def test_clocks(self):
        self.script("bin/nvidia-smi", '#!/usr/bin/env bash\nn=$(cat "$HOME/n" 2> /dev/null || echo 0)\n'
                    'echo $((n + 1)) > "$HOME/n"\n'
                    'case $n in 0) echo "345, 2619, 120.5, 40, 0x1";; 1) echo "1980, 3201, 690.25, 66, 0x4";;\n'
                    '*) echo "1755, 3201, 700.5, 70, 0x20";; esac\n')
        clocks, sampler = self.sample(lambda sampler: len(sampler.samples) >= 3)
        del sampler.samples[3:]
        self.assertEqual(sampler.between(0, time.monotonic()), {
            "samples": 3, "sm_mhz": [345, 1755, 1980], "memory_mhz": 3201, "watts": [690.25, 700.5], "celsius": 70,
            "slowdowns": ["power cap", "thermal"]})
        self.assertRegex(sampler.csv(), r"^seconds,sm_mhz.*\n0,345,2619,120.5,40,1\n")
        self.assertEqual(sampler.between(0, 1), {})

    def test_the_older_name_of_a_field(self):
        clocks, _ = self.sample(lambda sampler: sampler.samples, "1980, 2619, 690.25, 66, 0x4", "clocks_event_reasons")
        self.assertEqual(clocks["slowdowns"], ["power cap"])

    def test_neither_name(self):
        clocks, _ = self.sample(lambda sampler: sampler.samples, "1980, 2619, 690.25, 66", "reasons")
        self.assertEqual((clocks["sm_mhz"], clocks["slowdowns"]), ([1980, 1980, 1980], []))

    def test_fields_that_are_not_available(self):
        clocks, _ = self.sample(lambda sampler: sampler.samples, "[N/A], N/A, [Not Supported], 66, [N/A]")
        del clocks["samples"]
        self.assertEqual(clocks, {"celsius": 66, "slowdowns": []})

    def test_no_clocks(self):
        for text in (None, "nonsense", ""):
            clocks, sampler = self.sample(lambda sampler: sampler.failed >= 3, text)
            self.assertEqual((clocks, sampler.failed), ({}, 3))

    def test_a_sampler_that_hangs(self):
        self.script("bin/nvidia-smi", '#!/usr/bin/env bash\necho $$ > "$HOME/pid"\nexec sleep 1000\n')
        clocks, _ = self.sample(lambda _: (self.dir / "pid").exists() and (self.dir / "pid").read_text())
        self.assertEqual(clocks, {})
        self.assertTrue(gone(int((self.dir / "pid").read_text())))


if __name__ == "__main__":
    unittest.main()
