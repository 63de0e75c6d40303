// The table of activations: what forward leaves for backward, and the buffers that both work in.
//
// A row that is per layer exists L times while the recompute level is below `shared_from`, and once, overwritten layer
// by layer, from that level on; backward then computes it again before it reads it.
#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "model/arena.h"
#include "model/shape.h"

template <class T> struct BlockActivations {
    T* residual;                     // (B, T, C), the block's input
    T* norm1;                        // (B, T, C)
    float *norm1_mean, *norm1_rstd;  // (B, T)
    T* qkv;                          // (B, T, qkv channels)
    T* attn;                         // (B, T, C)
    float* attn_lse;                 // (B, NH, T)
    T* residual_mid;                 // (B, T, C), after attention was added
    T* norm2;                        // (B, T, C)
    float *norm2_mean, *norm2_rstd;  // (B, T)
    T* fc;                           // (B, T, 4C), before the activation
    T* fc_gelu;                      // (B, T, 4C), after it
};

template <class T> struct GptActivations {
    T* residual_f;                           // (B, T, C), the last block's output
    T* norm_f;                               // (B, T, C)
    float *norm_f_mean, *norm_f_rstd;        // (B, T)
    T* branch;                               // (B, T, C), what attention or the MLP adds to the residual
    T* logits;                               // (head rows, Vp), overwritten with their gradients
    float* loss;                             // (B, T)
    T* dresidual;                            // (B, T, C), gradient of the residual stream, updated block by block
    T* dbranch;                              // (B, T, C), gradient of a norm's or of attention's output
    T* dwide;                                // (B, T, 4C), gradient of fc, then of qkv
    std::vector<BlockActivations<T>> block;  // (L)
};

struct ActivationSizes {
    size_t tokens;     // B T
    size_t head_rows;  // min(options.head_rows, B T)
    GptShape shape;

    size_t per_token() const { return tokens; }
    size_t per_channel() const { return tokens * size_t(shape.n_embd); }
    size_t per_qkv() const { return tokens * size_t(shape.qkv_channels()); }
    size_t per_hidden() const { return tokens * size_t(shape.hidden()); }
    size_t per_head() const { return tokens * size_t(shape.n_head); }
    size_t per_wide() const { return tokens * size_t(std::max(shape.hidden(), shape.qkv_channels())); }
    size_t per_logit() const { return head_rows * size_t(shape.padded_vocab()); }
};

// For rows that are kept at every level.
inline constexpr Recompute kAlwaysKept = Recompute(int(Recompute::block) + 1);

template <class T> struct ActivationRow {
    const char* name;
    const char* category;
    size_t (ActivationSizes::*count)() const;  // elements, of one layer if per layer
    Recompute shared_from;
    bool training_only;
    bool per_layer;
    size_t element_bytes;
    std::function<void(GptActivations<T>&, size_t layer, std::byte* memory)> set;

    // `member` says whether the row is per layer and what its elements are.
    template <class Owner, class Element>
    ActivationRow(Element* Owner::*member, const char* row_name, const char* row_category,
                  size_t (ActivationSizes::*row_count)() const, Recompute row_shared_from, bool row_training_only)
        : name(row_name),
          category(row_category),
          count(row_count),
          shared_from(row_shared_from),
          training_only(row_training_only),
          per_layer(std::is_same_v<Owner, BlockActivations<T>>),
          element_bytes(sizeof(Element)),
          set([member](GptActivations<T>& acts, size_t layer, std::byte* memory) {
              if constexpr (std::is_same_v<Owner, BlockActivations<T>>)
                  acts.block[layer].*member = reinterpret_cast<Element*>(memory);
              else
                  acts.*member = reinterpret_cast<Element*>(memory);
          }) {}
};

template <class T> const std::vector<ActivationRow<T>>& activation_table() {
    using G = GptActivations<T>;
    using B = BlockActivations<T>;
    using S = ActivationSizes;
    using R = Recompute;
    static const char *kept = "activations", *backward = "backward buffers";
    static const std::vector<ActivationRow<T>> table = {
        {&B::residual, "residual", kept, &S::per_channel, kAlwaysKept, false},
        {&B::norm1, "norm1", kept, &S::per_channel, R::norm, false},
        {&B::norm1_mean, "norm1_mean", kept, &S::per_token, R::block, false},
        {&B::norm1_rstd, "norm1_rstd", kept, &S::per_token, R::block, false},
        {&B::qkv, "qkv", kept, &S::per_qkv, R::block, false},
        {&B::attn, "attn", kept, &S::per_channel, R::block, false},
        {&B::attn_lse, "attn_lse", kept, &S::per_head, R::block, false},
        {&B::residual_mid, "residual_mid", kept, &S::per_channel, R::block, false},
        {&B::norm2, "norm2", kept, &S::per_channel, R::norm, false},
        {&B::norm2_mean, "norm2_mean", kept, &S::per_token, R::block, false},
        {&B::norm2_rstd, "norm2_rstd", kept, &S::per_token, R::block, false},
        {&B::fc, "fc", kept, &S::per_hidden, R::block, false},
        {&B::fc_gelu, "fc_gelu", kept, &S::per_hidden, R::gelu, false},
        {&G::residual_f, "residual_f", kept, &S::per_channel, kAlwaysKept, false},
        {&G::norm_f, "norm_f", kept, &S::per_channel, kAlwaysKept, false},
        {&G::norm_f_mean, "norm_f_mean", kept, &S::per_token, kAlwaysKept, false},
        {&G::norm_f_rstd, "norm_f_rstd", kept, &S::per_token, kAlwaysKept, false},
        {&G::branch, "branch", kept, &S::per_channel, kAlwaysKept, false},
        {&G::loss, "loss", kept, &S::per_token, kAlwaysKept, false},
        {&G::logits, "logits", "logits", &S::per_logit, kAlwaysKept, false},
        {&G::dresidual, "dresidual", backward, &S::per_channel, kAlwaysKept, true},
        {&G::dbranch, "dbranch", backward, &S::per_channel, kAlwaysKept, true},
        {&G::dwide, "dwide", backward, &S::per_wide, kAlwaysKept, true},
    };
    return table;
}

// Takes every row from the arena.
template <class T> GptActivations<T> place_activations(const GptOptions& options, Arena& arena);
