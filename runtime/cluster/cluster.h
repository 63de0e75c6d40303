// The public header of runtime/cluster: the ranks of a run, how they are started and how they watch each other. Other
// folders include no other header of this one.
#pragma once

#include <memory>

#include "kernels/comm.h"
#include "runtime/cluster/control_channel.h"
#include "runtime/cluster/local_launcher.h"
#include "runtime/config/config.h"

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
    Comm comm_;
    std::unique_ptr<ControlChannel> control_;
};

// Runs `part` on rank 0 only. If it throws there, it fails on all ranks with the same exit code, and only rank 0 has
// the original message; `action` completes the others': "could not open run.dir". A collective.
void run_on_rank_0(const Comm& comm, const char* action, const std::function<void()>& part);

// `train_gpt --nproc COUNT ...`: starts COUNT ranks of this program on this machine with the arguments (the first is
// the program's name) by the launcher that comm_launcher() names, else by launch_local_ranks(), and returns their exit
// code. Fails with Exit::usage for several nodes with another launcher than ours.
Exit launch_ranks(int count, const LocalNode& node, const std::vector<std::string>& arguments);
