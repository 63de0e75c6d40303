#include <atomic>
#include <chrono>
#include <thread>

#include "runtime/io/files.h"
#include "test/support/expect_error.h"
#include "test/support/temporary_directory.h"
#include "test/support/toy_checkpoint.h"

namespace {

const std::vector<std::vector<size_t>> kShapes = {{1031, 509}, {}, {0, 7}, {3, 5, 7}};

// Like the trainer, calls advance() after each step until the save is over.
BackgroundSave::Result steps_until_it_ends(BackgroundSave& saver, const std::function<void()>& step) {
    for (;;) {
        step();
        if (auto result = saver.advance(saver.progress())) return *result;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

void nothing() {}

bool has_leftovers(const std::string& run_dir) {
    const std::vector<std::string> names = list_directory(checkpoints_directory(run_dir));
    return std::ranges::any_of(names, [](const std::string& name) { return name.starts_with("tmp."); });
}

}  // namespace

TEST_CASE("a background save has the state at its start, whatever training changes in the meantime") {
    TemporaryDirectory run;
    BackgroundSave saver(run.path(), comm_single(), {.keep = 2});
    CHECK(saver.progress().unfinished == 0);
    CHECK_FALSE(saver.advance(saver.progress()));
    for (int64_t step = 1; step <= 50; step++) {
        ToyModel model(uint64_t(step), kShapes);
        const ToyModel before = model;
        saver.begin(toy_info(step), model.tensors(), nothing);
        CHECK(saver.is_running());
        CHECK(saver.step() == step);
        const auto result = steps_until_it_ends(saver, [&] {
            for (auto& values : model.values())
                for (float& value : values) value += 1;
        });
        CHECK_FALSE(saver.is_running());
        CHECK_FALSE(result.error);
        CHECK(result.step == step);
        CHECK(result.stats.directory == step_directory(run.path(), step));
        CHECK_FALSE(model == before);
        const Checkpoint checkpoint(step_directory(run.path(), step));
        ToyModel loaded(0, kShapes);
        checkpoint.load(loaded.tensors());
        REQUIRE(loaded == before);
        CHECK(committed_steps(run.path()).size() == size_t(std::min<int64_t>(step, 2)));
    }
}

TEST_CASE("waiting for a background save returns when the save is complete") {
    TemporaryDirectory run;
    BackgroundSave saver(run.path(), comm_single(), {});
    ToyModel model(1, kShapes);
    const auto begin = [&](int64_t step) { saver.begin(toy_info(step), model.tensors(), nothing); };
    begin(1);
    expect_error(Exit::internal, {"another is running"}, [&] { begin(2); });
    const auto result = saver.wait(60);
    REQUIRE(result);
    CHECK_FALSE(result->error);
    CHECK(committed_steps(run.path()) == std::vector<int64_t>{1});
    CHECK_FALSE(saver.is_running());
}

TEST_CASE("a save that fails in the background is reported and leaves no files, and the next one can succeed") {
    TemporaryDirectory run;
    BackgroundSave saver(run.path(), comm_single(), {});
    ToyModel model(1, kShapes);
    save_toy(run.path(), 1, model);
    auto without_values = model.tensors();
    without_values[0].count--;  // the manifest is incomplete
    saver.begin(toy_info(2), without_values, nothing);
    const auto failed = saver.wait(60);
    REQUIRE(failed);
    REQUIRE(failed->error);
    CHECK(failed->error->code == Exit::data);
    CHECK_FALSE(has_leftovers(run.path()));
    CHECK(committed_steps(run.path()) == std::vector<int64_t>{1});

    saver.begin(toy_info(3), model.tensors(), nothing);
    CHECK_FALSE(saver.wait(60)->error);
    CHECK(committed_steps(run.path()) == std::vector<int64_t>{3});
}

TEST_CASE("a save that fails on one rank fails on all ranks") {
    TemporaryDirectory run;
    BackgroundSave saver(run.path(), comm_single(), {});
    ToyModel model(1, kShapes);
    saver.begin(toy_info(1), model.tensors(), nothing);
    CHECK_FALSE(saver.advance({.unfinished = 1, .failed = 1}));  // others are still writing
    std::optional<BackgroundSave::Result> result;
    while (saver.progress().unfinished > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    result = saver.advance({.failed = 1});
    REQUIRE(result);
    REQUIRE(result->error);
    CHECK(result->error->code == Exit::io);
    CHECK_FALSE(has_leftovers(run.path()));
    CHECK(committed_steps(run.path()).empty());
}

TEST_CASE("the action before the commit runs after the parts are written, and its failure fails the save") {
    TemporaryDirectory run;
    BackgroundSave saver(run.path(), comm_single(), {});
    ToyModel model(1, kShapes);
    int calls = 0;
    saver.begin(toy_info(1), model.tensors(), [&] {
        calls++;
        CHECK(committed_steps(run.path()).empty());
        for (const std::string& name : list_directory(checkpoints_directory(run.path())))
            CHECK(file_exists(checkpoints_directory(run.path()) + "/" + name + "/shard_0000.bin"));
    });
    CHECK_FALSE(saver.wait(60)->error);
    CHECK(calls == 1);
    const auto log = std::make_shared<int>();
    saver.begin(toy_info(2), model.tensors(), [log] { fail(Exit::io, "the log cannot be synced"); });
    const auto failed = saver.wait(60);
    CHECK(log.use_count() == 1);
    REQUIRE(failed->error);
    CHECK(failed->error->code == Exit::io);
    CHECK_THAT(failed->error->what(), ContainsSubstring("the log cannot be synced"));
    CHECK_FALSE(has_leftovers(run.path()));
    CHECK(committed_steps(run.path()) == std::vector<int64_t>{1});
}

TEST_CASE("a save that hangs delays no step, and completes when the disk works again") {
    TemporaryDirectory run;
    BackgroundSave saver(run.path(), comm_single(), {});
    ToyModel model(1, kShapes);
    std::atomic<bool> is_hanging = true;
    saver.begin(toy_info(1), model.tensors(), [&] { is_hanging.wait(true); });
    for (int step = 0; step < 200; step++) {
        CHECK_FALSE(saver.advance(saver.progress()));
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK_FALSE(saver.wait(0.1));
    CHECK(saver.is_running());
    CHECK(saver.elapsed_s() > 0.2);
    is_hanging = false;
    is_hanging.notify_all();
    CHECK_FALSE(saver.wait(60)->error);
    CHECK(committed_steps(run.path()) == std::vector<int64_t>{1});
}

TEST_CASE("a save whose directory cannot be created fails after its start") {
    TemporaryDirectory run;
    BackgroundSave saver(run / "moved away", comm_single(), {});
    ToyModel model(1, kShapes);
    saver.begin(toy_info(1), model.tensors(), nothing);
    const auto failed = saver.wait(60);
    REQUIRE(failed->error);
    CHECK(failed->error->code == Exit::cannot_create);
    CHECK_THAT(failed->error->what(), ContainsSubstring("moved away"));
}
