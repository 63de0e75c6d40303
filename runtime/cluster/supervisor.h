// `train_gpt --supervise`: starts a run, watches it, and starts it again after failures that another start may mend.
#pragma once

#include "runtime/cluster/child_program.h"
#include "runtime/cluster/rank_reports.h"

// How one start of the run has ended.
struct RunEnd {
    int code = 0;
    int stop_signal = 0;         // that the supervisor has received, or 0
    bool has_committed = false;  // a checkpoint that was not there before
};

struct Restart {
    bool is_due = false;
    double after_s = 0;
    std::string sentence;  // why, or why not; empty if nothing has to be said
};

// Decides whether the run is started again. Remembers how many restarts in a row have committed no checkpoint: the
// third such is the last.
class RestartPolicy {
public:
    Restart decide(const RunEnd& end);

private:
    int in_vain_ = 0;
};

// Whether a restart may mend what ended with this exit code: kExitCodes says so, and of 128 + N, death by a signal,
// every N that is not a user's SIGINT or SIGTERM.
bool may_restart(int code);

struct Supervised {
    // The command of the next start.
    std::function<std::vector<std::string>()> next_command;
    // The steps that are committed now.
    std::function<std::vector<int64_t>()> committed_steps;
    RankReports* reports = nullptr;  // null: the ranks are not on this machine, so that only their end is seen
};

// Starts the run and starts it again as RestartPolicy says, each time with a sentence on stderr, and returns the last
// exit code. Signals to this process stop the run as run_child() says, and are the end; between two starts the end is
// Exit::again.
int supervise(const Supervised& run, StopSignals& signals);
