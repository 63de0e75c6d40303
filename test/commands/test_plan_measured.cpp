// Pipelines balanced by measured times: a layer takes as long as any other, and each stage has a fixed time.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>

#include "commands/plan_measured.h"
#include "model/plan.h"
#include "runtime/io/files.h"
#include "test/support/catch.h"
#include "test/support/temporary_directory.h"

namespace {

GptOptions options_of(const std::vector<int>& layers, int chunks = 1) {
    // The head has as many products as two layers: 24 C^2 + 2 C T = C V.
    GptOptions options{.shape = {.n_layer = std::accumulate(layers.begin(), layers.end(), 0),
                                 .n_head = 2,
                                 .n_embd = 16,
                                 .n_positions = 64,
                                 .vocab_size = 512},
                       .batch = 1,
                       .seq_len = 64,
                       .optimizer = {},
                       .head_rows = 8};
    options.pipeline = {.size = int(layers.size()) / chunks, .chunks = chunks, .layers = layers};
    if (chunks > 1) options.pipeline.schedule = PipelineSchedule::interleaved;
    return options;
}

// A window's record of stages with these layers and times.
std::string record(int step, const std::vector<int>& layers, const std::vector<double>& ms) {
    std::string line = format("{\"kind\":\"ranks\",\"step\":%d,\"time\":1,\"slowest_rank\":0", step);
    for (size_t stage = 0; stage < layers.size(); stage++)
        line += format(",\"stage_%zu/compute_ms\":%g,\"stage_%zu/layers\":%d", stage, ms[stage], stage, layers[stage]);
    return line + "}\n";
}

std::string plan_of(const GptOptions& options, const std::string& records) {
    const TemporaryDirectory run;
    write_file_atomically(run.path() + "/metrics.jsonl", records);
    return measured_plan(options, run.path(), HUGE_VAL);
}

}  // namespace

TEST_CASE("measured times balance the stages", "[plan_measured]") {
    // 10 ms per layer, 20 ms for the head: exactly the arithmetic. 3 and 3 layers take 30 and 50 ms, 4 and 2 take 40.
    std::string text = plan_of(options_of({1, 5}), record(21, {1, 5}, {10, 70}));
    CHECK_THAT(text, ContainsSubstring("measured in 1 windows"));
    CHECK_THAT(text, ContainsSubstring("70.00 ms, and predicted 40.00 ms with\nparallel.pipeline_layers: [4, 2]\n"));
    // The first stage's machine or embedding takes 20 ms more, which stay. The sum of times is 100 ms, of layers 80 ms:
    // a layer counts 12.5 ms. 30 + 2 * 12.5 = 55 and 70 - 2 * 12.5 = 45, with one layer less 42.5 and 57.5.
    text = plan_of(options_of({1, 5}), record(21, {1, 5}, {30, 70}));
    CHECK_THAT(text, ContainsSubstring("70.00 ms, and predicted 55.00 ms with\nparallel.pipeline_layers: [3, 3]\n"));
    // Of three windows the median; windows of other layers and of another pipeline do not count.
    text = plan_of(options_of({1, 5}), record(21, {1, 5}, {10, 70}) + record(41, {1, 5}, {11, 170}) +
                                           record(61, {1, 5}, {9, 60}) + record(81, {3, 3}, {500, 1}) +
                                           record(101, {1, 5, 1}, {500, 1, 1}));
    CHECK_THAT(text, ContainsSubstring("measured in 3 windows"));
    CHECK_THAT(text, ContainsSubstring("the slowest stage takes 70.00 ms, and predicted 40.00 ms"));
    // Already balanced.
    text = plan_of(options_of({4, 2}), record(21, {4, 2}, {40, 40}));
    CHECK_THAT(text, ContainsSubstring("40.00 ms; no other layers are predicted to be faster\n"));
}

TEST_CASE("stages balanced by measured times fit into the memory", "[plan_measured]") {
    const auto bytes_of = [](const std::vector<int>& layers) {
        GptOptions stage = options_of(layers);
        size_t most = 0;
        for (int& rank = stage.pipeline.rank; rank < 2; rank++) most = std::max(most, planned_bytes(stage));
        return double(most);
    };
    const double most = (bytes_of({4, 2}) + bytes_of({3, 3})) / 2;
    REQUIRE(most < bytes_of({4, 2}));
    const TemporaryDirectory run;
    write_file_atomically(run.path() + "/metrics.jsonl", record(21, {1, 5}, {10, 70}));
    CHECK_THAT(measured_plan(options_of({1, 5}), run.path(), most),
               ContainsSubstring("predicted 50.00 ms with\nparallel.pipeline_layers: [3, 3]\n"));
}

TEST_CASE("measured times balance the parts of interleaved stages", "[plan_measured]") {
    // Parts 0 and 2 are stage 0's; the last part has the head. A layer counts 11 ms of 132; 4 ms more stay with stage
    // 0, half of them with each of its parts, and 4 ms less with stage 1.
    const std::string text = plan_of(options_of({4, 1, 4, 1}, 2), record(21, {8, 2}, {92, 40}));
    CHECK_THAT(text, ContainsSubstring("the slowest stage takes 92.00 ms, and predicted 70.00 ms"));
    CHECK_THAT(text, ContainsSubstring("parallel.pipeline_layers: [3, 3, 3, 1]\n"));
}

TEST_CASE("measured times of other layers are refused", "[plan_measured]") {
    CHECK_THROWS_WITH(plan_of(options_of({3, 3}), record(21, {1, 5}, {10, 70})), ContainsSubstring("[3, 3] layers"));
    CHECK_THROWS_WITH(plan_of(options_of({3, 3}), ""), ContainsSubstring("has no times of pipeline stages"));
    CHECK_THROWS_WITH(plan_of(options_of({6}), record(21, {6}, {10})), ContainsSubstring("must be above 1"));
}
