// `train_gpt --supervise`: starts a run, monitors it, and restarts it after failures that a restart may fix.
#pragma once

#include "kernels/base/check.h"
#include "runtime/cluster/child_program.h"
#include "runtime/cluster/rank_reports.h"

// How one start of the run ended.
struct RunEnd {
    int code = 0;
    int stop_signal = 0;         // the stop signal that the supervisor received, or 0
    bool has_committed = false;  // a new checkpoint
};

struct Restart {
    bool is_due = false;
    double after_s = 0;
    std::string sentence;  // the reason for or against a restart; empty: print no message
};

// Decides whether to restart the run. Counts the restarts in a row that commit no checkpoint, and gives up after the
// third.
class RestartPolicy {
public:
    Restart decide(const RunEnd& end);

private:
    int in_vain_ = 0;
};

// Returns the row of kExitCodes for an exit code, or null.
const ExitCode* row_of(int code);

// Returns whether a restart may fix a failure with this exit code. kExitCodes gives the policy of each code. Of the
// codes 128 + N (killed by signal N), all may be restarted except those of a user's SIGINT and SIGTERM.
bool may_restart(int code);

// Starts the run, restarts it as RestartPolicy decides, with a sentence on stderr each time, and returns the last exit
// code. `next_command` returns the command of each start, `committed_steps` the steps of the committed checkpoints. A
// signal to this process stops the run as described at run_child() and ends the supervision. A signal between two
// starts returns Exit::again.
int supervise(const std::function<std::vector<std::string>()>& next_command,
              const std::function<std::vector<int64_t>()>& committed_steps, RankReports& reports, StopSignals& signals);
