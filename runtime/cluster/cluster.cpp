#include "runtime/cluster/cluster.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "runtime/cluster/background_thread.h"
#include "runtime/cluster/child_program.h"
#include "runtime/cluster/rank_reports.h"
#include "runtime/cluster/rendezvous.h"
#include "runtime/cluster/shared_segments.h"
#include "runtime/io/files.h"
#include "runtime/io/installation.h"
#include "runtime/io/process.h"

namespace {

// Longer than the timeout of every phase, so that the control channel, whose message names the late rank, reports a
// hang first.
constexpr double kCollectiveTimeout_s = 3600;
constexpr double kLauncherEnds_s = 20;  // for the launcher to end after its ranks

Exit code_of(const std::exception& error) {
    const auto* known = dynamic_cast<const Error*>(&error);
    return known ? known->code : Exit::internal;
}

// Returns the result of `join`, or ends the process with Exit::hang after `limit_s`. While MPI starts, the ranks wait
// indefinitely for one that is stopped or missing.
template <class Join> auto within(double limit_s, const RankEnvironment& environment, const Join& join) {
    if (environment.size == 1) return join();
    const std::jthread watch = start_thread([limit_s, rank = environment.rank](const std::stop_token& stop) {
        if (stops_within(stop, limit_s)) return;
        std::fprintf(stderr, "train_gpt: %s ends: not all ranks joined %s within %g s (parallel.start_timeout_s)\n",
                     this_member(rank).text().c_str(), comm_library().c_str(), limit_s);
        ::_exit(int(Exit::hang));
    });
    return join();
}

// The token file is next to run.dir, or in the current directory until the parent of run.dir exists: the same path on
// all machines.
std::string token_file(const std::string& run_dir, std::string run_id) {
    const std::string trimmed = run_dir.substr(0, run_dir.find_last_not_of('/') + 1);
    const std::string name = trimmed.substr(trimmed.find_last_of('/') + 1);
    std::ranges::replace_if(
        run_id, [](unsigned char c) { return !std::isalnum(c) && c != '.'; }, '_');
    const std::string parent = directory_of(trimmed);
    return (directory_exists(parent) ? parent : ".") + "/" + name + ".token" + (run_id.empty() ? "" : "." + run_id);
}

// Forwards a program's standard output to this process's, because mpirun exits with 0 even if its output is lost.
class OutputRelay {
public:
    OutputRelay() {
        int ends[2];
        if (::pipe2(ends, O_CLOEXEC) != 0) fail(Exit::os, "cannot create a pipe: %s", std::strerror(errno));
        from_ = FileDescriptor(ends[0]), input_ = FileDescriptor(ends[1]);
        ::fcntl(from_, F_SETFL, O_NONBLOCK);
    }
    int input() const { return input_; }
    // Does not block. flush_output() reports errors.
    void forward() const {
        char bytes[1 << 16];
        for (ssize_t count; (count = ::read(from_, bytes, sizeof bytes)) > 0;)
            std::fwrite(bytes, 1, size_t(count), stdout);
        std::fflush(stdout);
    }

private:
    FileDescriptor from_, input_;
};

}  // namespace

ControlSettings control_settings(const Config& config) {
    const Config::Parallel& parallel = config.parallel;
    const double step_s = parallel.step_timeout_s, start_s = std::max(parallel.start_timeout_s, step_s);
    return {.silence_s = parallel.silence_s, .start_s = start_s, .step_s = step_s, .collective_timeout_s = start_s};
}

Ranks::Ranks(const RankEnvironment& environment, const Config& config, const std::string& revision)
    : reports_(start_reports(environment, activity_, ControlSettings().heartbeat_s)),
      local_rank_(environment.local_rank),
      kernel_check_(local_rank_, config.device.arch_kernels ? config.device.kernel_check_s : 0),
      grid_(grid_of(config, environment.size)) {
    if (environment.size > 1 && !environment.has_pmi && !comm_launcher().empty())
        fail(Exit::config,
             "srun started rank %d without PMI, but %s needs PMI to connect the ranks; use srun --mpi=pmix, or mpirun",
             environment.rank, comm_library());
    const CommSettings settings{
        .rank = environment.rank,
        .size = environment.size,
        .local_rank = environment.local_rank,
        .deterministic = config.parallel.deterministic_reduce,
        .deadline_s = kCollectiveTimeout_s,
        .gather = [this](const std::string& mine) { return control_->all_gather(mine, "the ranks of a communicator"); },
        .note = [this](uint64_t number, const char* name) { activity_->note_collective(number, name); },
        .note_wait = [this](bool begins) { activity_->note_wait(begins); }};
    ControlSettings timeouts = control_settings(config);
    timeouts.grid = grid_;
    RankEnvironment place = environment;
    place.token_file = token_file(config.run.dir, environment.run_id);
    const auto open = [&] {
        if (environment.size > 1) kernel_check_.results();
        comm_ = open_comm(settings);
    };
    if (!comm_needs_gather()) within(timeouts.start_s, environment, open);
    TextBroadcast broadcast;
    if (const TextBroadcast share = launcher_share(comm_); share && (!comm_needs_gather() || place.master_host.empty()))
        broadcast = [=](const std::string& mine) {
            return within(timeouts.start_s, place, [&] { return share(mine); });
        };
    control_ = std::make_unique<ControlChannel>(place, timeouts, broadcast, activity_);
    if (comm_needs_gather()) report_errors_of(open);
    control_->require_same(revision, "the program's revision");
    control_->require_same(config_digest(config), "the configuration's digest");
    control_->require_same(format("%d x %d x %d x %d, ZeRO stage %d", grid_.pipeline, grid_.data, grid_.context,
                                  grid_.tensor, config.parallel.zero_stage),
                           "the grid of ranks");
    report_errors_of([&] { grid_comm_ = GridComm(comm_, grid_, config.model.part(grid_.tensor).kv_head_parts); });
}

const KernelChoice& Ranks::kernels() {
    if (!kernels_) kernels_ = choice_of(control_->all_gather(text_of(kernel_check_.results()), "the kernels"));
    return *kernels_;
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

std::exception_ptr shared_error(ControlChannel& control, const std::exception_ptr& error) {
    std::string mine;  // the code and the message
    try {
        if (error) std::rethrow_exception(error);
    } catch (const Error& own) {
        mine = format("%d %s", int(own.code), own.what());
    }
    const std::vector<std::string> errors = control.all_gather(mine, "the errors of the ranks");
    const auto first = std::ranges::find_if(errors, [](const std::string& text) { return !text.empty(); });
    if (first == errors.end()) return nullptr;
    std::string message = first->substr(first->find(' ') + 1);
    if (errors.size() > 1) message = format("rank %d: ", int(first - errors.begin())) + message;
    return std::make_exception_ptr(SharedError(Exit(std::stoi(*first)), message));
}

bool is_stop_requested(const Comm& comm) { return all_reduce_max(stop_signal(), comm) != 0; }

void check_node(const LocalNode& node) {
    if (node.nodes > 1 && !comm_launcher().empty())
        fail(Exit::usage,
             "--node %d/%d: the ranks of this program communicate through %s; to use several machines, start them "
             "with %s",
             node.node, node.nodes, comm_library(), comm_launcher());
}

Exit launch_ranks(int count, const LocalNode& node, const std::vector<std::string>& arguments, bool prints_result) {
    const std::string launcher = comm_launcher();
    if (launcher.empty()) return Exit(launch_local_ranks(count, arguments, {.node = node}));
    // By default, mpirun refuses to run as root or with more ranks than cores, and binds ranks to cores. On a single
    // machine the user's count decides.
    const unsigned threads = std::max(1u, std::thread::hardware_concurrency() / unsigned(count));
    setenv("OMP_NUM_THREADS", std::to_string(threads).c_str(), 0);
    setenv("PATH", "/usr/local/bin:/usr/bin:/bin", 0);  // mpirun does not start without PATH
    setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 0);
    setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 0);
    // --quiet, so that the last line is a rank's error and not mpirun's banner about it. No TCP, so that no rank
    // listens on the network. The transports that Debian excludes by default stay excluded.
    std::vector<std::string> command{
        launcher, "--quiet",     "-np", std::to_string(count), "--oversubscribe", "--bind-to",
        "none",   "--mca",       "btl", "^tcp,uct,openib,ofi", "--mca",           "oob_tcp_if_include",
        "lo",     program_path()};
    command.insert(command.end(), arguments.begin() + 1, arguments.end());
    const SharedSegments segments;
    StopSignals signals;
    const OutputRelay relay;
    const auto find_hang = [&, find = find_childless_launcher(launcher, kLauncherEnds_s)] {
        relay.forward();
        return find();
    };
    const int code = run_child(command, signals, find_hang, prints_result ? relay.input() : STDOUT_FILENO);
    relay.forward();
    // With --quiet, mpirun does not print the reason.
    if (code < 128 + NSIG && (code > 128 || row_of(code))) {
        if (code == int(Exit::ok) && prints_result) flush_output();
        return Exit(code);
    }
    fail(Exit::os,
         "%s ended with exit code %d, which no rank returns: it could not start %d ranks, or MPI could not connect "
         "them. /dev/shm has %.1f MiB free; each rank needs about 4 MiB. Try \"%s -np %d true\" for details",
         launcher, code, count, double(free_bytes("/dev/shm")) / 0x1p20, launcher, count);
}
