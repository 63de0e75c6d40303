// The update: measure the gradients, clip, let the optimizer move the masters.
#include "model/state.h"

template <class Act> void update(GptState<Act>& s, const UpdateSettings& settings) {
    const int n_chunks = int(s.host_chunks.size());
    ops::squared_sums({.out = s.chunk_sums, .values = s.grad, .chunks = s.chunks, .n_chunks = n_chunks}, s.stream);
    ops::grad_norm_finish({.out = s.grad_norm,
                           .sums = s.chunk_sums,
                           .chunks = s.chunks,
                           .loss_scale = &s.scalars->loss_scale,
                           .n_chunks = n_chunks,
                           .clip = settings.grad_clip},
                          s.stream);

    Act* param = std::is_same_v<Act, float> ? nullptr : s.param;
    switch (s.options.optimizer) {
        case OptimizerKind::adamw:
            ops::adamw_update<Act>({.master = s.master,
                                    .param = param,
                                    .m = s.m,
                                    .v = s.v,
                                    .grad = s.grad,
                                    .chunks = s.chunks,
                                    .grad_norm = s.grad_norm,
                                    .scalars = s.scalars,
                                    .n_chunks = n_chunks,
                                    .beta1 = settings.beta1,
                                    .beta2 = settings.beta2,
                                    .eps = settings.eps,
                                    .weight_decay = settings.weight_decay},
                                   s.stream);
            break;
        case OptimizerKind::sgd:
            ops::sgd_update<Act>({.master = s.master,
                                  .param = param,
                                  .m = s.m,
                                  .grad = s.grad,
                                  .chunks = s.chunks,
                                  .grad_norm = s.grad_norm,
                                  .scalars = s.scalars,
                                  .n_chunks = n_chunks,
                                  .momentum = settings.momentum,
                                  .weight_decay = settings.weight_decay},
                                 s.stream);
            break;
    }
}

template void update(GptState<float>&, const UpdateSettings&);
template void update(GptState<bf16>&, const UpdateSettings&);
template void update(GptState<fp16>&, const UpdateSettings&);
