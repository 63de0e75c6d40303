// The public header of runtime/cluster: the ranks of a run, how they are started and how they watch each other. Other
// folders include no other header of this one.
#pragma once

#include "kernels/comm.h"
#include "runtime/cluster/control_channel.h"
#include "runtime/cluster/local_launcher.h"
#include "runtime/cluster/supervisor.h"
#include "runtime/config/config.h"

// The timeouts of a configuration.
ControlSettings control_settings(const Config& config);

// The connections of this rank to the others: the communicator that carries tensors and the control channel.
class Ranks {
public:
    // Connects the ranks. Fails with Exit::config unless all of them run the same revision of the program with the same
    // configuration; for the other errors see open_group() and open_comm().
    Ranks(const RankEnvironment& environment, const Config& config, const std::string& revision);

    const Comm& comm() const { return comm_; }
    ControlChannel& control() { return *control_; }
    int local_rank() const { return local_rank_; }  // among the ranks of this machine

    // Returns the result of `body` after all ranks have finished theirs. If it throws, reports the error to the other
    // ranks, which end with Exit::peer_lost, and rethrows.
    Exit run(const std::function<Exit()>& body);

private:
    void report_errors_of(const std::function<void()>& action);

    const int local_rank_;
    const std::shared_ptr<RankActivity> activity_ = std::make_shared<RankActivity>();
    const RankReporter reporter_;
    Comm comm_;
    std::unique_ptr<ControlChannel> control_;
};

// Runs `part` on rank 0 only. If it throws there, it fails on all ranks with the same exit code, and only rank 0 has
// the original message; `action` completes the others': "could not open run.dir". A collective.
void run_on_rank_0(const Comm& comm, const char* action, const std::function<void()>& part);

// Whether any rank has received a signal to stop. A collective.
bool is_stop_requested(const Comm& comm);

// Fails with Exit::usage for several nodes if these ranks need another launcher than ours.
void check_node(const LocalNode& node);

// `train_gpt --nproc COUNT ...`: starts COUNT ranks of this program on this machine with the arguments (the first is
// the program's name) by the launcher that comm_launcher() names, which this process owns as run_child() says, else by
// launch_local_ranks(), and returns their exit code; Exit::io if they print a result that cannot be written. Fails with
// Exit::usage for several nodes with another launcher than ours, and with Exit::os if the launcher does not start them.
Exit launch_ranks(int count, const LocalNode& node, const std::vector<std::string>& arguments, bool prints_result);
