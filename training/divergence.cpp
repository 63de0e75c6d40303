#include "training/divergence.h"

#include <algorithm>
#include <map>

#include "kernels/base/check.h"
#include "runtime/config/divergence.h"
#include "runtime/io/digest.h"
#include "runtime/io/joined.h"
#include "runtime/io/process.h"

namespace {

// The newest checkpoint to roll back to, opened on all ranks. Warns of each one that cannot be used.
std::optional<Checkpoint> find_healthy_checkpoint(TrainingRun& run) {
    constexpr int kNone = -1;
    int step = kNone;
    std::optional<Checkpoint> checkpoint;
    run_on_rank_0(run.comm, "find a checkpoint to roll back to", [&] {
        std::vector<int64_t> steps = committed_steps(run.config.run.dir);
        for (; !steps.empty() && !checkpoint; steps.pop_back()) {
            if (steps.back() % run.config.checkpoint.every_steps != 0 || steps.back() == 0) continue;
            try {
                Checkpoint candidate(step_directory(run.config.run.dir, steps.back()));
                const TrainState& info = candidate.manifest().info;
                if (info.healthy && info.run_id == run.state.run_id && info.step < run.state.step)
                    checkpoint.emplace(std::move(candidate));
            } catch (const Error& error) {
                run.progress.print(format("step %d | warning: %s", run.state.step, error.what()));
            }
        }
        if (checkpoint) step = checkpoint->manifest().info.step;
    });
    step = all_reduce_max(step, run.comm);
    if (step != kNone && !checkpoint) checkpoint.emplace(step_directory(run.config.run.dir, step));
    return checkpoint;
}

void load(TrainingRun& run, const Checkpoint& checkpoint, const Divergence& divergence) {
    const TrainState before = run.state;
    const int from_step = run.state.step, to_step = checkpoint.manifest().info.step;
    const int64_t skipped = tokens_of_steps(run.config, from_step) - tokens_of_steps(run.config, to_step);
    checkpoint.load(run.gpt.state_tensors());
    run.gpt.masters_changed();
    run.state = checkpoint.manifest().info;
    run.state.parent_step = to_step;
    run.state.config = before.config;  // may have changed since, with --accept-changes
    run.state.config_digest = before.config_digest;
    run.state.dataset_digest = before.dataset_digest;
    TrainState::Progress& progress = run.state.progress;
    progress.cursor = run.train_loader.cursor();
    progress.divergence.rollbacks = before.progress.divergence.rollbacks;
    progress.divergence.note({.from_step = from_step,
                              .to_step = to_step,
                              .skipped_samples = uint64_t(skipped / run.config.train.seq_len),
                              .is_spike = divergence.is_spike,
                              .loss = divergence.is_spike ? divergence.loss : 0,
                              .limit = divergence.is_spike ? divergence.limit : 0});
    progress.trained_s = before.progress.trained_s;
    progress.course_by_time = before.progress.course_by_time;
    run.train_loader.seek(progress.cursor, to_step + 1);
    const std::vector<Rollback>& rollbacks = progress.divergence.rollbacks;
    run_on_rank_0(run.comm, "cut the logs", [&] {
        run.log.reset();  // closed before its files are cut
        run.log = run_log(run.config, run.state, run.lock);
        // Write the earlier rollbacks that were cut off again.
        for (const Rollback& rollback : rollbacks)
            if (rollback.to_step >= to_step)
                run.log->write(RollbackRecord{rollback.to_step + 1, rollback, unix_time()});
    });
    run.progress.print(format("step %d | rolling back to the checkpoint of step %d, skipping %zu samples: %s",
                              from_step, to_step, size_t(rollbacks.back().skipped_samples),
                              divergence.sentence.c_str()));
}

// "; --resume-step 900 continues from the last healthy checkpoint", or "" if there is none.
std::string resume_advice(const TrainingRun& run) {
    std::vector<int64_t> steps = committed_steps(run.config.run.dir);
    for (; !steps.empty(); steps.pop_back()) {
        try {
            if (read_manifest(step_directory(run.config.run.dir, steps.back())).info.healthy)
                return format("; --resume-step %ld continues from the last healthy checkpoint", steps.back());
        } catch (const Error&) {
            // Damaged: try an older one.
        }
    }
    return "";
}

// A digest of this rank's copy of the tensors that must be identical on all ranks with its part of the model, or with
// `undivided` of those that all ranks have.
std::string digest_of_replicas(TrainingRun& run, bool undivided) {
    constexpr size_t kPartBytes = size_t(4) << 20;
    std::vector<std::byte> part(kPartBytes);
    Digest digest;
    for (const Comm& comm : run.grid_comm.distinct()) drain(comm);
    for (const NamedTensor& tensor : run.gpt.replicated_tensors()) {
        if (undivided && !tensor.boxes.empty()) continue;
        const auto* values = static_cast<const std::byte*>(tensor.values.data);
        const size_t bytes = tensor.count * size_of(tensor.values.dtype);
        for (size_t done = 0; done < bytes; done += kPartBytes) {
            const size_t count = std::min(kPartBytes, bytes - done);
            copy_to_host(part.data(), values + done, count, Stream{});
            synchronize(Stream{});
            digest.add(part.data(), count);
        }
    }
    return digest.hex();
}

}  // namespace

std::optional<Divergence> check_divergence(TrainingRun& run, const TrainRecord& record, const std::string& diagnosis) {
    const Config::Train& train = run.config.train;
    TrainState::Progress& progress = run.state.progress;
    const bool is_applied = record.skipped.empty();
    const bool is_routine = diagnosis.empty() && is_routine_skip(progress.loss_scale, run.config.loss_scale);
    const auto verdict =
        progress.divergence.check(record.step, record.loss, is_applied, is_routine, train.spike_deviations);
    if (!diagnosis.empty())
        return Divergence{false, train.on_nonfinite == OnNonFinite::rollback, diagnosis, record.loss, verdict.limit};
    if (!verdict.is_spike) return std::nullopt;
    const std::string sentence = format(
        "step %d: loss spike: %.6g is above the limit of %.6g, %g deviations above the median of the last %zu steps",
        record.step, record.loss, verdict.limit, train.spike_deviations, progress.divergence.window.losses.size() - 1);
    if (train.on_spike != OnSpike::warn)
        return Divergence{true, train.on_spike == OnSpike::rollback, sentence, record.loss, verdict.limit};
    run.progress.print("warning: " + sentence);
    return std::nullopt;
}

bool roll_back(TrainingRun& run, Divergence& divergence) {
    const bool is_allowed = run.state.progress.divergence.may_roll_back(run.state.step);
    const std::optional<Checkpoint> checkpoint = is_allowed ? find_healthy_checkpoint(run) : std::nullopt;
    if (checkpoint) {
        load(run, *checkpoint, divergence);
        return true;
    }
    divergence.sentence += is_allowed ? "; there is no healthy checkpoint to roll back to"
                                      : format("; the run has already rolled back %zu times within %d steps",
                                               DivergenceState::kMaxRollbacks, DivergenceState::kRollbackSteps);
    return false;
}

std::exception_ptr divergence_error(const TrainingRun& run, const Divergence& divergence) {
    const std::string advice = run.comm.rank == 0 ? resume_advice(run) : "";
    return std::make_exception_ptr(Error(Exit::non_finite, divergence.sentence + advice));
}

// Compares replicas, whose digests are given by rank. Returns a sentence about the ranks that differ; empty if none
// does.
static std::string replicas_problem(const std::map<int, std::string>& digests) {
    std::map<std::string, int> counts;
    for (const auto& [rank, digest] : digests) counts[digest]++;
    if (counts.size() <= 1) return "";
    const auto most = std::ranges::max_element(counts, {}, [](const auto& count) { return count.second; });
    const bool is_majority = 2 * size_t(most->second) > digests.size();
    std::vector<int> named;
    for (const auto& [rank, digest] : digests)
        if (!is_majority || digest != most->first) named.push_back(rank);
    return format("the weights of %s %s differ from %s", named.size() == 1 ? "rank" : "ranks", joined(named).c_str(),
                  is_majority ? "those of the other ranks" : "each other");
}

std::exception_ptr check_replicas_if_due(TrainingRun& run) {
    if (run.comm.size == 1 || !is_due(run.state.step, run.config.train.check_replicas_every)) return nullptr;
    if (run.gpt.replicated_tensors().empty()) return nullptr;
    const std::string own = digest_of_replicas(run, false);
    const std::string undivided = run.grid.tensor > 1 ? digest_of_replicas(run, true) : "";
    const std::vector<std::string> digests = run.control.all_gather(own + undivided, "the replicas' digests");
    // Of each stage: its tensor ranks' parts; then what all its ranks have.
    const int kinds = run.grid.tensor + 1;
    std::vector<std::map<int, std::string>> compared(size_t(run.grid.pipeline * kinds));
    for (int rank = 0; rank < run.comm.size; rank++) {
        const std::string& digest = digests[size_t(rank)];
        const Grid::Place place = run.grid.place_of(rank);
        compared[size_t(place.pipeline * kinds + place.tensor)][rank] = digest.substr(0, own.size());
        compared[size_t(place.pipeline * kinds + kinds - 1)][rank] = digest.substr(own.size());
    }
    for (const std::map<int, std::string>& replicas : compared)
        if (const std::string problem = replicas_problem(replicas); !problem.empty())
            return std::make_exception_ptr(Error(
                Exit::corruption, format("step %d: %s: likely silent data corruption by faulty hardware; "
                                         "--resume-step can continue from an earlier checkpoint, which may be valid",
                                         run.state.step, problem.c_str())));
    return nullptr;
}
