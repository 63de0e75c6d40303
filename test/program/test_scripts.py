"""The shell scripts, on machines simulated by a PATH with stand-ins."""
import math
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from trainer import ENVIRONMENT, ROOT, TRAINER, generated_text, wait_until

TOOLS = ["bash", "cp", "dirname", "env", "mkdir", "tail", "touch"]
PACKAGES = "make g++ libdnnl-dev libpcre2-dev libxxhash-dev libisal-dev libzstd-dev libsnappy-dev libsodium-dev " \
           "libutf8proc-dev nlohmann-json3-dev libcli11-dev"

# An apt-get that records its calls and installs the packages where the stand-in for g++ looks.
APT_GET = """#!/bin/bash
echo "apt-get $*" >> "$HOME/calls"
[[ $* != *update ]] || { touch "$HOME/lists"; exit 0; }
[ -e "$HOME/lists" ] || { echo "E: no list"; exit 100; }
[ ! -e "$HOME/broken" ] || { echo "E: broken"; exit 100; }
for name in make g++ bible xz python3; do cp "$HOME/done/$name" "$HOME/bin/"; done
"""


def exit_codes():
    """Returns the trainer's table: code -> (name, policy, meaning)."""
    lines = subprocess.run([TRAINER, "--exit-codes"], check=True, capture_output=True, text=True).stdout.splitlines()
    return {int(code): tuple(cells) for code, *cells in (line.split(" ", 3) for line in lines)}


class Folder(unittest.TestCase):
    """A test in a temporary directory that represents the repository, with its own PATH."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.home = Path(temporary.name)
        self.repository = self.home / "train_gpt"
        shutil.copytree(ROOT / "scripts", self.repository / "scripts")
        (self.home / "bin").mkdir()

    def tool(self, name, text, folder="bin"):
        path = self.home / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run_script(self, name, *args, path=None, expect=0, cwd=None, **variables):
        environment = {"PATH": path or str(self.home / "bin"), "HOME": str(self.home),
                       "OMP_WAIT_POLICY": ENVIRONMENT["OMP_WAIT_POLICY"], **variables}
        result = subprocess.run([self.repository / "scripts" / name, *args], env=environment, capture_output=True,
                                text=True, errors="replace", timeout=120, cwd=cwd)
        self.assertEqual(result.returncode, expect, result.stdout + result.stderr)
        return result.stdout + result.stderr


class Setup(Folder):
    def setUp(self):
        super().setUp()
        for tool in TOOLS:
            (self.home / "bin" / tool).symlink_to(shutil.which(tool))
        for name in ("make", "g++", "bible", "xz", "python3"):
            self.tool(name, "#!/bin/bash\n", "done")
        self.become(0)

    def calls(self):
        calls = self.home / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def become(self, user_id):
        self.tool("id", f"#!/bin/bash\necho {user_id}\n")

    def test_a_minimal_debian(self):
        self.tool("apt-get", APT_GET)
        said = self.run_script("setup.sh", "xz", "kjv")
        self.assertIn(f"installing {PACKAGES} xz-utils bible-kjv\n", said)
        self.assertIn("installed in", said)
        install, update, again = self.calls()
        self.assertTrue(install.endswith(f"install --no-install-recommends {PACKAGES} xz-utils bible-kjv"), install)
        self.assertTrue(update.endswith("update"))
        self.assertEqual(again, install)

    def test_a_machine_that_has_everything_is_not_touched(self):
        self.become(1000)
        self.tool("apt-get", APT_GET)
        for name in ("make", "g++"):
            self.tool(name, "#!/bin/bash\n")
        self.assertEqual(self.run_script("setup.sh"), "")
        self.assertEqual(self.calls(), [])
        self.assertFalse((self.repository / "build").exists())

    def test_only_missing_packages_are_installed(self):
        (self.home / "lists").touch()
        self.tool("apt-get", APT_GET)
        for name in ("make", "g++", "xz"):
            self.tool(name, "#!/bin/bash\n")
        self.run_script("setup.sh", "xz", "kjv")
        (install,) = self.calls()
        self.assertTrue(install.endswith("--no-install-recommends bible-kjv"), install)

    def test_without_permission_the_command_is_printed(self):
        self.become(1000)
        self.tool("apt-get", APT_GET)
        line = f"apt-get update && apt-get install -y --no-install-recommends {PACKAGES}"
        self.assertIn(f"\n  su - -c '{line}'\n", self.run_script("setup.sh", expect=77))
        self.tool("sudo", "#!/bin/bash\nexit 1\n")
        self.assertIn(f"\n  sudo sh -c '{line}'\n", self.run_script("setup.sh", expect=77))
        self.assertEqual(self.calls(), [])

    def test_a_user_with_sudo(self):
        self.become(1000)
        (self.home / "lists").touch()
        self.tool("apt-get", APT_GET)
        self.tool("sudo", '#!/bin/bash\necho "sudo $1 $2" >> "$HOME/calls"; shift\n[ "$1" = true ] || exec "$@"\n')
        self.run_script("setup.sh")
        self.assertEqual([call.split(" ", 1)[0] for call in self.calls()], ["sudo", "sudo", "apt-get"])
        self.assertEqual(self.calls()[:2], ["sudo -n true", "sudo -n env"])

    def test_another_system(self):
        said = self.run_script("setup.sh", "test", expect=69)
        for name in ("no apt-get", "oneDNN", "PCRE2", "xxHash", "ISA-L", "CLI11", "Catch2", "Python 3"):
            self.assertIn(name, said)

    def test_a_failing_apt(self):
        self.tool("apt-get", APT_GET)
        (self.home / "lists").touch()
        (self.home / "broken").touch()
        said = self.run_script("setup.sh", expect=69)
        self.assertIn("build/setup.log", said)
        self.assertIn("E: broken", said)

    def test_a_compiler_that_does_not_find_the_packages(self):
        (self.home / "lists").touch()
        self.tool("apt-get", APT_GET)
        self.tool("g++", "#!/bin/bash\nread -r line\n[[ $line != *dnnl.hpp* ]]\n", "done")
        said = self.run_script("setup.sh", expect=69)
        self.assertIn(f"{self.home}/bin/g++ does not find libdnnl-dev\n", said)

    def test_packages_for_downloads(self):
        said = self.run_script("setup.sh", "data", expect=69)
        self.assertIn("\n  curl\n  jq\n", said)
        self.assertEqual("CA certificates" in said, not Path("/etc/ssl/certs/ca-certificates.crt").exists())

    def test_packages_for_fuzzing(self):
        said = self.run_script("setup.sh", "fuzz", expect=69)
        self.assertIn("\n  clang\n  llvm-symbolizer\n", said)
        has_fuzzer = any(Path("/usr/lib").glob("llvm-*/lib/clang/*/lib/linux/libclang_rt.fuzzer-*.a"))
        self.assertEqual("for fuzzing and sanitizers" in said, not has_fuzzer)

    def test_an_unknown_purpose(self):
        self.assertIn("nonsense", self.run_script("setup.sh", "nonsense", expect=64))


class Sums(Folder):
    """test.sh sums the results of the test programs, and counts a program without results as failed."""

    def last_line(self, catch, python, expect, check=0, build=0, seed_1=":"):
        faults = 'if [ "$1" = test/faults ]; then echo "test cases: 1 | 1 passed | 0 failed"; exit; fi\n'
        for name, text in (("setup.sh", "exit 0"), ("catch", catch), ("python3", faults + python),
                           ("make", f'[[ "$*" == *check* ]] && exit {check}; exit {build}')):
            self.tool(name, f"#!/bin/bash\n{text}\n")
        shutil.copy(self.home / "bin/setup.sh", self.repository / "scripts/setup.sh")
        (self.repository / "build").mkdir(exist_ok=True)
        shutil.copy(self.home / "bin/catch", self.repository / "build/test_cpu")
        self.tool("simulated", f'#!/bin/bash\nif [[ "$*" == "--seed 1 "* ]]; then {seed_1}; fi\n'
                  'echo "All tests passed (3 assertions in 1 test case)"\n')
        for program in ("test_simt", "test_simt_asan", "test_simt_tsan", "test_pool_tsan", "test_corpora"):
            shutil.copy(self.home / "bin/simulated", self.repository / "build" / program)
        path = f"{self.home}/bin:{os.environ['PATH']}"
        output = self.run_script("test.sh", path=path, expect=expect).splitlines()
        if build == 0:  # the output of each program follows its command line
            shown = output.index("== build/test_corpora")
            self.assertIn("(3 assertions in 1 test case)", output[shown + 1])
        self.assertEqual("== failed" in output, expect != 0)
        self.failed = output[output.index("== failed") + 1:-1] if expect else []
        return output[-1]

    def test_sums(self):  # test/program is two programs: halves of its files
        good = 'echo "All tests passed (22 assertions in 6 test cases)"'
        one = 'echo "All tests passed (1 assertion in 1 test case)"'
        bad = 'echo "test cases: 6 | 4 passed | 2 failed"; echo "assertions: 9 | 1 passed | 8 failed"; exit 2'
        self.assertEqual(self.last_line(good, one, 0), "22 passed, 0 failed")
        self.assertEqual(self.last_line(good, bad, 1), "28 passed, 4 failed")
        self.assertEqual(self.last_line(good, 'echo "test cases: 3 | 3 passed | 0 failed"', 0), "26 passed, 0 failed")
        self.assertEqual(self.last_line(good, "exit 139", 1), "20 passed, 2 failed")
        self.assertEqual(self.last_line(good, "exit 0", 1), "20 passed, 2 failed")
        self.assertEqual(self.last_line(good + "; exit 1", one, 1), "22 passed, 1 failed")
        self.assertEqual(self.last_line(good, one, 1, check=1), "21 passed, 1 failed")
        self.assertEqual(self.failed, ["make -s check"])
        self.assertEqual(self.last_line(good, one, 1, build=2), "2 passed, 1 failed")
        # Failures of a program that runs in parallel with others.
        self.assertEqual(self.last_line(good, one, 1, seed_1="kill -KILL $$"), "21 passed, 1 failed")
        self.assertEqual(self.failed, ["""build/test_simt --seed 1 '~"*fp16"~"*a large matrix"': exit code 137"""])
        named = 'echo "FAIL: test_a (test_b.C)"; echo "x"; echo "a.cpp:3: FAILED:"; '
        self.assertEqual(self.last_line(good, named + bad, 1), "28 passed, 4 failed")
        self.assertEqual(self.failed, ["python3 test/program 'test_[!r-z]*': exit code 2",
                                       "FAIL: test_a (test_b.C)", "a.cpp:3: FAILED:",
                                       "python3 test/program 'test_[r-z]*': exit code 2",
                                       "FAIL: test_a (test_b.C)", "a.cpp:3: FAILED:"])
        self.assertEqual(self.last_line(good, one, 1, seed_1=bad), "25 passed, 2 failed")
        self.assertEqual(self.last_line(good, one, 1, seed_1=one + "; exit 1"), "22 passed, 1 failed")
        skipped = 'echo "skipped: test_a (test_b.C): no mpirun"; echo "test cases: 3 | 2 passed | 0 failed"'
        self.assertEqual(self.last_line(good, skipped, 0), "24 passed, 0 failed, 2 skipped")

    def test_ctrl_c_ends_every_test(self):
        self.last_line("exit 0", "exit 0", 1)
        (self.repository / "build/test_cpu").write_text('#!/bin/bash\necho $$ > "$HOME/pid"\nexec sleep 600\n')
        environment = {"PATH": f"{self.home}/bin:{os.environ['PATH']}", "HOME": str(self.home)}
        with subprocess.Popen([self.repository / "scripts/test.sh"], env=environment, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, start_new_session=True) as script:
            self.addCleanup(script.kill)
            pid = self.home / "pid"
            wait_until(lambda: pid.exists() and pid.read_text().endswith("\n"), "no test has started")
            os.killpg(script.pid, signal.SIGINT)
            self.assertEqual(script.wait(timeout=60), 130)
        wait_until(lambda: not Path("/proc", pid.read_text().strip()).exists(), "the test still runs")

    def test_other_arguments_are_refused(self):
        for arguments in (["--fast"], ["--quick", "--quick"]):
            self.assertIn("usage: scripts/test.sh [--quick]",
                          self.run_script("test.sh", *arguments, path=os.environ["PATH"], expect=64))


class Quick(Folder):
    def test_all_names_exist(self):
        note = ('#!/bin/bash\nprintf "%s|" "${0##*/}" "$@" >> "$HOME/commands"; echo >> "$HOME/commands"\n'
                'echo "All tests passed (1 assertion in 1 test case)"\n')
        (self.repository / "build").mkdir()
        for name in ("make", "python3", "test_cpu", "test_simt", "test_simt_asan", "test_simt_tsan", "test_pool_tsan",
                     "test_corpora"):
            self.tool(name, note)
            shutil.copy(self.home / "bin" / name, self.repository / "build")
        (self.repository / "scripts/setup.sh").write_text("#!/bin/bash\n")
        said = self.run_script("test.sh", "--quick", path=f"{self.home}/bin:{os.environ['PATH']}")
        self.assertEqual(said.splitlines()[-1], "11 passed, 0 failed")
        load = ("import sys, unittest; loader = unittest.TestLoader(); loader.loadTestsFromNames(sys.argv[1:]); "
                "sys.exit('\\n'.join(loader.errors) or 0)")
        for line in (self.home / "commands").read_text().splitlines():
            program, *arguments = line.split("|")[:-1]
            with self.subTest(program, arguments=arguments):
                if program == "python3":
                    result = subprocess.run(["python3", "-c", load, *arguments[1:]], cwd=ROOT / arguments[0],
                                            capture_output=True, text=True)
                    self.assertEqual(result.returncode, 0, result.stderr)
                elif program != "make":
                    result = subprocess.run([ROOT / "build" / program, "--list-tests", *arguments],
                                            capture_output=True, text=True)
                    self.assertNotRegex(result.stdout, r"(?m)^(0|No) (matching )?test cases")


@unittest.skipUnless(shutil.which("xz"), "xz is not installed")
class Quickstart(Folder):
    """quickstart.sh with a built trainer and a model that trains in a second."""

    def setUp(self):
        super().setUp()
        (self.repository / "build").mkdir()
        (self.repository / "build/train_gpt_cpu").symlink_to(TRAINER)
        (self.repository / "Makefile").write_text("build/train_gpt_cpu:\n")
        (self.repository / "configs").mkdir()
        (self.repository / "configs/quickstart.json").write_text("""{
            "run": {"dir": "runs/quickstart"},
            "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 300},
            "data": {"train": "build/quickstart/data/train_*.bin", "val": "build/quickstart/data/val_*.bin",
                     "tokenizer": "build/quickstart/data/tokenizer.json"},
            "train": {"max_steps": 40, "batch_size": 2, "seq_len": 32, "total_batch_tokens": 64, "precision": "fp32"},
            "schedule": {"name": "wsd", "warmup_steps": 5}, "eval": {"every_steps": 40, "batches": 0}
        }""")
        (self.home / "text.txt").write_text(generated_text(800))

    def quickstart(self, text, expect=0):
        return self.run_script("quickstart.sh", "--text", text, path=os.environ["PATH"], expect=expect)

    def test_own_text_twice(self):
        said = self.quickstart(self.home / "text.txt")
        loss, bits, xz_bits = (float(re.search(pattern, said)[1]) for pattern in (
            r"validation loss ([\d.]+)", r"train_gpt +([\d.]+) bits per byte", r"xz -9e +([\d.]+) bits per byte"))
        self.assertTrue(1 < loss < math.log(512) and 1 < bits < 6 and 0.5 < xz_bits < 6, said)  # 512: the vocabulary
        self.assertRegex(said, r"quickstart: done in \d+ s")

        text = (self.home / "text.txt").read_bytes()
        begin = text.index(b"\n", len(text) * 95 // 100 - 1) + 1
        compressed = [int(subprocess.run("xz -9ec | wc -c", shell=True, input=part, capture_output=True).stdout)
                      for part in (text, text[:begin])]
        self.assertAlmostEqual(xz_bits, 8 * (compressed[0] - compressed[1]) / (len(text) - begin), delta=0.001)
        self.assertIn(f"{len(text) - begin} bytes", said)

        # A billion steps exceed any time limit. The limit here ends the run at once instead of after minutes.
        self.assertNotIn("in the available time", said)
        script = self.repository / "scripts/quickstart.sh"
        script.write_text(re.sub(r"seconds=120", "seconds=3", script.read_text()).replace("$((320 - ", "$((0 - "))
        config = self.repository / "configs/quickstart.json"
        config.write_text(config.read_text().replace('"max_steps": 40', '"max_steps": 1000000000'))
        said = self.quickstart(self.home / "text.txt")
        self.assertRegex(said, r"trained \d+ of 1000000000 steps in the available time")
        self.assertTrue((self.repository / "runs/quickstart.old-1/metrics.jsonl").exists())

    def test_ctrl_c_saves(self):
        config = self.repository / "configs/quickstart.json"
        config.write_text(config.read_text().replace('"max_steps": 40', '"max_steps": 1000000000'))
        process = subprocess.Popen([self.repository / "scripts/quickstart.sh", "--text", self.home / "text.txt"],
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                                   env=ENVIRONMENT)
        metrics = self.repository / "runs/quickstart/metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.exists() and metrics.stat().st_size > 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to both the shell and the trainer
        said = process.communicate(timeout=60)[0].decode(errors="replace")
        self.assertEqual(process.returncode, 75, said)
        # The printed command has the time limit of the stopped run.
        self.assertRegex(said, r"build/train_gpt_cpu configs/quickstart.json --set model.vocab_size=512 "
                               r"--set train.max_minutes=[\d.]+ --resume")
        self.assertTrue(list((self.repository / "runs/quickstart/checkpoints").glob("step_*/COMMIT")))

    def test_wrong_arguments(self):
        self.assertIn("nowhere.txt", self.quickstart("nowhere.txt", expect=66))
        self.assertIn("usage", self.run_script("quickstart.sh", "text.txt", path=os.environ["PATH"], expect=64))

    def test_a_text_that_is_too_short(self):
        (self.home / "short.txt").write_text("One line.\n")
        self.assertIn("--val-fraction 0 for no validation split", self.quickstart(self.home / "short.txt", expect=65))


class Recipes(Folder):
    """Scripts that start runs on several machines, with simulated machines."""

    def setUp(self):
        super().setUp()
        (self.repository / "build").mkdir()
        self.tool("train_gpt", f"""#!/bin/bash
            echo "trainer $*"
            [ -z "$WAITS" ] || {{ trap 'echo stopped; exit 75' USR1; touch waits; while :; do sleep 0.05; done; }}
            echo "token $TRAIN_GPT_TOKEN" >> tokens
            exit "${{CODE:-0}}"
        """, folder="train_gpt/build")
        (self.repository / "config.json").write_text("{}")
        # mpirun on machines with different files; `broken` is unreachable.
        self.tool("mpirun", """#!/bin/bash
            echo "mpirun $*" >> "$HOME/calls"
            while [ $# != 0 ]; do
                case $1 in
                    --host) host=$2; shift ;;
                    sha256sum) [ "$host" = broken ] && { echo "no route to broken" >&2; exit 1; }
                               [ "$host" = other ] && { echo "0  $2"; exit 0; }
                               exec "$@" ;;
                    build/train_gpt) exec "$@" ;;
                esac
                shift
            done
        """)

    def train_hosts(self, *args, expect, **environment):
        result = subprocess.run([self.repository / "scripts/train_hosts.sh", *args], cwd=self.repository, text=True,
                                capture_output=True, timeout=60,
                                env={"HOME": str(self.home), "PATH": f"{self.home}/bin:{os.environ['PATH']}",
                                     **environment})
        self.assertEqual(result.returncode, expect, result.stdout + result.stderr)
        return result.stdout + result.stderr

    def test_a_run_on_two_machines(self):
        said = self.train_hosts("node1:8,node2:8", "build/train_gpt", "config.json", "--set", "run.seed=2", expect=0,
                                MPIRUN_FLAGS="-x NCCL_SOCKET_IFNAME=eth0")
        self.assertEqual(said, "trainer --supervise config.json --auto --set run.seed=2 -- mpirun --bind-to none "
                               "-x NCCL_SOCKET_IFNAME=eth0 --host node1:8,node2:8 -np 16 "
                               f"--wdir {self.repository.resolve()}\n")
        calls = (self.home / "calls").read_text().splitlines()
        self.assertEqual(len(calls), 2)
        for host, call in zip(("node1", "node2"), calls):
            self.assertIn(f"--host {host} -np 1 ", call)

    def test_unsuitable_machines(self):
        said = self.train_hosts("node1:8,other:8", "build/train_gpt", "config.json", expect=69)
        self.assertIn("other has a different build/train_gpt or config.json in", said)
        self.assertIn("no route", self.train_hosts("broken:8", "build/train_gpt", "config.json", expect=69))
        self.assertIn("nothing.json", self.train_hosts("node1:8", "build/train_gpt", "nothing.json", expect=69))

    def test_wrong_arguments(self):
        for hosts in ("node1", "node1:0", "node1:8,:8"):
            said = self.train_hosts(hosts, "build/train_gpt", "config.json", expect=64)
            self.assertIn("must be HOST:RANKS", said)
        self.assertIn("usage", self.train_hosts("node1:8", expect=64))

    def test_the_job_of_kubernetes(self):
        """Its numbers are consistent, the trainer accepts its command, and it uses the same final exit codes."""
        text = (ROOT / "scripts/train.kubernetes.yaml").read_text()

        def number(pattern):
            return re.search(pattern + r"(\d+)", text)[1]
        pods, gpus = number("completions: "), number("nvidia.com/gpu: ")
        self.assertEqual((number("parallelism: "), number("JOB_COMPLETION_INDEX/"), number("--nproc ")),
                         (pods, pods, gpus))
        command = " ".join(re.search(r"args:\n +- (.*\n.*)\n", text)[1].split())
        run = subprocess.run(["bash", "-c", command], cwd=self.repository, capture_output=True, text=True, timeout=20,
                             env={**os.environ, "JOB_COMPLETION_INDEX": "1",
                                  "PATH": f"{self.repository}/build:{os.environ['PATH']}"})
        self.assertEqual(run.stdout, "trainer --supervise --nproc 8 --node 1/2 --master train-gpt-0.train-gpt:29500 "
                                     "/usr/local/share/train_gpt/configs/gpt2_124M.json --auto\n", run.stderr)
        understood = subprocess.run([TRAINER, *run.stdout.split()[1:]], capture_output=True, text=True, timeout=20)
        self.assertIn("to use several machines, start them with mpirun", understood.stderr)
        final = [int(code) for code in re.search(r"values: \[(.*)\]", text)[1].split(",")]
        self.assertEqual(final, [code for code, (_, policy, _) in exit_codes().items() if code and policy == "final"])

    def slurm(self, code, **environment):
        self.tool("scontrol", "#!/bin/bash\necho \"scontrol $*\"\n")
        return self.run_script("train.slurm", "config.json", path=f"{self.home}/bin:{os.environ['PATH']}", expect=code,
                               cwd=self.repository, SLURM_JOB_ID="17", **environment)

    def test_the_job_of_slurm(self):
        """The job is requeued if it was stopped with a checkpoint; every other exit code is final."""
        for code in (0, 75, 76, 78, 137):
            said = self.slurm(code, CODE=str(code))
            self.assertIn("trainer --supervise config.json --auto -- srun --kill-on-bad-exit=0\n", said)
            self.assertEqual("scontrol requeue 17\n" in said, code == 75)
        tokens = (self.repository / "tokens").read_text().splitlines()
        self.assertEqual(len(set(tokens)), 5)
        for token in tokens:
            self.assertRegex(token, "^token [0-9a-f]{32}$")

    def test_slurms_signal_reaches_the_supervisor_at_any_moment(self):
        """Delays each place of the script in turn by a second, during which the signal arrives."""
        path = self.repository / "scripts/train.slurm"
        lines = path.read_text().splitlines(keepends=True)
        begin = next(place for place, line in enumerate(lines) if line.startswith("trap ")) + 1
        places = [place for place in range(begin, len(lines)) if not lines[place].startswith("#")]
        processes = []
        self.tool("scontrol", "#!/bin/bash\necho \"scontrol $*\"\n")
        for place in places:
            script = path.with_name(f"train_{place}.slurm")
            script.write_text("".join(lines[:place] + ["sleep 1\n"] + lines[place:]))
            script.chmod(0o755)
            folder = self.home / str(place)
            shutil.copytree(self.repository / "build", folder / "build")
            environment = {"HOME": str(self.home), "PATH": f"{self.home}/bin:{os.environ['PATH']}", "WAITS": "yes",
                           "SLURM_JOB_ID": "17"}
            if lines[place].startswith(("scontrol", "    ", "fi", "exit")):
                continue  # the run is over
            processes.append((lines[place], folder, subprocess.Popen(
                [script, "config.json"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)))
        self.assertGreaterEqual(len(processes), 4)
        for line, folder, process in processes:
            self.addCleanup(process.kill)
            wait_until((folder / "waits").exists, "the run has not begun")
            process.send_signal(signal.SIGTERM)
        for line, folder, process in processes:
            with self.subTest(before=line):
                said = process.communicate(timeout=60)[0]
                self.assertEqual((process.returncode, "scontrol requeue 17\n" in said), (75, True), said)


class ExitCodes(unittest.TestCase):
    """The table in kernels/base/check.h: the program's output, the enumeration and the documentation agree."""

    def test_the_table_has_every_code(self):
        header = (ROOT / "kernels/base/check.h").read_text()
        enumeration = re.search(r"enum class Exit : int \{(.*?)\};", header, re.S)[1]
        self.assertEqual(re.findall(r"(\w+) = (\d+)", enumeration),
                         [(name, str(code)) for code, (name, _, _) in exit_codes().items()])
        self.assertLessEqual({policy for _, policy, _ in exit_codes().values()}, {"final", "restart"})

    def test_the_documentation_has_the_table(self):
        rows = "".join(path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
        expected = [f"| {code} | {' | '.join(columns)} |" for code, columns in exit_codes().items()]
        self.assertEqual([row for row in expected if f"\n{row}\n" not in rows], [])
