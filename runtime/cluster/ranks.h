// The ranks of a run, from their meeting to their parting.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/comm.h"
#include "runtime/cluster/control_channel.h"
#include "runtime/cluster/local_ranks.h"
#include "runtime/config/config.h"

class Ranks {
public:
    // Meets the others, and makes sure that all run the same program with the same configuration.
    Ranks(const Place& place, const Config& config, const std::string& program);

    const Comm& comm() const { return comm_; }
    ControlChannel& control() { return *control_; }

    // What body returns, after all ranks have come to its end. If it throws, the others are told and end with
    // Exit::peer_lost, and the exception goes on.
    Exit run(const std::function<Exit()>& body);

private:
    void or_tell_others(const std::function<void()>& action);

    Comm comm_;
    std::unique_ptr<ControlChannel> control_;
};

// `train_gpt --nproc COUNT ...`: starts that many ranks of this program on this machine with the arguments (the first
// is the program's name), by the launcher that comm_launcher() names or by our own, and returns how they ended. Several
// nodes fail with Exit::usage where the launcher is not ours.
Exit start_ranks(int count, const LocalNode& node, const std::vector<std::string>& arguments);
