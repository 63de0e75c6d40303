#include "dev/bench_cases.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <type_traits>

#include "kernels/check.h"
#include "model/tensors.h"

std::string Workload::title() const { return format("%s, B=%d, T=%d", name.c_str(), batch, seq_len); }

namespace {

// Device arrays with random content, freed together.
class Arrays {
public:
    template <class T> T* make(size_t count, float deviation = 1.0f) {
        T* values = static_cast<T*>(make_scratch(count * sizeof(T)));
        ops::normal_fill({noise(), kNoise, 7, next_++, deviation, 0}, Stream{});
        for (size_t begin = 0; begin < count; begin += kNoise)
            ops::cast(ops::Cast<T>{values + begin, noise(), std::min(kNoise, count - begin)}, Stream{});
        synchronize(Stream{});
        return values;
    }
    int* make_ids(size_t count, int below) {
        std::vector<int> host(count);
        for (int& id : host) id = int(random_() % unsigned(below));
        return put(host);
    }
    template <class T> T* put(const std::vector<T>& host) {
        void* values = make_scratch(host.size() * sizeof(T));
        copy_to_device(values, host.data(), host.size() * sizeof(T), Stream{});
        synchronize(Stream{});
        return static_cast<T*>(values);
    }
    void* make_scratch(size_t bytes) {
        buffers_.emplace_back(std::max<size_t>(bytes, 1));
        return buffers_.back().data();
    }

private:
    // Repeated to fill an array.
    static constexpr size_t kNoise = 1 << 20;
    float* noise() {
        if (!noise_.data()) noise_ = DeviceBuffer(kNoise * sizeof(float));
        return static_cast<float*>(noise_.data());
    }

    std::vector<DeviceBuffer> buffers_;
    DeviceBuffer noise_;
    uint32_t next_ = 0;
    std::mt19937 random_{7};
};

MakeGroup group(std::function<void(std::vector<Case>&, Arrays&)> add) {
    return [add] {
        auto arrays = std::make_shared<Arrays>();
        CaseGroup made;
        add(made.cases, *arrays);
        made.arrays = arrays;
        return made;
    };
}

struct Linear {
    std::string name;
    double calls;
    int rows, n, k;
    bool gelu_behind = false, gelu_before = false;  // of the product, forward
};

template <class T> void add_linear(std::vector<Case>& cases, Arrays& arrays, const Linear& linear) {
    const size_t R = size_t(linear.rows), N = size_t(linear.n), K = size_t(linear.k);
    T *inp = arrays.make<T>(R * K), *out = arrays.make<T>(R * N), *weight = arrays.make<T>(N * K, 0.02f);
    T *bias = arrays.make<T>(N, 0.02f), *pre_out = linear.gelu_behind ? arrays.make<T>(R * N) : nullptr;
    T* pre_inp = linear.gelu_before ? arrays.make<T>(R * K) : nullptr;
    T* dinp = arrays.make<T>(R * K);
    float *dweight = arrays.make<float>(N * K), *dbias = arrays.make<float>(N);
    ops::MatmulForward<T> forward{out, pre_out, inp, weight, bias, linear.rows, linear.n, linear.k};
    ops::MatmulBackwardInput<T> input{dinp, out, weight, pre_inp, linear.rows, linear.n, linear.k};
    ops::MatmulBackwardWeight<T> grad{dweight, dbias, nullptr, out, inp, linear.rows, linear.n, linear.k, false};
    grad.scratch = arrays.make_scratch(ops::matmul_backward_weight_scratch_bytes(grad));
    const double flops = 2.0 * double(R * N) * double(K), both = double(R * K + R * N) * sizeof(T);
    const double weights = double(N * K);
    cases.push_back({linear.name + " forward", linear.calls, [=] { ops::matmul_forward(forward, Stream{}); }, flops,
                     both + weights * sizeof(T) + (pre_out ? double(R * N) * sizeof(T) : 0)});
    cases.push_back({linear.name + " backward input", linear.calls,
                     [=] { ops::matmul_backward_input(input, Stream{}); }, flops,
                     both + weights * sizeof(T) + (pre_inp ? double(R * K) * sizeof(T) : 0)});
    cases.push_back({linear.name + " backward weight", linear.calls,
                     [=] { ops::matmul_backward_weight(grad, Stream{}); }, flops, both + weights * sizeof(float)});
}

template <class T> void add_attention(std::vector<Case>& cases, Arrays& arrays, const Workload& work) {
    const GptShape& s = work.shape;
    const size_t tokens = size_t(work.batch * work.seq_len), C = size_t(s.n_embd);
    T *qkv = arrays.make<T>(tokens * 3 * C), *out = arrays.make<T>(tokens * C), *dout = arrays.make<T>(tokens * C);
    T* dqkv = arrays.make<T>(tokens * 3 * C);
    float* lse = arrays.make<float>(tokens * size_t(s.n_head));
    const float scale = 1.0f / std::sqrt(float(s.head_size()));
    ops::AttentionForward<T> forward{out, lse, qkv, work.batch, work.seq_len, s.n_head, s.n_head, s.head_size(), scale};
    ops::AttentionBackward<T> backward{dqkv,       nullptr,      dout,     qkv,      out,           lse,
                                       work.batch, work.seq_len, s.n_head, s.n_head, s.head_size(), scale};
    backward.scratch = arrays.make_scratch(ops::attention_backward_scratch_bytes(backward));
    const double flops = 2.0 * double(tokens) * double(work.seq_len) * double(C);  // two products, causal half
    const double unit = double(tokens * C) * sizeof(T), L = s.n_layer;
    cases.push_back({"attention forward", L, [=] { ops::attention_forward(forward, Stream{}); }, flops, 4 * unit});
    cases.push_back(
        {"attention backward", L, [=] { ops::attention_backward(backward, Stream{}); }, 2.5 * flops, 8 * unit});
}

template <class T> void add_norm(std::vector<Case>& cases, Arrays& arrays, const Workload& work) {
    const int rows = work.batch * work.seq_len, cols = work.shape.n_embd;
    const size_t count = size_t(rows) * size_t(cols);
    T *inp = arrays.make<T>(count), *branch = arrays.make<T>(count), *residual = arrays.make<T>(count);
    T *out = arrays.make<T>(count), *weight = arrays.make<T>(size_t(cols)), *bias = arrays.make<T>(size_t(cols));
    float *mean = arrays.make<float>(size_t(rows)), *rstd = arrays.make<float>(size_t(rows));
    float *dweight = arrays.make<float>(size_t(cols)), *dbias = arrays.make<float>(size_t(cols));
    ops::ResidualNormForward<T> forward{residual, out, mean, rstd, inp, branch, weight, bias, rows, cols, 1e-5f};
    ops::NormBackward<T> backward{branch, dweight, dbias, nullptr, out,  residual, weight,
                                  mean,   rstd,    rows,  cols,    true, false};
    backward.scratch = arrays.make_scratch(ops::norm_backward_scratch_bytes(backward));
    const double unit = double(count) * sizeof(T);
    const double calls = 2 * work.shape.n_layer;
    cases.push_back(
        {"residual norm forward", calls, [=] { ops::residual_norm_forward(forward, Stream{}); }, 0, 4 * unit});
    cases.push_back({"norm backward", calls, [=] { ops::norm_backward(backward, Stream{}); }, 0, 4 * unit});
}

template <class T> void add_cross_entropy(std::vector<Case>& cases, Arrays& arrays, const Workload& work) {
    const int tokens = work.batch * work.seq_len, rows = std::min(work.head_rows, tokens);
    const int V = work.shape.vocab_size, Vp = work.shape.padded_vocab();
    T* logits = arrays.make<T>(size_t(rows) * size_t(Vp));
    float* loss = arrays.make<float>(size_t(rows));
    int* ids = arrays.make_ids(size_t(rows), V);
    ops::CrossEntropy<T> entropy{logits, loss, ids, nullptr, rows, V, Vp, 1e-4f, true};
    cases.push_back({"cross entropy", double(tokens) / rows, [=] { ops::cross_entropy(entropy, Stream{}); }, 0,
                     2.0 * rows * Vp * sizeof(T)});
}

template <class T> void add_embedding(std::vector<Case>& cases, Arrays& arrays, const Workload& work) {
    const GptShape& s = work.shape;
    const int rows = work.batch * work.seq_len, Vp = s.padded_vocab();
    const size_t C = size_t(s.n_embd);
    T *wte = arrays.make<T>(size_t(Vp) * C), *wpe = arrays.make<T>(size_t(s.n_positions) * C);
    T* out = arrays.make<T>(size_t(rows) * C);
    float *dwte = arrays.make<float>(size_t(Vp) * C), *dwpe = arrays.make<float>(size_t(s.n_positions) * C);
    int* ids = arrays.make_ids(size_t(rows), s.vocab_size);
    ops::EmbeddingForward<T> forward{out, ids, wte, wpe, work.batch, work.seq_len, s.n_embd};
    ops::EmbeddingBackward<T> backward{dwte,         dwpe,     nullptr, out,           ids,  work.batch,
                                       work.seq_len, s.n_embd, Vp,      s.n_positions, false};
    backward.scratch = arrays.make_scratch(ops::embedding_backward_scratch_bytes(backward));
    const double unit = double(rows) * s.n_embd * sizeof(T);
    cases.push_back({"embedding forward", 1, [=] { ops::embedding_forward(forward, Stream{}); }, 0, 2 * unit});
    cases.push_back({"embedding backward", 1, [=] { ops::embedding_backward(backward, Stream{}); }, 0,
                     unit + rows * 8.0 * s.n_embd});
}

template <class T> void add_update(std::vector<Case>& cases, Arrays& arrays, const Workload& work) {
    const TensorLayout layout = lay_out_tensors(work.shape);
    const std::vector<ops::Chunk> grid = chunk_grid(layout);
    float *master = arrays.make<float>(layout.elements), *m = arrays.make<float>(layout.elements, 1e-3f);
    float *v = static_cast<float*>(arrays.make_scratch(layout.elements * 4)),
          *grad = arrays.make<float>(layout.elements, 1e-3f);
    T* param = std::is_same_v<T, float> ? nullptr : arrays.make<T>(layout.elements);
    auto* chunks = arrays.put(grid);
    auto* sums = static_cast<double*>(arrays.make_scratch(grid.size() * sizeof(double)));
    auto* norm = arrays.put(std::vector<ops::GradNorm>{{1, 1, -1, 0}});
    auto* scalars = arrays.put(std::vector<ops::StepScalars>{{1, 1e-6f, 1, 1}});
    const int n = int(grid.size());
    ops::SquaredSums squares{sums, grad, chunks, n};
    ops::AdamwUpdate<T> adamw{master, param, m, v, grad, chunks, norm, scalars, n, 0.9f, 0.95f, 1e-8f, 0.1f};
    const double N = double(layout.elements);
    cases.push_back({"squared sums", 1, [=] { ops::squared_sums(squares, Stream{}); }, 0, 4 * N});
    cases.push_back(
        {"adamw update", 1, [=] { ops::adamw_update(adamw, Stream{}); }, 0, N * (28 + (param ? sizeof(T) : 0))});
}

}  // namespace

template <class T> std::vector<MakeGroup> op_groups(const Workload& work) {
    const GptShape& s = work.shape;
    const int tokens = work.batch * work.seq_len, C = s.n_embd, head_rows = std::min(work.head_rows, tokens);
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
    add_product({"fc_proj", L, tokens, C, s.hidden(), false, true});
    add(add_norm<T>);
    add_product({"head", double(tokens) / head_rows, head_rows, s.padded_vocab(), C});
    add(add_cross_entropy<T>);
    add(add_embedding<T>);
    add(add_update<T>);
    return groups;
}

template <class T> MakeGroup product_roof(int size) {
    return group([=](std::vector<Case>& cases, Arrays& arrays) {
        const size_t count = size_t(size) * size_t(size);
        T *out = arrays.make<T>(count), *inp = arrays.make<T>(count), *weight = arrays.make<T>(count);
        ops::MatmulForward<T> product{out, nullptr, inp, weight, nullptr, size, size, size};
        cases.push_back({format("product of %d", size), 1, [=] { ops::matmul_forward(product, Stream{}); },
                         2.0 * double(count) * size, 3.0 * double(count) * sizeof(T)});
    });
}

MakeGroup stream_roof(size_t elements) {
    return group([=](std::vector<Case>& cases, Arrays& arrays) {
        float* inp = arrays.make<float>(elements);
        bf16* out = arrays.make<bf16>(elements);
        ops::Cast<bf16> cast{out, inp, elements};
        cases.push_back({"cast of fp32 to bf16", 1, [=] { ops::cast(cast, Stream{}); }, 0, 6.0 * double(elements)});
    });
}

template std::vector<MakeGroup> op_groups<float>(const Workload&);
template std::vector<MakeGroup> op_groups<bf16>(const Workload&);
template std::vector<MakeGroup> op_groups<fp16>(const Workload&);
template MakeGroup product_roof<float>(int);
template MakeGroup product_roof<bf16>(int);
template MakeGroup product_roof<fp16>(int);
