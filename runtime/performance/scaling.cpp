#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "runtime/io/json.h"
#include "runtime/performance/performance.h"

namespace {

constexpr double kTera = 1e12, kGiga = 1e9, kGiB = 0x1p30;
constexpr double kForwardShare = 1.0 / 3;

CommTime operator+(const CommTime& a, const CommTime& b) {
    return {a.nvlink_bytes + b.nvlink_bytes, a.net_bytes + b.net_bytes, a.nvlink_s + b.nvlink_s, a.net_s + b.net_s,
            a.seconds + b.seconds};
}

CommTime operator*(double times, const CommTime& a) {
    return {times * a.nvlink_bytes, times * a.net_bytes, times * a.nvlink_s, times * a.net_s, times * a.seconds};
}

// The same collective on every bucket, in sequence.
struct Collectives {
    CommTime outer, layers;
    CommTime all() const { return outer + layers; }
};

Collectives collectives(double wire_bytes, const ScalingInputs& in) {
    Collectives result;
    result.outer = collective_time(in.bucket_elements[0] * wire_bytes, in);
    for (size_t i = 1; i < in.bucket_elements.size(); i++)
        result.layers = result.layers + collective_time(in.bucket_elements[i] * wire_bytes, in);
    return result;
}

// A forward or backward pass: its compute, the communication that overlaps with it, the exposed communication after it,
// and how often a step runs it.
struct Pass {
    double compute_s;
    CommTime behind;
    CommTime bare;
    int times = 1;
};

StagePrediction predict_stage(int stage, const ScalingInputs& in) {
    const double micro_step_s = in.flops_per_token * in.tokens_per_micro_step / (in.peak_share * in.gpu.flops_per_s);
    const double forward_s = kForwardShare * micro_step_s, backward_s = micro_step_s - forward_s;
    const Collectives reduce = collectives(in.grad_wire_bytes, in);
    const Collectives gather = collectives(in.param_wire_bytes, in);
    const CommTime none;

    const int others = in.micro_steps - 1;
    Pass first_forward{forward_s, none, none}, forward{forward_s, none, none, others};
    Pass backward{backward_s, none, none, others}, last_backward{backward_s, reduce.layers, reduce.outer};
    if (stage == 0) last_backward = {backward_s, 2 * reduce.layers, 2 * reduce.outer};
    if (stage >= 1) first_forward = {forward_s, gather.layers, gather.outer};
    // Between micro-steps the outer bucket can overlap with another pass.
    if (stage >= 2) backward.behind = reduce.all();
    if (stage == 3) {
        forward.behind = gather.all();
        backward.behind = backward.behind + gather.all();
        last_backward.behind = last_backward.behind + gather.all();
    }

    StagePrediction step;
    for (const Pass& pass : {first_forward, forward, backward, last_backward}) {
        const double t = pass.behind.seconds, c = pass.compute_s;
        const double seconds = std::max(t, c + in.overlap_slowdown * t);
        const double exposed = std::max(t - c, 0.0);
        step.communication = step.communication + double(pass.times) * (pass.behind + pass.bare);
        step.compute_s += pass.times * c;
        step.exposed_s += pass.times * (exposed + pass.bare.seconds);
        step.slowdown_s += pass.times * (seconds - c - exposed);
    }
    step.step_s = step.compute_s + step.exposed_s + step.slowdown_s;
    step.tokens_per_s = in.gpus * (in.micro_steps * in.tokens_per_micro_step) / step.step_s;
    step.efficiency = step.compute_s / step.step_s;
    return step;
}

}  // namespace

double parse_rate(const std::string& text, const std::string& option) {
    static const std::map<std::string_view, double> kUnits = {
        {"", 1},         {"B/s", 1},        {"kB/s", 1e3},     {"MB/s", 1e6},     {"GB/s", 1e9},     {"TB/s", 1e12},
        {"b/s", 1. / 8}, {"kb/s", 1e3 / 8}, {"Mb/s", 1e6 / 8}, {"Gb/s", 1e9 / 8}, {"Tb/s", 1e12 / 8}};
    double number = 0;
    const char* const end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, number);
    const auto unit = kUnits.find(std::string_view(rest, end).substr(rest != end && *rest == ' '));
    const double rate = unit == kUnits.end() ? 0 : number * unit->second;
    if (error != std::errc() || !(rate > 0) || !std::isfinite(rate))
        fail(Exit::usage, "%s: %s is not a valid rate, expected bytes or bits per second: 450GB/s, 400Gb/s, 50e9",
             option, printed(text));
    return rate;
}

void check_nodes(int gpus, int gpus_per_node) {
    if (gpus > gpus_per_node && gpus % gpus_per_node != 0)
        fail(Exit::usage, "--gpus %d must be at most --gpus-per-node %d, or a multiple of it", gpus, gpus_per_node);
}

CommTime collective_time(double bytes, const ScalingInputs& in) {
    const int ranks = std::min(in.gpus, in.gpus_per_node), nodes = in.gpus / ranks;
    if (in.gpus == 1) return {};
    CommTime time;
    time.nvlink_bytes = bytes * (ranks - 1) / ranks;
    time.net_bytes = bytes / ranks * (nodes - 1) / nodes;
    const double nvlink_latency_s = (ranks - 1) * (in.gpu.has_nvlink ? in.nvlink_hop_s : in.pcie_hop_s);
    const double net_latency_s = std::log2(nodes) * in.net_level_s;
    const double nvlink_s = time.nvlink_bytes / (in.nvlink_bytes_per_s * in.nvlink_share);
    const double net_s = time.net_bytes / (in.net_bytes_per_s * in.net_share);
    time.nvlink_s = nvlink_latency_s + nvlink_s;
    time.net_s = net_latency_s + net_s;
    time.seconds = in.start_s + nvlink_latency_s + net_latency_s + std::max(nvlink_s, net_s);
    return time;
}

std::array<StagePrediction, 4> predict_scaling(const ScalingInputs& in) {
    require(!in.bucket_elements.empty(), "scaling: the outer bucket is missing");
    require(in.gpus >= 1 && in.gpus_per_node >= 1 && in.micro_steps >= 1 && in.nvlink_bytes_per_s > 0 &&
                in.net_bytes_per_s > 0 && in.peak_share > 0 && in.gpu.flops_per_s > 0 && in.flops_per_token > 0 &&
                in.tokens_per_micro_step > 0,
            "scaling: counts, rates, shares, FLOPs and tokens must be positive");
    check_nodes(in.gpus, in.gpus_per_node);
    return {predict_stage(0, in), predict_stage(1, in), predict_stage(2, in), predict_stage(3, in)};
}

std::string scaling_table(const ScalingInputs& in) {
    const std::array<StagePrediction, 4> stages = predict_scaling(in);
    const int nodes = (in.gpus + in.gpus_per_node - 1) / in.gpus_per_node;
    const char* link = in.gpu.has_nvlink ? "NVLink" : "PCIe";
    const double tokens = in.micro_steps * in.tokens_per_micro_step;

    std::string table = format("predicted for %d %s on %d node%s; %s %.0f GB/s", in.gpus, in.gpu.product, nodes,
                               nodes == 1 ? "" : "s", link, in.nvlink_bytes_per_s / kGiga);
    if (nodes > 1) table += format(", network %.0f GB/s", in.net_bytes_per_s / kGiga);
    table += format(
        " per GPU and direction\n%.0f tokens per step, %.0f per GPU in %d micro-step%s; %.2f ms of compute at "
        "%.0f %% of %.1f TFLOP/s\n\n",
        in.gpus * tokens, tokens, in.micro_steps, in.micro_steps == 1 ? "" : "s", stages[0].compute_s * 1e3,
        in.peak_share * 100, in.gpu.flops_per_s / kTera);
    table += format("%9s%12s%11s ms%11s ms%11s ms%11s ms%11s ms%12s%12s\n", "ZeRO", "memory GiB", link, "network",
                    "exposed", "slowdown", "step", "tokens/s", "efficiency");
    bool fits = true;
    for (size_t stage = 0; stage < stages.size(); stage++) {
        const StagePrediction& s = stages[stage];
        const double memory_gib = in.memory_bytes_per_rank[stage] / kGiB;
        const bool is_too_large = memory_gib > in.gpu.memory_gib;
        fits = fits && !is_too_large;
        table += format("%9zu%11s%c%14.2f%14.2f%14.2f%14.2f%14.2f%12.0f%10.1f %%\n", stage,
                        memory_gib > 0 ? format("%.2f", memory_gib).c_str() : "-", is_too_large ? '*' : ' ',
                        s.communication.nvlink_s * 1e3, s.communication.net_s * 1e3, s.exposed_s * 1e3,
                        s.slowdown_s * 1e3, s.step_s * 1e3, s.tokens_per_s, s.efficiency * 100);
    }
    if (!fits) table += format("* more than the %.0f GiB of this GPU\n", in.gpu.memory_gib);
    return table;
}
