#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "model/schedule.h"
#include "runtime/io/files.h"
#include "runtime/io/json.h"
#include "runtime/performance/performance.h"

namespace {

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

Collectives collectives(const std::vector<double>& bucket_elements, double wire_bytes, const ScalingInputs& in) {
    const RankGroup replicas{in.replicas(), in.tensor};
    Collectives result;
    if (bucket_elements[0] > 0) result.outer = collective_time(bucket_elements[0] * wire_bytes, replicas, in);
    for (size_t i = 1; i < bucket_elements.size(); i++)
        result.layers = result.layers + collective_time(bucket_elements[i] * wire_bytes, replicas, in);
    return result;
}

// A pass: its compute, the communication that overlaps with it, the exposed communication of the outer bucket, and that
// of the ranks that divide its layers and sequences.
struct PassTime {
    double compute_s;
    CommTime behind, bare, within;

    double exposed_s() const { return std::max(behind.seconds - compute_s, 0.0); }
    double seconds(const ScalingInputs& in) const {
        const double t = behind.seconds;
        return std::max(t, compute_s + in.overlap_slowdown * t) + bare.seconds + within.seconds;
    }
    // If it begins `late_s` after its communication.
    double late_seconds(double late_s, const ScalingInputs& in) const {
        PassTime late = *this;
        late.bare.seconds = std::max(bare.seconds - late_s, 0.0);
        late.behind.seconds = std::max(behind.seconds - std::max(late_s - bare.seconds, 0.0), 0.0);
        return late.seconds(in);
    }
};

// The passes of a part by kind: first those that communicate once per step (the first forward pass and the last pass
// with gradients), then the others.
using PartTimes = std::array<std::array<PassTime, 2>, 3>;

PartTimes times_of(const PartWork& part, const ScalingInputs& in) {
    const Collectives reduce = collectives(part.bucket_elements, in.grad_wire_bytes, in);
    const Collectives gather = collectives(part.bucket_elements, in.param_wire_bytes, in);
    PartTimes times{};
    for (size_t kind = 0; kind < times.size(); kind++) {
        const PassWork& work = part.passes[kind];
        const double tokens = in.tokens_per_micro_step;
        const CommTime rows = collective_time(tokens / in.context * in.row_bytes, {in.tensor}, in);
        const CommTime ring =
            collective_time(tokens / in.tensor * work.ring_bytes_per_token, {in.context, in.tensor}, in);
        const double ranks = in.tensor * in.context;
        for (PassTime& time : times[kind]) {
            time.compute_s = work.flops_per_token * tokens / ranks / (in.peak_share * in.gpu.flops_per_s);
            CommTime exposed = work.ring_bytes_per_token > 0 ? ring : CommTime();
            exposed.seconds = std::max(
                exposed.seconds - time.compute_s * work.attention_flops / std::max(work.flops_per_token, 1.0), 0.0);
            time.within = work.collectives * rows + exposed;
        }
    }
    auto& [first_forward, forward] = times[Pass::forward];
    auto& [last, other] = times[part.passes[Pass::weights].flops_per_token > 0 ? Pass::weights : Pass::backward];
    last.behind = (in.zero_stage == 0 ? 2 : 1) * reduce.layers;
    last.bare = (in.zero_stage == 0 ? 2 : 1) * reduce.outer;
    if (in.zero_stage >= 1) first_forward.behind = gather.layers, first_forward.bare = gather.outer;
    // Between micro-steps the outer bucket can overlap with another pass.
    if (in.zero_stage >= 2) other.behind = reduce.all();
    if (in.zero_stage == 3) {
        forward.behind = gather.all();
        other.behind = other.behind + gather.all();
        last.behind = last.behind + gather.all();
    }
    return times;
}

// Returns how fast each of `ranks` ranks on a node computes while all of them do.
double speed_of(int ranks, const ScalingInputs& in) {
    if (in.cores == 0) return 1;
    const double busy = in.cores > 1 ? (std::min<double>(ranks, in.cores) - 1) / (in.cores - 1) : 1;
    return std::min(1.0, in.cores / ranks) / (1 + in.contention * busy);
}

CommTime message_time(double bytes, int stage, const ScalingInputs& in) {
    const int ranks = in.replicas() * in.tensor, node = in.gpus_per_node;
    CommTime time;
    if (stage * ranks / node == ((stage + 2) * ranks - 1) / node) {
        time.nvlink_bytes = bytes;
        time.nvlink_s =
            (in.gpu.has_nvlink ? in.nvlink_hop_s : in.pcie_hop_s) + bytes / (in.nvlink_bytes_per_s * in.nvlink_share);
    } else {
        time.net_bytes = bytes;
        time.net_s = in.net_level_s + bytes / (in.net_bytes_per_s * in.net_share);
    }
    time.seconds = in.start_s + time.nvlink_s + time.net_s;
    return time;
}

// The stages of a pipeline in time.
class Pipeline {
public:
    Pipeline(const ScalingInputs& in, const std::vector<std::vector<PartTimes>>& times)
        : in_(in), times_(times), stages_(times.size()), parts_(int(times[0].size())) {
        for (std::vector<double>& ends : ends_)
            ends.assign(stages_.size() * size_t(parts_) * size_t(in.micro_steps), kNever);
        const double bytes = in.tokens_per_micro_step * in.row_bytes / (in.tensor * in.context);
        // The ring's last edge leads to the first stage, which is far away.
        for (int stage = 0; stage < in.pipeline; stage++) edges_.push_back(message_time(bytes, stage, in).seconds);
        edges_.back() = *std::ranges::max_element(edges_);
    }

    // Returns the time when each stage has ended its last pass and reduced its gradients.
    std::vector<double> run() {
        std::vector<double> ends(stages_.size());
        for (double now = 0; now < kNever;) {
            int running = 0;
            double next = kNever;
            for (size_t s = 0; s < stages_.size(); s++) next = std::min(next, begin(s, now)), running += is_running(s);
            const double speed = running == 0 ? 1 : speed_of(running * in_.replicas() * in_.tensor, in_);
            for (const Stage& stage : stages_)
                if (stage.left_s >= 0) next = std::min(next, now + stage.left_s / speed);
            for (size_t s = 0; s < stages_.size(); s++) {
                Stage& stage = stages_[s];
                if (stage.left_s < 0) continue;
                const bool ends_now = now + stage.left_s / speed <= next;
                stage.left_s = std::max(stage.left_s - (next - now) * speed, 0.0);
                if (!ends_now) continue;
                end_of(s, in_.passes[s][stage.next++]) = ends[s] = next;
                stage.left_s = -1;
            }
            now = next;
        }
        for (size_t s = 0; s < stages_.size(); s++) {
            require(stages_[s].next == in_.passes[s].size(), "scaling: stage %zu has a pass that never begins", s);
            ends[s] = std::max(ends[s], stages_[s].reduced_s) + stages_[s].bare_s;
        }
        return ends;
    }

private:
    static constexpr double kNever = HUGE_VAL;
    struct Stage {
        size_t next = 0;
        double left_s = -1;                // of its pass; negative: it has none
        double reduced_s = 0, bare_s = 0;  // the end of its reductions but the outer bucket's, and the time of that
    };

    bool is_running(size_t stage) const { return stages_[stage].left_s >= 0; }
    double& end_of(size_t stage, const Pass& pass) {
        return ends_[pass.kind]
                    [(size_t(pass.chunk) * stages_.size() + stage) * size_t(in_.micro_steps) + size_t(pass.micro_step)];
    }

    // Returns when the input of a stage's pass arrives.
    double arrival(size_t stage, const Pass& pass) {
        const size_t last = stages_.size() - 1;
        const bool is_forward = pass.kind == Pass::forward, is_edge = stage == (is_forward ? 0 : last);
        if (pass.kind == Pass::weights) return 0;
        if (is_edge && pass.chunk == (is_forward ? 0 : parts_ - 1))
            return is_forward ? 0 : end_of(stage, {Pass::forward, pass.chunk, pass.micro_step});
        const size_t from = is_forward ? (stage + last) % (last + 1) : (stage + 1) % (last + 1);
        const int chunk = is_edge ? pass.chunk + (is_forward ? -1 : 1) : pass.chunk;
        return end_of(from, {pass.kind, chunk, pass.micro_step}) + edges_[is_forward ? from : stage];
    }

    // Begins the stage's next pass if its input has arrived. Returns when it arrives, if that is later.
    double begin(size_t s, double now) {
        Stage& stage = stages_[s];
        if (stage.left_s >= 0 || stage.next == in_.passes[s].size()) return kNever;
        const Pass& pass = in_.passes[s][stage.next];
        const double ready = arrival(s, pass);
        if (ready > now) return ready;
        const bool is_forward = pass.kind == Pass::forward;
        const bool is_other = pass.micro_step != (is_forward ? 0 : in_.micro_steps - 1);
        const PassTime& time = times_[s][size_t(pass.chunk)][pass.kind][is_other];
        if (is_other) {
            stage.left_s = time.seconds(in_);
        } else if (is_forward) {
            stage.left_s = time.late_seconds(now, in_);
        } else {  // the next stage needs the pass's result, and does not wait for reductions
            stage.left_s = time.compute_s + in_.overlap_slowdown * std::min(time.behind.seconds, time.compute_s) +
                           time.within.seconds;
            stage.reduced_s = std::max(stage.reduced_s, now) + time.behind.seconds;
            stage.bare_s += time.bare.seconds;
        }
        return kNever;
    }

    const ScalingInputs& in_;
    const std::vector<std::vector<PartTimes>>& times_;
    std::vector<Stage> stages_;
    int parts_;
    std::array<std::vector<double>, 3> ends_;  // by kind: (parts, stages, micro-steps)
    std::vector<double> edges_;                // of the message from each stage to the next one
};

// A stage without the time when it waits.
StepPrediction busy_step(const std::vector<PartTimes>& parts, const std::vector<PartWork>& work,
                         const ScalingInputs& in) {
    StepPrediction step;
    for (const PartTimes& part : parts)
        for (const auto& kind : part)
            for (size_t is_other = 0; is_other < kind.size(); is_other++) {
                const PassTime& pass = kind[is_other];
                const double times = is_other ? in.micro_steps - 1 : 1;
                const double exposed = pass.exposed_s();
                step.communication = step.communication + times * (pass.behind + pass.bare + pass.within);
                step.compute_s += times * pass.compute_s;
                step.exposed_s += times * (exposed + pass.bare.seconds + pass.within.seconds);
                step.slowdown_s +=
                    times * (pass.seconds(in) - pass.within.seconds - pass.bare.seconds - pass.compute_s - exposed);
            }
    double elements = 0;
    for (const PartWork& part : work)
        elements += std::accumulate(part.bucket_elements.begin(), part.bucket_elements.end(), 0.0);
    step.update_s = in.update_s_per_element * elements / (in.zero_stage > 0 ? in.replicas() : 1);
    if (const double rate = in.gpu.host_bytes_per_s() * in.nvlink_share; rate > 0) {
        step.update_s += in.update_host_bytes / rate;
        if (in.pipeline == 1) step.exposed_s += std::max(in.passes_host_bytes / rate - step.compute_s, 0.0);
    }
    return step;
}

}  // namespace

// The constants of a machine that a file can set.
static std::vector<std::pair<std::string, double*>> machine_constants(ScalingInputs& in) {
    return {{"flops_per_s", &in.gpu.flops_per_s},
            {"memory_gib", &in.gpu.memory_gib},
            {"memory_bytes_per_s", &in.gpu.memory_bytes_per_s},
            {"link_bytes_per_s", &in.nvlink_bytes_per_s},
            {"start_s", &in.start_s},
            {"hop_s", &in.nvlink_hop_s},
            {"overlap_slowdown", &in.overlap_slowdown},
            {"update_s_per_element", &in.update_s_per_element},
            {"cores", &in.cores},
            {"contention", &in.contention}};
}

// CPU ranks with a core each, in memory of unknown size.
static ScalingInputs cpu_machine() {
    ScalingInputs in;
    in.gpu = {"cpu", "CPU ranks", {}, 50e9, 50e9, 10e9, 0, 2e9, true};
    in.nvlink_bytes_per_s = in.gpu.link_bytes_per_s;
    in.peak_share = in.nvlink_share = in.overlap_slowdown = 1;
    in.start_s = 50e-6, in.nvlink_hop_s = 0;
    in.update_s_per_element = 1e-9;
    return in;
}

ScalingInputs machine_named(const std::string& name) {
    ScalingInputs in = cpu_machine();
    if (name == in.gpu.name) return in;
    if (!name.ends_with(".json")) {
        in = {};
        in.gpu = find_gpu(name);
        in.nvlink_bytes_per_s = in.gpu.link_bytes_per_s;
        return in;
    }
    in.gpu.product = "ranks of a measured machine";
    const auto constants = machine_constants(in);
    const auto json = parse_json(read_file(name), name, Exit::usage);
    for (const auto& [key, value] : json.items()) {
        const auto constant = std::ranges::find(constants, key, [](const auto& c) { return c.first; });
        if (constant == constants.end() || !value.is_number() || value < 0)
            fail(Exit::usage, "--gpu: %s: %s is not the name of a constant with a value of at least 0", name, key);
        *constant->second = value;
    }
    return in;
}

ScalingInputs machine_of_device(const std::string& gpu_name) {
    if (gpu_name.empty()) return cpu_machine();
    const GpuModel* const gpu = gpu_of_device(gpu_name);
    if (!gpu)
        fail(Exit::config,
             "parallel.auto: the speed of %s is unknown; set parallel.auto to false and parallel.tensor, "
             "parallel.pipeline and parallel.zero_stage",
             printed(gpu_name));
    return machine_named(gpu->name);
}

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

CommTime collective_time(double bytes, const RankGroup& group, const ScalingInputs& in) {
    if (group.ranks == 1) return {};
    const int ranks = std::min(group.ranks, std::max(1, in.gpus_per_node / group.stride));
    const int nodes = (group.ranks + ranks - 1) / ranks;
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

StepPrediction predict_step(const ScalingInputs& in) {
    require(in.gpus >= 1 && in.gpus_per_node >= 1 && in.micro_steps >= 1 && in.nvlink_bytes_per_s > 0 &&
                in.net_bytes_per_s > 0 && in.peak_share > 0 && in.gpu.flops_per_s > 0 && in.tokens_per_micro_step > 0,
            "scaling: counts, rates, shares and tokens must be positive");
    require(in.data() >= 1 && in.data() * in.context * in.tensor * in.pipeline == in.gpus,
            "scaling: %d GPUs are no grid of %d x %d x %d", in.gpus, in.pipeline, in.context, in.tensor);
    require(int(in.stages.size()) == in.pipeline && (in.pipeline == 1 || in.passes.size() == in.stages.size()),
            "scaling: the work or the passes of a stage are missing");
    check_nodes(in.gpus, in.gpus_per_node);
    std::vector<std::vector<PartTimes>> times;
    std::vector<StepPrediction> steps;
    for (const std::vector<PartWork>& parts : in.stages) {
        times.emplace_back();
        for (const PartWork& part : parts) {
            require(!part.bucket_elements.empty(), "scaling: the outer bucket is missing");
            times.back().push_back(times_of(part, in));
        }
        steps.push_back(busy_step(times.back(), parts, in));
    }
    const auto busy_s = [](const StepPrediction& s) { return s.compute_s + s.exposed_s + s.slowdown_s + s.update_s; };
    double compute_s = 0;
    for (const StepPrediction& stage : steps) compute_s += stage.compute_s / in.pipeline;
    StepPrediction step = *std::ranges::max_element(steps, {}, busy_s);
    if (in.pipeline > 1) {
        const std::vector<double> ends = Pipeline(in, times).run();
        for (size_t stage = 0; stage < ends.size(); stage++)
            step.step_s = std::max(step.step_s, ends[stage] + steps[stage].update_s);
        step.bubble_s = std::max(step.step_s - busy_s(step), 0.0);
    } else {
        step.step_s = busy_s(step) / speed_of(in.gpus, in);
        step.bubble_s = step.step_s - busy_s(step);
    }
    step.tokens_per_s = in.data() * (in.micro_steps * in.tokens_per_micro_step) / step.step_s;
    step.efficiency = compute_s / step.step_s;
    return step;
}
