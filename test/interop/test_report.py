"""The page of `train_gpt report` in a real browser: headless Chromium (apt-get install chromium), driven over its
DevTools protocol with a mouse. Every error on the console is a failure.

    REPORT_SCREENSHOTS=folder python3 test/interop test_report      also leaves screenshots there
"""
import base64
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
import urllib.request
from pathlib import Path

import websocket

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "test/program"))
from trainer import ENVIRONMENT, TRAINER, wait_until  # noqa: E402

REQUIREMENTS = [["websocket-client==1.*"]]
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'<script>"
DESKTOP, PHONE = (1320, 900), (390, 844)


class Browser:
    """A page of headless Chromium. Keeps what the console says."""

    def __init__(self, profile):
        if shutil.which("chromium") is None:
            raise FileNotFoundError("chromium is not installed: apt-get install chromium")
        self.process = subprocess.Popen(
            ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
             "--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        port_file = Path(profile, "DevToolsActivePort")
        wait_until(lambda: port_file.exists() and port_file.read_text().count("\n") >= 1, "Chromium did not start")
        port = port_file.read_text().split()[0]
        targets = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json"))
        self.socket = websocket.create_connection(
            next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page"), timeout=60)
        self.number, self.errors, self.requests = 0, [], []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")

    def close(self):
        self.socket.close()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def note(self, event):
        method, said = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(said["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.errors.append(said["args"])
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.errors.append(said["entry"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])

    def call(self, method, **parameters):
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while (answer := json.loads(self.socket.recv())).get("id") != self.number:
            self.note(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def value(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def open(self, path, size=DESKTOP, dark=False, touch=False):
        self.errors, self.requests = [], []
        self.call("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1,
                  mobile=touch)
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme",
                                                           "value": "dark" if dark else "light"}])
        self.call("Page.navigate", url=Path(path).as_uri())
        wait_until(lambda: self.value("document.readyState") == "complete", "the page was not loaded")
        self.settle()

    def settle(self):
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def box(self, selector):
        """The element, scrolled into view: left, top, width, height in the window."""
        return self.value(f"""(() => {{ const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{block: "center", behavior: "instant"}});
            const b = element.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]; }})()""")

    def mouse(self, kind, x, y, **more):
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="none" if kind == "mouseMoved" else "left",
                  **more)

    def drag(self, selector, begin, end):
        """The mouse across an element, from one share of its width to another."""
        left, top, width, height = self.box(selector)
        y = top + height / 2
        self.mouse("mouseMoved", left + begin * width, y)
        self.mouse("mousePressed", left + begin * width, y, clickCount=1)
        for i in range(1, 11):
            self.mouse("mouseMoved", left + (begin + (end - begin) * i / 10) * width, y, buttons=1)
        self.mouse("mouseReleased", left + end * width, y, clickCount=1)
        self.settle()

    def screenshot(self, path, whole=True):
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole,
                            **({"clip": clip} if whole else {}))
        Path(path).write_bytes(base64.b64decode(picture["data"]))

    def visible(self, title="Loss"):
        """[first, last] position on the x axis of a chart."""
        return self.value(f"""(() => {{ const chart = charts.find(({{root}}) =>
            root.parentElement.querySelector("h2").textContent === {json.dumps(title)});
            return [chart.scales.x.min, chart.scales.x.max]; }})()""")


def write_run(folder, steps, level=2.0, seed=1):
    """A run as a program leaves it, with every kind of record."""
    noise, start = random.Random(seed), 1.79e9
    folder.mkdir()
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            loss = level + 5 * math.exp(-step / (0.1 * steps)) + noise.gauss(0, 0.1)
            record = {"kind": "train", "step": step, "time": start + step * 0.1, "loss": loss,
                      "lr": 1e-3 * (1 - step / steps), "grad_norm": abs(noise.gauss(1, 0.1)), "loss_scale": 65536.0,
                      "tokens": step * 512, "step_ms": 90.0, "tokens_per_s": noise.gauss(5000, 200), "mfu": 0.4,
                      "compute_ms": 80.0, "comm_ms": 1.0, "data_ms": 2.0, "optimizer_ms": 7.0, "comm_bytes": 0,
                      "power_w": noise.gauss(200, 5)}
            if step == 7:
                record.update(skipped="h.0.attn.c_attn.weight", loss="nan")
            file.write(json.dumps(record) + "\n")
            if step % (steps // 20) == 0:
                validation = {"kind": "val", "step": step, "loss": loss + 0.1, "bits_per_byte": loss / 2}
                file.write(json.dumps(validation) + "\n")
                quiz = {"kind": "questions", "step": step, "quiz/questions": 50, "quiz/acc": 0.5 + noise.gauss(0, 0.1),
                        "quiz/acc_stderr": 0.07, "quiz/acc_norm": None, "quiz/acc_norm_stderr": None,
                        "quiz/acc_per_token": 0.4, "quiz/acc_per_token_stderr": 0.07}
                file.write(json.dumps(quiz) + "\n")
    with open(folder / "samples.jsonl", "w") as file:
        for step in (steps // 3, steps // 2, steps):
            sample = {"step": step, "time": start, "prompt": HOSTILE, "text": f"{HOSTILE} of {step}"}
            file.write(json.dumps(sample) + "\n")
    config = {"train": {"max_steps": steps * 2}, "optim": {"learning_rate": level}}
    (folder / "config.json").write_text(json.dumps(config))
    began = {"step": 0, "time": start, "revision": "abc", "host": HOSTILE, "device": "a CPU", "ranks": 1, "threads": 2,
             "parameters": 1234567, "flops_per_token": 7e6,
             "memory_bytes": {"weights": 1 << 20, "activations": 3 << 20}}
    (folder / "run.json").write_text(json.dumps({"starts": [began]}))
    return folder


class ReportInChromium(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        cls.addClassCleanup(cls.temporary.cleanup)
        cls.dir = Path(cls.temporary.name)
        cls.browser = Browser(cls.dir / "profile")
        cls.addClassCleanup(cls.browser.close)
        for name, steps, level in (("short", 1000, 2.0), ("longer", 1500, 2.5), (HOSTILE.replace("/", ""), 900, 1.5),
                                   ("long", 30000, 2.0)):
            write_run(cls.dir / name, steps, level, len(name))
        cls.report("one.html", "short")
        cls.report("three.html", "short", "longer", HOSTILE)
        cls.report("long.html", "long")
        cls.pictures = os.environ.get("REPORT_SCREENSHOTS")

    @classmethod
    def report(cls, out, *runs):
        subprocess.run([TRAINER, "report", *runs, "--out", out], cwd=cls.dir, check=True, capture_output=True,
                       env=ENVIRONMENT)

    def open(self, name, **how):
        self.browser.open(self.dir / name, **how)
        self.browser.value("try { sessionStorage.clear(); localStorage.clear(); } catch {}")
        self.browser.open(self.dir / name, **how)

    def check_quiet(self):
        """Nothing on the console, nothing loaded but the page, no markup from files."""
        self.assertEqual(self.browser.errors, [])
        self.assertEqual(set(self.browser.requests), {self.browser.value("location.href")})
        self.assertNotEqual(self.browser.value("document.title"), "taken")
        self.assertEqual(self.browser.value("document.querySelectorAll('img').length"), 0)

    def drawn(self):
        """The share of each visible chart's canvas that is painted."""
        return self.browser.value("""Object.fromEntries(
          [...document.querySelectorAll("figure")].map(figure => {
            const canvas = figure.querySelector("canvas");
            const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            let painted = 0;
            for (let i = 3; i < pixels.length; i += 4) painted += pixels[i] > 0;
            return [figure.getAttribute("aria-label"), painted / pixels.length * 4];
        }))""")

    def test_every_section_in_each_look(self):
        for page, charts in (("one.html", 8), ("three.html", 8), ("long.html", 8)):
            for size, dark, touch in ((DESKTOP, False, False), (DESKTOP, True, False), (PHONE, False, True),
                                      (PHONE, True, True)):
                with self.subTest(page=page, size=size, dark=dark):
                    self.open(page, size=size, dark=dark, touch=touch)
                    self.check_quiet()
                    drawn = self.drawn()
                    self.assertEqual(len(drawn), charts, drawn)
                    self.assertGreater(min(drawn.values()), 0.005, drawn)
                    self.assertIn("questions: quiz/acc", drawn)
                    paper = self.browser.value("getComputedStyle(document.body).backgroundColor")
                    self.assertEqual(paper, "rgb(13, 17, 23)" if dark else "rgb(246, 248, 250)")
                    # No sideways scrolling of the page, at any width.
                    self.assertLessEqual(self.browser.value("document.documentElement.scrollWidth"), size[0])
                    empty = self.browser.value("[...document.querySelectorAll('main > section')].filter("
                                               "section => !section.firstChild).map(section => section.id)")
                    self.assertLessEqual(set(empty), {"notes"})
                    if page == "long.html":  # whose last group has its point before the last step
                        self.assertAlmostEqual(self.browser.visible()[1], 30000, delta=15)
                    if self.pictures:
                        look = f"{page[:-5]}_{size[0]}_{'dark' if dark else 'light'}.png"
                        self.browser.screenshot(Path(self.pictures, look))

    def test_a_drag_zooms_all_charts_and_a_double_click_resets(self):
        browser = self.browser
        self.open("one.html")
        self.assertEqual(browser.visible(), [1, 1000])
        browser.drag("#charts figure:first-child .u-over", 0.25, 0.5)
        for chart in ("Loss", "Gradient norm", "Learning rate"):
            first, last = browser.visible(chart)
            self.assertAlmostEqual(first, 250, delta=8, msg=chart)
            self.assertAlmostEqual(last, 500, delta=8, msg=chart)
        browser.drag("[aria-label='Gradient norm'] .u-over", 0.5, 1)  # inside what is visible
        self.assertAlmostEqual(browser.visible("Loss")[0], 375, delta=10)
        left, top, width, height = browser.box("#charts .u-over")
        for count in (1, 2):
            browser.mouse("mousePressed", left + width / 2, top + height / 2, clickCount=count)
            browser.mouse("mouseReleased", left + width / 2, top + height / 2, clickCount=count)
        browser.settle()
        self.assertEqual(browser.visible(), [1, 1000])
        self.assertEqual(browser.visible("Learning rate"), [1, 1000])
        self.check_quiet()

    def test_the_legend_follows_the_mouse(self):
        self.open("one.html")
        records = [json.loads(line) for line in (self.dir / "short/metrics.jsonl").read_text().splitlines()]
        rates = {record["step"]: record["lr"] for record in records if record["kind"] == "train"}
        left, top, width, height = self.browser.box("[aria-label='Learning rate'] .u-over")
        self.browser.mouse("mouseMoved", left + width * 0.3, top + height / 2)
        self.browser.settle()
        step, rate = self.browser.value("[...document.querySelectorAll(\"[aria-label='Learning rate'] .u-value\")].map("
                                        "cell => Number(cell.textContent))")
        self.assertAlmostEqual(step, 300, delta=8)
        self.assertAlmostEqual(rate, rates[step], delta=1e-7)

    def test_axes_scale_and_smoothing(self):
        browser = self.browser
        self.open("one.html")
        for axis, last in (("tokens", 512000), ("hours", 0.025), ("step", 1000)):
            browser.value(f"(() => {{ const axis = document.querySelector('#x-axis'); axis.value = '{axis}';"
                          "axis.dispatchEvent(new Event('change', {bubbles: true})); })()")
            browser.settle()
            for chart in ("Loss", "Validation"):
                self.assertAlmostEqual(browser.visible(chart)[1], last, delta=last * 1e-3)
        for control in ("log", "smooth"):
            browser.settle()
            before = browser.value("document.querySelector('#charts canvas').toDataURL()")
            browser.value(f"document.querySelector('#{control}').click()")
            browser.settle()
            after = browser.value("document.querySelector('#charts canvas').toDataURL()")
            self.assertNotEqual(after, before, control)
        self.check_quiet()

    def test_the_legend_hides_a_run_in_all_charts(self):
        for page, name in (("three.html", "longer"), ("long.html", "long")):  # long has bands
            self.open(page)
            shown = "charts.map(chart => chart.series.filter(line => line.show).length)"
            before = self.browser.value(shown)
            self.browser.value("[...document.querySelectorAll('#charts figure:first-child .u-label')].find(label => "
                               f"label.textContent === '{name}').click()")
            self.browser.settle()
            after = self.browser.value(shown)
            self.assertTrue(all(b > a for a, b in zip(after, before)), (before, after))
            if page == "long.html":  # the validation loss is left
                self.assertEqual(after[0], 2)
                self.assertEqual(set(after[1:]), {1})
            self.browser.value("document.querySelector('#log').click()")  # draws again
            self.assertEqual(self.browser.value(shown), after)
            self.check_quiet()

    def test_rollbacks_and_skipped_updates(self):
        folder = write_run(self.dir / "rolled", 400)
        self.report("plain.html", "rolled")
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"kind": "rollback", "step": 201, "from_step": 250, "reason": "spike"}) + "\n")
        self.report("rolled.html", "rolled")
        pictures = []
        for page in ("plain.html", "rolled.html"):
            self.open(page)
            pictures.append(self.browser.value("document.querySelector('#charts canvas').toDataURL()"))
            facts = self.browser.value("document.querySelector('#environment').innerText")
            self.assertIn("1: at step 7 (h.0.attn.c_attn.weight)", facts)
        self.assertIn("from step 250 to 200", facts)
        self.assertNotEqual(*pictures)
        self.check_quiet()

    def test_samples_and_configuration(self):
        self.open("one.html")
        texts = self.browser.value("[...document.querySelectorAll('#samples pre')].map(box => box.textContent)")
        self.assertEqual(texts, [f"{HOSTILE} of {step}" for step in (333, 500, 1000)])
        rows = self.browser.value("[...document.querySelectorAll('#configuration tbody tr')].map(row => "
                                  "[...row.children].map(cell => cell.textContent))")
        self.assertEqual(rows, [["train.max_steps", "19073", "2000"], ["optim.learning_rate", "0.0006", "2"]])
        self.open("three.html")
        self.assertEqual(self.browser.value("document.querySelectorAll('#configuration tbody tr.differs').length"), 2)

    def test_accessibility_tree(self):
        """Every control and chart has a name, and every table has headers."""
        self.open("three.html")
        unnamed = [node for node in self.browser.call("Accessibility.getFullAXTree")["nodes"]
                   if node.get("role", {}).get("value") in ("checkbox", "combobox", "figure")
                   and not node["ignored"] and not node.get("name", {}).get("value")]
        self.assertEqual(unnamed, [])
        self.assertEqual(self.browser.value("[...document.querySelectorAll('.card table')].filter(table => "
                                            "!table.tHead || !table.querySelector('tbody th[scope=row]')).length"), 0)


if __name__ == "__main__":
    unittest.main()
