// The predicted step of a grid of ranks, compared with published formulas and with steps computed by hand.
#include <cmath>

#include "runtime/io/files.h"
#include "runtime/performance/performance.h"
#include "test/support/expect_error.h"
#include "test/support/temporary_directory.h"

namespace {

// A pipeline whose stages each have one part: a forward pass takes 1 s, the rest 2 s.
ScalingInputs pipeline_of(int stages, int micro_steps, PipelineSchedule schedule, int chunks = 1) {
    ScalingInputs in;
    in.gpu = find_gpu("h100");
    in.gpu.flops_per_s = in.peak_share = in.tokens_per_micro_step = 1;
    in.gpus = in.gpus_per_node = in.pipeline = stages;
    in.nvlink_bytes_per_s = 1;
    in.micro_steps = micro_steps;
    const bool defers = schedule == PipelineSchedule::zero_bubble;
    const double forward = 1.0 / chunks;
    PartWork part{{{{forward}, {defers ? forward : 2 * forward}, {defers ? forward : 0}}}, {0}};
    in.stages.assign(size_t(stages), std::vector<PartWork>(size_t(chunks), part));
    in.passes = schedule_passes(schedule, stages, chunks, micro_steps);
    in.start_s = in.nvlink_hop_s = in.net_level_s = 0;
    return in;
}

bool is_near(double x, double expected) { return std::abs(x - expected) <= 1e-12 * (1 + std::abs(expected)); }

double bubble_share(const StepPrediction& step) { return step.bubble_s / step.step_s; }

}  // namespace

TEST_CASE("step time: the bubble of a pipeline matches the published formulas", "[scaling]") {
    using enum PipelineSchedule;
    for (int p : {1, 2, 4, 8})
        for (int m : {p, 2 * p, 5 * p}) {
            INFO(p << " stages, " << m << " micro-steps");
            // Narayanan et al., arXiv 2104.04473, section 2.2: (p - 1) / m of the compute, with v chunks (p - 1) / (v
            // m)
            for (const PipelineSchedule schedule : {gpipe, one_f_one_b}) {
                const StepPrediction step = predict_step(pipeline_of(p, m, schedule));
                CHECK(is_near(bubble_share(step), double(p - 1) / (m + p - 1)));
                CHECK(is_near(step.compute_s, 3 * m));
                CHECK(is_near(step.efficiency, double(m) / (m + p - 1)));
                CHECK(is_near(step.tokens_per_s, m / (3.0 * (m + p - 1))));
            }
            if (p == 1) continue;
            CHECK(is_near(bubble_share(predict_step(pipeline_of(p, m, interleaved, 2))),
                          double(p - 1) / (2 * m + p - 1)));
            // Qi et al., arXiv 2401.10241, table 1: (p - 1) (T_F + T_B - T_W)
            CHECK(is_near(predict_step(pipeline_of(p, m, zero_bubble)).bubble_s, p - 1));
        }
}

TEST_CASE("step time: stages wait for messages and for the slowest stage", "[scaling]") {
    // One micro-step on two stages: two forward and two backward passes in turn, and a message in each direction.
    ScalingInputs in = pipeline_of(2, 1, PipelineSchedule::one_f_one_b);
    in.row_bytes = 0.25;
    in.nvlink_share = 1;
    CHECK(is_near(predict_step(in).step_s, 6 + 2 * 0.25));
    in.start_s = 0.5, in.nvlink_hop_s = 0.125;
    CHECK(is_near(predict_step(in).step_s, 6 + 2 * (0.25 + 0.625)));
    // On two nodes the message crosses the network.
    in.gpus_per_node = 1;
    in.net_bytes_per_s = 0.5, in.net_share = 1, in.net_level_s = 2;
    CHECK(is_near(predict_step(in).step_s, 6 + 2 * (0.25 / 0.5 + 0.5 + 2)));

    // The second stage takes twice as long: it computes all the time but for the first forward pass and the first
    // stage's last backward pass.
    in = pipeline_of(2, 8, PipelineSchedule::one_f_one_b);
    for (PassWork& pass : in.stages[1][0].passes) pass.flops_per_token *= 2;
    const StepPrediction step = predict_step(in);
    CHECK(is_near(step.compute_s, 8 * 6));
    CHECK(is_near(step.step_s, 1 + 8 * 6 + 2));
    CHECK(is_near(step.efficiency, (8 * 6 + 8 * 3) / 2.0 / step.step_s));
}

TEST_CASE("step time: ranks that divide layers and sequences wait for their collectives", "[scaling]") {
    ScalingInputs in = pipeline_of(1, 3, PipelineSchedule::one_f_one_b);
    in.gpus = in.gpus_per_node = 4, in.tensor = 4;
    in.tokens_per_micro_step = 2;
    in.row_bytes = 10;
    in.nvlink_share = 1;
    in.stages[0][0].passes[Pass::forward].collectives = 4;
    in.stages[0][0].passes[Pass::backward].collectives = 6;
    in.stages[0][0].passes[Pass::forward].ring_bytes_per_token = 8;
    StepPrediction step = predict_step(in);
    CHECK(is_near(step.compute_s, 3 * 3 * 2.0 / 4));
    CHECK(is_near(step.exposed_s, 3 * (4 + 6) * 20 * 0.75));  // (t - 1) / t of B T C elements in each collective
    CHECK(is_near(step.communication.nvlink_bytes, step.exposed_s));
    CHECK(is_near(step.tokens_per_s, 6 / step.step_s));  // all ranks compute the same samples

    // Each of 2 x 2 ranks has half of the rows; keys and values of the other half pass once around the ring.
    in.tensor = in.context = 2;
    step = predict_step(in);
    CHECK(is_near(step.compute_s, 3 * 3 * 2.0 / 4));
    CHECK(is_near(step.exposed_s, 3 * ((4 + 6) * 10 * 0.5 + 8 * 0.5)));
    // Attention hides the ring while it computes, here for the whole forward pass.
    in.stages[0][0].passes[Pass::forward].attention_flops = 1;
    CHECK(is_near(predict_step(in).exposed_s, step.exposed_s - 3 * 0.5));
}

TEST_CASE("step time: groups of distant ranks use the network", "[scaling]") {
    ScalingInputs in = pipeline_of(1, 1, PipelineSchedule::one_f_one_b);
    in.gpus = 64, in.gpus_per_node = 8;
    // Neighbors fill a node; with a stride of 2 four of them are on a node, with a stride of 8 one.
    for (const auto& [group, on_node] : {std::pair(RankGroup{8, 1}, 8), {{32, 2}, 4}, {{8, 8}, 1}, {{4, 16}, 1}}) {
        INFO(group.ranks << " ranks with a stride of " << group.stride);
        const CommTime time = collective_time(1e9, group, in);
        const double nodes = double(group.ranks) / on_node;
        CHECK(is_near(time.nvlink_bytes, 1e9 * (on_node - 1) / on_node));
        CHECK(is_near(time.net_bytes, 1e9 / on_node * (nodes - 1) / nodes));
    }
}

TEST_CASE("step time: data parallelism reduces the gradients of a rank's part", "[scaling]") {
    // 2 stages x 2 ranks with different samples x 2 ranks that divide the layers.
    ScalingInputs in = pipeline_of(2, 4, PipelineSchedule::one_f_one_b);
    in.gpus = in.gpus_per_node = 8, in.tensor = 2;
    in.nvlink_share = 1, in.overlap_slowdown = 0;
    in.grad_wire_bytes = 1, in.param_wire_bytes = 0.5;
    for (auto& stage : in.stages) stage[0].bucket_elements = {0, 4, 4};
    const StepPrediction alone = predict_step(pipeline_of(2, 4, PipelineSchedule::one_f_one_b));
    const double hidden[] = {8, 4, 4 * 4};  // bytes: reduce-scatter and all-gather, reduce-scatter, in each micro-step
    for (in.zero_stage = 0; in.zero_stage <= 2; in.zero_stage++) {
        INFO("ZeRO " << in.zero_stage);
        const StepPrediction step = predict_step(in);
        CHECK(is_near(step.communication.nvlink_bytes, hidden[in.zero_stage] + (in.zero_stage > 0 ? 2 : 0)));
        CHECK(step.step_s > alone.step_s / 2);
        CHECK(is_near(step.tokens_per_s, 2 * 4 / step.step_s));
    }
    // A last backward pass of 1 s hides 1 of the 8 s; a stage that begins later has gathered its parameters by then.
    in.zero_stage = 0;
    CHECK(is_near(predict_step(in).step_s, alone.step_s / 2 + 8 - 1));

    // Two ranks with different samples and whole layers. The first stage gathers its parameters in 2 s, longer than its
    // forward pass; the second one has its own when the activations arrive.
    in = pipeline_of(2, 1, PipelineSchedule::one_f_one_b);
    in.gpus = in.gpus_per_node = 4;
    in.nvlink_share = 1, in.overlap_slowdown = 0;
    in.grad_wire_bytes = 0, in.param_wire_bytes = 1, in.zero_stage = 1;
    for (auto& stage : in.stages) stage[0].bucket_elements = {0, 4};
    CHECK(is_near(predict_step(in).step_s, 2 + 1 + 2 + 2));
    // Passes of weights complete the gradients: 8 s of reductions begin with the last one, a second before the end.
    in = pipeline_of(2, 2, PipelineSchedule::zero_bubble);
    in.gpus = in.gpus_per_node = 4;
    in.nvlink_share = 1, in.overlap_slowdown = 0, in.grad_wire_bytes = 1;
    for (auto& stage : in.stages) stage[0].bucket_elements = {0, 8};
    CHECK(is_near(predict_step(in).step_s, 3 * 2 + 1 - 1 + 8));
}

TEST_CASE("step time: ranks share cores, and an update of shards is shorter", "[scaling]") {
    ScalingInputs in = pipeline_of(1, 3, PipelineSchedule::one_f_one_b);
    in.cores = 2, in.contention = 0.25;
    CHECK(is_near(predict_step(in).step_s, 9));
    in.gpus = 2, in.gpus_per_node = 4;
    CHECK(is_near(predict_step(in).step_s, 9 * 1.25));
    in.gpus = 4;
    CHECK(is_near(predict_step(in).step_s, 9 * 1.25 * 2));
    // Stages: with one micro-step only one of them computes at a time.
    in = pipeline_of(4, 1, PipelineSchedule::one_f_one_b);
    in.cores = 2, in.contention = 0.25;
    CHECK(is_near(predict_step(in).step_s, 4 * 3));
    // With many micro-steps the cores are never idle.
    in = pipeline_of(4, 64, PipelineSchedule::one_f_one_b);
    in.cores = 2;
    CHECK(predict_step(in).step_s >= 64 * 3 * 4 / 2.0);
    CHECK(predict_step(in).step_s <= 64 * 3 * 4 / 2.0 + 4 * 3);

    in = pipeline_of(1, 3, PipelineSchedule::one_f_one_b);
    in.gpus = in.gpus_per_node = 8;
    in.stages[0][0].bucket_elements = {100, 300};
    for (in.zero_stage = 0; in.zero_stage < 4; in.zero_stage++) {
        in.update_s_per_element = 0;
        const double before_s = predict_step(in).step_s;
        in.update_s_per_element = 0.01;
        CHECK(is_near(predict_step(in).step_s - before_s, in.zero_stage == 0 ? 4 : 0.5));
    }
    in.zero_stage = 0, in.nvlink_share = 0.5, in.gpu.has_nvlink = true, in.gpu.pcie_bytes_per_s = 0;
    const double before_s = predict_step(in).step_s;
    in.update_host_bytes = 30;
    CHECK(predict_step(in).step_s == before_s);  // the rate is not known
    in.gpu.pcie_bytes_per_s = 10;
    CHECK(is_near(predict_step(in).step_s - before_s, 6));
}

TEST_CASE("step time: a machine is a GPU, CPU ranks or a file of constants", "[scaling]") {
    CHECK(machine_named("h200").nvlink_bytes_per_s == 450e9);
    CHECK(std::string(machine_of_device("NVIDIA H200").gpu.name) == "h200");
    CHECK(std::string(machine_of_device("").gpu.name) == "cpu");
    expect_error(Exit::config, {"parallel.auto", "NVIDIA T4", "parallel.tensor"},
                 [] { machine_of_device("NVIDIA T4"); });
    const TemporaryDirectory folder;
    const std::string path = folder.path() + "/machine.json";
    write_file_atomically(path, R"({"flops_per_s": 2e9, "link_bytes_per_s": 3e9, "cores": 2})");
    const ScalingInputs machine = machine_named(path);
    CHECK((machine.gpu.flops_per_s == 2e9 && machine.nvlink_bytes_per_s == 3e9 && machine.cores == 2));
    CHECK(machine.peak_share == 1);
    for (const char* text : {R"({"flops": 2e9})", R"({"cores": -1})", R"({"cores": "2"})"}) {
        write_file_atomically(path, text);
        expect_error(Exit::usage, {path, "constant"}, [&] { machine_named(path); });
    }
}
