// The update: the gradient norm over all ranks, clipping, and the optimizer's step on the masters.
#include "kernels/numeric.h"
#include "kernels/op_stream.h"
#include "kernels/ops.h"
#include "kernels/tensor.h"
#include "model/state.h"

namespace {

// Counts the elements of all chunks, for a trace.
OpNote note_of(const std::vector<ops::Chunk>& chunks, const GptState& s) {
    OpNote note;
    for (size_t i = 0; s.stream.trace && i < chunks.size(); i++) note.elements += size_t(chunks[i].count);
    return note;
}

}  // namespace

void update(GptState& s) {
    const int n_own = int(s.host_own_chunks.size()), n_all = int(s.host_all_chunks.size());
    const StepSums sums = step_sums(s);
    s.update_time.start(s.stream);
    run(s.stream, ops::squared_sums, {.out = s.sums, .values = s.own_grad, .chunks = s.own_chunks, .n_chunks = n_own},
        note_of(s.host_own_chunks, s));
    s.update_time.stop(s.stream);
    wait(all_reduce_sum(s.sums, sums.count(), s.comm, s.stream), s.comm, s.stream);
    s.update_time.start(s.stream);
    run(s.stream, ops::grad_norm_finish,
        {.out = s.grad_norm,
         .sums = s.sums,
         .chunks = s.all_chunks,
         .loss_scale = &s.scalars->loss_scale,
         .n_chunks = n_all,
         .clip = s.options.optimizer.grad_clip});

    // Without shards, a rank measures only its own part of the gradients, so that each is counted once, but updates all
    // parameters.
    const bool is_sharded = s.options.is_sharded();
    const ops::UpdateArrays arrays{.master = s.master,
                                   .param = s.options.precision == Dtype::fp32 ? View() : s.own_param,
                                   .m = s.m,
                                   .grad = s.own_grad,
                                   .chunks = is_sharded ? s.own_chunks : s.all_chunks,
                                   .grad_norm = s.grad_norm,
                                   .scalars = s.scalars,
                                   .n_chunks = is_sharded ? n_own : n_all};
    const OpNote note = note_of(is_sharded ? s.host_own_chunks : s.host_all_chunks, s);
    const OptimizerSettings& o = s.options.optimizer;
    switch (o.kind) {
        case OptimizerKind::adamw:
            run(s.stream, ops::adamw_update, {arrays, s.v, o.beta1, o.beta2, o.eps, o.weight_decay}, note);
            break;
        case OptimizerKind::sgd: run(s.stream, ops::sgd_update, {arrays, o.momentum, o.weight_decay}, note); break;
    }
    s.update_time.stop(s.stream);
}
