"""The live line in the terminal emulator pyte: it stays one whole line, whatever happens to the screen."""
import re

import pyte
from screen import OnTerminal
from trainer import ENVIRONMENT, TRAINER, TrainerTest

REQUIREMENTS = [["pyte"]]


class Emulated(TrainerTest):
    def test_the_live_line(self):
        changes = {"train_max_steps": 150, "eval_every_steps": 50, "eval_batches": 1, "sample_every_steps": 75,
                   "sample_tokens": 5}
        environment = {**ENVIRONMENT, "TERM": "xterm"}
        for columns, rows in ((90, 24), (50, 13), (140, 50)):
            with self.subTest(size=(columns, rows)):
                config = self.write_config(run_dir=f"run_{columns}", **changes)
                terminal = OnTerminal([TRAINER, config], self.dir, environment, columns, rows)
                self.assertEqual(terminal.finish(), 0)
                screen = pyte.HistoryScreen(columns, rows, history=1000)
                pyte.Stream(screen).feed(terminal.raw)
                above = ["".join(line[column].data for column in range(columns)).rstrip()
                         for line in screen.history.top]
                shown = [line.rstrip() for line in screen.display]
                while shown and not shown[-1]:
                    shown.pop()
                # The emulator of the other tests shows the same lines.
                own = [line.rstrip() for line in terminal.screen.lines]
                while own and not own[-1]:
                    own.pop()
                self.assertEqual(above + shown, own)
                self.assertEqual(len(re.findall(r"step \d+/150", "\n".join(own))), 1)
