// The public header of runtime/cluster: the ranks of a run, how they start and how they monitor each other. Other
// folders include only this header.
#pragma once

#include <exception>
#include <optional>

#include "kernels/base/check.h"
#include "kernels/comm.h"                      // IWYU pragma: export
#include "runtime/cluster/control_channel.h"   // IWYU pragma: export
#include "runtime/cluster/kernel_check.h"      // IWYU pragma: export
#include "runtime/cluster/local_launcher.h"    // IWYU pragma: export
#include "runtime/cluster/rank_environment.h"  // IWYU pragma: export
#include "runtime/cluster/stragglers.h"        // IWYU pragma: export
#include "runtime/cluster/supervisor.h"        // IWYU pragma: export
#include "runtime/config/config.h"             // IWYU pragma: export

// Returns the timeouts that a configuration sets.
ControlSettings control_settings(const Config& config);

// The connections of this rank to the others: the communicator that carries tensors and the control channel.
class Ranks {
public:
    // Connects the ranks. Fails with Exit::config unless all of them run the same revision of the program with the same
    // configuration. See open_group() and open_comm() for the other errors.
    Ranks(const RankEnvironment& environment, const Config& config, const std::string& revision);

    const Comm& comm() const { return comm_; }
    const Grid& grid() const { return grid_; }
    const GridComm& grid_comm() const { return grid_comm_; }
    ControlChannel& control() { return *control_; }
    int local_rank() const { return local_rank_; }
    // The kernels that all ranks use, after their check (device.arch_kernels). The first call is a collective, and must
    // precede the use of the GPU.
    const KernelChoice& kernels();

    // Runs `body` and returns its result once all ranks have finished theirs. If it throws, reports the error to the
    // other ranks, which end with Exit::peer_lost, and rethrows it.
    Exit run(const std::function<Exit()>& body);

private:
    void report_errors_of(const std::function<void()>& action);

    const std::shared_ptr<RankActivity> activity_ = std::make_shared<RankActivity>();
    const std::jthread reports_;
    const int local_rank_;
    KernelCheck kernel_check_;
    std::optional<KernelChoice> kernels_;
    Comm comm_;
    std::unique_ptr<ControlChannel> control_;
    const Grid grid_;
    GridComm grid_comm_ = comm_single();
};

// Runs `part` on rank 0 only. A collective. If `part` throws, this call fails on all ranks with the same exit code:
// rank 0 rethrows the original error, the others report that rank 0 could not `action` ("open run.dir").
void run_on_rank_0(const Comm& comm, const char* action, const std::function<void()>& part);

// An error that all ranks throw together, with the same code, after the same step.
struct SharedError : Error {
    using Error::Error;
};

// Collective. If a rank has an error (null: none), returns on all ranks a SharedError with the error of the first such
// rank; its number precedes the message if there are several ranks. Returns null if no rank has an error.
std::exception_ptr shared_error(ControlChannel& control, const std::exception_ptr& error);

// Returns whether any rank has received a signal to stop. A collective.
bool is_stop_requested(const Comm& comm);

// Fails with Exit::usage if `node` is one of several nodes and comm_launcher() names an external launcher.
void check_node(const LocalNode& node);

// `train_gpt --nproc COUNT ...`: starts COUNT ranks of this program on this machine and returns their exit code.
// `arguments` begins with the program's name. Uses the launcher that comm_launcher() names, which run_child() starts
// and owns, or else launch_local_ranks(). Returns Exit::io if the ranks print a result and it cannot be written. Fails
// with Exit::os if the launcher does not start the ranks. Call check_node() first.
Exit launch_ranks(int count, const LocalNode& node, const std::vector<std::string>& arguments, bool prints_result);
