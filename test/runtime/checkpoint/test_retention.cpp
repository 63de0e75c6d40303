#include "runtime/io/files.h"
#include "test/support/expect_error.h"
#include "test/support/system_faults.h"
#include "test/support/temporary_directory.h"
#include "test/support/toy_checkpoint.h"

namespace {

struct StoredCheckpoint {
    int64_t step;
    std::string run_id;
    bool valid;  // can be read
    bool healthy;
};
using Stored = std::vector<StoredCheckpoint>;

// The decision for checkpoints whose validity is known, as apply_retention() computes it.
std::vector<int64_t> decide(const Stored& stored, const std::string& run_id, int keep) {
    std::vector<TrainState> valid;
    for (const StoredCheckpoint& c : stored)
        if (c.valid) valid.push_back({.step = int(c.step), .run_id = c.run_id, .healthy = c.healthy});
    return steps_to_delete(valid, run_id, {.keep = keep});
}

// Successive random numbers of one sequence.
class Dice {
public:
    explicit Dice(uint64_t seed) : seed_(seed) {}
    int below(int limit) { return int(philox(seed_, 0, drawn_++).word[0] % uint32_t(limit)); }
    bool one_in(int n) { return below(n) == 0; }

private:
    uint64_t seed_, drawn_ = 0;
};

bool is_own(const StoredCheckpoint& checkpoint) { return checkpoint.valid && checkpoint.run_id == "own"; }
bool is_own_healthy(const StoredCheckpoint& checkpoint) { return is_own(checkpoint) && checkpoint.healthy; }

size_t count_own_healthy(const Stored& stored) {
    return size_t(std::count_if(stored.begin(), stored.end(), is_own_healthy));
}

int64_t newest_own(const Stored& stored) {
    int64_t newest = -1;
    for (const StoredCheckpoint& checkpoint : stored)
        if (is_own(checkpoint)) newest = std::max(newest, checkpoint.step);
    return newest;
}

Stored without(const Stored& stored, const std::vector<int64_t>& steps) {
    Stored rest;
    for (const StoredCheckpoint& checkpoint : stored)
        if (std::find(steps.begin(), steps.end(), checkpoint.step) == steps.end()) rest.push_back(checkpoint);
    return rest;
}

// The rule that a decision violates; empty if none.
std::string objection(const Stored& stored, int keep, const std::vector<int64_t>& deleted) {
    Stored rest = without(stored, deleted);
    if (rest.size() + deleted.size() != stored.size()) return "deletes a checkpoint that does not exist, or one twice";
    if (!std::is_sorted(deleted.begin(), deleted.end())) return "not ascending";
    auto is_foreign = [](const StoredCheckpoint& c) { return !is_own(c); };
    if (std::count_if(rest.begin(), rest.end(), is_foreign) != std::count_if(stored.begin(), stored.end(), is_foreign))
        return "deletes a checkpoint of another run or one that is not valid";
    if (newest_own(rest) != newest_own(stored)) return "deletes the newest valid checkpoint";
    size_t healthy = count_own_healthy(stored);
    if (count_own_healthy(rest) != std::min(healthy, size_t(keep))) return "wrong number of healthy checkpoints";
    auto is_deleted = [&](int64_t step) { return std::binary_search(deleted.begin(), deleted.end(), step); };
    for (const StoredCheckpoint& gone : stored)
        for (const StoredCheckpoint& kept : rest)
            if (is_own_healthy(gone) && is_deleted(gone.step) && is_own_healthy(kept) && kept.step < gone.step)
                return "keeps an older healthy checkpoint instead of a newer one";
    for (const StoredCheckpoint& own : stored) {
        if (!is_own(own) || own.healthy) continue;
        const auto newer = std::ranges::count_if(
            stored, [&](const StoredCheckpoint& other) { return is_own(other) && other.step > own.step; });
        if ((newer >= keep) != is_deleted(own.step)) return "an unhealthy checkpoint is not kept while it is new";
    }
    if (std::count_if(rest.begin(), rest.end(), is_own) > 2 * keep) return "keeps too many";
    return {};
}

// One random history of a run directory: healthy and unhealthy saves, other runs' checkpoints, damage, resumes, and a
// decision after each event.
std::string live_through(uint64_t seed) {
    Dice dice(seed);
    int keep = 1 + dice.below(4);
    Stored stored;
    int64_t step = 0;
    for (int event = 0; event < 10; event++) {
        step += 1 + dice.below(3);
        std::string run_id = dice.one_in(5) ? "foreign" : "own";
        stored.push_back({step, run_id, !dice.one_in(8), !dice.one_in(4)});
        if (dice.one_in(6)) stored[size_t(dice.below(int(stored.size())))].valid = false;
        if (dice.one_in(8)) std::reverse(stored.begin(), stored.end());
        if (dice.one_in(8)) stored.erase(stored.begin() + dice.below(int(stored.size())));
        std::vector<int64_t> deleted = decide(stored, "own", keep);
        std::string wrong = objection(stored, keep, deleted);
        if (!wrong.empty()) return format("seed %llu, event %d: %s", (unsigned long long)seed, event, wrong.c_str());
        if (!dice.one_in(4)) stored = without(stored, deleted);  // else the process was killed before
    }
    return {};
}

}  // namespace

TEST_CASE("retention follows its rules in 100,000 random histories of a run directory") {
    std::string wrong;
    for (uint64_t seed = 0; seed < 100'000 && wrong.empty(); seed++) wrong = live_through(seed);
    CHECK(wrong == "");
}

TEST_CASE("retention by example") {
    auto own = [](int64_t step, bool healthy) { return StoredCheckpoint{step, "own", true, healthy}; };
    CHECK(decide({}, "own", 1).empty());
    CHECK(decide({own(1, true), own(2, true), own(3, true)}, "own", 2) == std::vector<int64_t>{1});
    CHECK(decide({own(1, true), own(2, false), own(3, false)}, "own", 1) == std::vector<int64_t>{2});
    CHECK(decide({own(1, false), own(2, true)}, "own", 1) == std::vector<int64_t>{1});
    CHECK(decide({own(1, false), own(2, true), own(3, false)}, "own", 1) == std::vector<int64_t>{1});
    CHECK(decide({own(1, false), own(2, false)}, "own", 1) == std::vector<int64_t>{1});
    CHECK(decide({own(1, true), {2, "own", false, true}}, "own", 1).empty());
    CHECK(decide({own(1, true), own(2, true)}, "other", 1).empty());
    expect_error(Exit::internal, {"at least one"}, [&] { decide({own(1, true)}, "own", 0); });
}

TEST_CASE("retention keeps the checkpoint with the lowest validation loss on request") {
    auto saved = [](int step, int best_step) {
        TrainState state{.step = step, .run_id = "own"};
        state.progress.best = {.loss = 1, .step = best_step};
        return state;
    };
    const std::vector<TrainState> stored = {saved(10, 10), saved(20, 20), saved(30, 20), saved(40, 20)};
    CHECK(steps_to_delete(stored, "own", {.keep = 1, .keep_best = true}) == std::vector<int64_t>{10, 30});
    CHECK(steps_to_delete(stored, "own", {.keep = 1}) == std::vector<int64_t>{10, 20, 30});
    // The newest checkpoint's loss record counts, in any order of the list.
    const std::vector<TrainState> moved_on = {saved(50, 50), saved(20, 20), saved(40, 20)};
    CHECK(steps_to_delete(moved_on, "own", {.keep = 1, .keep_best = true}) == std::vector<int64_t>{20, 40});
    TrainState foreign = saved(60, 30);
    foreign.run_id = "other";
    const std::vector<TrainState> shared = {saved(20, 20), saved(30, 20), saved(40, 20), foreign};
    CHECK(steps_to_delete(shared, "own", {.keep = 1, .keep_best = true}) == std::vector<int64_t>{30});
}

TEST_CASE("retention keeps the checkpoint that a diverging run rolls back to") {
    auto saved = [](int step, bool healthy = true) {
        return TrainState{.step = step, .run_id = "own", .healthy = healthy};
    };
    const Retention wanted{.keep = 1, .rollback_every = 10};
    // 25 and 27 were saved because the run was stopped; 30 is not healthy.
    CHECK(steps_to_delete({saved(10), saved(20), saved(25), saved(27)}, "own", wanted) == std::vector<int64_t>{10, 25});
    CHECK(steps_to_delete({saved(10), saved(20), saved(27), saved(30, false)}, "own", wanted) ==
          std::vector<int64_t>{10});
    CHECK(steps_to_delete({saved(20), saved(27), saved(30, false), saved(40)}, "own", wanted) ==
          std::vector<int64_t>{20, 27, 30});
}

TEST_CASE("a checkpoint's new name is on the disk before its files are deleted") {
    TemporaryDirectory run;
    for (const int step : {1, 2}) save_toy(run.path(), step, ToyModel(1, {{3}}));
    const std::string doomed = checkpoints_directory(run.path()) + "/deleting.step_00000001";
    const auto retain = [&] { apply_retention(run.path(), "run-a", {.keep = 1}); };
    CHECK(stop_at_sync(checkpoints_directory(run.path()), retain, [&] {
        CHECK(list_directory(doomed).size() == 3);
        CHECK(committed_steps(run.path()) == std::vector<int64_t>{2});
    }));
    CHECK_FALSE(directory_exists(doomed));
}

TEST_CASE("the lowest validation loss is the first of equal ones, and never NaN") {
    BestValidation best;
    CHECK_FALSE(best.note(std::nan(""), 10));
    CHECK(best == BestValidation{0, 0, 1});
    CHECK(best.note(2.5, 20));
    CHECK_FALSE(best.note(2.5, 30));
    CHECK_FALSE(best.note(std::nan(""), 40));
    CHECK(best == BestValidation{2.5, 20, 2});
    CHECK(best.note(2.25, 50));
    CHECK(best == BestValidation{2.25, 50, 0});
}
