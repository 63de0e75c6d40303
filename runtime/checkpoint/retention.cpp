#include <algorithm>
#include <filesystem>

#include "runtime/checkpoint/checkpoint.h"
#include "runtime/io/files.h"

std::vector<int64_t> steps_to_delete(const std::vector<TrainState>& stored, const std::string& run_id,
                                     const Retention& wanted) {
    const int keep = wanted.keep;
    require(keep >= 1, "retention: at least one checkpoint must be kept, not %d", keep);
    int newest_step = -1, best_step = 0, rollback_step = 0;
    for (const TrainState& own : stored) {
        if (own.run_id != run_id) continue;
        if (own.step > newest_step) newest_step = own.step, best_step = own.progress.best.step;
        if (own.healthy && wanted.rollback_every > 0 && own.step % wanted.rollback_every == 0)
            rollback_step = std::max(rollback_step, own.step);
    }
    std::vector<int64_t> superfluous;
    for (const TrainState& candidate : stored) {
        int newer = 0, newer_healthy = 0;
        for (const TrainState& other : stored) {
            if (other.run_id != run_id || other.step <= candidate.step) continue;
            newer++;
            newer_healthy += other.healthy;
        }
        const bool matters = (candidate.healthy ? newer_healthy : newer) < keep ||
                             (wanted.keep_best && candidate.step == best_step) ||
                             (rollback_step > 0 && candidate.step == rollback_step);
        if (candidate.run_id == run_id && !matters) superfluous.push_back(candidate.step);
    }
    std::ranges::sort(superfluous);
    return superfluous;
}

std::vector<int64_t> apply_retention(const std::string& run_dir, const std::string& run_id, const Retention& wanted) {
    std::vector<TrainState> valid;
    for (int64_t step : committed_steps(run_dir)) {
        try {
            valid.push_back(read_manifest(step_directory(run_dir, step)).info);
        } catch (const Error&) {
            // Keep an invalid checkpoint.
        }
    }
    const std::vector<int64_t> superfluous = steps_to_delete(valid, run_id, wanted);
    for (int64_t step : superfluous) {
        const std::filesystem::path committed = step_directory(run_dir, step);
        const std::string doomed = committed.parent_path() / ("deleting." + committed.filename().string());
        remove_tree(doomed);  // left by a deletion that failed
        rename_path(committed, doomed);
        sync_directory(directory_of(doomed));
        remove_tree(doomed);
    }
    return superfluous;
}
