#include "model/schedule.h"

#include <algorithm>
#include <climits>

#include "kernels/base/check.h"

namespace {

constexpr int kBuffers = 2;  // of a stage for results of one kind that are not sent yet

// All stages in simulated time: a forward pass takes 1 unit, a backward pass 2. Chunk c of stage s is the virtual stage
// c * stages + s.
struct Simulation {
    int stages, chunks, micro_steps;
    std::vector<int> ends[2] = {};    // by kind: (virtual stages, micro_steps) when the pass ends, INT_MAX at first
    std::vector<int> unsent[2] = {};  // by kind: (stages) results that no pass of another stage has begun to use

    bool exists(int virtual_stage) const { return virtual_stage >= 0 && virtual_stage < chunks * stages; }
    int& end_of(Pass::Kind kind, int virtual_stage, int micro_step) {
        return ends[kind][size_t(virtual_stage) * size_t(micro_steps) + size_t(micro_step)];
    }

    // Returns whether the pass has its input and a buffer for its result.
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

// A stage begins its next forward pass if it can and not too many wait, else its next backward pass if it can. With
// whole groups, interleaved passes have the same order as in Megatron-LM. Stages would wait for each other in a circle
// if they strictly alternated like Megatron-LM and the last group were small, or with more than 10 stages if their
// buffers were not limited here.
std::vector<std::vector<Pass>> schedule_passes(PipelineSchedule schedule, int stages, int chunks, int micro_steps) {
    const std::vector<Pass> forwards = in_order(Pass::forward, stages, chunks, micro_steps);
    const std::vector<Pass> backwards = in_order(Pass::backward, stages, chunks, micro_steps);
    Simulation x{stages, chunks, micro_steps};
    for (std::vector<int>& ends : x.ends) ends.assign(size_t(stages) * forwards.size(), INT_MAX);
    for (std::vector<int>& unsent : x.unsent) unsent.assign(size_t(stages), 0);
    std::vector<std::vector<Pass>> passes(static_cast<size_t>(stages));
    std::vector<size_t> begun[2] = {std::vector<size_t>(passes.size()), std::vector<size_t>(passes.size())};
    std::vector<int> idle_at(passes.size());
    size_t left = 2 * passes.size() * forwards.size();
    for (int time = 0, last_end = 0; left > 0; time++) {
        require(time <= last_end, "schedule: no stage can begin a pass, %zu passes are left", left);
        for (int stage = 0; stage < stages; stage++) {
            if (idle_at[size_t(stage)] > time) continue;
            size_t &f = begun[Pass::forward][size_t(stage)], &b = begun[Pass::backward][size_t(stage)];
            const bool is_forward = f < forwards.size() && f - b < size_t(most_waiting(schedule, x, stage)) &&
                                    x.can_begin(stage, forwards[f], time);
            if (!is_forward && (b == backwards.size() || !x.can_begin(stage, backwards[b], time))) continue;
            const Pass& pass = is_forward ? forwards[f++] : backwards[b++];
            passes[size_t(stage)].push_back(pass), left--;
            const int end = time + (is_forward ? 1 : 2);
            x.begin(stage, pass, end);
            idle_at[size_t(stage)] = end, last_end = std::max(last_end, end);
        }
    }
    return passes;
}

int most_in_flight(const std::vector<Pass>& passes, int chunk) {
    chunk = std::max(chunk, 0);  // a micro-step begins and ends with chunk 0
    int now = 0, most = 0;
    for (const Pass& pass : passes)
        if (pass.chunk == chunk) most = std::max(most, now += pass.kind == Pass::forward ? 1 : -1);
    return most;
}
