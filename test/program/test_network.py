"""Two "nodes": network namespaces joined by a virtual cable, with one rank each, which communicate over TCP."""
import os
import shutil
import signal
import subprocess
import time
import unittest

from test_ranks import EIGHT, MPI_ENVIRONMENT, is_gone
from trainer import TRAINER, TrainerTest, trainers_in

# Replaces ssh for mpirun: HOST COMMAND...
AGENT = """#!/bin/sh
host=$1; shift
exec ip netns exec "PREFIX_${host##*.}" sh -c "$*"
"""


def ip(*args):
    subprocess.run(["ip", *map(str, args)], check=True, capture_output=True)


def namespaces_are_allowed():
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("mpirun"):
        return False
    name = f"train_gpt_try_{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return False
    ip("netns", "del", name)
    return True


@unittest.skipUnless(namespaces_are_allowed(), "network namespaces need root, iproute2 and mpirun")
class TwoNodes(TrainerTest):
    def setUp(self):
        super().setUp()
        self.prefix = f"tg{os.getpid()}"
        names = [f"{self.prefix}_{node}" for node in (1, 2)]
        for name in names:
            ip("netns", "add", name)
            self.addCleanup(ip, "netns", "del", name)
        cables = [f"{self.prefix}v{node}" for node in (1, 2)]
        ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for node, (name, cable) in enumerate(zip(names, cables), 1):
            ip("-n", name, "addr", "add", f"10.77.0.{node}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        self.cable = "-n", names[1], "link", "set", cables[1]
        (self.dir / "agent").write_text(AGENT.replace("PREFIX", self.prefix))
        (self.dir / "agent").chmod(0o755)
        network = ["--mca", "plm_rsh_agent", str(self.dir / "agent"), "--mca", "btl", "tcp,self"]
        for layer in ("btl_tcp_if_include", "oob_tcp_if_include"):
            network += ["--mca", layer, "10.77.0.0/24"]
        self.command = ["ip", "netns", "exec", names[0], "mpirun", *network, "--host", "10.77.0.1:1,10.77.0.2:1",
                        "-np", "2", TRAINER]

    def start(self, **changes):
        config = self.write_config(**changes)
        process = subprocess.Popen([*self.command, config], cwd=self.dir, env=MPI_ENVIRONMENT, text=True,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.addCleanup(process.kill)
        return process

    def test_two_nodes_train_as_one_rank(self):
        changes = dict(EIGHT, parallel_deterministic_reduce=True)
        self.run_trainer(self.write_config(run_dir="one", **changes))
        for stage in (0, 3):
            with self.subTest(stage=stage):
                process = self.start(run_dir=f"two_{stage}", parallel_zero_stage=stage, **changes)
                said = process.communicate(timeout=90)[1]
                self.assertEqual(process.returncode, 0, said)
                self.assertEqual(self.records(f"two_{stage}"), self.records("one"))
                self.assertEqual(self.logical_state(20, f"two_{stage}"), self.logical_state(20, "one"))

    def test_a_cut_cable_ends_both_nodes_in_time(self):
        process = self.start(train_max_steps=100000, train_total_batch_tokens=120, parallel_silence_s=3)
        self.wait_for_steps()
        ranks = trainers_in(self.dir)
        self.assertEqual(len(ranks), 2)
        ip(*self.cable, "down")
        deadline = time.monotonic() + 20
        while not all(map(is_gone, ranks)):
            self.assertLess(time.monotonic(), deadline, "a rank is still running")
            time.sleep(0.05)
        ip(*self.cable, "up")
        process.send_signal(signal.SIGTERM)  # mpirun waits forever for the other node's daemon
        said = process.communicate(timeout=60)[1]
        self.assertIn("rank 1", said)
        self.assertIn("no heartbeat", said)
