#include "model/schedule.h"

#include <algorithm>
#include <array>
#include <climits>

#include "kernels/base/check.h"

namespace {

// All stages in simulated time: a forward or weights pass takes 1 unit, a backward pass 2. With weights passes a
// backward pass takes about 1, which leads to the same order. Chunk c of stage s is the virtual stage c * stages + s.
struct Simulation {
    int stages, chunks, micro_steps;
    // By kind, except weights: (virtual stages, micro_steps) when the pass ends, INT_MAX at first.
    std::vector<int> ends[2] = {};
    std::vector<int> unsent[2] = {};  // the same: (stages) results that no pass of another stage has begun to use

    bool exists(int virtual_stage) const { return virtual_stage >= 0 && virtual_stage < chunks * stages; }
    int& end_of(Pass::Kind kind, int virtual_stage, int micro_step) {
        return ends[kind][size_t(virtual_stage) * size_t(micro_steps) + size_t(micro_step)];
    }

    // Returns whether a forward or backward pass has its input and a buffer for its result.
    bool can_begin(int stage, const Pass& pass, int time) {
        const int here = pass.chunk * stages + stage, step = pass.kind == Pass::forward ? 1 : -1;
        if (exists(here + step) && unsent[pass.kind][size_t(stage)] == kBuffers) return false;
        if (exists(here - step)) return end_of(pass.kind, here - step, pass.micro_step) <= time;
        return pass.kind == Pass::forward || end_of(Pass::forward, here, pass.micro_step) <= time;
    }
    void begin(int stage, const Pass& pass, int end) {
        const int here = pass.chunk * stages + stage, step = pass.kind == Pass::forward ? 1 : -1;
        if (exists(here + step)) unsent[pass.kind][size_t(stage)]++;
        if (exists(here - step)) unsent[pass.kind][size_t((here - step) % stages)]--;
        end_of(pass.kind, here, pass.micro_step) = end;
    }
};

// Returns the passes of one kind in the order of every stage: groups of `stages` micro-steps, each chunk by chunk. When
// the first stage has done a chunk of a whole group, the last stage has done the group's first micro-step.
std::vector<Pass> in_order(Pass::Kind kind, int stages, int chunks, int micro_steps) {
    std::vector<Pass> order;
    for (int first = 0; first < micro_steps; first += stages)
        for (int chunk = 0; chunk < chunks; chunk++)
            for (int i = first; i < std::min(first + stages, micro_steps); i++)
                order.push_back({kind, kind == Pass::forward ? chunk : chunks - 1 - chunk, i});
    return order;
}

// Returns how many forward passes of a stage may wait for their backward passes; with interleaved, as in Megatron-LM.
int most_waiting(PipelineSchedule schedule, const Simulation& x, int stage) {
    if (schedule == PipelineSchedule::interleaved) return (x.chunks - 1) * x.stages + 2 * (x.stages - stage - 1) + 1;
    return schedule == PipelineSchedule::gpipe && x.stages > 1 ? x.chunks * x.micro_steps : x.stages - stage;
}

}  // namespace

// A stage begins its next forward pass if it can and not too many wait, else its next backward pass if it can, else its
// next weights pass. With whole groups, interleaved passes have the same order as in Megatron-LM. Stages would wait for
// each other in a circle if they strictly alternated like Megatron-LM and the last group were small, or with more than
// 10 stages if their buffers were not limited here.
std::vector<std::vector<Pass>> schedule_passes(PipelineSchedule schedule, int stages, int chunks, int micro_steps) {
    const bool has_weights = schedule == PipelineSchedule::zero_bubble && stages > 1;
    const std::vector<Pass> order[] = {
        in_order(Pass::forward, stages, chunks, micro_steps),
        in_order(Pass::backward, stages, chunks, micro_steps),
        in_order(Pass::weights, stages, chunks, has_weights ? micro_steps : 0),
    };
    Simulation x{stages, chunks, micro_steps};
    for (std::vector<int>& ends : x.ends) ends.assign(size_t(stages) * order[0].size(), INT_MAX);
    for (std::vector<int>& unsent : x.unsent) unsent.assign(size_t(stages), 0);
    std::vector<std::vector<Pass>> passes(static_cast<size_t>(stages));
    std::vector<std::array<size_t, 3>> begun(passes.size());  // by kind
    std::vector<int> idle_at(passes.size());
    const auto can_begin = [&](int stage, Pass::Kind kind, int time) {
        const auto& [forwards, backwards, weights] = begun[size_t(stage)];
        const size_t next = begun[size_t(stage)][kind];
        if (next == order[kind].size()) return false;
        if (kind == Pass::weights) return weights < backwards;
        if (kind == Pass::forward && forwards - backwards >= size_t(most_waiting(schedule, x, stage))) return false;
        if (kind == Pass::forward && has_weights && forwards - weights >= size_t(stages)) return false;
        return x.can_begin(stage, order[kind][next], time);
    };
    size_t left = passes.size() * (order[0].size() + order[1].size() + order[2].size());
    for (int time = 0, last_end = 0; left > 0; time++) {
        require(time <= last_end, "schedule: no stage can begin a pass, %zu passes are left", left);
        for (int stage = 0; stage < stages; stage++) {
            if (idle_at[size_t(stage)] > time) continue;
            for (const Pass::Kind kind : {Pass::forward, Pass::backward, Pass::weights}) {
                if (!can_begin(stage, kind, time)) continue;
                const Pass& pass = order[kind][begun[size_t(stage)][kind]++];
                passes[size_t(stage)].push_back(pass), left--;
                const int end = time + (kind == Pass::backward ? 2 : 1);
                if (kind != Pass::weights) x.begin(stage, pass, end);
                idle_at[size_t(stage)] = end, last_end = std::max(last_end, end);
                break;
            }
        }
    }
    return passes;
}

static bool has_weights_passes(const std::vector<Pass>& passes) {
    return std::ranges::find(passes, Pass::weights, &Pass::kind) != passes.end();
}

// Returns the largest number of micro-steps whose first pass has begun and whose last pass has not ended.
static int most_between(const std::vector<Pass>& passes, int chunk, Pass::Kind first, Pass::Kind last) {
    int now = 0, most = 0;
    for (const Pass& pass : passes)
        if (pass.chunk == chunk) most = std::max(most, now += int(pass.kind == first) - int(pass.kind == last));
    return most;
}

int most_in_flight(const std::vector<Pass>& passes, int chunk) {
    return most_between(passes, chunk, Pass::forward, has_weights_passes(passes) ? Pass::weights : Pass::backward);
}

int most_deferred(const std::vector<Pass>& passes) {
    return has_weights_passes(passes) ? most_between(passes, 0, Pass::backward, Pass::weights) : 0;
}
