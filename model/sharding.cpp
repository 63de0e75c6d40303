#include "model/sharding.h"

#include <bit>
#include <utility>

#include "kernels/base/check.h"
#include "kernels/numeric.h"
#include "kernels/op_stream.h"
#include "kernels/ops.h"
#include "model/offload.h"

namespace {

const Bucket& bucket_at(const GptState& s, int bucket) { return s.layout.buckets[size_t(bucket)]; }

bool is_alone(const GptState& s) { return s.comms.data.size == 1; }

Ticket reduce(GptState& s, const float* inp, float* out, size_t piece) {
    return reduce_scatter_sum({.out = out, .scratch = s.comm_scratch, .inp = inp, .count = piece}, s.comms.data,
                              s.stream);
}

// Reduces whole gradients, a piece of each rank, into `shard` of the pieces' owners. Without it, all ranks gather the
// sums.
void reduce_whole(GptState& s, float* grads, float* shard, size_t piece) {
    float* const mine = grads + size_t(s.comms.data.rank) * piece;
    s.grads_ready = reduce(s, grads, shard ? shard : mine, piece);
    if (!shard) s.grads_ready = all_gather(grads, mine, piece * sizeof(float), s.comms.data, s.stream);
}

void reduce_bucket(GptState& s, int number) {
    const Bucket& bucket = bucket_at(s, number);
    float* const shard = s.options.is_sharded() ? s.own_grad + bucket.shard_begin : nullptr;
    reduce_whole(s, s.grad + bucket.begin, shard, bucket.piece);
}

// Waits for the slot's sum and, unless it is the step's first, adds it to the earlier ones.
void accumulate(GptState& s, BucketSlot& slot) {
    if (slot.bucket < 0) return;
    wait(slot.ticket, s.comms.data, s.stream);
    if (slot.is_added) {
        const Bucket& bucket = bucket_at(s, slot.bucket);
        run(s.stream, ops::add, {.out = s.own_grad + bucket.shard_begin, .inp = slot.reduced, .count = bucket.piece});
    }
    slot.bucket = -1;
}

}  // namespace

void prefetch_params(GptState& s, int bucket) {
    if (s.options.keeps_whole_parameters() || bucket < 0 || size_t(bucket) >= s.layout.buckets.size()) return;
    BucketSlot& slot = s.param_slot[slot_of(s.layout, bucket)];
    if (slot.bucket == bucket) return;
    const Bucket& b = bucket_at(s, bucket);
    const View own = s.own_param.from(b.shard_begin);
    slot.bucket = bucket;
    if (slot.copies)
        copy_offloaded(s, slot.values, own, b.piece, slot.copies->stream());
    else
        slot.ticket = all_gather(slot.values.data, own.data, b.piece * size_of(own.dtype), s.comms.data, s.stream);
}

void wait_params(GptState& s, int bucket) {
    if (s.options.keeps_whole_parameters()) {
        if (s.options.is_sharded()) wait(std::exchange(s.param_ready[size_t(bucket)], {}), s.comms.data, s.stream);
        return;
    }
    prefetch_params(s, bucket);
    const BucketSlot& slot = s.param_slot[slot_of(s.layout, bucket)];
    if (slot.copies)
        wait_for(s.stream, slot.copies->stream());
    else
        wait(slot.ticket, s.comms.data, s.stream);
}

void prefetch_grads(GptState& s, int bucket, const MicroStep& micro) {
    if (!s.options.offload_gradients || bucket < 0 || size_t(bucket) >= s.layout.buckets.size()) return;
    BucketSlot& slot = s.grad_slot[slot_of(s.layout, bucket)];
    if (slot.bucket == bucket) return;
    const Bucket& b = bucket_at(s, bucket);
    slot.bucket = bucket;
    if (micro.accumulate)
        copy_offloaded(s, slot.values, {s.own_grad + b.shard_begin, Dtype::fp32}, b.piece, slot.copies->stream());
}

void begin_grads(GptState& s, int bucket, const MicroStep& micro) {
    if (s.options.keeps_whole_gradients()) return;
    BucketSlot& slot = s.grad_slot[slot_of(s.layout, bucket)];
    if (!slot.copies) return accumulate(s, slot);
    prefetch_grads(s, bucket, micro);
    wait_for(s.stream, slot.copies->stream());
}

void wait_shards(GptState& s) {
    for (BucketSlot& slot : s.grad_slot) {
        if (slot.copies)
            wait_for(s.stream, slot.copies->stream());
        else
            accumulate(s, slot);
    }
    if (s.options.offload_gradients)
        for (const int window : {0, 1}) wait_for(s.offload.stream(window), s.stream);
}

void end_grads(GptState& s, int bucket, const MicroStep& micro) {
    const Bucket& b = bucket_at(s, bucket);
    BucketSlot& slot = s.grad_slot[slot_of(s.layout, bucket)];
    if (slot.copies) {
        const View own(s.own_grad + b.shard_begin, Dtype::fp32);
        return copy_offloaded(s, own, slot.values, b.piece, slot.copies->stream());
    }
    if (is_alone(s)) return;
    if (s.options.keeps_whole_gradients()) {
        if (micro.last && !s.options.deterministic_reduce) reduce_bucket(s, bucket);
        return;
    }
    slot.bucket = bucket;
    slot.is_added = micro.index > 0;
    float* out = slot.is_added ? slot.reduced : s.own_grad + b.shard_begin;
    slot.ticket = reduce(s, slot.values.as<float>(), out, b.piece);
}

static int& micro_steps_done(GptState& s, Pass::Kind kind, int chunk) {
    return (kind == Pass::weights ? s.weights_done : s.micro_steps_done)[size_t(chunk)];
}

// The deterministic sum is a binary counter. Before micro-step i it holds a partial sum for each 1 in i's binary
// digits, the largest at the bottom; afterwards equal ones are added to each other. So the sum of 2^k micro-steps is
// the same tree whether one rank adds them or several.
MicroStep begin_micro_step(GptState& s, Pass::Kind kind, int chunk) {
    const int index = micro_steps_done(s, kind, chunk);
    require(index < s.step.micro_steps, "micro-step %d in a step of %d", index + 1, s.step.micro_steps);
    const bool counted = s.options.deterministic_reduce;
    if (counted) point_gradients(s, size_t(std::popcount(unsigned(index))));
    return {.index = index,
            .last = index + 1 == s.step.micro_steps,
            .accumulate = index > 0 && !counted && (s.options.keeps_whole_gradients() || s.options.offload_gradients)};
}

namespace {

// Sums the gradients with Division::summed of tensors in `range` over s.group: packs the parts of them that are the
// same on all ranks of the group, and unpacks the sums.
void sum_in_group(GptState& s, float* grads, const FlatRange& range) {
    if (s.group.comm.size == 1) return;
    auto copy_parts = [&](bool pack) {
        float* packed = s.summed;
        for (const Tensor& tensor : s.layout.tensors) {
            const TensorPart part = summed_part(s, tensor);
            if (part.count == 0 || tensor.begin < range.begin || tensor.begin >= range.end) continue;
            float* grad = grads + part.shard_begin;
            copy_on_device(pack ? packed : grad, pack ? grad : packed, part.count * sizeof(float), s.stream);
            packed += part.count;
        }
    };
    copy_parts(true);
    const size_t count = s.summed_elements / size_t(s.group.comm.size);
    float* own = s.summed + size_t(s.group.comm.rank) * count;
    const ReduceScatter op{.out = own, .scratch = s.group.scratch, .inp = s.summed, .count = count};
    reduce_scatter_sum(op, s.group.comm, s.stream);
    wait(all_gather(s.summed, own, count * sizeof(float), s.group.comm, s.stream), s.group.comm, s.stream);
    copy_parts(false);
}

// Sums a tensor's gradient over the ring. Each rank keeps a piece of the sum and has -0 elsewhere, so that the sum over
// all ranks at the end of the step has the sum once.
void sum_into_pieces(GptState& s, float* grad, size_t elements) {
    const Comm& ring = s.ring.comm;
    const size_t count = round_up(elements, kTensorAlignment) / size_t(ring.size), before = size_t(ring.rank) * count;
    float* const own = grad + before;
    const ReduceScatter op{.out = own, .scratch = s.ring.terms.scratch, .inp = grad, .count = count};
    wait(reduce_scatter_sum(op, ring, s.stream), ring, s.stream);
    run(s.stream, ops::fill, {.out = grad, .count = before, .value = -0.0f});
    const size_t after = size_t(ring.size) * count - before - count;
    run(s.stream, ops::fill, {.out = own + count, .count = after, .value = -0.0f});
}

// Sums the gradients of a micro-step over the ring if they have terms.
void sum_in_ring(GptState& s, size_t level, const FlatRange& range, Pass::Kind kind) {
    if (s.ring.comm.size == 1 || !s.options.context.has_terms()) return;
    for (const Tensor& tensor : s.layout.tensors) {
        const bool is_deferred = s.options.pipeline.defers_weights() && tensor.row->is_linear();
        if (is_deferred == (kind == Pass::weights) && range.begin <= tensor.begin && tensor.begin < range.end)
            sum_into_pieces(s, s.levels[level] + tensor.begin, tensor.count);
    }
    if (!s.head_levels.empty() && kind == Pass::backward)
        sum_into_pieces(s, s.head_levels[level], s.layout.bucket_elements(s.layout.tied_bucket));
}

// levels[top - 1] += levels[top] in a range, repeated `times` times downward, and the same for the head's levels.
void merge_levels(GptState& s, int top, int times, const FlatRange& range) {
    for (; times > 0; times--, top--) {
        run(s.stream, ops::add,
            {.out = s.levels[size_t(top - 1)] + range.begin,
             .inp = s.levels[size_t(top)] + range.begin,
             .count = range.end - range.begin});
        if (!s.head_levels.empty())
            run(s.stream, ops::add,
                {.out = s.head_levels[size_t(top - 1)],
                 .inp = s.head_levels[size_t(top)],
                 .count = s.layout.bucket_elements(s.layout.tied_bucket)});
    }
}

}  // namespace

void end_micro_step(GptState& s, Pass::Kind kind, int chunk) {
    const unsigned index = unsigned(micro_steps_done(s, kind, chunk));
    if (!s.options.deterministic_reduce) return;
    const FlatRange& own = s.layout.chunks[size_t(chunk)];
    if (kind == Pass::backward) sum_in_group(s, s.levels[size_t(std::popcount(index))], own);
    sum_in_ring(s, size_t(std::popcount(index)), own, kind);
    const auto merge = [&](const FlatRange& range) {
        merge_levels(s, std::popcount(index), std::countr_one(index), range);
    };
    if (!s.options.pipeline.defers_weights()) return merge(own);
    for (const Tensor& tensor : s.layout.tensors)
        if (tensor.row->is_linear() == (kind == Pass::weights)) merge({tensor.begin, tensor.begin + tensor.count});
}

void count_micro_step(GptState& s, Pass::Kind kind, int chunk) { micro_steps_done(s, kind, chunk)++; }

int gradient_place(const GptState& s, int micro_step) {
    const unsigned index = unsigned(micro_step);
    return s.options.deterministic_reduce ? 64 * std::popcount(index) + std::countr_one(index) : index > 0;
}

namespace {

// Returns the head's part of a tied embedding's gradient, or the embedding's, from the other stage, which is next to
// this one in the ring.
const float* gradient_of_other_stage(GptState& s, float* mine, size_t count) {
    const StageComm& neighbors = s.comms.neighbors;
    const Comm& pair = s.options.pipeline.is_first() ? neighbors.from_previous : neighbors.to_next;
    const int other = 1 - pair.rank;
    const size_t bytes = count * sizeof(float);
    wait(exchange({{{other, mine, bytes}}, {{other, s.tied, bytes}}}, pair, s.stream), pair, s.stream);
    return s.tied;
}

// Returns the same of the head on this rank, summed over ranks.
const float* gradient_of_head(GptState& s) {
    float* const head = s.head_levels[0];
    if (is_alone(s)) return head;
    reduce_whole(s, head, s.tied, bucket_at(s, s.layout.tied_bucket).piece);
    wait(s.grads_ready, s.comms.data, s.stream);
    return s.tied ? s.tied : head;
}

// Adds the two parts of a tied embedding's gradient.
void sum_tied_embedding(GptState& s) {
    if (s.layout.tied_bucket < 0) return;
    const Bucket& bucket = bucket_at(s, s.layout.tied_bucket);
    const bool is_sharded = s.options.is_sharded();
    float* const grad = s.own_grad + (is_sharded ? bucket.shard_begin : bucket.begin);
    const size_t count = bucket.piece * size_t(is_sharded ? 1 : s.options.ranks);
    const float* other = s.head_levels.empty() ? gradient_of_other_stage(s, grad, count) : gradient_of_head(s);
    run(s.stream, ops::add, {.out = grad, .inp = other, .count = count});
}

}  // namespace

void finish_grads(GptState& s) {
    if (s.options.deterministic_reduce) {
        const int sums = std::popcount(unsigned(s.micro_steps_done[0]));
        merge_levels(s, sums - 1, sums - 1, {0, s.layout.elements});
        for (size_t bucket = 0; !is_alone(s) && bucket < s.layout.buckets.size(); bucket++)
            reduce_bucket(s, int(bucket));
    }
    wait_shards(s);
    wait(s.grads_ready, s.comms.data, s.stream);
    if (!s.options.deterministic_reduce) sum_in_group(s, s.own_grad, {0, s.layout.elements});
    sum_tied_embedding(s);
}

void gather_params(GptState& s) {
    for (BucketSlot& slot : s.param_slot) slot.bucket = -1;
    if (!s.options.is_sharded() || !s.options.keeps_whole_parameters()) return;
    for (size_t i = 0; i < s.layout.buckets.size(); i++) {
        const Bucket& bucket = s.layout.buckets[i];
        s.param_ready[i] = all_gather(s.param.from(bucket.begin).data, s.own_param.from(bucket.shard_begin).data,
                                      bucket.piece * size_of(s.own_param.dtype), s.comms.data, s.stream);
    }
}
