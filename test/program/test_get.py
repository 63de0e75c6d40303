"""data/get.sh with a local server that implements Hugging Face's API and that can interrupt transfers, send wrong
content or be down.

Repositories, paths and headers have the names used on huggingface.co and raw.githubusercontent.com. The listing has the
format of https://huggingface.co/docs/huggingface.js/hub/interfaces/ListFileEntry.
"""
import hashlib
import http.server
import json
import os
import pty
import random
import re
import shutil
import signal
import socketserver
import subprocess
import tempfile
import threading
import time
import unittest
from pathlib import Path

from trainer import FROM_TERMINAL, ROOT, TRAINER, wait_until

SCRIPT = ROOT / "data/get.sh"
SHARDS = ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"]


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def noise(size, seed):
    return random.Random(seed).randbytes(size)


class Server(socketserver.ThreadingTCPServer):
    """Serves `repositories`: name -> {path: content}.

    `faults`: end of a path -> what happens to its next requests: a tuple of status and headers, bytes instead of the
    file, "break off", "stall", "no range", or None. `published` overrides the listing's entry of a file. `seen`: the
    names of requested files, each with the first byte of its range.
    """
    daemon_threads = True

    def __init__(self, repositories):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories, self.faults, self.published, self.seen = repositories, {}, {}, []
        self.page = 1000  # files on one page of a listing
        self.go_on = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def handle_error(self, request, address):
        pass  # the client was killed

    def close(self):
        self.go_on.set()
        self.shutdown()
        self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, content=b"", length=None, **headers):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)
        if length not in (None, len(content)):
            self.close_connection = True

    def do_GET(self):
        path, _, query = self.path.partition("?")
        begin = int(re.match(r"bytes=(\d+)-", self.headers.get("Range", "bytes=0-"))[1])
        self.server.seen.append((path.rsplit("/", 1)[-1], begin))
        faults = next((each for end, each in self.server.faults.items() if path.endswith(end) and each), [None])
        resolve = re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/main/(.*)", path)
        # A file's address only redirects, as on the Hub for large files; faults occur at the redirect's target.
        fault = None if resolve and not isinstance(faults[0], tuple) else faults.pop(0)
        if isinstance(fault, tuple):  # (status, headers...)
            return self.answer(fault[0], b"an explanation", **dict(fault[1:]))
        listing = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/main", path)
        if isinstance(fault, bytes):  # instead of the file
            return self.answer(200, fault, Content_Type="text/html")
        if listing and listing[1] in self.server.repositories:
            return self.list_files(listing[1], query)
        if resolve:
            return self.answer(302, Location=f"/cdn/{resolve[1]}/{resolve[2]}")
        repository, name = re.fullmatch(r"/?(?:cdn/)?([^/]+/[^/]+)/(.*)", path.lstrip("/")).groups()
        content = self.server.repositories.get(repository, {}).get(name)
        if content is None:
            return self.answer(404, b"Entry not found")
        if fault == "no range":
            begin = 0
        end = len(content)
        part = {"Content_Range": f"bytes {begin}-{end - 1}/{end}"} if begin else {}
        if fault in ("break off", "stall"):
            half = content[begin:(begin + end) // 2]
            self.answer(206 if begin else 200, half, length=end - begin, **part)
            if fault == "stall":
                self.wfile.flush()
                self.server.go_on.wait(30)
            return None
        return self.answer(206 if begin else 200, content[begin:], **part)

    do_HEAD = do_GET

    def list_files(self, repository, query):
        entries = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": "data"},
                   {"type": "file", "oid": "1" * 40, "size": 30, "path": "README.md"}]
        for path, content in sorted(self.server.repositories[repository].items()):
            said = {"size": len(content), "oid": sha256(content), **self.server.published.get(path, {})}
            entries.append({"type": "file", "oid": "2" * 40, "size": said["size"], "path": path, "xetHash": "3" * 64,
                            "lfs": {**said, "pointerSize": 134}})
        first = int(dict(pair.split("=") for pair in query.split("&")).get("cursor", 0))
        link = {}
        if len(entries) > first + self.server.page:
            link["Link"] = (f'<{self.server.url}/api/datasets/{repository}/tree/main?recursive=true&cursor='
                            f'{first + self.server.page}>; rel="next"')
        self.answer(200, json.dumps(entries[first:first + self.server.page]).encode(), **link)


class GetTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.dir = Path(temporary.name)
        self.files = {name: noise(200_000, name) for name in SHARDS}
        self.server = Server({"kjj0/fineweb10B-gpt2": self.files})
        self.addCleanup(self.server.close)
        self.out = self.dir / "datasets/fineweb10B"

    def get(self, *arguments, expect=0, endpoint=None, script=SCRIPT, **environment):
        result = subprocess.run(
            [script, *map(str, arguments), "--endpoint", endpoint or self.server.url], cwd=self.dir, text=True,
            capture_output=True, timeout=60, env={**os.environ, "no_proxy": "*", **environment})
        self.assertEqual(result.returncode, expect, result.stdout + result.stderr)
        return result.stdout + result.stderr

    def fault(self, name, *faults):
        self.server.faults["/" + name] = list(faults)

    def asked_for(self):
        """Returns the requests since the last call: files, each with the first byte of its range."""
        seen, self.server.seen[:] = list(dict.fromkeys(self.server.seen)), []
        return seen

    def check(self, names=SHARDS, also=()):
        """Requires exactly these files, with the server's content."""
        self.assertEqual(sorted(path.name for path in self.out.iterdir()), sorted([*names, *also, "lock", ".files"]))
        for name in names:
            self.assertEqual(sha256((self.out / name).read_bytes()), sha256(self.files[name]), name)


class Downloads(GetTest):
    def test_a_data_set(self):
        said = self.get("fineweb10B")
        self.check()
        self.assertIn("600.0 kB in 3 files; 0 already in datasets/fineweb10B, 600.0 kB to download", said)
        self.assertRegex(said, r"\nnext:\n  \S*train_gpt(_cpu)? \S*configs/gpt2_124M.json\n$")
        self.asked_for()
        self.assertIn("3 already in datasets/fineweb10B, 0.0 B to download", self.get("fineweb10B"))
        self.assertEqual(self.asked_for(), [("main", 0)])  # only the listing
        self.assertEqual((self.out / SHARDS[0]).stat().st_mode & 0o777, 0o666 & ~current_umask())

    def test_the_first_shards(self):
        self.get("fineweb10B", "--shards", 1, "--out", "a/b")
        self.out = self.dir / "a/b"
        self.check([SHARDS[0], SHARDS[2]])
        # Validation first; one request per file, which follows the redirect.
        self.assertEqual(self.asked_for(), [("main", 0), (SHARDS[2], 0), (SHARDS[0], 0)])
        said = self.get("fineweb10B", "--out", "a/b")
        self.check()
        self.assertEqual(self.asked_for(), [("main", 0), (SHARDS[1], 0)])
        self.assertIn("--set data.train='a/b/fineweb_train_*.bin' --set data.val='a/b/fineweb_val_*.bin'", said)

    def test_the_paths_of_each_data_set(self):
        """The names are the publishers'; the pattern matches these files only."""
        tinystories = ["train-00000-of-00004-2d5a1467fff1081b", "train-00001-of-00004-5852b56a2bd28fd9",
                       "validation-00000-of-00001-869c898b519ad725"]
        for name, repository, taken, left, following in (
                ("tinystories", "roneneldan/TinyStories", [f"data/{stem}.parquet" for stem in tinystories],
                 ["TinyStories_all_data.tar.gz", "TinyStoriesV2-GPT4-train.txt",
                  "old/data/train-00000-of-00001.parquet"],
                 "prepare datasets/text/tinystories/*.parquet "),
                ("openwebtext", "Skylion007/openwebtext",
                 [f"plain_text/train-000{n:02}-of-00080.parquet" for n in range(80)],
                 ["openwebtext.py", "subsets/urlsf_subset00.tar"], "prepare datasets/text/openwebtext/*.parquet "),
                ("finewebedu10B", "kjj0/finewebedu10B-gpt2",
                 ["finewebedu_train_000099.bin", "finewebedu_val_000000.bin"],
                 [".gitattributes", "finewebedu_train_000001.bin.part"],
                 "--set data.train='datasets/finewebedu10B/finewebedu_train_*.bin' ")):
            with self.subTest(name):
                self.server.repositories = {repository: {path: path.encode() for path in [*taken, *left]}}
                shards = ["--shards", 3] if name == "openwebtext" else []
                self.assertIn(following, self.get(name, *shards))
                out = self.dir / ("datasets" if name.startswith("fineweb") else "datasets/text") / name
                there = {path.name: path.read_text() for path in out.iterdir() if path.name not in ("lock", ".files")}
                expected = taken[:3] if shards else taken
                self.assertEqual(there, {path.rsplit("/", 1)[-1]: path for path in expected})

    def test_a_file_on_github(self):
        """Uses a small file and its checksum instead of the real ones."""
        content = b"First Citizen:\nBefore we proceed any further, hear me speak.\n"
        script, text = self.dir / "get.sh", SCRIPT.read_text()
        for name, owner, revision, path, length in (
                ("tinyshakespeare", "karpathy/char-rnn", "6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e",
                 "data/tinyshakespeare/input.txt", "length=1115394"),
                ("hellaswag", "rowanz/hellaswag", "a29ff8e9a04bba4bd6588223785ce105328adc57",
                 "data/hellaswag_val.jsonl", "length=12246618")):
            with self.subTest(name):
                self.assertEqual(text.count(length), 1)
                checksum = text[text.index(path):].split("sha256=", 1)[1][:64]
                script.write_text(text.replace(length, f"length={len(content)}").replace(checksum, sha256(content)))
                script.chmod(0o755)
                self.server.repositories = {owner: {f"{revision}/{path}": content}}
                self.get(name, script=script)
                [file] = self.dir.glob(f"datasets/**/{path.rsplit('/', 1)[-1]}")
                self.assertEqual(file.read_bytes(), content)
                self.server.repositories = {owner: {f"{revision}/{path}": content[:-1] + b"?"}}
                file.unlink()
                self.assertIn(f"instead of {sha256(content)}", self.get(name, script=script, expect=65))
                self.assertFalse(file.exists())

    def test_a_listing_in_pages(self):
        self.server.page = 2
        self.get("fineweb10B")
        self.check()
        self.assertEqual([name for name, _ in self.server.seen if name == "main"], ["main"] * 3)


class Interruptions(GetTest):
    def test_a_transfer_that_breaks_off(self):
        self.fault(SHARDS[0], "break off", "break off")
        self.assertIn("retrying in 1 s", self.get("fineweb10B", "--shards", 1))
        self.check([SHARDS[0], SHARDS[2]])
        self.assertEqual(self.asked_for()[2:], [(SHARDS[0], 0), (SHARDS[0], 100_000), (SHARDS[0], 150_000)])

    def test_ctrl_c(self):
        command = [SCRIPT, "fineweb10B", "--shards", "1", "--endpoint", self.server.url]
        part = self.out / (SHARDS[0] + ".part")
        for number, kill in ((signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill)):
            self.fault(SHARDS[0], "stall")
            process = subprocess.Popen(command, cwd=self.dir, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                       text=True, env={**os.environ, "no_proxy": "*"}, **FROM_TERMINAL)
            wait_until(lambda: part.exists() and part.stat().st_size > 90_000, "half of the shard did not arrive", 20)
            # Meanwhile another call is refused.
            self.assertIn(f"is in use by another process: pid {process.pid}, host ",
                          self.get("fineweb10B", expect=73))
            kill(process.pid, number)
            said = process.communicate(timeout=20)[0]
            self.assertEqual(process.returncode, 75, said)
            self.assertIn(f"run the same command again:\nget:  {SCRIPT} fineweb10B --shards 1 --endpoint http", said)
            self.check([SHARDS[2]], [part.name])
            self.server.go_on.set()  # the thread of this request ends
            self.server.go_on = threading.Event()
            os.truncate(part, 90_000 if kill is os.kill else 0)
        self.asked_for()
        self.assertIn(f"{SHARDS[0]}, 200.0 kB, from byte 90000", self.get("fineweb10B", "--shards", 1))
        self.check([SHARDS[0], SHARDS[2]])
        self.assertEqual(self.asked_for(), [("main", 0), (SHARDS[0], 90_000)])

    def test_a_server_that_is_busy(self):
        self.fault(SHARDS[0], (500,), (429, ("Retry-After", "0")), (503, ("RateLimit", '"resolvers";r=0;t=0')))
        self.fault("main", (429, ("RateLimit", '"api";r=0;t=0')))
        said = self.get("fineweb10B")
        self.check()
        self.assertEqual(re.findall(r"(\d{3}; retrying in \d) s", said),
                         ["429; retrying in 0", "500; retrying in 1", "429; retrying in 0", "503; retrying in 0"])
        self.fault("main", (429, ("Retry-After", "86400")))
        self.assertIn("the server requests a wait of 86400 s", self.get("fineweb10B"))  # all files are complete

    def test_retries_run_out(self):
        self.fault(SHARDS[0], "break off", "break off", *[(502,)] * 5)  # received bytes reset the count
        said = self.get("fineweb10B", "--tries", 2, expect=74)
        self.assertIn("502; 150000 of 200000 bytes are downloaded. To resume, run again:", said)
        self.check([SHARDS[2]], [SHARDS[0] + ".part"])
        self.fault(SHARDS[0])
        self.get("fineweb10B", "--tries", 2)
        self.check()

    def test_a_server_without_ranges(self):
        self.fault(SHARDS[0], "break off", *["no range"] * 9)
        self.assertIn("cannot resume a transfer", self.get("fineweb10B", "--tries", 3))
        self.check()

    def test_a_proxys_page_does_not_damage_a_partial_download(self):
        self.fault(SHARDS[0], "break off", b"<html>Please log in</html>")
        self.assertIn("sent an HTML page instead of", self.get("fineweb10B", expect=65))
        self.get("fineweb10B")
        self.check()
        self.assertIn((SHARDS[0], 100_000), self.asked_for()[-5:])

    def test_no_server(self):
        self.server.close()
        said = self.get("fineweb10B", expect=74)
        host = self.server.url[len("http://"):]
        for words in (f"get: cannot reach {host}: curl: (7) ", "--endpoint https://MIRROR", "20.7 GB",
                      "fineweb_val_000000.bin and fineweb_train_000001.bin to 000103.bin, 200 MB each",
                      "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/tree/main"):
            self.assertIn(words, said)
        said = self.get("tinyshakespeare", expect=74)
        self.assertIn("/data/tinyshakespeare/input.txt\n", said)

    def test_a_later_call_without_a_network(self):
        self.get("fineweb10B")
        self.server.close()
        self.assertIn("using its file list of 2", self.get("fineweb10B", "--verify"))
        (self.out / SHARDS[1]).unlink()
        self.assertIn("cannot reach", self.get("fineweb10B", expect=74))
        self.check([SHARDS[0], SHARDS[2]])


class WrongContent(GetTest):
    def refuse(self, name, *words):
        """Downloading `name` exits with 65 and these words and sets the file aside; the next call succeeds."""
        said = self.get("fineweb10B", expect=65)
        for word in words:
            self.assertIn(word, said)
        self.assertFalse((self.out / name).exists())
        self.assertTrue((self.out / (name + ".mismatch")).exists())
        self.get("fineweb10B")
        self.check(also=[name + ".mismatch"])

    def test_wrong_bytes(self):
        wrong = noise(200_000, 99)
        self.fault(SHARDS[2], wrong)
        self.refuse(SHARDS[2], f"{SHARDS[2]}.part has the SHA-256 {sha256(wrong)} instead of ",
                    f"instead of {sha256(self.files[SHARDS[2]])}", f"kept as {SHARDS[2]}.mismatch")
        self.assertEqual((self.out / (SHARDS[2] + ".mismatch")).read_bytes(), wrong)

    def test_wrong_sizes(self):
        self.fault(SHARDS[2], self.files[SHARDS[2]] + b"x")
        self.refuse(SHARDS[2], "has 200001 bytes instead of 200000")
        self.fault(SHARDS[2], b"")
        (self.out / SHARDS[2]).unlink()
        self.refuse(SHARDS[2], "has 0 bytes instead of 200000 and is empty")

    def test_other_content_instead_of_the_file(self):
        self.fault(SHARDS[2], b"<!DOCTYPE html><title>Sign in</title>")
        self.refuse(SHARDS[2], "has 37 bytes instead of 200000 and is an HTML page")
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 200000\n"
        self.fault(SHARDS[2], pointer)
        (self.out / SHARDS[2]).unlink()
        self.refuse(SHARDS[2], "is a Git LFS pointer")

    def test_damage_after_the_download(self):
        self.get("fineweb10B")
        short, changed = self.out / SHARDS[0], self.out / SHARDS[1]
        short.write_bytes(self.files[SHARDS[0]][:-1])
        changed.write_bytes(b"?" + self.files[SHARDS[1]][1:])
        said = self.get("fineweb10B")
        self.assertIn(f"{SHARDS[0]} has 199999 bytes instead of 200000", said)
        self.assertEqual(short.read_bytes(), self.files[SHARDS[0]])
        self.assertEqual(changed.read_bytes()[:1], b"?")  # the size is unchanged
        said = self.get("fineweb10B", "--verify")
        self.assertIn(f"{SHARDS[1]} has the SHA-256 ", said)
        self.check(also=[f"{name}.mismatch" for name in SHARDS[:2]])

    def test_invalid_listings(self):
        for fault, code, words in ((b"<html>Please log in</html>", 65, "the response is an HTML page"),
                                   (b'{"error": "no"}', 65, "with a list of files"),
                                   (b"[]", 66, "has no file that matches"), ((404,), 66, "404"),
                                   ((401,), 66, "denies access")):
            with self.subTest(words):
                self.fault("main", fault)
                self.assertIn(words, self.get("fineweb10B", expect=code))
        self.server.published = {SHARDS[1]: {"oid": None}}
        self.assertIn(f"publishes no SHA-256 for {SHARDS[1]}", self.get("fineweb10B", expect=65))
        self.assertFalse((self.out / ".files").exists())

    def test_a_file_that_was_removed(self):
        self.fault(SHARDS[1], (404,))
        self.assertIn(f"resolve/main/{SHARDS[1]} (curl: (22)", self.get("fineweb10B", expect=66))
        self.check([SHARDS[0], SHARDS[2]])


class Limits(GetTest):
    def test_a_disk_that_is_too_small(self):
        self.server.published = {SHARDS[0]: {"size": 10**15}}
        said = self.get("fineweb10B", expect=74)
        self.assertRegex(said, r"has [\d.]+ [kMGT]?B free, but the download needs 1\.0 PB")
        self.check([])
        full = self.get("fineweb10B", "--out", "/dev/full", expect=73)
        self.assertIn("/dev/full", full)

    def test_arguments(self):
        overview = subprocess.run([SCRIPT], capture_output=True, text=True, check=True).stdout
        names = re.findall(r"^(\w+) +(?:[\d.]+ [MG]B)", overview, re.M)
        self.assertEqual(names, "tinyshakespeare tinystories openwebtext fineweb10B finewebedu10B hellaswag".split())
        self.assertEqual(subprocess.run([SCRIPT, "--help"], capture_output=True, text=True).stdout, overview)
        for arguments, words in (
                ("fineweb10b", "unknown data set 'fineweb10b'"), ("fineweb10B hellaswag", "only one data set"),
                ("fineweb10B --shards 0", "0 is not an integer"), ("fineweb10B --tries x", "x is not an integer"),
                ("--verify", "name"), ("fineweb10B --out", "--out requires"),
                ("fineweb10B --shard 1", "unknown option --shard"),
                ("fineweb10B --endpoint /tmp", "https://")):
            with self.subTest(words):
                result = subprocess.run([SCRIPT, *arguments.split()], cwd=self.dir, capture_output=True, text=True)
                self.assertEqual((result.returncode, result.stdout), (64, ""))
                self.assertIn(words, result.stderr)
        self.assertEqual(list(self.dir.iterdir()), [])

    def test_a_command_that_is_missing(self):
        (self.dir / "bin").mkdir()
        for tool in ("bash", "env", "curl", "flock"):
            (self.dir / "bin" / tool).symlink_to(shutil.which(tool))
        said = self.get("fineweb10B", expect=66, PATH=str(self.dir / "bin"))
        self.assertIn("jq is not installed; run scripts/setup.sh data", said)

    def test_the_trainer_names_the_command(self):
        """For each data set without shards in its default folder, from any working directory, and for no other."""
        overview = subprocess.run([SCRIPT], capture_output=True, text=True, check=True).stdout
        for name in [*re.findall(r"^(\w+) +(?:[\d.]+ [MG]B)", overview, re.M), "mine"]:
            for cwd, script in ((ROOT, "data/get.sh"), (self.dir, SCRIPT)):
                result = subprocess.run([TRAINER, "--set", f"data.train=datasets/{name}/no_such_train_*.bin", "--set",
                                         f"run.dir={self.dir}/run", ROOT / "configs/quickstart.json"], cwd=cwd,
                                        capture_output=True, text=True)
                self.assertEqual(result.returncode, 66, result.stderr)
                line = f'data.train: no file matches "datasets/{name}/no_such_train_*.bin"'
                self.assertIn(line, result.stderr)
                self.assertEqual(f"{script} {name}" in result.stderr, name != "mine", result.stderr)

    def test_progress_on_a_terminal(self):
        self.fault(SHARDS[2], "stall")
        pid, terminal = pty.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # background processes may ignore it
            os.chdir(self.dir)
            os.environ["no_proxy"] = "*"
            os.execv(SCRIPT, [SCRIPT, "fineweb10B", "--endpoint", self.server.url])
        seen, deadline = b"", time.monotonic() + 20
        progress = re.compile(rb"\r\x1b\[K    9\d\.\d kB of 200\.0 kB, \d+\.\d k?B/s")
        while not progress.search(seen) and time.monotonic() < deadline:
            seen += os.read(terminal, 4096)
        self.assertRegex(seen, progress)
        os.write(terminal, b"\x03")
        while b"run the same command again" not in seen and time.monotonic() < deadline:
            seen += os.read(terminal, 4096)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 75, seen)
        os.close(terminal)


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask
