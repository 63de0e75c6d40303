"""The trainer on a terminal: the view, the status line, progress within a step, and Ctrl-C."""
import os
import re
import signal

from screen import OnTerminal
from trainer import ENVIRONMENT, TRAINER, TrainerTest

BRAILLE = re.compile("[\u2801-\u28ff]")
OFTEN = {"train_max_steps": 200, "eval_every_steps": 50, "eval_batches": 1, "sample_every_steps": 100,
         "sample_tokens": 5, "sample_prompt": "The "}
# A step with so many micro-steps that it outlasts every test.
ENDLESS = {"train_total_batch_tokens": 60 * 1_000_000, "schedule_warmup_steps": 0}


class Terminal(TrainerTest):
    def start(self, columns=90, rows=24, locale="C.UTF-8", **changes):
        environment = {**ENVIRONMENT, "LC_ALL": locale, "OMP_NUM_THREADS": "2"}
        terminal = OnTerminal([TRAINER, self.write_config(**changes)], self.dir, environment, columns, rows)
        self.addCleanup(terminal.end)
        return terminal

    def said_once(self, text):
        """Requires the separate lines in order, with none lost or repeated."""
        for step in (50, 100, 150, 200):
            self.assertEqual(len(re.findall(rf"^step {step} \| validation loss \d", text, re.M)), 1, text)
        self.assertEqual(re.findall(r"^step (\d+) \| sample\nThe ", text, re.M), ["100", "200"])

    def test_the_view(self):
        terminal = self.start(**OFTEN)
        self.assertEqual(terminal.finish(), 0)
        text = terminal.screen.text()
        self.said_once(text)
        block = text[text.rindex("checkpoint"):]
        for part in ("step 200/200 (100.0 %)", "0 s left", "epoch ", "validation ", "lr ", "norm ", "tokens/s",
                     "ms per step", "forward, backward", "optimizer", "communication 0 %", "data"):
            self.assertEqual(block.count(part), 1, f"{part} in\n{text}")
        loss = self.losses()[-1]
        self.assertEqual(block.count(f"loss {loss:.4f}"), 1, block)
        self.assertRegex(block, BRAILLE)
        self.assertEqual(text.count("200/200"), 1)
        self.assertLess(max(map(len, block.splitlines()[1:])), 90)
        self.assertTrue(terminal.raw.endswith("\r\n"))

    def test_the_view_in_ascii(self):
        terminal = self.start(locale="C", **OFTEN)
        self.assertEqual(terminal.finish(), 0)
        self.assertTrue(terminal.raw.isascii())
        self.assertRegex(terminal.screen.text(), r"(?m)^ +[\d.]+ \|[* ]*\*")

    def test_a_small_terminal_has_one_line(self):
        terminal = self.start(40, 10, **OFTEN)
        self.assertEqual(terminal.finish(), 0)
        text = terminal.screen.text()
        self.said_once(text)
        self.assertRegex(text.splitlines()[-1], r"^step 200/200 \| loss \d")
        self.assertEqual(len(re.findall(r"^step \d+/200", text, re.M)), 1)

    def test_plain_lines_on_a_terminal(self):
        terminal = self.start(log_terminal="plain", log_every_steps=50, **OFTEN)
        self.assertEqual(terminal.finish(), 0)
        self.assertNotIn("\x1b", terminal.raw)
        self.assertEqual(re.findall(r"^step (\d+)/200", terminal.screen.text(), re.M), ["1", "50", "100", "150", "200"])

    def test_resizing_and_suspending_leave_whole_blocks(self):
        terminal = self.start(**dict(OFTEN, train_max_steps=1_000_000, checkpoint_every_steps=0, eval_every_steps=0,
                                     sample_every_steps=0))
        terminal.wait_for(r"step \d+/1000000 \(")
        for columns, rows in ((60, 20), (120, 40), (30, 10)):
            terminal.resize(columns, rows)
            before = len(terminal.raw)
            while not re.search(r"step \d+/1000000", terminal.raw[before + 4000:]):
                terminal.read(1)
            terminal.screen.widest = 0
            terminal.wait_for(r"step \d+/1000000")
            for _ in range(20):
                terminal.read(1)
            self.assertLess(terminal.screen.widest, columns)
        terminal.resize(90, 24)
        terminal.wait_for(r"step \d+/1000000 \(.*\n.*\n.*\n.*\Z")
        os.kill(terminal.pid, signal.SIGSTOP)
        while terminal.screen.text() != (terminal.read(0.3), terminal.screen.text())[1]:
            pass
        terminal.screen.feed("\r\n[1]+  Stopped\r\n$ fg\r\n")  # as a shell prints
        before = terminal.screen.text()
        os.kill(terminal.pid, signal.SIGCONT)
        for _ in range(20):
            terminal.read(1)
        self.assertTrue(terminal.screen.text().startswith(before[:before.index("$ fg") + 4]), terminal.screen.text())
        terminal.type("\x03")
        self.assertEqual(terminal.finish(), 75)
        self.assertRegex(terminal.screen.text(), r"stopped by signal 2; --resume continues")

    def test_ctrl_c_answers_within_a_long_step(self):
        for size in ((90, 24), (60, 8)):
            with self.subTest(size=size):
                terminal = self.start(*size, run_dir=f"run_{size[0]}", **ENDLESS)
                self.assertLess(terminal.wait_for(r"micro-step \d+/1000000 \| \d+ s"), 30)
                terminal.type("\x03")
                self.assertLess(terminal.wait_for("stopping after this step; press again to stop now"), 2)
                terminal.wait_for(r"stopping after this step \| step 1/20 \| micro-step")
                terminal.type("\x03")
                self.assertEqual(terminal.finish(), 128 + signal.SIGINT)
