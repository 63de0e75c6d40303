#include "training/saving.h"

#include "kernels/base/check.h"
#include "kernels/trace.h"
#include "runtime/config/divergence.h"

namespace {

constexpr int kMaxFailures = 3;        // in a row
constexpr double kPatience_s = 30;     // time a save may take before a warning, or when the next one is due
constexpr double kMaxWaiting_s = 600;  // limit for a save that must succeed; below the control channel's limit

// Completes the part of the checkpoint that is not tensors.
void complete_state(TrainingRun& run) {
    TrainState& state = run.state;
    state.healthy = is_healthy_after(state.progress.divergence, state.step, run.config.checkpoint.every_steps);
    if (run.config.train.max_minutes > 0) state.progress.trained_s = run.elapsed_s();
}

// Prints the result of a save, or returns its error as described at save(). Called on all ranks. Throws errors that are
// not the disk's.
std::exception_ptr record_save(TrainingRun& run, const BackgroundSave::Result& result, bool must_succeed) {
    if (!result.error) {
        run.progress.print(format("step %ld | checkpoint %s, %.1f MiB in %.1f s", result.step,
                                  result.stats.directory.c_str(), double(result.stats.bytes) / 0x1p20,
                                  result.stats.seconds));
        if (!result.warning.empty())
            run.progress.print(format("step %ld | warning: %s", result.step, result.warning.c_str()));
        run.state.parent_step = result.step;
        run.failed_saves = 0;
        return nullptr;
    }
    const Exit code = result.error->code;
    if (code != Exit::io && code != Exit::cannot_create && code != Exit::permission) throw *result.error;
    const Error error(Exit::io, result.error->what());  // run.dir could be written to when the run started
    if (must_succeed && run.error) {                    // the run ends with its earlier error
        run.progress.print(format("step %ld | the last save failed: %s", result.step, error.what()));
        return run.error;
    }
    if (must_succeed || ++run.failed_saves == kMaxFailures) return std::make_exception_ptr(error);
    run.progress.print(
        format("step %ld | save failed %d of %d times: %s", result.step, run.failed_saves, kMaxFailures, error.what()));
    return nullptr;
}

BackgroundSave::Result stuck_save(const TrainingRun& run) {
    const Error error(Exit::io, format("the save of step %ld has not finished after %.0f s", run.background_save.step(),
                                       run.background_save.elapsed_s()));
    return {.step = run.state.step, .error = error};
}

// Syncs the logs first: the records of a step must be on disk before its checkpoint is committed.
void save_in_foreground(const TrainingRun& run, BackgroundSave::Result& result) {
    const std::string& dir = run.config.run.dir;
    run_on_rank_0(run.comm, "sync the logs", [&] { run.log->sync(); });
    result.stats = save_checkpoint(dir, run.comm, run.state, run.gpt.saved_tensors());
    if (run.comm.rank != 0) return;
    try {
        apply_retention(dir, run.state.run_id, retention_of(run.config));
    } catch (const Error& failure) {  // the checkpoint is committed
        result.warning = format("older checkpoints could not be deleted: %s", failure.what());
    }
}

}  // namespace

bool checkpoint_is_due(const TrainingRun& run) {
    return run.must_keep || run.is_complete() || is_due(run.state.step, run.config.checkpoint.every_steps);
}

std::exception_ptr save(TrainingRun& run, bool must_succeed) {
    const HostSpan span(run.trace, "checkpoint");
    run.control.note_phase(Phase::save, run.state.step);
    run.progress.begin(format("step %d | checkpoint", run.state.step));
    if (run.background_save.is_running()) {
        const double limit_s = must_succeed ? kMaxWaiting_s : kPatience_s - run.background_save.elapsed_s();
        const auto ended = run.background_save.wait(limit_s);
        if (!ended) return record_save(run, stuck_save(run), must_succeed);
        if (const auto error = record_save(run, *ended, false)) return error;
    }
    complete_state(run);
    BackgroundSave::Result result{.step = run.state.step};
    const bool is_asynchronous = run.config.checkpoint.asynchronous;
    try {
        if (is_asynchronous)
            run.background_save.begin(run.state, run.gpt.saved_tensors(), [log = run.log] { log->sync(); });
        else
            save_in_foreground(run, result);
    } catch (const Error& error) {
        result.error = error;
    }
    if (result.error || !is_asynchronous)
        if (const auto error = record_save(run, result, must_succeed)) return error;
    if (!must_succeed) return nullptr;
    return finish_save(run);
}

std::exception_ptr finish_save(TrainingRun& run) {
    run.control.note_phase(Phase::save, run.state.step);
    if (!run.background_save.is_running()) return nullptr;
    const auto ended = run.background_save.wait(kMaxWaiting_s);
    return record_save(run, ended ? *ended : stuck_save(run), true);
}

std::exception_ptr follow_save(TrainingRun& run, const BackgroundSave::Progress& sums) {
    BackgroundSave& save = run.background_save;
    if (const auto ended = save.advance(sums)) return record_save(run, *ended, false);
    if (!save.is_running() || save.elapsed_s() < kPatience_s || run.slow_save == save.step()) return nullptr;
    run.slow_save = save.step();
    run.progress.print(format("step %d | warning: the save of step %ld has not finished after %.0f s", run.state.step,
                              save.step(), save.elapsed_s()));
    return nullptr;
}
