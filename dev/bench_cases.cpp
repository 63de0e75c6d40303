#include "dev/bench_cases.h"

#include <cmath>
#include <set>
#include <type_traits>

#include "dev/bench_arrays.h"
#include "kernels/base/exact_squares.h"
#include "kernels/op_work.h"
#include "model/tensors.h"
#include "model/update.h"

namespace {

MakeGroup group(std::function<void(std::vector<Case>&, Arrays&)> add) {
    return [add] {
        auto arrays = std::make_shared<Arrays>();
        CaseGroup made;
        add(made.cases, *arrays);
        made.arrays = arrays;
        return made;
    };
}

// `calls`: of the op per step. `elements`: of all its chunks, if it works on chunks.
template <class Op>
Case case_of(const std::string& name, double calls, void (*op)(const Op&, Stream),
             const std::type_identity_t<Op>& arguments, size_t elements = 0) {
    const ops::Work work = ops::work_of_any(arguments, elements);
    return {name, calls, [=] { op(arguments, Stream{}); }, work.flops, work.bytes};
}

std::vector<int> random_ids(int count, int below) {
    std::mt19937 random(7);
    std::vector<int> ids(static_cast<size_t>(count));
    for (int& id : ids) id = int(random() % unsigned(below));
    return ids;
}

struct Linear {
    std::string name;
    double calls;
    int rows, n, k;
    bool gelu_behind = false, gelu_before = false;  // of the product, forward
};

// The operands of the three GEMMs of a layer.
template <class T> struct LinearArrays {
    LinearArrays(Arrays& arrays, const Linear& linear) {
        const size_t R = size_t(linear.rows), N = size_t(linear.n), K = size_t(linear.k);
        inp = arrays.make<T>(R * K), out = arrays.make<T>(R * N), weight = arrays.make<T>(N * K, 0.02f);
        bias = arrays.make<T>(N, 0.02f), dinp = arrays.make<T>(R * K);
        if (linear.gelu_behind) pre_out = arrays.make<T>(R * N);
        if (linear.gelu_before) pre_inp = arrays.make<T>(R * K);
        dweight = arrays.make<float>(N * K), dbias = arrays.make<float>(N);
        scratch = arrays.make_scratch(ops::matmul_backward_weight_scratch_bytes(backward_weight(linear)));
    }
    ops::MatmulForward forward(const Linear& l) const {
        return {out, pre_out, inp, weight, bias, l.rows, l.n, l.k, activation_if(l.gelu_behind)};
    }
    ops::MatmulBackwardInput backward_input(const Linear& l) const {
        return {dinp, out, weight, pre_inp, l.rows, l.n, l.k, activation_if(l.gelu_before)};
    }
    static ActivationFunction activation_if(bool gelu) {
        return gelu ? ActivationFunction::gelu_new : ActivationFunction::none;
    }
    ops::MatmulBackwardWeight backward_weight(const Linear& l) const {
        return {dweight, dbias, scratch, out, inp, l.rows, l.n, l.k, false};
    }

    T *inp, *out, *weight, *bias, *dinp, *pre_out = nullptr, *pre_inp = nullptr;
    float *dweight = nullptr, *dbias = nullptr;
    void* scratch = nullptr;
};

template <class T> void add_linear(std::vector<Case>& cases, Arrays& arrays, const Linear& linear) {
    const LinearArrays<T> layer(arrays, linear);
    auto add = [&](const char* name, auto* op, const auto& arguments, const char* variant_of = nullptr) {
        cases.push_back(case_of(linear.name + name, linear.calls, op, arguments));
        if (variant_of) cases.back().variant_of = linear.name + variant_of;
    };
    auto forward = layer.forward(linear);
    add(" forward", ops::matmul_forward, forward);
    if (linear.gelu_behind) {
        forward.pre_activation = nullptr, forward.activation = ActivationFunction::none;
        add(" forward without GELU", ops::matmul_forward, forward, " forward");
        forward.activation = ActivationFunction::relu2;
        add(" forward with relu2", ops::matmul_forward, forward, " forward");
    }
    auto input = layer.backward_input(linear);
    add(" backward input", ops::matmul_backward_input, input);
    if (linear.gelu_before) {
        input.kept = nullptr, input.activation = ActivationFunction::none;
        add(" backward input without GELU", ops::matmul_backward_input, input, " backward input");
        input.kept = arrays.make_relu2<T>(size_t(linear.rows) * size_t(linear.k));
        input.activation = ActivationFunction::relu2;
        add(" backward input with relu2", ops::matmul_backward_input, input, " backward input");
    }
    auto grad = layer.backward_weight(linear);
    add(" backward weight", ops::matmul_backward_weight, grad);
    grad.accumulate = true;
    add(" backward weight, adding", ops::matmul_backward_weight, grad, " backward weight");
    grad.accumulate = false, grad.dbias = nullptr;
    add(" backward weight without bias", ops::matmul_backward_weight, grad, " backward weight");
}

// The head's GEMMs process some rows at a time; the first writes the gradient of the weight, the others accumulate.
template <class T> void add_head(std::vector<Case>& cases, Arrays& arrays, const Workload& work) {
    const Linear head{"head", 1, work.rows_of_head(), work.shape.padded_vocab(), work.shape.n_embd};
    const double calls = double(work.tokens()) / head.rows;
    const LinearArrays<T> layer(arrays, head);
    auto forward = layer.forward(head);
    forward.bias = nullptr;
    const auto input = layer.backward_input(head);
    auto grad = layer.backward_weight(head);
    grad.dbias = nullptr;
    auto adding = grad;
    adding.accumulate = true;
    cases.push_back(case_of("head forward", calls, ops::matmul_forward, forward));
    cases.push_back(case_of("head backward input", calls, ops::matmul_backward_input, input));
    cases.push_back(case_of("head backward weight", 1, ops::matmul_backward_weight, grad));
    if (calls > 1)
        cases.push_back(case_of("head backward weight, adding", calls - 1, ops::matmul_backward_weight, adding));
}

// Adds a variant of a case, which is not part of the step.
template <class Op>
void add_variant(std::vector<Case>& cases, const char* of, const char* name, double calls,
                 void (*op)(const Op&, Stream), const std::type_identity_t<Op>& arguments) {
    cases.push_back(case_of(name, calls, op, arguments));
    cases.back().variant_of = of;
}

template <class T> void add_activations(std::vector<Case>& cases, Arrays& arrays, const Workload& work) {
    const size_t count = size_t(work.tokens()) * size_t(work.shape.hidden());
    T *out = arrays.make<T>(count), *inp = arrays.make<T>(count);
    const double calls = work.shape.n_layer;
    const ops::ActivationForward gelu{out, inp, count};
    add_variant(cases, "fc forward", "gelu forward alone", calls, ops::activation_forward, gelu);
}

// A gated MLP with two thirds of the hidden size, and so the same number of parameters.
template <class T> void add_swiglu(std::vector<Case>& cases, Arrays& arrays, const Workload& work) {
    const int rows = work.tokens(), hidden = std::max(1, work.shape.hidden() * 2 / 3 / 64) * 64;
    const size_t count = size_t(rows) * size_t(hidden);
    T *inp = arrays.make<T>(2 * count), *out = arrays.make<T>(count), *dinp = arrays.make<T>(2 * count);
    const ops::GatedActivationForward forward{out, inp, rows, hidden, ActivationFunction::silu};
    const ops::GatedActivationBackward backward{dinp, out, inp, rows, hidden, ActivationFunction::silu};
    const double calls = work.shape.n_layer;
    add_variant(cases, "fc forward", "swiglu forward", calls, ops::gated_activation_forward, forward);
    add_variant(cases, "fc_proj backward input", "swiglu backward", calls, ops::gated_activation_backward, backward);
}

// Query heads per key-value head in the benchmark of grouped-query attention: the smallest divisor from 3 on.
int bench_group(int n_head) {
    int group = std::min(3, n_head);
    while (n_head % group) group++;
    return group;
}

template <class T> void add_attention(std::vector<Case>& cases, Arrays& arrays, const Workload& work) {
    const GptShape& s = work.shape;
    const size_t tokens = size_t(work.batch * work.seq_len), C = size_t(s.n_embd);
    T *qkv = arrays.make<T>(tokens * 3 * C), *out = arrays.make<T>(tokens * C), *dout = arrays.make<T>(tokens * C);
    T* dqkv = arrays.make<T>(tokens * 3 * C);
    float* lse = arrays.make<float>(tokens * size_t(s.n_head));
    const float scale = 1.0f / std::sqrt(float(s.head_size()));
    const auto add = [&](const std::string& variant, int n_kv_head, int window) {
        ops::AttentionForward forward{.out = out,
                                      .lse = lse,
                                      .qkv = qkv,
                                      .batch = work.batch,
                                      .seq_len = work.seq_len,
                                      .n_head = s.n_head,
                                      .n_kv_head = n_kv_head,
                                      .head_size = s.head_size(),
                                      .scale = scale,
                                      .window = window};
        ops::AttentionBackward backward{.dqkv = dqkv,
                                        .scratch = nullptr,
                                        .dout = dout,
                                        .qkv = qkv,
                                        .out = out,
                                        .lse = lse,
                                        .batch = work.batch,
                                        .seq_len = work.seq_len,
                                        .n_head = s.n_head,
                                        .n_kv_head = n_kv_head,
                                        .head_size = s.head_size(),
                                        .scale = scale,
                                        .window = window};
        backward.scratch = arrays.make_scratch(ops::attention_backward_scratch_bytes(backward));
        cases.push_back(case_of("attention forward" + variant, s.n_layer, ops::attention_forward, forward));
        if (!variant.empty()) cases.back().variant_of = "attention forward";
        cases.push_back(case_of("attention backward" + variant, s.n_layer, ops::attention_backward, backward));
        if (!variant.empty()) cases.back().variant_of = "attention backward";
    };
    add("", s.n_head, 0);
    add(", grouped heads", s.n_head / bench_group(s.n_head), 0);
    add(", window of T/4", s.n_head, std::max(1, work.seq_len / 4));
}

template <class T> void add_norm(std::vector<Case>& cases, Arrays& arrays, const Workload& work) {
    const int rows = work.batch * work.seq_len, cols = work.shape.n_embd;
    const size_t count = size_t(rows) * size_t(cols);
    T *inp = arrays.make<T>(count), *branch = arrays.make<T>(count), *residual = arrays.make<T>(count);
    T *out = arrays.make<T>(count), *weight = arrays.make<T>(size_t(cols)), *bias = arrays.make<T>(size_t(cols));
    float *mean = arrays.make<float>(size_t(rows)), *rstd = arrays.make<float>(size_t(rows));
    float *dweight = arrays.make<float>(size_t(cols)), *dbias = arrays.make<float>(size_t(cols));
    ops::ResidualNormForward forward{residual, out, mean, rstd, inp, branch, weight, bias, rows, cols, 1e-5f};
    auto first = forward;  // of the forward pass: there is no branch to add
    first.residual = nullptr;
    first.branch = nullptr;
    ops::NormBackward backward{branch, dweight, dbias, nullptr, out,  residual, weight,
                               mean,   rstd,    rows,  cols,    true, false};
    backward.scratch = arrays.make_scratch(ops::norm_backward_scratch_bytes(backward));
    auto last = backward;  // of the forward pass: nothing went around it
    last.accumulate_dinp = false;
    const double calls = 2 * work.shape.n_layer;
    cases.push_back(case_of("norm forward", 1, ops::residual_norm_forward, first));
    cases.push_back(case_of("residual norm forward", calls, ops::residual_norm_forward, forward));
    cases.push_back(case_of("final norm backward", 1, ops::norm_backward, last));
    cases.push_back(case_of("norm backward", calls, ops::norm_backward, backward));
    forward.mean = nullptr, forward.bias = nullptr;
    backward.mean = nullptr, backward.dbias = nullptr;
    add_variant(cases, "residual norm forward", "residual RMSNorm forward", calls, ops::residual_norm_forward, forward);
    add_variant(cases, "norm backward", "RMSNorm backward", calls, ops::norm_backward, backward);
    forward.weight = nullptr;
    backward.weight = nullptr, backward.dweight = nullptr;
    add_variant(cases, "residual norm forward", "residual RMSNorm forward without weights", calls,
                ops::residual_norm_forward, forward);
    add_variant(cases, "norm backward", "RMSNorm backward without weights", calls, ops::norm_backward, backward);
}

template <class T> void add_cross_entropy(std::vector<Case>& cases, Arrays& arrays, const Workload& work) {
    const int tokens = work.tokens(), rows = work.rows_of_head();
    const int V = work.shape.vocab_size, Vp = work.shape.padded_vocab();
    T* logits = arrays.make<T>(size_t(rows) * size_t(Vp));
    float* loss = arrays.make<float>(size_t(tokens));
    int* ids = arrays.put(random_ids(rows, V));
    ops::CrossEntropy entropy{logits, loss, ids, nullptr, rows, V, Vp, 1e-4f, true};
    const double calls = double(tokens) / rows;
    cases.push_back(case_of("cross entropy", calls, ops::cross_entropy, entropy));
    entropy.softcap = 15, entropy.z_loss = 1e-4f;
    add_variant(cases, "cross entropy", "cross entropy with soft cap and z-loss", calls, ops::cross_entropy, entropy);
    // Qwen's vocabulary, in the memory of the same logits.
    constexpr int kLongVocab = 151'936;
    if (const size_t long_rows = size_t(rows) * size_t(Vp) / kLongVocab; long_rows > 0)
        add_variant(cases, "cross entropy", "cross entropy of 151936 columns", calls, ops::cross_entropy,
                    {logits, loss, ids, nullptr, int(long_rows), kLongVocab, kLongVocab, 1e-4f, true});
    auto* sum = static_cast<double*>(arrays.make_scratch(sizeof(double)));
    ops::LossSum losses{sum, loss, tokens, false};
    cases.push_back(case_of("loss sum", 1, ops::loss_sum, losses));
}

template <class T> void add_embedding(std::vector<Case>& cases, Arrays& arrays, const Workload& work) {
    const GptShape& s = work.shape;
    const int rows = work.batch * work.seq_len, Vp = s.padded_vocab();
    const size_t C = size_t(s.n_embd);
    T *wte = arrays.make<T>(size_t(Vp) * C), *wpe = arrays.make<T>(size_t(s.n_positions) * C);
    T* out = arrays.make<T>(size_t(rows) * C);
    float *dwte = arrays.make<float>(size_t(Vp) * C), *dwpe = arrays.make<float>(size_t(s.n_positions) * C);
    const std::vector<int> tokens = random_ids(rows, s.vocab_size);
    int* ids = arrays.put(tokens);
    ops::EmbeddingForward forward{out, ids, wte, wpe, work.batch, work.seq_len, s.n_embd};
    ops::EmbeddingBackward backward{dwte,         dwpe,     nullptr, out,           ids,  work.batch,
                                    work.seq_len, s.n_embd, Vp,      s.n_positions, false};
    backward.scratch = arrays.make_scratch(ops::embedding_backward_scratch_bytes(backward));
    cases.push_back(case_of("embedding forward", 1, ops::embedding_forward, forward));
    cases.push_back(case_of("embedding backward", 1, ops::embedding_backward, backward));
    // The number of distinct tokens is known here.
    const double width = s.n_embd, used = double(std::set<int>(tokens.begin(), tokens.end()).size());
    cases.end()[-2].bytes = (double(rows) + used + work.seq_len) * width * sizeof(T);
    cases.back().bytes = double(rows) * width * sizeof(T) + (2 * used + s.n_positions) * width * sizeof(float);
    backward.dwpe = nullptr, backward.accumulate_dwte = false;
    add_variant(cases, "embedding backward", "embedding backward, overwriting, without positions", 1,
                ops::embedding_backward, backward);
}

template <class T> void add_update(std::vector<Case>& cases, Arrays& arrays, const Workload& work) {
    const TensorLayout layout = lay_out_tensors(work.shape);
    std::vector<ops::Chunk> grid = chunk_grid(layout);
    for (ops::Chunk& chunk : grid) chunk.state_begin = chunk.begin;
    float *master = arrays.make<float>(layout.elements), *m = arrays.make<float>(layout.elements, 1e-3f);
    float *v = static_cast<float*>(arrays.make_scratch(layout.elements * 4)),
          *grad = arrays.make<float>(layout.elements, 1e-3f);
    T* param = std::is_same_v<T, float> ? nullptr : arrays.make<T>(layout.elements);
    auto* chunks = arrays.put(grid);
    auto* sums =
        static_cast<double*>(arrays.make_scratch(layout.tensors.size() * ops::kSquareEntries * sizeof(double)));
    auto* norm = arrays.put(std::vector<ops::GradNorm>{{1, 1, -1, 0}});
    auto* loss_scale = arrays.put(std::vector<float>{1});
    auto* scalars = arrays.put(
        std::vector<ops::UpdateScalars>{update_scalars(OptimizerSettings(), {OptimizerKind::adamw, 0.1}, 1e-6, 100)});
    const int n = int(grid.size());
    ops::SquaredSums squares{sums, grad, chunks, n};
    ops::ElementwiseUpdate adamw{.rule = OptimizerKind::adamw,
                                 .master = master,
                                 .param = param,
                                 .state = {m, v},
                                 .grad = grad,
                                 .chunks = chunks,
                                 .scalars = scalars,
                                 .grad_norm = norm,
                                 .n_chunks = n};
    ops::GradNormFinish finish{norm, sums, loss_scale, int(layout.tensors.size()), 1.0f};
    const size_t numbers = layout.tensors.size() * ops::kSquareEntries;
    cases.push_back(case_of("clear sums", 1, ops::fill, {reinterpret_cast<float*>(sums), 2 * numbers, 0}));
    cases.push_back(case_of("squared sums", 1, ops::squared_sums, squares, layout.elements));
    cases.push_back(case_of("gradient norm", 1, ops::grad_norm_finish, finish));
    cases.push_back(case_of("adamw update", 1, ops::elementwise_update, adamw, layout.elements));
    ops::ElementwiseUpdate narrow = adamw;
    narrow.state[0] = arrays.make<bf16>(layout.elements, 1e-3f);
    narrow.state[1] = static_cast<bf16*>(arrays.make_scratch(layout.elements * sizeof(bf16)));
    cases.push_back(case_of("adamw update, state in bf16", 1, ops::elementwise_update, narrow, layout.elements));
    cases.back().variant_of = "adamw update";
}

}  // namespace

template <class T> std::vector<MakeGroup> op_groups(const Workload& work) {
    const GptShape& s = work.shape;
    const int tokens = work.tokens(), C = s.n_embd;
    const double L = s.n_layer;
    std::vector<MakeGroup> groups;
    auto add = [&](void (*add_cases)(std::vector<Case>&, Arrays&, const Workload&)) {
        groups.push_back(group([=](std::vector<Case>& cases, Arrays& arrays) { add_cases(cases, arrays, work); }));
    };
    auto add_product = [&](const Linear& linear) {
        groups.push_back(
            group([=](std::vector<Case>& cases, Arrays& arrays) { add_linear<T>(cases, arrays, linear); }));
    };
    add_product({"qkv", L, tokens, s.qkv_channels(), C});
    add(add_attention<T>);
    add_product({"attn_proj", L, tokens, C, C});
    add_product({"fc", L, tokens, s.hidden(), C, true});
    add(add_activations<T>);
    add(add_swiglu<T>);
    add_product({"fc_proj", L, tokens, C, s.hidden(), false, true});
    add(add_norm<T>);
    add(add_head<T>);
    add(add_cross_entropy<T>);
    add(add_embedding<T>);
    add(add_update<T>);
    return groups;
}

template std::vector<MakeGroup> op_groups<float>(const Workload&);
template std::vector<MakeGroup> op_groups<bf16>(const Workload&);
template std::vector<MakeGroup> op_groups<fp16>(const Workload&);
