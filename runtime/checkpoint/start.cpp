#include "runtime/checkpoint/checkpoint.h"
#include "runtime/cluster/cluster.h"
#include "runtime/config/loss_scale.h"
#include "runtime/io/files.h"
#include "runtime/io/process.h"

namespace {

// Returns the checkpoint to resume from, if any. Reports damaged ones on stderr.
std::optional<Checkpoint> checkpoint_to_resume(const std::string& run_dir, const StartRequest& request) {
    if (request.mode != StartMode::resume && request.mode != StartMode::automatic) return std::nullopt;
    auto report = [](const std::string& sentence) {
        std::fprintf(stderr, "train_gpt: %s\n", printable_text(sentence).c_str());
    };
    if (request.step) return open_step(run_dir, *request.step, report);
    std::optional<Checkpoint> newest = find_newest_valid(run_dir, report);
    const std::string directory = checkpoints_directory(run_dir);
    if (!newest && request.mode == StartMode::resume)
        fail(Exit::no_input, "%s: no checkpoint to resume from", directory);
    if (!newest && has_checkpoints(run_dir) && !list_directory(directory).empty())
        fail(Exit::no_input,
             "%s: every checkpoint has been set aside and none is left to resume from; --fresh starts over", directory);
    return newest;
}

void refuse_changes(const Checkpoint& checkpoint, const Config& config, const std::string& dataset_digest) {
    const TrainState& info = checkpoint.manifest().info;
    std::string changes;
    for (const std::string& difference : config_differences(checkpoint.config(), config))
        changes += "\n  " + difference;
    if (dataset_digest != info.dataset_digest)
        changes += "\n  data.train: the files or weights differ from the ones used for training so far";
    if (!changes.empty())
        fail(Exit::config,
             "%s: options that affect the run's result differ from the checkpoint's:%s\n"
             "--accept-changes continues with the new values, --fresh starts over",
             checkpoint.directory(), changes);
}

// A file that is missing here is an I/O error, not a missing input: it was moved, or a network file system does not
// show it on this machine yet.
Checkpoint found_by_rank_0(const std::string& directory) {
    try {
        return Checkpoint(directory);
    } catch (const Error& error) {
        if (error.code != Exit::no_input) throw;
        throw Error(Exit::io, std::string(error.what()) + " (but rank 0 has just read it)");
    }
}

}  // namespace

RunStart start_run(const Config& config, const StartRequest& request, const std::string& dataset_digest,
                   const Comm& comm) {
    constexpr int kNone = -1;
    RunStart start;
    int step = kNone;
    run_on_rank_0(comm, "open run.dir", [&] {
        start.lock = open_run_directory(config.run.dir, request.mode);
        start.lock.guard([&] { start.checkpoint = checkpoint_to_resume(config.run.dir, request); });
        if (start.checkpoint) step = start.checkpoint->manifest().info.step;
    });
    step = all_reduce_max(step, comm);
    if (step != kNone && !start.checkpoint) start.checkpoint = found_by_rank_0(step_directory(config.run.dir, step));
    if (start.checkpoint && !request.accept_changes) refuse_changes(*start.checkpoint, config, dataset_digest);
    TrainState& state = start.state;
    if (start.checkpoint) {
        state = start.checkpoint->manifest().info;
        state.parent_step = state.step;
        // A new limit needs a new decision.
        if (start.checkpoint->config().train.max_minutes != config.train.max_minutes)
            state.progress.course_by_time = {};
    } else {
        state.run_id = random_hex(16);
        state.progress.loss_scale = first_loss_scale(config.loss_scale);
    }
    if (!config.loss_scale.dynamic) state.progress.loss_scale.scale = float(config.loss_scale.fixed);
    state.config = config_json(config);
    state.config_digest = config_digest(config);
    state.dataset_digest = dataset_digest;
    return start;
}
