// Starts the ranks of this machine without an external launcher: `train_gpt --nproc 8 CONFIG.json`. To use several
// machines, start one launcher on each: `train_gpt --nproc 8 --node 1/2 --master host:29500 CONFIG.json`.
#pragma once

#include <string>
#include <vector>

// This machine's place among the machines of the run; each has the same number of ranks.
struct LocalNode {
    int node = 0, nodes = 1;
    std::string master_host;  // with several nodes: the host of node 0, where rank 0 listens at master_port
    int master_port = 0;
};

// In seconds. After a rank fails, the control channel ends the others within `grace_s`. Ranks that remain receive
// SIGTERM and, after another `term_s`, SIGKILL.
struct LocalLauncherSettings {
    double grace_s = 10;
    double term_s = 10;
    LocalNode node = {};
};

// Starts `count` (>= 1) copies of this program with the arguments `command` (command[0] is the program's name) and
// waits for them. Each finds its rank by find_rank_environment(). On one node, rank 0 inherits a socket that listens at
// 127.0.0.1, and all ranks receive a fresh token. On several nodes, rank 0 itself listens at master_port, and the ranks
// use the token in TRAIN_GPT_TOKEN, if this process's environment has it. SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 are
// forwarded, each once. Every rank has its own process group, so a terminal's Ctrl-C does not reach it twice. If this
// process is killed, the ranks are killed. Their standard input is empty.
//
// Returns the most informative exit code: the code of the first rank that failed by itself (128 + signal, if a signal
// killed it), else Exit::peer_lost if any rank returned it, else Exit::again if any rank returned it, else 0. Prints a
// line on stderr for each rank that a signal from elsewhere killed. Fails with Exit::os if a process cannot be started.
//
// Must be called before other threads run. Afterwards the process should exit: SIGCHLD, SIGHUP, SIGPIPE and the
// forwarded signals stay blocked.
int launch_local_ranks(int count, const std::vector<std::string>& command, const LocalLauncherSettings& settings = {});
