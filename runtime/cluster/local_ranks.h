// Several ranks on this machine without a launcher: `train_gpt --nproc 8 CONFIG.json`. One of these on each of several
// machines makes a run of all: `train_gpt --nproc 8 --node 1/2 --master host:29500 CONFIG.json`.
#pragma once

#include <string>
#include <vector>

// This machine among those of the run; each has as many ranks.
struct LocalNode {
    int node = 0, nodes = 1;
    std::string master_host;  // of several: node 0's, where its rank 0 listens at master_port
    int master_port = 0;
};

// Seconds. After one rank has failed, the others notice by the control channel and end themselves; who has not done so
// after `grace_s` is asked to (SIGTERM), and after `term_s` more it is killed.
struct LocalRanksSettings {
    double grace_s = 10;
    double term_s = 10;
    LocalNode place = {};
};

// Starts `count` (>= 1) copies of this program with the arguments `command` (command[0] is the program's name) and
// waits for all of them. Each finds its place by find_place(): rank 0 inherits a socket that listens at 127.0.0.1
// already, and all share a fresh token. On several nodes rank 0 listens at master_port itself, and they share the token
// that TRAIN_GPT_TOKEN holds in this process's environment, if it does. SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 are handed
// on, once for each time that they arrive: the ranks have process groups of their own, so that a terminal's Ctrl-C does
// not reach them twice. When this process is killed, the ranks are. Standard input is empty for them.
//
// Returns the exit code that tells most: the one of the rank that failed first by itself (128 + signal, if a signal
// killed it), then Exit::peer_lost, Exit::again if any was stopped that way, else 0. A sentence on stderr names each
// rank that was killed by a signal that did not come from here. Fails with Exit::os if a process cannot be started.
//
// To be called before any other thread runs. SIGCHLD, SIGHUP, SIGPIPE and the signals above are blocked meanwhile.
int start_local_ranks(int count, const std::vector<std::string>& command, const LocalRanksSettings& settings = {});
