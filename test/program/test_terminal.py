"""The trainer on a terminal: the live line, progress within a step, and Ctrl-C."""
import os
import re
import signal

from screen import OnTerminal
from trainer import ENVIRONMENT, TRAINER, TrainerTest

OFTEN = {"train_max_steps": 200, "eval_every_steps": 50, "eval_batches": 1, "sample_every_steps": 100,
         "sample_tokens": 5, "sample_prompt": "The "}
# A step with so many micro-steps that it outlasts every test.
ENDLESS = {"train_total_batch_tokens": 60 * 1_000_000, "schedule_warmup_steps": 0}


class Terminal(TrainerTest):
    def start(self, columns=90, **changes):
        environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "2"}
        terminal = OnTerminal([TRAINER, self.write_config(**changes)], self.dir, environment, columns)
        self.addCleanup(terminal.end)
        return terminal

    def said_once(self, text):
        """Requires the separate lines in order, with none lost or repeated."""
        for step in (50, 100, 150, 200):
            self.assertEqual(len(re.findall(rf"^step {step} \| validation loss \d", text, re.M)), 1, text)
        self.assertEqual(re.findall(r"^step (\d+) \| sample\nThe ", text, re.M), ["100", "200"])

    def test_the_live_line(self):
        for columns in (120, 40):
            with self.subTest(columns=columns):
                terminal = self.start(columns, run_dir=f"run_{columns}", **OFTEN)
                self.assertEqual(terminal.finish(), 0)
                self.assertTrue(terminal.raw.isascii())
                text = terminal.screen.text()
                self.said_once(text)
                steps = re.findall(r"^step \d+/200.*", text, re.M)
                self.assertEqual(len(steps), 1, text)
                line = (rf"step 200/200 \| loss {self.losses(f'run_{columns}')[-1]:.4f} \| lr \S+ \| norm \S+ "
                        r"\| [\d,]+ tokens/s \| \d+ ms \| 0 s left")
                self.assertRegex(steps[0], line + "$" if columns == 120 else line[:30])
                # What the run says at its end is below the line.
                self.assertRegex(text[text.index(steps[0]):], r"^.*\ntrained  200 steps, [\s\S]*\nnext: [\s\S]*\n$")
                self.assertTrue(terminal.raw.endswith("\r\n"))

    def test_plain_lines_on_a_terminal(self):
        terminal = self.start(log_terminal="plain", log_every_steps=50, **OFTEN)
        self.assertEqual(terminal.finish(), 0)
        self.assertNotIn("\x1b", terminal.raw)
        self.assertEqual(re.findall(r"^step (\d+)/200", terminal.screen.text(), re.M), ["1", "50", "100", "150", "200"])

    def test_resizing_and_suspending_leave_whole_lines(self):
        terminal = self.start(**dict(OFTEN, train_max_steps=1_000_000, checkpoint_every_steps=0, eval_every_steps=0,
                                     sample_every_steps=0))
        terminal.wait_for(r"step \d+/1000000")  # the child has set the size of its terminal
        for columns in (60, 120, 30):
            terminal.resize(columns)
            before = len(terminal.raw)
            while not re.search(r"step \d+/1000000", terminal.raw[before + 20_000:]):
                terminal.read(1)
            terminal.screen.widest = 0
            terminal.wait_for(r"step \d+/1000000")
            for _ in range(20):
                terminal.read(1)
            self.assertLess(terminal.screen.widest, columns)
        terminal.resize(90)
        os.kill(terminal.pid, signal.SIGSTOP)
        while terminal.screen.text() != (terminal.read(0.3), terminal.screen.text())[1]:
            pass
        terminal.screen.feed("\r\n[1]+  Stopped\r\n$ fg\r\n")  # as a shell prints
        before = terminal.screen.text()
        os.kill(terminal.pid, signal.SIGCONT)
        for _ in range(20):
            terminal.read(1)
        self.assertTrue(terminal.screen.text().startswith(before), terminal.screen.text())
        self.assertRegex(terminal.screen.text()[len(before):], r"^step \d+/1000000 [^\n]*$")
        terminal.type("\x03")
        self.assertEqual(terminal.finish(), 75)
        self.assertRegex(terminal.screen.text(), r"stopped by signal 2; --resume continues")

    def test_ctrl_c_answers_within_a_long_step(self):
        terminal = self.start(**ENDLESS)
        self.assertLess(terminal.wait_for(r"micro-step \d+/1000000 \| \d+ s"), 30)
        terminal.type("\x03")
        self.assertLess(terminal.wait_for("stopping after this step; press again to stop now"), 2)
        terminal.wait_for(r"stopping after this step \| step 1/20 \| micro-step")
        terminal.type("\x03")
        self.assertEqual(terminal.finish(), 128 + signal.SIGINT)
