#include <cerrno>
#include <cmath>
#include <limits>
#include <tuple>

#include "runtime/checkpoint/shard.h"
#include "runtime/io/crc32c.h"
#include "runtime/io/digest.h"
#include "runtime/io/files.h"
#include "test/support/expect_error.h"
#include "test/support/system_faults.h"
#include "test/support/temporary_directory.h"
#include "test/support/toy_checkpoint.h"

namespace {

// Larger than a block, not a multiple of one; a single number; a tensor without elements; a small tensor.
const std::vector<std::vector<size_t>> kShapes = {{1031, 509}, {}, {0, 7}, {3, 5, 7}};

bool has_only(const std::string& directory, std::vector<std::string> names) {
    return list_directory(directory) == names;
}

std::string save_with_ranks(const std::string& run_dir, int64_t step, ToyModel& model, int ranks) {
    std::vector<std::vector<NamedTensor>> parts;
    for (int rank = 0; rank < ranks; rank++) parts.push_back(model.tensors(rank, ranks));
    return save_parts(run_dir, step, model.tensors(), parts);
}

}  // namespace

TEST_CASE("checksums have their published values") {
    CHECK(crc32c("123456789", 9) == 0xe3069283u);  // RFC 3720's polynomial, the check value of the CRC catalogue
    CHECK(crc32c("", 0) == 0);
    CHECK(xxh3_128("") == "99aa06d3014798d86001c324468d497f");
}

TEST_CASE("loading a checkpoint restores every bit and all of its metadata") {
    TemporaryDirectory run;
    ToyModel saved(1, kShapes), loaded(2, kShapes);
    saved.values()[0][7] = -0.0f;
    TrainState info = toy_info(100);
    info.parent_step = 50;
    info.progress.updates = 49;
    info.progress.cursor = uint64_t(std::numeric_limits<int64_t>::max());
    info.progress.loss_scale.scale = 0.1f + 0.2f;
    info.progress.trained_s = 0.1 + 0.2;
    info.progress.course_by_time = {.end_step = 120, .cooldown_begin = 99};
    info.progress.best = {.loss = 1.0 / 3, .step = 80, .worse_since = 2};
    info.progress.noise = {.noise = -2.0 / 3, .signal = -1e-7};
    SaveStats stats = save_checkpoint(run.path(), comm_single(), info, saved.tensors());
    CHECK(stats.bytes == (1031 * 509 + 1 + 3 * 5 * 7) * sizeof(float));
    CHECK(stats.directory == step_directory(run.path(), 100));
    CHECK(has_only(checkpoints_directory(run.path()), {"step_00000100"}));
    CHECK(has_only(stats.directory, {"COMMIT", "MANIFEST.json", "shard_0000.bin"}));
    CHECK(committed_steps(run.path()) == std::vector<int64_t>{100});

    Checkpoint checkpoint(stats.directory);
    checkpoint.load(loaded.tensors());
    CHECK(loaded == saved);
    const TrainState& read = checkpoint.manifest().info;
    CHECK(read.healthy);
    CHECK(read.step == 100);
    CHECK(read.parent_step == 50);
    CHECK(read.run_id == info.run_id);
    CHECK(read.config == info.config);
    CHECK(read.config_digest == info.config_digest);
    CHECK(read.dataset_digest == info.dataset_digest);
    CHECK(read.progress.updates == 49);
    CHECK(read.progress.cursor == info.progress.cursor);
    CHECK(read.progress.loss_scale.scale == info.progress.loss_scale.scale);
    CHECK(read.progress.trained_s == info.progress.trained_s);
    CHECK(read.progress.course_by_time == info.progress.course_by_time);
    CHECK(read.progress.best == info.progress.best);
    CHECK(read.progress.noise == info.progress.noise);
}

TEST_CASE("any number of ranks can load a checkpoint from any number of ranks") {
    TemporaryDirectory run;
    ToyModel saved(3, kShapes);
    for (int writers : {1, 2, 3, 8}) {
        Checkpoint checkpoint(save_with_ranks(run.path(), writers, saved, writers));
        for (int readers : {1, 2, 3, 5}) {
            ToyModel loaded(4, kShapes);
            for (int rank = 0; rank < readers; rank++) checkpoint.load(loaded.tensors(rank, readers));
            INFO(writers << " writers, " << readers << " readers");
            CHECK(loaded == saved);
        }
    }
}

TEST_CASE("the GEMM algorithms in a checkpoint of an earlier version are ignored") {
    TemporaryDirectory run;
    ToyModel saved(1, {{5}}), loaded(2, {{5}});
    const std::string directory = save_toy(run.path(), 1, saved).directory;
    const std::string text = read_file(directory + "/MANIFEST.json");
    std::string earlier = text;
    earlier.replace(earlier.find("\"updates\""), 0, "\"device_choices\": \"cublaslt 130100\",");
    commit_text(directory, earlier);

    Checkpoint checkpoint(directory);
    checkpoint.load(loaded.tensors());
    CHECK(loaded == saved);
    CHECK(manifest_to_text(checkpoint.manifest()) == text);
}

TEST_CASE("a load changes no tensor unless all tensors match") {
    TemporaryDirectory run;
    ToyModel model(1, {{4, 3}, {5}}), untouched(2, {{4, 3}, {5}}), target(2, {{4, 3}, {5}});
    Checkpoint checkpoint(save_toy(run.path(), 1, model).directory);

    auto missing = target.tensors();
    missing.push_back({"tensor/9", {2}});
    expect_error(Exit::data, {"step_00000001", "no tensor tensor/9"}, [&] { checkpoint.load(missing); });
    auto left_over = target.tensors();
    left_over.pop_back();
    expect_error(Exit::data, {"tensor/1", "model does not have"}, [&] { checkpoint.load(left_over); });
    auto other_shape = target.tensors();
    other_shape[1].shape = {1, 5};
    expect_error(Exit::data, {"tensor/1", "fp32 (5)", "fp32 (1, 5)"}, [&] { checkpoint.load(other_shape); });
    auto other_type = target.tensors();
    other_type[1].values.dtype = Dtype::bf16;
    expect_error(Exit::data, {"tensor/1", "bf16 (5)"}, [&] { checkpoint.load(other_type); });
    auto twice = target.tensors();
    twice.push_back(twice[0]);
    expect_error(Exit::internal, {"tensor/0", "twice"}, [&] { checkpoint.load(twice); });
    auto beyond = target.tensors();
    beyond[0].first = 1;
    expect_error(Exit::internal, {"tensor/0", "12"}, [&] { checkpoint.load(beyond); });
    CHECK(target == untouched);

    checkpoint.load(left_over, OtherTensors::ignore);
    CHECK(target.values()[0] == model.values()[0]);
    CHECK(target.values()[1] == untouched.values()[1]);
}

TEST_CASE("loading only the weights converts FP32 to BF16 and back") {
    TemporaryDirectory run;
    ToyModel wide(1, kShapes), exact(2, kShapes);
    std::vector<std::vector<bf16>> narrow;
    std::vector<NamedTensor> tensors = wide.tensors();
    for (size_t i = 0; i < tensors.size(); i++) {
        narrow.emplace_back(wide.values()[i].size());
        tensors[i].values = View(narrow[i].data());
    }
    Checkpoint(save_toy(run.path(), 1, wide).directory).load(tensors, OtherTensors::ignore);
    bool is_rounded = true, is_exact = true;
    for (size_t i = 0; i < narrow.size(); i++)
        for (size_t e = 0; e < narrow[i].size(); e++)
            is_rounded = is_rounded && narrow[i][e].bits == from_float<bf16>(wide.values()[i][e]).bits;
    CHECK(is_rounded);
    const SaveStats stats = save_checkpoint(run.path(), comm_single(), toy_info(2), tensors);
    Checkpoint(stats.directory).load(exact.tensors(), OtherTensors::ignore);
    for (size_t i = 0; i < narrow.size(); i++)
        for (size_t e = 0; e < narrow[i].size(); e++)
            is_exact = is_exact && exact.values()[i][e] == to_float(narrow[i][e]);
    CHECK(is_exact);
}

TEST_CASE("a value that is not finite makes a checkpoint unhealthy") {
    for (float value :
         {std::nanf(""), std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity()}) {
        TemporaryDirectory run;
        ToyModel model(1, kShapes);
        model.values()[0].back() = value;
        save_toy(run.path(), 1, model);
        CHECK(!read_manifest(step_directory(run.path(), 1)).info.healthy);
    }
    TemporaryDirectory run;
    ToyModel model(1, {{2}});
    model.values()[0] = {std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min()};
    CHECK(read_manifest(save_toy(run.path(), 1, model).directory).info.healthy);
}

TEST_CASE("a checkpoint that could not be loaded is not committed") {
    TemporaryDirectory run;
    ToyModel model(1, {{4, 3}, {5}});
    auto save = [&](const TrainState& info, const std::vector<NamedTensor>& tensors) {
        save_checkpoint(run.path(), comm_single(), info, tensors);
    };
    auto expect_nothing_left = [&] { CHECK(has_only(checkpoints_directory(run.path()), {})); };

    auto hole = model.tensors();
    hole[0].count--;
    expect_error(Exit::data, {"tensor/0", "11 of 12"}, [&] { save(toy_info(1), hole); });
    expect_nothing_left();
    auto twice = model.tensors();
    twice.push_back(twice[0]);
    expect_error(Exit::data, {"tensor/0", "twice"}, [&] { save(toy_info(1), twice); });
    expect_nothing_left();
    TrainState info = toy_info(1);
    info.progress.loss_scale.scale = std::nanf("");
    expect_error(Exit::data, {"state.loss_scale.scale", "is null"}, [&] { save(info, model.tensors()); });
    expect_nothing_left();
    auto failing = model.tensors();
    failing[1].values.data = nullptr;  // detected after tensor 0 has been written
    expect_error(Exit::internal, {"tensor/1", "no values"}, [&] { save(toy_info(1), failing); });
    expect_nothing_left();

    save(toy_info(1), model.tensors());
    CHECK(has_only(checkpoints_directory(run.path()), {"step_00000001"}));
}

TEST_CASE("a commit sets aside the checkpoints after the step that the run continued from") {
    TemporaryDirectory run;
    auto model = [](int64_t step) { return ToyModel(uint64_t(step), {{5}}); };
    for (int64_t step : {10, 20, 30}) save_toy(run.path(), step, model(step));
    const std::string before = read_file(step_directory(run.path(), 20) + "/shard_0000.bin");
    save_toy(run.path(), 20, model(21));
    CHECK(has_only(checkpoints_directory(run.path()),
                   {"step_00000010", "step_00000020", "superseded.step_00000020.1", "superseded.step_00000030.1"}));
    CHECK(read_file(checkpoints_directory(run.path()) + "/superseded.step_00000020.1/shard_0000.bin") == before);
    CHECK(read_file(step_directory(run.path(), 20) + "/shard_0000.bin") != before);
}

TEST_CASE("a run can continue from the checkpoint of any step") {
    TemporaryDirectory run;
    std::vector<std::string> reports;
    auto open = [&](int64_t step) {
        return open_step(run.path(), step, [&](const std::string& line) { reports.push_back(line); });
    };
    expect_error(Exit::no_input, {run.path(), "step 10"}, [&] { open(10); });
    for (int64_t step : {10, 20, 30}) save_toy(run.path(), step, ToyModel(uint64_t(step), {{5}}));
    expect_error(Exit::no_input, {"step 15", "available steps: 10, 20, 30"}, [&] { open(15); });
    overwrite(step_directory(run.path(), 10) + "/COMMIT", "");
    expect_error(Exit::data, {"step_00000010"}, [&] { open(10); });
    CHECK(reports.empty());  // a failed attempt changes nothing
    CHECK(committed_steps(run.path()).size() == 3);
    CHECK(open(20).manifest().info.step == 20);
    CHECK(reports.size() == 1);
    CHECK(
        has_only(checkpoints_directory(run.path()), {"step_00000010", "step_00000020", "superseded.step_00000030.1"}));
}

TEST_CASE("a checkpoint that is set aside stays aside after a power cut") {
    TemporaryDirectory run;
    save_toy(run.path(), 1, ToyModel(1, kShapes));
    bool is_over = false;
    const auto put_aside = [&] {
        set_aside(run.path(), 1, "superseded");
        is_over = true;
    };
    CHECK(stop_at_sync(checkpoints_directory(run.path()), put_aside, [&] {
        CHECK_FALSE(is_over);
        CHECK(has_only(checkpoints_directory(run.path()), {"superseded.step_00000001.1"}));
    }));
}

TEST_CASE("an older checkpoint replaces one that cannot be read, which stays unchanged") {
    for (const auto& [file, error, code] : {std::tuple{"shard_0000.bin", EIO, Exit::io},
                                            {"MANIFEST.json", EIO, Exit::io},
                                            {"COMMIT", EACCES, Exit::permission}}) {
        INFO(file);
        TemporaryDirectory run;
        for (int64_t step : {10, 20}) save_toy(run.path(), step, ToyModel(uint64_t(step), {{300'000}}));
        std::vector<std::string> reports;
        auto find = [&] {
            return find_newest_valid(run.path(), [&](const std::string& line) { reports.push_back(line); });
        };
        {
            const SystemFault fault(SystemCall::read, std::string("step_00000020/") + file, error);
            const auto found = find();
            REQUIRE(found);
            CHECK(found->manifest().info.step == 10);
            REQUIRE(reports.size() == 1);
            CHECK_THAT(reports[0], ContainsSubstring("step 20 cannot be read") && ContainsSubstring(file) &&
                                       ContainsSubstring(std::strerror(error)));
        }
        CHECK(committed_steps(run.path()) == std::vector<int64_t>{10, 20});
        {
            const SystemFault fault(SystemCall::read, std::string("/") + file, error);
            expect_error(code, {run.path(), "no checkpoint can be read", file}, find);
        }
        CHECK(committed_steps(run.path()) == std::vector<int64_t>{10, 20});
        CHECK(find()->manifest().info.step == 20);
    }
}

TEST_CASE("a disk that fails or returns other bytes while a checkpoint is loaded is reported") {
    TemporaryDirectory run;
    ToyModel model(1, {{300'000}, {3}}), target(2, {{300'000}, {3}});
    const Checkpoint checkpoint(save_toy(run.path(), 1, model).directory);
    const std::string path = checkpoint.directory() + "/shard_0000.bin";
    {
        const SystemFault fault(SystemCall::read, "shard_0000.bin", EIO);
        expect_error(Exit::io, {path, "offset 0"}, [&] { checkpoint.load(target.tensors()); });
    }
    const std::string bytes = read_file(path);
    overwrite(path, with_flipped_bit(bytes, 8 * ((1 << 20) + 5)));
    expect_error(Exit::data, {path, "at offset 1048576", "CRC32C"}, [&] { checkpoint.load(target.tensors()); });
    overwrite(path, bytes);
    checkpoint.load(target.tensors());
    CHECK(target == model);
}

TEST_CASE("checkpoints that cannot be listed are not treated as absent") {
    TemporaryDirectory run;
    auto find = [&] { return find_newest_valid(run.path(), [](const std::string&) {}); };
    CHECK_FALSE(has_checkpoints(run.path()));
    save_toy(run.path(), 1, ToyModel(1, {{3}}));
    for (const int error : {EIO, ESTALE, EACCES}) {
        for (const SystemCall call : {SystemCall::examine, SystemCall::list}) {
            const SystemFault fault(call, "/checkpoints", error);
            expect_error(error == EACCES ? Exit::permission : Exit::io,
                         {run.path() + "/checkpoints", std::strerror(error)}, find);
        }
    }
    std::filesystem::rename(run / "checkpoints", run / "elsewhere");
    std::filesystem::create_symlink("elsewhere", run / "checkpoints");
    CHECK(find());
    std::filesystem::rename(run / "elsewhere", run / "unmounted");
    expect_error(Exit::io, {run.path() + "/checkpoints", "is the target of the link mounted"}, find);
    std::filesystem::rename(run / "unmounted", run / "elsewhere");
    CHECK(find());
}

TEST_CASE("a save reserves disk space before it begins") {
    TemporaryDirectory run;
    check_space(run.path(), 1000);
    size_t available = free_bytes(run.path());
    expect_error(Exit::io, {run.path(), std::to_string(available)}, [&] { check_space(run.path(), available); });
}

TEST_CASE("the newest valid and healthy checkpoint is found, and newer ones are set aside") {
    TemporaryDirectory run;
    std::vector<std::string> reports;
    auto find = [&] {
        return find_newest_valid(run.path(), [&](const std::string& line) { reports.push_back(line); });
    };
    CHECK(!find());

    const std::vector<std::vector<size_t>> shapes = {{300}};
    for (int64_t step : {10, 20, 30}) save_toy(run.path(), step, ToyModel(uint64_t(step), shapes));
    ToyModel unhealthy(40, shapes);
    unhealthy.values()[0][0] = std::nanf("");
    save_toy(run.path(), 40, unhealthy);
    std::string checkpoints = checkpoints_directory(run.path());
    make_directories(checkpoints + "/tmp.00000050.0badcafe");
    make_directories(checkpoints + "/deleting.step_00000001/left");
    make_directories(checkpoints + "/step_1");  // not a name that the program uses
    std::string shard = step_directory(run.path(), 30) + "/shard_0000.bin";
    overwrite(shard, with_flipped_bit(read_file(shard), 4321));

    auto found = find();
    REQUIRE(found);
    CHECK(found->manifest().info.step == 20);
    ToyModel loaded(0, shapes);
    found->load(loaded.tensors());
    CHECK(loaded == ToyModel(20, shapes));
    REQUIRE(reports.size() == 2);
    CHECK_THAT(reports[0], ContainsSubstring("step 40") && ContainsSubstring("unhealthy.step_00000040.1") &&
                               ContainsSubstring("non-finite values"));
    CHECK_THAT(reports[1], ContainsSubstring("step 30") && ContainsSubstring("shard_0000.bin") &&
                               ContainsSubstring("offset 0") && ContainsSubstring("CRC32C"));
    CHECK(has_only(checkpoints, {"damaged.step_00000030.1", "step_00000010", "step_00000020", "step_1",
                                 "unhealthy.step_00000040.1"}));

    save_toy(run.path(), 30, ToyModel(30, shapes));
    std::filesystem::remove(shard);
    for (int64_t step : {10, 20}) overwrite(step_directory(run.path(), step) + "/COMMIT", "");
    CHECK(!find());
    CHECK(reports.size() == 5);
    CHECK(directory_exists(checkpoints + "/damaged.step_00000030.2"));
}

TEST_CASE("a checkpoint of a newer program version stops the search and is not moved") {
    TemporaryDirectory run;
    for (int64_t step : {1, 2}) save_toy(run.path(), step, ToyModel(1, {{3}}));
    std::string directory = step_directory(run.path(), 2);
    std::string text = read_file(directory + "/MANIFEST.json");
    commit_text(directory, replaced(text, "\"version\": 2", "\"version\": 3"));
    expect_error(Exit::data, {"MANIFEST.json", "version 3", "versions 1 to 2"},
                 [&] { find_newest_valid(run.path(), [](const std::string&) {}); });
    CHECK(committed_steps(run.path()) == std::vector<int64_t>{1, 2});
}

TEST_CASE("retention on disk keeps the newest, other runs' and unreadable checkpoints") {
    TemporaryDirectory run;
    ToyModel model(1, {{9}});
    save_toy(run.path(), 5, model, "run-b");
    for (int64_t step : {10, 20, 30, 40, 50}) save_toy(run.path(), step, model);
    overwrite(step_directory(run.path(), 20) + "/MANIFEST.json", "{}");
    std::string shard = step_directory(run.path(), 50) + "/shard_0000.bin";
    overwrite(shard, read_file(shard).substr(1));  // so 50 does not count as newer

    make_directories(checkpoints_directory(run.path()) + "/deleting.step_00000010/left");
    CHECK(apply_retention(run.path(), "run-a", {.keep = 2}) == std::vector<int64_t>{10});
    CHECK(has_only(checkpoints_directory(run.path()),
                   {"step_00000005", "step_00000020", "step_00000030", "step_00000040", "step_00000050"}));
    CHECK(apply_retention(run.path(), "run-a", {.keep = 1}) == std::vector<int64_t>{30});
    CHECK(apply_retention(run.path(), "run-a", {.keep = 1}).empty());
}
