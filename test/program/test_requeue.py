"""scripts/requeue.sh: what it starts again, and that a signal reaches the run once, whenever it comes."""
import os
import shutil
import signal
import subprocess
import unittest

from test_ranks import MPI_ENVIRONMENT
from test_scripts import Folder, exit_codes
from trainer import FROM_TERMINAL, ROOT, TRAINER, TrainerTest, wait_until

REQUEUE = ROOT / "scripts/requeue.sh"


def start(command, **how):
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **FROM_TERMINAL,
                            **how)


class Requeue(Folder):
    """requeue.sh around a command that ends with one code after the other."""

    def requeue(self, *codes, expect):
        self.tool("run", "#!/bin/bash\ncode=$(head -n 1 codes); sed -i 1d codes; echo \"$code\" >> ended; exit $code\n")
        (self.repository / "codes").write_text("".join(f"{code}\n" for code in codes))
        (self.repository / "ended").unlink(missing_ok=True)
        result = subprocess.run([REQUEUE, self.home / "bin/run", TRAINER], timeout=60,
                                cwd=self.repository, capture_output=True, text=True)
        self.assertEqual(result.returncode, expect, result.stderr)
        return (self.repository / "ended").read_text().split()

    def test_it_starts_again_what_asks_for_it(self):
        self.assertEqual(self.requeue(75, 76, 0, 99, expect=0), ["75", "76", "0"])

    def test_it_does_what_the_trainer_says_of_each_code(self):
        for code, (_, policy, _) in exit_codes().items():
            with self.subTest(code=code):
                again = ["99"] if policy in ("retry", "restart") else []
                self.assertEqual(self.requeue(code, 99, expect=99 if again else code), [str(code), *again])

    def test_codes_that_the_trainer_does_not_list_are_final(self):
        for code in (1, 5, 7, 130, 137, 143):
            self.assertEqual(self.requeue(code, 0, expect=code), [str(code)])

    def test_it_gives_up(self):
        self.assertEqual(self.requeue(76, 80, 76, 0, expect=76), ["76", "80", "76"])
        self.assertEqual(self.requeue(76, 75, 80, 0, expect=0), ["76", "75", "80", "0"])  # 75 is no failure

    def test_it_asks_the_trainer_of_the_command_else_the_one_beside_it(self):
        self.tool("run", "#!/bin/bash\nexit 5\n")
        for folder, name in (("bin", "train_gpt"), ("train_gpt/build", "train_gpt_cpu")):
            script = self.repository / "scripts/requeue.sh"
            command = [script, self.home / "bin/run", *([self.home / folder / name] if folder == "bin" else [])]
            said = subprocess.run(command, capture_output=True, text=True, timeout=60)
            self.assertEqual((said.returncode, "--exit-codes" in said.stderr), (64, True), said.stderr)
            self.tool(name, "#!/bin/bash\n[ \"$*\" = --exit-codes ] && echo 5 five restart what it means\n", folder)
            process = start(command)
            self.addCleanup(process.kill)
            self.assertIn("requeue: ended with 5; again in 1 s", process.stderr.readline())
            process.terminate()
            process.wait(timeout=60)
            (self.home / folder / name).unlink()

    def send(self, script, folder, *signals, tool="run"):
        """Starts a run that ends with 75 once it has heard so many signals, and sends them to the script's group."""
        heard = folder / "heard"
        self.tool(tool, f"""#!/bin/bash
            for name in TERM INT USR1; do trap "echo $name >> heard" $name; done
            touch heard
            while [ "$(wc -l < heard)" -lt {len(signals)} ]; do sleep 0.05; done
            exit 75
        """, folder)
        process = start([script, folder / tool, TRAINER], cwd=folder)
        self.addCleanup(process.kill)
        wait_until(heard.exists, "the run has not begun")
        for count, number in enumerate(signals):
            wait_until(lambda count=count: len(heard.read_text().split()) >= count, f"{count} signals were not heard")
            os.killpg(process.pid, number)
        return process

    def test_ctrl_c_reaches_the_run_once(self):
        for tool, first in (("run", "INT"), ("mpirun", "USR1")):
            folder = self.home / f"in_{tool}"
            process = self.send(REQUEUE, folder, signal.SIGINT, signal.SIGINT, tool=tool)
            said = process.communicate(timeout=60)[1]
            self.assertEqual((process.returncode, (folder / "heard").read_text().split()), (75, [first, "INT"]), said)

    def test_a_signal_at_any_moment_reaches_the_run_once_and_ends_the_loop(self):
        """A second passes at one place of the script or another, while the run begins and gets the signal."""
        lines = REQUEUE.read_text().splitlines(keepends=True)
        begin = lines.index("while true; do\n") + 1
        processes = []
        for place in range(begin, len(lines)):
            script = self.home / f"requeue_{place}.sh"
            script.write_text("".join(lines[:place] + ["sleep 1\n"] + lines[place:]))
            script.chmod(0o755)
            if subprocess.run(["bash", "-n", script], capture_output=True, check=False).returncode == 0:
                folder = self.home / str(place)
                processes.append((place, folder, self.send(script, folder, signal.SIGTERM)))
        self.assertGreater(len(processes), 15)
        for place, folder, process in processes:
            said = process.communicate(timeout=60)[1]
            with self.subTest(before=lines[place]):
                self.assertEqual((process.returncode, (folder / "heard").read_text()), (75, "TERM\n"), said)

    def test_a_signal_between_two_runs_ends_the_loop(self):
        self.tool("run", "#!/bin/bash\necho >> ended\nexit 76\n")
        process = start([REQUEUE, self.home / "bin/run", TRAINER], cwd=self.repository)
        self.addCleanup(process.kill)
        wait_until((self.repository / "ended").exists, "the run has not ended")
        self.assertIn("again in 1 s", process.stderr.readline())
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(timeout=60), 76)
        self.assertEqual((self.repository / "ended").read_text(), "\n")


class Trainers(TrainerTest):
    def check_ctrl_c(self, *command):
        config = self.write_config(train_max_steps=100000, train_total_batch_tokens=120)
        process = start([REQUEUE, *command, TRAINER, config, "--auto"], cwd=self.dir, env=MPI_ENVIRONMENT)
        self.addCleanup(process.kill)
        self.wait_for_steps()
        for number in (signal.SIGHUP, signal.SIGINT):  # a closed terminal ends nothing
            os.killpg(process.pid, number)
        said = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, 75, said)
        self.assertTrue(self.step_dir(len(self.records(kind="train"))).exists())

    def test_ctrl_c_saves(self):
        self.check_ctrl_c()

    @unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
    def test_ctrl_c_saves_under_mpirun(self):
        self.check_ctrl_c("mpirun", "-np", "2")


if __name__ == "__main__":
    unittest.main()
