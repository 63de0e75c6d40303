#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <tuple>

#include "data/shards/loader.h"
#include "data/shards/permutation.h"
#include "test/support/expect_error.h"
#include "test/support/temporary_directory.h"

// Tokens of a stream in three shards: token i of the stream is i.
class LoaderFixture {
protected:
    LoaderFixture() {
        int begin = 0;
        for (int size : {41, 7, 55}) {
            ShardWriter writer(directory_.path(), format("part%zu", paths_.size()), 60'000);
            std::vector<int32_t> ids;
            for (int i = begin; i < begin + size; i++) ids.push_back(i);
            writer.append(ids);
            writer.finish();
            paths_.push_back(directory_ / writer.names().front());
            begin += size;
        }
    }
    TokenStream stream(int vocab_size = 60'000) const { return TokenStream(paths_, vocab_size); }

    static constexpr int kTokens = 103;
    TemporaryDirectory directory_;
    std::vector<std::string> paths_;
};

static std::vector<int32_t> copy_rows(const Batch& batch, const LoaderOptions& options) {
    size_t count = size_t(options.batch) * size_t(options.seq_len);
    std::vector<int32_t> values(batch.inputs, batch.inputs + count);
    values.insert(values.end(), batch.targets, batch.targets + count);
    return values;
}

// The window in a row, identified by its first token.
static uint64_t window_in_row(const Batch& batch, const LoaderOptions& options, int row) {
    const int32_t* inputs = batch.inputs + size_t(row) * size_t(options.seq_len);
    const int32_t* targets = batch.targets + size_t(row) * size_t(options.seq_len);
    for (int t = 0; t < options.seq_len; t++) {
        CHECK(inputs[t] == inputs[0] + t);
        CHECK(targets[t] == inputs[t] + 1);
    }
    CHECK(inputs[0] % options.seq_len == 0);
    return uint64_t(inputs[0] / options.seq_len);
}

TEST_CASE_METHOD(LoaderFixture, "loader: the order of samples is the same for any number of ranks and rows") {
    TokenStream tokens = stream();
    constexpr uint64_t kSamples = 72;  // of 25 windows: almost three epochs
    for (auto [world, batch] : {std::pair{1, 1}, {1, 6}, {2, 3}, {3, 2}, {3, 4}, {2, 12}}) {
        std::vector<uint64_t> windows(kSamples);
        for (int rank = 0; rank < world; rank++) {
            LoaderOptions options = {.seq_len = 4, .batch = batch, .seed = 11, .rank = rank, .world = world};
            Loader loader(tokens, options);
            CHECK(loader.windows() == 25);
            while (loader.cursor() < kSamples) {
                uint64_t first = loader.cursor() + uint64_t(rank * batch);
                Batch rows = loader.next();
                for (int row = 0; row < batch; row++)
                    windows[first + uint64_t(row)] = window_in_row(rows, options, row);
            }
            CHECK(loader.cursor() == kSamples);
        }
        for (uint64_t s = 0; s < kSamples; s++) CHECK(windows[s] == permuted(s % 25, 25, 11, uint32_t(s / 25)));
        for (size_t epoch = 0; epoch < 2; epoch++) {
            auto begin = windows.begin() + std::ptrdiff_t(25 * epoch);
            CHECK(std::set<uint64_t>(begin, begin + 25).size() == 25);
        }
    }
}

TEST_CASE_METHOD(LoaderFixture, "loader: evaluation reads the windows in order") {
    TokenStream tokens = stream();
    LoaderOptions options = {.seq_len = 5, .batch = 3, .order = SampleOrder::once};
    Loader loader(tokens, options);
    for (uint64_t s = 0; s < 18; s += 3) {
        Batch rows = loader.next();
        for (int row = 0; row < 3; row++) CHECK(window_in_row(rows, options, row) == s + uint64_t(row));
    }
}

TEST_CASE_METHOD(LoaderFixture, "loader: starting or seeking anywhere gives the same samples as reading up to there") {
    TokenStream tokens = stream();
    LoaderOptions options = {.seq_len = 4, .batch = 2, .seed = 3, .rank = 1, .world = 2};
    std::map<uint64_t, std::vector<int32_t>> expected;
    Loader straight(tokens, options);
    while (straight.cursor() < 120) {
        uint64_t cursor = straight.cursor();
        expected[cursor] = copy_rows(straight.next(), options);
    }
    Loader seeking(tokens, options);
    for (uint64_t cursor = 0; cursor < 108; cursor += 4) {
        Loader started(tokens, options, cursor);
        seeking.seek(108 - cursor);
        for (uint64_t step = 0; step < 3; step++) {
            CHECK(copy_rows(started.next(), options) == expected[cursor + 4 * step]);
            CHECK(copy_rows(seeking.next(), options) == expected[108 - cursor + 4 * step]);
        }
        CHECK(seeking.cursor() == 108 - cursor + 12);
    }
    Loader odd(tokens, options, 5);  // a cursor that is not a multiple of any size
    Loader even(tokens, {.seq_len = 4, .batch = 1, .seed = 3}, 7);
    Batch first_row = odd.next();
    Batch same = even.next();
    CHECK(std::equal(same.inputs, same.inputs + 4, first_row.inputs));
}

namespace {

// Samples per step, over all ranks, of a ramp.
int ramped_samples(int step) { return step <= 3 ? 8 : step <= 5 ? 24 : 16; }

LoaderOptions ramped_options(int rank, int world, uint64_t seed) {
    return {.seq_len = 4,
            .batch = 2,
            .seed = seed,
            .rank = rank,
            .world = world,
            .micro_steps = 24 / (2 * world),
            .micro_steps_of = [world](int step) { return ramped_samples(step) / (2 * world); }};
}

}  // namespace

TEST_CASE_METHOD(LoaderFixture,
                 "loader: with a ramp, the samples of a step depend neither on the start nor on the ranks") {
    TokenStream tokens = stream();
    for (const int world : {1, 2, 4})
        for (int rank = 0; rank < world; rank++) {
            uint64_t begin = 0;  // of the first step that is read
            for (int first_step = 1; first_step <= 8; first_step++) {
                const LoaderOptions options = ramped_options(rank, world, 11);
                Loader loader(tokens, options, begin, first_step);
                if (first_step % 2 == 0) loader.seek(0), loader.next(), loader.seek(begin, first_step);
                uint64_t step_begin = begin;
                for (int step = first_step; step < first_step + 4; step++) {
                    INFO("world " << world << ", rank " << rank << ", from step " << first_step << ", step " << step);
                    CHECK(loader.cursor() == step_begin);
                    const int micro_steps = options.micro_steps_of(step);
                    for (int row = 0; row < 2 * micro_steps; row += 2) {
                        const Batch batch = loader.next();
                        for (int i = 0; i < 2; i++) {
                            const uint64_t sample = step_begin + uint64_t(rank * 2 * micro_steps + row + i);
                            CHECK(window_in_row(batch, options, i) ==
                                  permuted(sample % 25, 25, 11, uint32_t(sample / 25)));
                        }
                    }
                    step_begin += uint64_t(ramped_samples(step));
                }
                begin += uint64_t(ramped_samples(first_step));
            }
        }
}

TEST_CASE_METHOD(LoaderFixture, "loader: wait_for_step finds the errors of its step of a ramp") {
    const TokenStream tokens = stream(100);  // only window 24 has a token of 100 or more
    for (uint64_t seed = 0; seed < 40; seed++) {
        const LoaderOptions options = ramped_options(0, 1, seed);
        Loader loader(tokens, options);
        bool has_bad_token = false;
        for (int step = 1; !has_bad_token; step++) {
            INFO("seed " << seed << ", step " << step);
            for (int i = 0; i < ramped_samples(step); i++) {
                const uint64_t sample = loader.cursor() + uint64_t(i);
                has_bad_token |= permuted(sample % 25, 25, seed, uint32_t(sample / 25)) == 24;
            }
            REQUIRE(bool(loader.wait_for_step()) == has_bad_token);
            for (int micro = 0; !has_bad_token && micro < options.micro_steps_of(step); micro++) loader.next();
        }
    }
}

// The pauses between the two seeks let the second seek occur at any point of the thread's work for the first one.
TEST_CASE_METHOD(LoaderFixture, "loader: rows read ahead for an older seek are dropped") {
    TokenStream tokens = stream();
    LoaderOptions options = {.seq_len = 1, .batch = 100, .seed = 4};
    std::vector<std::vector<int32_t>> expected;
    for (uint64_t cursor = 0; cursor < 50; cursor++) {
        Loader loader(tokens, options, cursor);
        expected.push_back(copy_rows(loader.next(), options));
    }
    Loader loader(tokens, options);
    for (size_t i = 0; i < 2000; i++) {
        size_t first = i % 50, second = i * 7 % 50;
        loader.seek(first);
        auto pause_end = std::chrono::steady_clock::now() + std::chrono::microseconds(i % 100);
        while (std::chrono::steady_clock::now() < pause_end) std::this_thread::yield();
        loader.seek(second);
        if (copy_rows(loader.next(), options) != expected[second]) FAIL("seek " << first << ", then " << second);
    }
}

TEST_CASE_METHOD(LoaderFixture, "loader: the rows in hand stay valid while the thread reads ahead") {
    TokenStream tokens = stream();
    LoaderOptions options = {.seq_len = 4, .batch = 3, .seed = 8};
    Loader reference(tokens, options), held(tokens, options);
    for (int i = 0; i < 200; i++) {
        Batch rows = held.next();
        std::vector<int32_t> before = copy_rows(rows, options);
        if (i < 20) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        CHECK(copy_rows(rows, options) == before);
        CHECK(copy_rows(reference.next(), options) == before);
    }
}

TEST_CASE_METHOD(LoaderFixture, "loader: evaluation gives every target exactly once") {
    TokenStream tokens = stream();
    for (auto [seq_len, batch, world] :
         {std::tuple{4, 3, 1}, {5, 2, 2}, {17, 3, 3}, {51, 1, 1}, {102, 1, 2}, {200, 4, 1}}) {
        std::vector<int> times(kTokens);
        uint64_t batches = 0;
        for (int rank = 0; rank < world; rank++) {
            Loader loader(
                tokens, {.seq_len = seq_len, .batch = batch, .order = SampleOrder::once, .rank = rank, .world = world});
            batches = loader.batches_per_pass();
            for (uint64_t i = 0; i < batches + 2; i++) {
                Batch rows = loader.next();
                for (int t = 0; t < batch * seq_len; t++) {
                    if (rows.targets[t] == -1) {
                        CHECK(rows.inputs[t] == 0);
                        continue;
                    }
                    CHECK(rows.targets[t] == rows.inputs[t] + 1);
                    if (i >= batches) FAIL("a target after the last batch");
                    times[size_t(rows.targets[t])]++;
                }
            }
        }
        INFO("seq_len " << seq_len << ", batch " << batch << ", world " << world);
        CHECK(times[0] == 0);
        CHECK(std::count(times.begin(), times.end(), 1) == kTokens - 1);
        CHECK((batches - 1) * uint64_t(batch * world * seq_len) < kTokens - 1);
    }
}

TEST_CASE_METHOD(LoaderFixture, "loader: overlapping evaluation gives every target once, with preceding context") {
    TokenStream tokens = stream();
    for (auto [seq_len, stride, batch] :
         {std::tuple{8, 4, 3}, {17, 1, 2}, {16, 5, 4}, {102, 7, 1}, {60, 59, 3}, {9, 9, 2}}) {
        INFO("seq_len " << seq_len << ", stride " << stride << ", batch " << batch);
        Loader loader(tokens, {.seq_len = seq_len, .batch = batch, .order = SampleOrder::once, .stride = stride});
        std::vector<int> times(kTokens);
        for (uint64_t i = 0; i < loader.batches_per_pass() + 2; i++) {
            const Batch rows = loader.next();
            for (int t = 0; t < batch * seq_len; t++) {
                const int target = rows.targets[t], position = t % seq_len;
                if (target == -1) continue;
                times[size_t(target)]++;
                CHECK(target == rows.inputs[t] + 1);
                // Context: all tokens since the start of the stream, or at least seq_len - stride tokens.
                CHECK(position + 1 >= std::min(target, seq_len - stride));
                CHECK(rows.inputs[t - position] == target - 1 - position);
            }
        }
        CHECK(times[0] == 0);
        CHECK(std::count(times.begin(), times.end(), 1) == kTokens - 1);
    }
}

TEST_CASE_METHOD(LoaderFixture, "loader: a bad token is reported when its batch is requested, and only then") {
    TokenStream tokens = stream(50);  // tokens of 50 or more are too large: window 12 of length 4 has the first one
    LoaderOptions options = {.seq_len = 4, .batch = 1, .order = SampleOrder::once};
    Loader loader(tokens, options);
    for (int i = 0; i < 12; i++) loader.next();
    for (int again = 0; again < 2; again++) {
        expect_error(Exit::data, {"part2_000000.bin", "token 2 is 50", "50 tokens"}, [&] { loader.next(); });
        CHECK(loader.cursor() == 12);
    }
    loader.seek(3);
    CHECK(window_in_row(loader.next(), options, 0) == 3);
}

TEST_CASE_METHOD(LoaderFixture, "loader: each shard of a window that spans several is checked for changes") {
    // With length 45, window 0 has tokens 0 to 45, and the shards end at 41, 48 and 103.
    const LoaderOptions options = {.seq_len = 45, .batch = 1, .order = SampleOrder::once};
    for (size_t changed = 0; changed < 3; changed++) {
        const TokenStream tokens = stream();
        std::filesystem::last_write_time(paths_[changed], std::filesystem::file_time_type::clock::now());
        Loader loader(tokens, options);
        if (changed == 2) loader.next();
        expect_error(Exit::data, {paths_[changed], "has been written to"}, [&] { loader.next(); });
    }
}

TEST_CASE_METHOD(LoaderFixture, "loader: too few tokens for one micro-batch of all ranks") {
    TokenStream tokens = stream();
    expect_error(Exit::config, {"part0_000000.bin and 2 more", "103 tokens", "25 sequences", "seq_len 4", "26"},
                 [&] { Loader loader(tokens, {.seq_len = 4, .batch = 13, .world = 2}); });
    expect_error(Exit::config, {"103 tokens", "0 sequences"},
                 [&] { Loader loader(tokens, {.seq_len = 103, .batch = 1}); });
    for (auto [seq_len, windows] : {std::pair{1, 102}, {50, 2}, {51, 2}, {52, 1}, {102, 1}})
        CHECK(Loader(tokens, {.seq_len = seq_len, .batch = 1}).windows() == uint64_t(windows));
    TokenStream nothing({}, 10);
    for (SampleOrder order : {SampleOrder::shuffled, SampleOrder::once})
        expect_error(Exit::config, {"no shard", "0 sequences"},
                     [&] { Loader loader(nothing, {.seq_len = 1, .batch = 1, .order = order}); });
}

TEST_CASE_METHOD(LoaderFixture, "loader: starts, seeks and ends at any moment") {
    TokenStream tokens = stream();
    for (uint64_t i = 0; i < 300; i++) {
        Loader loader(tokens, {.seq_len = 4, .batch = 2, .seed = i});
        if (i % 3 == 1) loader.next();
        if (i % 3 == 2) loader.seek(i);
    }
    SUCCEED();
}
