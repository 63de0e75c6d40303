#include "runtime/cluster/cluster.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>

#include "runtime/io/io.h"

namespace {

// Longer than any phase may take, because the control channel's message names the late rank.
constexpr double kCollectiveTimeout_s = 3600;

Exit code_of(const std::exception& error) {
    const auto* known = dynamic_cast<const Error*>(&error);
    return known ? known->code : Exit::internal;
}

}  // namespace

Ranks::Ranks(const RankEnvironment& environment, const Config& config, const std::string& revision)
    : local_rank_(environment.local_rank) {
    if (environment.size > 1 && !environment.has_pmi && !comm_launcher().empty())
        fail(Exit::config,
             "srun has started rank %d without PMI, which ranks that communicate by %s need to find each other: use "
             "srun --mpi=pmix, or mpirun",
             environment.rank, comm_library());
    const CommSettings settings{
        .rank = environment.rank,
        .size = environment.size,
        .local_rank = environment.local_rank,
        .deterministic = config.parallel.deterministic_reduce,
        .deadline_s = kCollectiveTimeout_s,
        .gather = [this](const std::string& mine) { return control_->all_gather(mine, "the GPUs of the ranks"); },
        .note =
            [this](uint64_t number, const char* name) {
                if (control_) control_->note_collective(number, name);
            }};
    const double step_s = config.parallel.step_timeout_s;
    const ControlSettings timeouts{.silence_s = config.parallel.silence_s,
                                   .start_s = std::max(ControlSettings().start_s, step_s),
                                   .step_s = step_s,
                                   .evaluation_s = step_s};
    const auto connect = [&](const TextBroadcast& broadcast) {
        control_ = std::make_unique<ControlChannel>(environment, timeouts, broadcast);
    };
    if (comm_needs_gather()) {
        connect(launcher_share());
        report_errors_of([&] { comm_ = open_comm(settings); });
    } else {
        comm_ = open_comm(settings);
        connect([this](const std::string& mine) { return broadcast_text(mine, comm_); });
    }
    control_->require_same(revision, "the program's revision");
    control_->require_same(config_digest(config), "the configuration's digest");
}

Exit Ranks::run(const std::function<Exit()>& body) {
    Exit result = Exit::ok;
    report_errors_of([&] {
        result = body();
        control_->leave();
        close_comm(comm_);
    });
    return result;
}

void Ranks::report_errors_of(const std::function<void()>& action) {
    try {
        action();
    } catch (const std::exception& error) {
        control_->leave_with_error(code_of(error), error.what());
        throw;
    }
}

void run_on_rank_0(const Comm& comm, const char* action, const std::function<void()>& part) {
    std::exception_ptr error;
    Exit code = Exit::ok;
    try {
        if (comm.rank == 0) part();
    } catch (const std::exception& failure) {
        error = std::current_exception();
        code = code_of(failure);
    }
    code = Exit(all_reduce_max(int(code), comm));
    if (error) std::rethrow_exception(error);
    if (code != Exit::ok) fail(code, "rank %d ends because rank 0 could not %s", comm.rank, action);
}

Exit launch_ranks(int count, const LocalNode& node, const std::vector<std::string>& arguments) {
    const std::string launcher = comm_launcher();
    if (launcher.empty()) return Exit(launch_local_ranks(count, arguments, {.node = node}));
    if (node.nodes > 1)
        fail(Exit::usage,
             "--node %d/%d: the ranks of this program communicate by %s: start those of several machines "
             "by %s",
             node.node, node.nodes, comm_library(), launcher);

    // By default, mpirun refuses root and more ranks than cores, and binds ranks to cores; on a single machine the
    // user's count decides.
    const unsigned threads = std::max(1u, std::thread::hardware_concurrency() / unsigned(count));
    setenv("OMP_NUM_THREADS", std::to_string(threads).c_str(), 0);
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 0);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 0);
    // Quiet, so that the error of a rank is the last line and not mpirun's banner about it.
    std::vector<std::string> command{launcher,          "--quiet",   "-np",  std::to_string(count),
                                     "--oversubscribe", "--bind-to", "none", program_path()};
    command.insert(command.end(), arguments.begin() + 1, arguments.end());
    execvp(launcher.c_str(), argv_of(command).data());
    fail(Exit::os, "--nproc: %s, which the communication library %s needs, could not be started: %s", launcher,
         comm_library(), std::strerror(errno));
}
