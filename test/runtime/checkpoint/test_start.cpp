// How a run starts: from step 0 or from a checkpoint.
#include "kernels/comm.h"
#include "runtime/config/schedule.h"
#include "test/support/expect_error.h"
#include "test/support/temporary_directory.h"
#include "test/support/toy_checkpoint.h"

namespace {

class Start {
protected:
    Start() { config.run.dir = directory / "run"; }

    RunStart start(const StartRequest& request, const std::string& digest = "da7a") {
        return start_run(config, request, digest, comm_single());
    }
    // Commits a checkpoint of a run that continues from a start.
    void save(TrainState state, int step) {
        state.step = step;
        ToyModel model(1, {{3}});
        save_checkpoint(config.run.dir, comm_single(), state, model.tensors());
    }
    // A new run with a checkpoint of step 8.
    TrainState run_to_8() {
        TrainState state = start({}).state;
        state.progress.course_by_time = {.end_step = 30, .cooldown_begin = 20};
        state.progress.updates = 7;
        save(state, 8);
        return state;
    }

    TemporaryDirectory directory;
    Config config;
};

const StartRequest kResume{.mode = StartMode::resume}, kAuto{.mode = StartMode::automatic};

}  // namespace

TEST_CASE_METHOD(Start, "start: a new run has a run id, the initial loss scale and this configuration") {
    config.loss_scale.dynamic = true;
    config.loss_scale.initial = 64;
    const RunStart first = start({});
    CHECK_FALSE(first.checkpoint);
    CHECK(first.state.run_id.size() == 32);
    CHECK(first.state.step == 0);
    CHECK(first.state.parent_step == -1);
    CHECK(first.state.progress.loss_scale.scale == 64);
    CHECK(first.state.config == config_json(config));
    CHECK(first.state.config_digest == config_digest(config));
    CHECK(first.state.dataset_digest == "da7a");
    expect_error(Exit::cannot_create, {"in use"}, [&] { start(kAuto); });  // while the first one holds the lock
}

TEST_CASE_METHOD(Start, "start: a resumed run has the checkpoint's state, and the checkpoint is its parent") {
    const TrainState state = run_to_8();
    for (const StartRequest& request : {kResume, kAuto}) {
        const RunStart again = start(request);
        REQUIRE(again.checkpoint);
        CHECK(again.state.run_id == state.run_id);
        CHECK(again.state.step == 8);
        CHECK(again.state.parent_step == 8);
        CHECK(again.state.progress.updates == 7);
        CHECK(again.state.progress.course_by_time == state.progress.course_by_time);
    }
    expect_error(Exit::usage, {"not empty"}, [&] { start({}); });
    const RunStart fresh = start({.mode = StartMode::fresh});
    CHECK_FALSE(fresh.checkpoint);
    CHECK(fresh.state.run_id != state.run_id);
}

TEST_CASE_METHOD(Start, "start: a changed option is rejected or accepted, and the time limit is decided again") {
    run_to_8();
    config.optim.learning_rate *= 2;
    const std::string refused = "options that affect the run's result differ";
    const auto said = [&](const std::string& digest) {
        try {
            start(kResume, digest);
        } catch (const Error& error) {
            CHECK(error.code == Exit::config);
            return std::string(error.what());
        }
        return std::string();
    };
    CHECK_THAT(said("da7a"), ContainsSubstring(refused) && ContainsSubstring("optim.learning_rate") &&
                                 !ContainsSubstring("data.train"));
    CHECK_THAT(said("other"), ContainsSubstring("optim.learning_rate") && ContainsSubstring("data.train"));
    config.loss_scale.fixed = 256;
    config.train.max_minutes = 3;
    const StartRequest accepting{.mode = StartMode::resume, .accept_changes = true};
    const RunStart changed = start(accepting, "other");
    CHECK(changed.state.config == config_json(config));
    CHECK(changed.state.config_digest == config_digest(config));
    CHECK(changed.state.dataset_digest == "other");
    CHECK(changed.state.progress.loss_scale.scale == 256);
    CHECK(changed.state.progress.course_by_time == RunLength());
}

TEST_CASE_METHOD(Start, "start: a dynamic loss scale is the checkpoint's") {
    config.loss_scale.dynamic = true;
    TrainState state = start({}).state;
    state.progress.loss_scale.scale = 4;
    save(state, 8);
    config.loss_scale.fixed = 256;
    CHECK(start({.mode = StartMode::resume, .accept_changes = true}).state.progress.loss_scale.scale == 4);
}

TEST_CASE_METHOD(Start, "start: a given step is continued from, and a run is never restarted silently") {
    TrainState state = run_to_8();
    save(state, 9);
    CHECK(start({.mode = StartMode::resume, .step = 8}).state.step == 8);
    CHECK(committed_steps(config.run.dir) == std::vector<int64_t>{8});
    expect_error(Exit::no_input, {"no checkpoint of step 9"}, [&] { start({.mode = StartMode::resume, .step = 9}); });
    set_aside(config.run.dir, 8, "damaged");
    expect_error(Exit::no_input, {"no checkpoint to resume from"}, [&] { start(kResume); });
    expect_error(Exit::no_input, {"every checkpoint has been set aside", "--fresh"}, [&] { start(kAuto); });
}
