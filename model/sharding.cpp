#include "model/sharding.h"

#include <bit>

#include "kernels/check.h"

namespace {

template <class Act> const Bucket& bucket_at(const GptState<Act>& s, int bucket) {
    return s.layout.buckets[size_t(bucket)];
}

template <class Act> bool is_alone(const GptState<Act>& s) { return s.comm.size == 1; }

template <class Act> Ticket reduce(GptState<Act>& s, const float* inp, float* out, size_t piece) {
    return reduce_scatter_sum({.out = out, .scratch = s.comm_scratch, .inp = inp, .count = piece}, s.comm, s.stream);
}

// A bucket of whole gradients, to whoever owns them; without shards everybody gets the sums back.
template <class Act> void reduce_whole(GptState<Act>& s, int number) {
    const Bucket& bucket = bucket_at(s, number);
    float* grad = s.grad + bucket.begin;
    float* mine = grad + size_t(s.comm.rank) * bucket.piece;
    const bool sharded = s.options.is_sharded();
    s.grads_ready = reduce(s, grad, sharded ? s.own_grad + bucket.shard_begin : mine, bucket.piece);
    if (!sharded) s.grads_ready = all_gather(grad, mine, bucket.piece * sizeof(float), s.comm, s.stream);
}

// The window's sum has come; where it is not the step's first it is added to those before it.
template <class Act> void settle(GptState<Act>& s, Window<float>& window) {
    if (window.bucket < 0) return;
    wait(window.ticket, s.comm, s.stream);
    if (window.is_added) {
        const Bucket& bucket = bucket_at(s, window.bucket);
        ops::add({.out = s.own_grad + bucket.shard_begin, .inp = window.reduced, .count = bucket.piece}, s.stream);
    }
    window.bucket = -1;
}

}  // namespace

template <class Act> void expect_params(GptState<Act>& s, int bucket) {
    if (s.options.keeps_whole_parameters() || bucket < 0 || size_t(bucket) >= s.layout.buckets.size()) return;
    Window<Act>& window = s.param_window[window_of(bucket)];
    if (window.bucket == bucket) return;
    const Bucket& b = bucket_at(s, bucket);
    window.bucket = bucket;
    window.ticket = all_gather(window.values, s.own_param + b.shard_begin, b.piece * sizeof(Act), s.comm, s.stream);
}

template <class Act> void need_params(GptState<Act>& s, int bucket) {
    if (!s.options.is_sharded()) return;
    expect_params(s, bucket);
    const bool whole = s.options.keeps_whole_parameters();
    wait(whole ? s.param_ready[size_t(bucket)] : s.param_window[window_of(bucket)].ticket, s.comm, s.stream);
}

template <class Act> void begin_grads(GptState<Act>& s, int bucket) {
    if (!s.options.keeps_whole_gradients()) settle(s, s.grad_window[window_of(bucket)]);
}

template <class Act> void end_grads(GptState<Act>& s, int bucket, const MicroStep& micro) {
    if (is_alone(s)) return;
    if (s.options.keeps_whole_gradients()) {
        if (micro.last && !s.options.deterministic_reduce) reduce_whole(s, bucket);
        return;
    }
    const Bucket& b = bucket_at(s, bucket);
    Window<float>& window = s.grad_window[window_of(bucket)];
    window.bucket = bucket;
    window.is_added = micro.index > 0;
    float* out = window.is_added ? window.reduced : s.own_grad + b.shard_begin;
    window.ticket = reduce(s, window.values, out, b.piece);
}

// The deterministic sum is a binary counter: before micro-step i it holds a partial sum for each 1 in i's binary
// digits, the largest at the bottom, and after it equal ones have been added to each other. So the sum of 2^k
// micro-steps is the same tree whether one rank adds them or several.
template <class Act> MicroStep begin_micro_step(GptState<Act>& s, float grad_scale) {
    const int index = s.micro_steps_done;
    require(index < s.options.micro_steps, "micro_step: number %d of %d in a step", index + 1, s.options.micro_steps);
    const bool counted = s.options.deterministic_reduce;
    if (counted) s.grads = tensor_views(s.layout, s.levels[size_t(std::popcount(unsigned(index)))]);
    return {.index = index,
            .last = index + 1 == s.options.micro_steps,
            .accumulate = index > 0 && !counted && s.options.keeps_whole_gradients(),
            .grad_scale = grad_scale};
}

namespace {

// levels[top - 1] += levels[top], `times` times downwards.
template <class Act> void merge_levels(GptState<Act>& s, int top, int times) {
    for (; times > 0; times--, top--)
        ops::add({.out = s.levels[size_t(top - 1)], .inp = s.levels[size_t(top)], .count = s.layout.elements},
                 s.stream);
}

}  // namespace

template <class Act> void end_micro_step(GptState<Act>& s) {
    const unsigned index = unsigned(s.micro_steps_done++);
    if (s.options.deterministic_reduce) merge_levels(s, std::popcount(index), std::countr_one(index));
}

template <class Act> void finish_grads(GptState<Act>& s) {
    if (s.options.deterministic_reduce) {
        const int sums = std::popcount(unsigned(s.micro_steps_done));
        merge_levels(s, sums - 1, sums - 1);
        for (size_t bucket = 0; !is_alone(s) && bucket < s.layout.buckets.size(); bucket++)
            reduce_whole(s, int(bucket));
    }
    for (Window<float>& window : s.grad_window) settle(s, window);
    wait(s.grads_ready, s.comm, s.stream);
}

template <class Act> void share_params(GptState<Act>& s) {
    for (Window<Act>& window : s.param_window) window.bucket = -1;
    if (!s.options.is_sharded() || !s.options.keeps_whole_parameters()) return;
    for (size_t i = 0; i < s.layout.buckets.size(); i++) {
        const Bucket& bucket = s.layout.buckets[i];
        s.param_ready[i] = all_gather(s.param + bucket.begin, s.own_param + bucket.shard_begin,
                                      bucket.piece * sizeof(Act), s.comm, s.stream);
    }
}

#define INSTANTIATE(Act)                                            \
    template void need_params(GptState<Act>&, int);                 \
    template void expect_params(GptState<Act>&, int);               \
    template void begin_grads(GptState<Act>&, int);                 \
    template void end_grads(GptState<Act>&, int, const MicroStep&); \
    template MicroStep begin_micro_step(GptState<Act>&, float);     \
    template void end_micro_step(GptState<Act>&);                   \
    template void finish_grads(GptState<Act>&);                     \
    template void share_params(GptState<Act>&);
INSTANTIATE(float)
INSTANTIATE(bf16)
INSTANTIATE(fp16)
#undef INSTANTIATE
