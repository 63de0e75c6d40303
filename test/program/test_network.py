"""Two "nodes": network namespaces joined by a virtual cable, with one or two ranks each, which communicate over TCP."""
import os
import shutil
import signal
import subprocess
import time
import unittest

from test_ranks import EIGHT, MPI_ENVIRONMENT, is_gone
from test_simulated import SIMULATED
from test_simulated_ranks import FOUR, PORT
from test_supervise import ENDLESS
from trainer import ENVIRONMENT, FROM_TERMINAL, TRAINER, TrainerTest, trainers_in, wait_until

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
        self.names, self.network = names, network

    def start(self, *flags, ranks=2, **changes):
        """Starts half of the ranks on each node with mpirun, with --supervise under a supervisor on the first."""
        hosts = ",".join(f"10.77.0.{node}:{ranks // 2}" for node in (1, 2))
        mpirun = ["mpirun", *self.network, "--host", hosts, "-np", str(ranks)]
        config = self.write_config(**changes)
        command = [TRAINER, config, *flags, "--", *mpirun] if flags else [*mpirun, TRAINER, config]
        process = subprocess.Popen(["ip", "netns", "exec", self.names[0], *command], cwd=self.dir, env=MPI_ENVIRONMENT,
                                   text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **FROM_TERMINAL)
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

    def cut(self, ranks, program=TRAINER):
        """Cuts the cable, waits until all ranks have ended and repairs it."""
        pids = trainers_in(self.dir, program)
        self.assertEqual(len(pids), ranks)
        ip(*self.cable, "down")
        wait_until(lambda: all(map(is_gone, pids)), "a rank is still running", 60)
        ip(*self.cable, "up")

    def test_a_cut_cable_ends_both_nodes_in_time(self):
        """The cable carries the messages of data ranks or of stages; the others stay on a node."""
        for ranks, others, changes in ((2, "rank 1", {}),
                                       (4, r"rank [23] \(data 1, tensor [01]\)", dict(parallel_tensor=2)),
                                       (4, r"rank [23] \(data 0, pipeline 1, tensor [01]\)",
                                        dict(parallel_pipeline=2, parallel_tensor=2))):
            with self.subTest(ranks=ranks, **changes):
                shutil.rmtree(self.dir / "run", ignore_errors=True)
                process = self.start(ranks=ranks, train_max_steps=100000, train_total_batch_tokens=120, model_n_head=4,
                                     parallel_silence_s=8, **changes)
                self.wait_for_steps(process)
                self.cut(ranks)
                process.send_signal(signal.SIGTERM)  # mpirun waits forever for the other node's daemon
                self.assertRegex(process.communicate(timeout=60)[1], others + r" on \S+ \(pid \d+\) .*no heartbeat")

    def test_a_grid_continues_after_the_cable_is_repaired(self):
        changes = dict(ENDLESS, train_total_batch_tokens=120, model_n_head=4, checkpoint_every_steps=10,
                       parallel_silence_s=8, parallel_pipeline=2, parallel_tensor=2)
        process = self.start("--supervise", ranks=4, **changes)

        def newest():
            return max((int(path.name[5:]) for path in (self.dir / "run/checkpoints").glob("step_*")), default=0)

        wait_until(newest, "no checkpoint")
        self.cut(4)
        before = newest()
        wait_until(lambda: newest() > before, "the run has not continued")
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
        self.assertEqual(process.returncode, 75, said)
        self.assertEqual(said.count("restarting in 1 s"), 1, said)
        self.assertRegex(said, r"rank [23] \(data 0, pipeline 1, tensor [01]\) on \S+ \(pid \d+\) .*no heartbeat")
        self.assertEqual([subprocess.check_output(["ip", "netns", "pids", name]) for name in self.names], [b"", b""])

    def test_the_exit_codes_of_nodes_without_mpirun(self):
        """Simulated GPUs, whose messages do not need the cable. Each node reports a rank of the other one."""
        config = self.write_config(**dict(FOUR, train_max_steps=100000, train_total_batch_tokens=40, model_n_head=4),
                                   parallel_silence_s=8, parallel_tensor=2)
        nodes = [subprocess.Popen(["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c",
                                   f'hostname node{node} && exec "$@"', "sh", SIMULATED, "--nproc", "2",
                                   "--node", f"{node}/2", "--master", f"10.77.0.1:{PORT}", config],
                                  cwd=self.dir, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                  env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"}) for node, name in enumerate(self.names)]
        for process in nodes:
            self.addCleanup(process.kill)
        self.wait_for_steps(*nodes)
        self.cut(4, SIMULATED)
        for node, process in enumerate(nodes):
            said = process.communicate(timeout=60)[1]
            self.assertIn(process.returncode, (76, 80), said)
            self.assertRegex(said, rf"rank \d \(data {1 - node}, tensor [01]\) on node{1 - node} \(pid \d+\)")
