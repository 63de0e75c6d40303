
#include "runtime/checkpoint/shard.h"
#include "runtime/io/digest.h"
#include "runtime/io/files.h"
#include "test/support/expect_error.h"
#include "test/support/temporary_directory.h"
#include "test/support/toy_checkpoint.h"

namespace {

const std::vector<std::vector<size_t>> kShapes = {{61}, {7, 3}};

// Whether opening fails because of damage or a missing file, not for another reason.
bool is_refused(const std::string& directory) {
    try {
        Checkpoint checkpoint(directory);
        return false;
    } catch (const Error& error) {
        return error.code == Exit::data || error.code == Exit::no_input;
    }
}

// The number of damaged versions of a file, out of `cases`, that are accepted as valid. Restores the file.
template <class Damage> size_t count_accepted(const std::string& path, size_t cases, Damage damage) {
    std::string content = read_file(path), directory = path.substr(0, path.rfind('/'));
    size_t accepted = 0;
    for (size_t i = 0; i < cases; i++) {
        overwrite(path, damage(content, i));
        accepted += !is_refused(directory);
    }
    overwrite(path, content);
    return accepted;
}

struct Saved {
    TemporaryDirectory run;
    std::string directory = save_toy(run.path(), 100, ToyModel(1, kShapes)).directory;
    std::string path(const std::string& name) const { return directory + "/" + name; }
    ~Saved() { CHECK(!is_refused(directory)); }  // only the damage was rejected
};

const std::vector<std::string> kFiles = {"COMMIT", "MANIFEST.json", "shard_0000.bin"};

}  // namespace

TEST_CASE("every flipped bit of a checkpoint's files is found") {
    Saved saved;
    for (const std::string& name : kFiles) {
        size_t bits = 8 * read_file(saved.path(name)).size();
        INFO(name << ", " << bits << " bits");
        CHECK(count_accepted(saved.path(name), bits, with_flipped_bit) == 0);
    }
}

TEST_CASE("flipped bits in several blocks are found and reported with their offset") {
    TemporaryDirectory run;
    std::string directory = save_toy(run.path(), 100, ToyModel(1, {{600'000}})).directory;
    std::string path = directory + "/shard_0000.bin", content = read_file(path);
    CHECK(read_manifest(directory).shards[0].xxh3_128 == xxh3_128(content));  // computed in parts, the same hash
    for (uint64_t i = 0; i < 40; i++) {
        size_t bit = (uint64_t(philox(5, 0, i).word[0]) << 32 | philox(5, 0, i).word[1]) % (8 * content.size());
        overwrite(path, with_flipped_bit(content, bit));
        std::string offset = "offset " + std::to_string(bit / 8 / kBlockBytes * kBlockBytes) + " is";
        expect_error(Exit::data, {path, offset, "must be"}, [&] { Checkpoint checkpoint(directory); });
    }
}

TEST_CASE("a checkpoint's file cut at any length, extended, or missing is rejected") {
    Saved saved;
    for (const std::string& name : kFiles) {
        INFO(name);
        std::string path = saved.path(name), content = read_file(path);
        CHECK(count_accepted(path, content.size(), [](auto& all, size_t i) { return all.substr(0, i); }) == 0);
        CHECK(count_accepted(path, 100, [](auto& all, size_t i) { return all + std::string(i + 1, '\0'); }) == 0);
        CHECK(count_accepted(path, 100, [](auto& all, size_t i) { return all + std::string(i + 1, '\n'); }) == 0);
        std::filesystem::remove(path);
        expect_error(Exit::no_input, {path}, [&] { Checkpoint checkpoint(saved.directory); });
        std::filesystem::create_directory(path);
        CHECK(is_refused(saved.directory));
        std::filesystem::remove(path);
        overwrite(path, content);
    }
}

TEST_CASE("files of another step, run or position are rejected") {
    Saved saved;
    std::string other_step = save_toy(saved.run.path(), 200, ToyModel(2, kShapes)).directory;
    TemporaryDirectory other;
    std::string other_run = save_toy(other.path(), 100, ToyModel(3, kShapes), "run-b").directory;
    for (const std::string& name : kFiles)
        for (const std::string& from : {other_step, other_run}) {
            INFO(name << " of " << from);
            std::string foreign = read_file(from + "/" + name);
            CHECK(count_accepted(saved.path(name), 1, [&](auto&, size_t) { return foreign; }) == 0);
        }
    std::string renamed = step_directory(saved.run.path(), 300);
    std::filesystem::rename(other_step, renamed);
    expect_error(Exit::data, {"step_00000300", "step 200"}, [&] { Checkpoint checkpoint(renamed); });
}

TEST_CASE("swapped shards of two ranks are rejected") {
    TemporaryDirectory run;
    ToyModel model(1, {{64}});
    Manifest manifest{.info = toy_info(1), .world_size = 2, .tensors = model.tensors(), .shards = {}};
    for (int rank : {0, 1})
        manifest.shards.push_back(write_shard(run.path(), rank, model.tensors(rank, 2), copy_part_from_device));
    commit_text(run.path(), manifest_to_text(manifest));
    CHECK(!is_refused(run.path()));
    std::string first = read_file(run / "shard_0000.bin"), second = read_file(run / "shard_0001.bin");
    overwrite(run / "shard_0000.bin", second);
    overwrite(run / "shard_0001.bin", first);
    CHECK(is_refused(run.path()));
}

TEST_CASE("a manifest that contradicts itself is rejected even if its hash is correct") {
    Saved saved;
    std::string text = read_file(saved.path("MANIFEST.json"));
    struct Case {
        const char *from, *to, *words;
    };
    const Case cases[] = {
        {"\"format\"", "\"former\"", "format is missing"},
        {"train_gpt checkpoint", "train_gpt\\u001b[31m", "\\u001b"},
        {"\"version\": 2", "\"version\": 0", "version 0"},
        {"\"version\": 2", "\"version\": 1.0", "version must be an integer"},
        {"\"step\": 100", "\"step\": -1", "step must be an integer from 0 to 1000000000, is -1"},
        {"\"step\": 100", "\"step\": 4294967297", "is 4294967297"},
        {"\"step\": 100", "\"step\": 1000000001", "is 1000000001"},
        {"\"parent_step\": -1", "\"parent_step\": 101", "parent_step is 101, but step is 100"},
        {"\"updates\": 0", "\"updates\": -5", "state.updates must be an integer from 0 to 1000000000, is -5"},
        {"\"updates\": 0", "\"updates\": 101", "state.updates is 101, but step is 100"},
        {"\"cursor\": 800", "\"cursor\": -1", "state.cursor"},
        {"\"good_steps\": 0", "\"good_steps\": 101", "state.loss_scale.good_steps is 101"},
        {"\"skipped_in_a_row\": 0", "\"skipped_in_a_row\": 101", "skipped_in_a_row is 101"},
        {"\"total_skipped\": 0", "\"total_skipped\": 101", "total_skipped is 101"},
        {"\"last_good_step\": 0", "\"last_good_step\": 101", "last_good_step is 101"},
        {"\"step\": 100", "\"step\": 18446744073709551615", "is 18446744073709551615"},
        {"\"step\": 100", "\"step\": 100, \"step\": 100", "step"},
        {"\"step\": 100", "\"step\": 100, \"other\": 1", "keys"},
        {"\"healthy\": true", "\"healthy\": 1", "true or false"},
        {"\"state\": {", "\"state\": 0, \"x\": {", "must be an object"},
        {"\"world_size\": 1", "\"world_size\": 2", "1 shards"},
        {"\"world_size\": 1", "\"world_size\": 0", "world_size must be an integer from 1 to 2147483647, is 0"},
        {"\"world_size\": 1", "\"world_size\": 4294967297", "4294967297"},
        {"\"dtype\": \"fp32\"", "\"dtype\": \"fp64\"", "fp64"},
        {"\"dtype\": \"fp32\"", "\"dtype\": \"bf16\"", "offset"},
        {"\"name\": \"tensor/0\"", "\"name\": \"tensor/1\"", "twice"},
        {"\"name\": \"tensor/0\"", "\"name\": \"\"", "not a valid name"},
        {"\"name\": \"tensor/0\"", "\"name\": \"other\"", "not listed"},
        {"   61\n", "   62\n", "61 of 62"},
        {"   61\n", "   60\n", "has 60"},
        {"   61\n", "   -61\n", "-61"},
        {"   61\n", "   61.0\n", "61.0"},
        {"   61\n", "   9223372036854775807, 4\n", "63 bits"},
        {"   61\n", "   2305843009213693952\n", "63 bits"},
        {"   61\n", "   4611686018427387904, 4\n", "63 bits"},
        {"shard_0000.bin", "shard_0001.bin", "shard_0000.bin"},
        {"shard_0000.bin", "../shard_0000.bin", "shard_0000.bin"},
        {"shard_0000.bin", "/etc/passwd", "shard_0000.bin"},
        {"\"bytes\": 328", "\"bytes\": 332", "end at 328 of 332"},
        {"\"bytes\": 328", "\"bytes\": 324", "end by 324"},
        {"\"bytes\": 328", "\"bytes\": 9223372036854775807", "hexadecimal digits"},
        {"\"crc32c_of_each_mib\": \"", "\"crc32c_of_each_mib\": \"0", "hexadecimal digits"},
        {"\"xxh3_128\": \"", "\"xxh3_128\": \"0", "hexadecimal digits"},
        {"\"file_offset\": 0", "\"file_offset\": 4", "must be at 0"},
        {"\"first\": 0", "\"first\": 1", "61"},
        {"\"count\": 61", "\"count\": 0", "shards[0].pieces[0].count must be an integer from 1"},
        {"\"count\": 61", "\"count\": 18446744073709551615", "is 18446744073709551615"},
        {"\"tensor\": \"tensor/0\"", "\"tensor\": \"tensor/1\"", "tensor/1"},
    };
    for (const Case& c : cases) {
        INFO(c.from << " -> " << c.to);
        commit_text(saved.directory, replaced(text, c.from, c.to));
        expect_error(Exit::data, {"MANIFEST.json", c.words}, [&] { Checkpoint checkpoint(saved.directory); });
    }
    std::string shard = read_file(saved.path("shard_0000.bin"));
    commit_text(saved.directory, replaced(text, xxh3_128(shard), xxh3_128("something else")));
    expect_error(Exit::data, {"shard_0000.bin", xxh3_128(shard)}, [&] { Checkpoint checkpoint(saved.directory); });
    commit_text(saved.directory, text);
}
