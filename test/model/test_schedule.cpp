// The order of the passes of a step, executed by stages that exchange messages.
#include <algorithm>
#include <set>
#include <tuple>

#include "model/schedule.h"
#include "test/support/catch.h"

namespace {

constexpr size_t kBuffers = 2;  // of a stage for results of one kind that are not yet sent

// A message from a stage to a neighbor in the ring of stages.
struct Message {
    int chunk, micro_step;  // of the pass that needs it
    int sent_at;
    int taken_at = -1;  // when that pass began
};

// The messages of one kind from a stage to the next (forward) or the previous one (backward), first in, first out.
struct Edge {
    std::vector<Message> messages;
    size_t taken = 0;
};

struct Stage {
    const std::vector<Pass>* passes;
    size_t done = 0;
    int time = 0;
    Edge out[2] = {};  // by kind
};

// Stages that execute their passes in order. A forward pass takes 1 unit, a backward pass 2; if there are weights
// passes, each takes 1.
class Ring {
public:
    Ring(const std::vector<std::vector<Pass>>& passes, int chunks) : m_chunks(chunks) {
        for (const std::vector<Pass>& list : passes) {
            m_stages.push_back({.passes = &list});
            for (const Pass& pass : list)
                if (pass.kind == Pass::weights) m_backward_time = 1;
        }
    }

    // Executes all passes and returns the time, or says what is wrong.
    int run() {
        for (bool moves = true; moves && problem.empty();) {
            moves = false;
            for (size_t stage = 0; stage < m_stages.size(); stage++)
                while (problem.empty() && step(stage)) moves = true;
        }
        int end = 0;
        for (const Stage& stage : m_stages) {
            if (stage.done < stage.passes->size() && problem.empty()) problem = "deadlock";
            for (const Edge& edge : stage.out)
                if (edge.taken < edge.messages.size() && problem.empty()) problem = "a message is left";
            end = std::max(end, stage.time);
        }
        return end;
    }
    std::string problem;

private:
    // Executes the stage's next pass if it can begin.
    bool step(size_t index) {
        Stage& stage = m_stages[index];
        if (stage.done == stage.passes->size()) return false;
        const Pass pass = (*stage.passes)[stage.done];
        if (pass.kind == Pass::weights) {
            if (!m_deferred.erase({index, pass.micro_step})) problem = "a weights pass comes before its backward pass";
            stage.time++, stage.done++;
            return true;
        }
        const bool is_forward = pass.kind == Pass::forward, is_first = index == 0,
                   is_last = index + 1 == m_stages.size();
        const bool begins = is_first && pass.chunk == 0, turns = is_last && pass.chunk == m_chunks - 1;
        int begin = stage.time;
        Edge* in = nullptr;
        if (is_forward ? !begins : !turns) {
            const size_t from = is_forward ? (is_first ? m_stages.size() : index) - 1 : is_last ? 0 : index + 1;
            in = &m_stages[from].out[pass.kind];
            if (in->taken == in->messages.size()) return false;
            const Message& message = in->messages[in->taken];
            if (message.chunk != pass.chunk || message.micro_step != pass.micro_step)
                problem = "a message of another pass";
            begin = std::max(begin, message.sent_at);
        } else if (!is_forward && !m_turned.contains(pass.micro_step)) {
            problem = "the last backward pass comes before its forward pass";
        }
        Edge& out = stage.out[pass.kind];
        const bool sends = is_forward ? !turns : !begins;
        if (sends && out.messages.size() >= kBuffers) {
            const Message& earlier = out.messages[out.messages.size() - kBuffers];
            if (earlier.taken_at < 0) return false;
            begin = std::max(begin, earlier.taken_at);
        }
        if (in) in->messages[in->taken++].taken_at = begin;
        stage.time = begin + (is_forward ? 1 : m_backward_time), stage.done++;
        if (!is_forward) m_deferred.insert({index, pass.micro_step});
        if (is_forward && turns) m_turned.insert(pass.micro_step);
        const int next = is_forward ? pass.chunk + int(is_last) : pass.chunk - int(is_first);
        if (sends) out.messages.push_back({next, pass.micro_step, stage.time});
        return true;
    }

    int m_chunks, m_backward_time = 2;
    std::vector<Stage> m_stages;
    std::set<std::tuple<size_t, int>> m_deferred;  // stages and micro-steps whose backward, not weights, pass is done
    std::set<int> m_turned;                        // micro-steps whose last forward pass is done
};

std::vector<Pass> of_kind(const std::vector<Pass>& passes, Pass::Kind kind) {
    std::vector<Pass> result;
    for (const Pass& pass : passes)
        if (pass.kind == kind) result.push_back(pass);
    return result;
}

// Returns what is wrong with the order and number of the passes, or "".
std::string order_problem(const std::vector<std::vector<Pass>>& passes, int chunks, int micro_steps, bool has_weights) {
    for (const Pass::Kind kind : {Pass::forward, Pass::backward, Pass::weights}) {
        const int count = kind == Pass::weights && !has_weights ? 0 : micro_steps;
        std::vector<int> next(static_cast<size_t>(chunks), 0);
        const std::vector<Pass> first = of_kind(passes[0], kind);
        for (const Pass& pass : first) {
            if (pass.chunk < 0 || pass.chunk >= chunks) return "no such chunk";
            if (pass.micro_step != next[size_t(pass.chunk)]++) return "micro-steps of a chunk are not in order";
        }
        if (next != std::vector(size_t(chunks), count)) return "a pass is missing";
        for (const std::vector<Pass>& list : passes)
            if (of_kind(list, kind) != first) return "stages have different orders";
    }
    return "";
}

// Returns the largest number of passes whose `first` kind has begun and whose `last` kind has not ended.
int most_waiting(const std::vector<Pass>& passes, Pass::Kind first, Pass::Kind last) {
    std::set<std::tuple<int, int>> now;
    size_t most = 0;
    for (const Pass& pass : passes) {
        if (pass.kind == first) now.insert({pass.chunk, pass.micro_step});
        if (pass.kind == last) now.erase({pass.chunk, pass.micro_step});
        most = std::max(most, now.size());
    }
    return int(most);
}

// Checks a schedule and returns the time of its step.
int check_schedule(PipelineSchedule schedule, int stages, int chunks, int micro_steps) {
    CAPTURE(name_of(schedule), stages, chunks, micro_steps);
    const auto passes = schedule_passes(schedule, stages, chunks, micro_steps);
    REQUIRE(passes.size() == size_t(stages));
    const bool has_weights = schedule == PipelineSchedule::zero_bubble && stages > 1;
    REQUIRE(order_problem(passes, chunks, micro_steps, has_weights) == "");
    Ring ring(passes, chunks);
    const int time = ring.run();
    REQUIRE(ring.problem == "");
    for (int stage = 0; stage < stages; stage++) {
        const std::vector<Pass>& list = passes[size_t(stage)];
        const int most = most_waiting(list, Pass::forward, Pass::backward);
        if (schedule == PipelineSchedule::interleaved) {
            REQUIRE(most <= (chunks - 1) * stages + 2 * (stages - stage - 1) + 1);
        } else {
            const int all = schedule == PipelineSchedule::gpipe && stages > 1 ? micro_steps : stages - stage;
            REQUIRE(most == std::min(all, micro_steps));
            const int kept = has_weights ? most_waiting(list, Pass::forward, Pass::weights) : most;
            const int deferred = has_weights ? most_waiting(list, Pass::backward, Pass::weights) : 0;
            REQUIRE(kept == std::min(has_weights ? stages : all, micro_steps));
            REQUIRE(deferred <= (has_weights ? std::min(stage + 1, micro_steps) : 0));
            REQUIRE(most_in_flight(list, 0) == kept);
            REQUIRE(most_deferred(list) == deferred);
        }
    }
    return time;
}

// Returns a stage's passes as in Megatron-LM, for whole groups: (v - 1) p + 2 (p - stage - 1) forward passes, then one
// forward and one backward pass in turn, then the other backward passes.
std::vector<Pass> megatron_passes(int stage, int p, int v, int m) {
    const auto pass = [&](Pass::Kind kind, int k) {
        const int chunk = k % (p * v) / p;
        return Pass{kind, kind == Pass::forward ? chunk : v - 1 - chunk, k / (p * v) * p + k % p};
    };
    std::vector<Pass> passes;
    const int warm_up = std::min((v - 1) * p + 2 * (p - stage - 1), v * m);
    for (int k = 0; k < v * m + warm_up; k++) {
        if (k < v * m) passes.push_back(pass(Pass::forward, k));
        if (k >= warm_up) passes.push_back(pass(Pass::backward, k - warm_up));
    }
    return passes;
}

// Returns a stage's passes as in section 2.1 of arXiv 2401.10241, for at least p micro-steps: p - stage - 1 forward
// passes, then one forward, backward and weights pass in turn. The weights passes begin `stage` micro-steps later than
// the backward passes, so that all stages have p micro-steps in flight.
std::vector<Pass> zb_h1_passes(int stage, int p, int m) {
    std::vector<Pass> passes;
    const int warm_up = p - stage - 1;
    for (int k = 0; k < m + warm_up + stage; k++) {
        if (k < m) passes.push_back({Pass::forward, 0, k});
        if (k >= warm_up && k < m + warm_up) passes.push_back({Pass::backward, 0, k - warm_up});
        if (k >= warm_up + stage) passes.push_back({Pass::weights, 0, k - warm_up - stage});
    }
    return passes;
}

// Writes passes as F, B or W, the micro-step, and a letter for each chunk if there are several.
std::string text_of(const std::vector<Pass>& passes, bool has_chunks = false) {
    std::string text;
    for (const Pass& pass : passes) {
        text += (text.empty() ? "" : " ") + std::string(1, "FBW"[pass.kind]);
        text += std::to_string(pass.micro_step) + (has_chunks ? std::string(1, char('a' + pass.chunk)) : "");
    }
    return text;
}

}  // namespace

// Narayanan et al., arXiv 2006.09503, and arXiv 2104.04473, section 2.2: a stage of p idles for p - 1 forward and
// backward passes, which is (p - 1) / (m + p - 1) of the step.
TEST_CASE("gpipe and 1f1b idle for p - 1 micro-steps", "[model][pipeline]") {
    for (const PipelineSchedule schedule : {PipelineSchedule::gpipe, PipelineSchedule::one_f_one_b})
        for (int p = 1; p <= 16; p++)
            for (int m = 1; m <= 64; m++) {
                const int time = check_schedule(schedule, p, 1, m), idle = time - 3 * m;
                CAPTURE(name_of(schedule), p, m, time);
                REQUIRE(idle * (m + p - 1) == time * (p - 1));
            }
}

// arXiv 2104.04473, section 2.2: with v chunks the idle time is (p - 1) / (v m) of the rest. A last group of fewer than
// p micro-steps takes no longer than a whole one.
TEST_CASE("interleaved stages idle for (p - 1) / v micro-steps", "[model][pipeline]") {
    for (int p = 1; p <= 16; p++)
        for (int v = 1; v <= 4; v++)
            for (int m = 1; m <= 64; m++) {
                const int time = check_schedule(PipelineSchedule::interleaved, p, v, m), busy = 3 * v * m;
                const int whole_groups = (m + p - 1) / p * p;
                CAPTURE(p, v, m, time);
                REQUIRE(time <= 3 * v * whole_groups + 3 * (p - 1));
                if (m % p > 0) continue;
                REQUIRE((time - busy) * v * m == (p - 1) * busy);
                const auto passes = schedule_passes(PipelineSchedule::interleaved, p, v, m);
                for (int stage = 0; stage < p; stage++)
                    REQUIRE(passes[size_t(stage)] == megatron_passes(stage, p, v, m));
            }
    // With passes of equal length in the simulation, the step would take 67 units.
    CHECK(check_schedule(PipelineSchedule::interleaved, 3, 4, 4) <= 66);
}

// arXiv 2401.10241, section 2.3: ZB-H1 idles for (p - 1) (T_F + T_B - T_W). No schedule with p micro-steps in flight
// takes less time: the first backward pass of the first stage begins after 2 p - 1 passes that depend on each other.
// That stage does at most min(p, m) of its 3 m passes before.
TEST_CASE("zero bubble idles for p - 1 units", "[model][pipeline]") {
    for (int p = 1; p <= 16; p++)
        for (int m = 1; m <= 64; m++) {
            const int time = check_schedule(PipelineSchedule::zero_bubble, p, 1, m);
            CAPTURE(p, m, time);
            REQUIRE(time == 2 * p - 1 + 3 * m - std::min(p, m));
            REQUIRE(time <= 3 * (m + p - 1));  // of 1f1b
            if (m < p || p == 1) continue;
            REQUIRE(time - 3 * m == p - 1);
            const auto passes = schedule_passes(PipelineSchedule::zero_bubble, p, 1, m);
            for (int stage = 0; stage < p; stage++) REQUIRE(passes[size_t(stage)] == zb_h1_passes(stage, p, m));
        }
}

TEST_CASE("long pipelines have no deadlock", "[model][pipeline]") {
    for (const int m : {1, 63, 64, 65, 127, 200}) {
        check_schedule(PipelineSchedule::gpipe, 64, 1, m);
        check_schedule(PipelineSchedule::one_f_one_b, 64, 1, m);
        check_schedule(PipelineSchedule::interleaved, 64, 3, m);
        check_schedule(PipelineSchedule::zero_bubble, 64, 1, m);
    }
}

// arXiv 2104.04473, figure 4: stage s begins with p - s - 1 forward passes.
TEST_CASE("1f1b alternates after the warm-up", "[model][pipeline]") {
    const auto passes = schedule_passes(PipelineSchedule::one_f_one_b, 4, 1, 6);
    REQUIRE(passes.size() == 4);
    CHECK(text_of(passes[0]) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5");
    CHECK(text_of(passes[1]) == "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5");
    CHECK(text_of(passes[2]) == "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5");
    CHECK(text_of(passes[3]) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5");
}

TEST_CASE("gpipe does all forward passes first", "[model][pipeline]") {
    for (const std::vector<Pass>& passes : schedule_passes(PipelineSchedule::gpipe, 3, 1, 4))
        CHECK(text_of(passes) == "F0 F1 F2 F3 B0 B1 B2 B3");
}

TEST_CASE("interleaved stages do two micro-steps of a chunk, then of the next", "[model][pipeline]") {
    const auto passes = schedule_passes(PipelineSchedule::interleaved, 2, 2, 4);
    REQUIRE(passes.size() == 2);
    CHECK(text_of(passes[0], true) == "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a");
    CHECK(text_of(passes[1], true) == "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a");
    CHECK(most_in_flight(passes[0], 0) == 4);
    CHECK(most_in_flight(passes[0], 1) == 2);
    CHECK(most_in_flight(passes[1], 0) == 3);
    CHECK(most_in_flight(passes[1], 1) == 1);
}

// arXiv 2401.10241, figure 3: weights passes follow at once on the first stage, and s micro-steps later on stage s.
TEST_CASE("zero bubble delays the gradients of weights", "[model][pipeline]") {
    const auto passes = schedule_passes(PipelineSchedule::zero_bubble, 4, 1, 6);
    REQUIRE(passes.size() == 4);
    CHECK(text_of(passes[0]) == "F0 F1 F2 F3 B0 W0 F4 B1 W1 F5 B2 W2 B3 W3 B4 W4 B5 W5");
    CHECK(text_of(passes[1]) == "F0 F1 F2 B0 F3 B1 W0 F4 B2 W1 F5 B3 W2 B4 W3 B5 W4 W5");
    CHECK(text_of(passes[2]) == "F0 F1 B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 B4 W2 B5 W3 W4 W5");
    CHECK(text_of(passes[3]) == "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 W3 W4 W5");
    for (int stage = 0; stage < 4; stage++) {
        CHECK(most_in_flight(passes[size_t(stage)], 0) == 4);
        CHECK(most_deferred(passes[size_t(stage)]) == stage + 1);
    }
}

TEST_CASE("one stage does a micro-step's passes in turn", "[model][pipeline]") {
    for (const PipelineSchedule schedule : {PipelineSchedule::gpipe, PipelineSchedule::one_f_one_b,
                                            PipelineSchedule::interleaved, PipelineSchedule::zero_bubble})
        CHECK(text_of(schedule_passes(schedule, 1, 1, 3)[0]) == "F0 B0 F1 B1 F2 B2");
}
