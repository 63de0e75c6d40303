// Milliseconds of a whole training step, and of every op in it at the same shapes: where the time goes.
//
//     build/bench_cpu [fp32|bf16|fp16 ...]      (default: fp32 bf16)
//
// Per op: calls in a step, median of repeated calls, its share of the step, and GFLOP/s or GB/s counted from the shapes
// (bytes: every operand once). Figures of a shared machine are only worth comparing within one run.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "model/gpt.h"
#include "model/plan.h"

namespace {

struct Workload {
    const char* name;
    GptShape shape;
    int batch, seq_len;
};

const std::vector<Workload>& workloads() {
    static const std::vector<Workload> all = {
        {"GPT-2 124M, B=4, T=64", {12, 12, 12, 768, 1024, 50257}, 4, 64},
        {"6 layers, 384 wide, vocabulary 4096, B=4, T=256", {6, 6, 6, 384, 256, 4096}, 4, 256},
        {"6 layers, 384 wide, vocabulary 4096, B=8, T=256", {6, 6, 6, 384, 256, 4096}, 8, 256},
    };
    return all;
}

double now_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Median over at least 5 calls and 0.3 seconds, after one call that is not counted.
double median_ms(const std::function<void()>& call) {
    call();
    std::vector<double> times;
    const double begin = now_ms();
    while (times.size() < 5 || (now_ms() - begin < 300 && times.size() < 200)) {
        const double start = now_ms();
        call();
        times.push_back(now_ms() - start);
    }
    std::nth_element(times.begin(), times.begin() + long(times.size() / 2), times.end());
    return times[times.size() / 2];
}

double step_ms(const Workload& work, Dtype precision) {
    GptOptions options;
    options.shape = work.shape;
    options.batch = work.batch, options.seq_len = work.seq_len;
    options.precision = precision;
    options.head_rows = 1024;
    Gpt gpt(options, comm_single());
    gpt.initialize(1);
    std::mt19937 random(1);
    std::vector<int> tokens(size_t(work.batch * work.seq_len) + 1);
    for (int& token : tokens) token = int(random() % unsigned(work.shape.vocab_size));
    const MicroStep micro{.first = true, .grad_scale = 1.0f / float(tokens.size() - 1)};
    return median_ms([&] {
        gpt.begin_step({.loss_scale = 1, .learning_rate = 1e-4f, .bias_correction1 = 0.1f, .bias_correction2 = 0.05f});
        gpt.micro_step(tokens.data(), tokens.data() + 1, micro);
        gpt.end_step({});
    });
}

// Device arrays with random content, freed together.
class Arrays {
public:
    template <class T> T* make(size_t count, float deviation = 1.0f) {
        buffers_.emplace_back(count * sizeof(T));
        T* values = static_cast<T*>(buffers_.back().data());
        std::vector<T> host(count);
        std::normal_distribution<float> normal(0.0f, deviation);
        for (T& value : host) value = from_float<T>(normal(random_));
        copy_to_device(values, host.data(), count * sizeof(T), Stream{});
        synchronize(Stream{});
        return values;
    }
    int* make_ids(size_t count, int below) {
        buffers_.emplace_back(count * sizeof(int));
        std::vector<int> host(count);
        for (int& id : host) id = int(random_() % unsigned(below));
        copy_to_device(buffers_.back().data(), host.data(), count * sizeof(int), Stream{});
        synchronize(Stream{});
        return static_cast<int*>(buffers_.back().data());
    }
    void* make_scratch(size_t bytes) {
        buffers_.emplace_back(std::max<size_t>(bytes, 1));
        return buffers_.back().data();
    }

private:
    std::vector<DeviceBuffer> buffers_;
    std::mt19937 random_{7};
};

struct Case {
    std::string name;
    int calls;  // in one step
    std::function<void()> call;
    double flops, bytes;
};

template <class T>
void add_linear(std::vector<Case>& cases, Arrays& arrays, const std::string& name, int calls, int rows, int n, int k,
                bool gelu) {
    const size_t R = size_t(rows), N = size_t(n), K = size_t(k);
    T *inp = arrays.make<T>(R * K), *out = arrays.make<T>(R * N), *weight = arrays.make<T>(N * K, 0.02f);
    T *bias = arrays.make<T>(N, 0.02f), *pre = gelu ? arrays.make<T>(R * N) : nullptr;
    float *dweight = arrays.make<float>(N * K), *dbias = arrays.make<float>(N);
    ops::MatmulForward<T> forward{out, pre, inp, weight, bias, rows, n, k};
    ops::MatmulBackwardInput<T> input{inp, out, weight, nullptr, rows, n, k};
    ops::MatmulBackwardWeight<T> grad{dweight, dbias, nullptr, out, inp, rows, n, k, false};
    grad.scratch = arrays.make_scratch(ops::matmul_backward_weight_scratch_bytes(grad));
    const double flops = 2.0 * double(R * N) * double(K);
    cases.push_back({name + " forward", calls, [=] { ops::matmul_forward(forward, Stream{}); }, flops, 0});
    cases.push_back({name + " backward input", calls, [=] { ops::matmul_backward_input(input, Stream{}); }, flops, 0});
    cases.push_back({name + " backward weight", calls, [=] { ops::matmul_backward_weight(grad, Stream{}); }, flops, 0});
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
    cases.push_back({"attention forward", s.n_layer, [=] { ops::attention_forward(forward, Stream{}); }, flops, 0});
    cases.push_back(
        {"attention backward", s.n_layer, [=] { ops::attention_backward(backward, Stream{}); }, 2.5 * flops, 0});
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
    const int calls = 2 * work.shape.n_layer;
    cases.push_back(
        {"residual norm forward", calls, [=] { ops::residual_norm_forward(forward, Stream{}); }, 0, 4 * unit});
    cases.push_back({"norm backward", calls, [=] { ops::norm_backward(backward, Stream{}); }, 0, 4 * unit});
}

template <class T> void add_ends(std::vector<Case>& cases, Arrays& arrays, const Workload& work) {
    const GptShape& s = work.shape;
    const int rows = work.batch * work.seq_len, Vp = s.padded_vocab();
    T *logits = arrays.make<T>(size_t(rows) * size_t(Vp)), *wte = arrays.make<T>(size_t(Vp) * size_t(s.n_embd));
    T *wpe = arrays.make<T>(size_t(s.n_positions) * size_t(s.n_embd)),
      *out = arrays.make<T>(size_t(rows) * size_t(s.n_embd));
    float *loss = arrays.make<float>(size_t(rows)), *dwte = arrays.make<float>(size_t(Vp) * size_t(s.n_embd));
    float* dwpe = arrays.make<float>(size_t(s.n_positions) * size_t(s.n_embd));
    int* ids = arrays.make_ids(size_t(rows), s.vocab_size);
    ops::CrossEntropy<T> entropy{logits, loss, ids, nullptr, rows, s.vocab_size, Vp, 1e-4f, true};
    ops::EmbeddingForward<T> forward{out, ids, wte, wpe, work.batch, work.seq_len, s.n_embd};
    ops::EmbeddingBackward<T> backward{dwte,         dwpe,     nullptr, out,           ids,  work.batch,
                                       work.seq_len, s.n_embd, Vp,      s.n_positions, false};
    backward.scratch = arrays.make_scratch(ops::embedding_backward_scratch_bytes(backward));
    const double unit = double(rows) * s.n_embd * sizeof(T);
    cases.push_back(
        {"cross entropy", 1, [=] { ops::cross_entropy(entropy, Stream{}); }, 0, 2.0 * rows * Vp * sizeof(T)});
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
    auto* chunks = static_cast<ops::Chunk*>(arrays.make_scratch(grid.size() * sizeof(ops::Chunk)));
    copy_to_device(chunks, grid.data(), grid.size() * sizeof(ops::Chunk), Stream{});
    auto* sums = static_cast<double*>(arrays.make_scratch(grid.size() * sizeof(double)));
    auto* norm = static_cast<ops::GradNorm*>(arrays.make_scratch(sizeof(ops::GradNorm)));
    auto* scalars = static_cast<ops::StepScalars*>(arrays.make_scratch(sizeof(ops::StepScalars)));
    const ops::StepScalars host_scalars{1, 1e-6f, 1, 1};
    const ops::GradNorm host_norm{1, 1, -1, 0};
    copy_to_device(scalars, &host_scalars, sizeof(host_scalars), Stream{});
    copy_to_device(norm, &host_norm, sizeof(host_norm), Stream{});
    const int n = int(grid.size());
    ops::SquaredSums squares{sums, grad, chunks, n};
    ops::AdamwUpdate<T> adamw{master, param, m, v, grad, chunks, norm, scalars, n, 0.9f, 0.95f, 1e-8f, 0.1f};
    const double N = double(layout.elements);
    cases.push_back({"squared sums", 1, [=] { ops::squared_sums(squares, Stream{}); }, 0, 4 * N});
    cases.push_back(
        {"adamw update", 1, [=] { ops::adamw_update(adamw, Stream{}); }, 0, N * (28 + (param ? sizeof(T) : 0))});
}

template <class T> void bench(const Workload& work) {
    const GptShape& s = work.shape;
    const int rows = work.batch * work.seq_len, C = s.n_embd, L = s.n_layer;
    std::vector<Case> cases;
    Arrays arrays;
    add_linear<T>(cases, arrays, "qkv", L, rows, s.qkv_channels(), C, false);
    add_attention<T>(cases, arrays, work);
    add_linear<T>(cases, arrays, "attn_proj", L, rows, C, C, false);
    add_linear<T>(cases, arrays, "fc", L, rows, s.hidden(), C, true);
    add_linear<T>(cases, arrays, "fc_proj", L, rows, C, s.hidden(), false);
    add_norm<T>(cases, arrays, work);
    add_linear<T>(cases, arrays, "head", 1, rows, s.padded_vocab(), C, false);
    add_ends<T>(cases, arrays, work);
    add_update<T>(cases, arrays, work);

    const double whole = step_ms(work, dtype_of<T>);
    GptOptions options;
    options.shape = s, options.batch = work.batch, options.seq_len = work.seq_len, options.precision = dtype_of<T>;
    options.head_rows = 1024;
    std::printf("\n%s, %s: %.1f ms a step, %.0f tokens/s, %.1f MiB planned\n", work.name, name_of(dtype_of<T>), whole,
                rows / whole * 1000, double(planned_bytes(options)) / 0x1p20);
    double sum = 0;
    for (const Case& one : cases) {
        const double ms = median_ms(one.call);
        sum += ms * one.calls;
        const double rate = (one.flops > 0 ? one.flops : one.bytes) / ms * 1e-6;
        std::printf("  %-26s %3d x %8.3f ms = %8.1f ms  %5.1f %%  %7.1f %s\n", one.name.c_str(), one.calls, ms,
                    ms * one.calls, 100 * ms * one.calls / whole, rate, one.flops > 0 ? "GFLOP/s" : "GB/s");
    }
    std::printf("  %-26s                  %8.1f ms  %5.1f %%\n", "sum of the ops", sum, 100 * sum / whole);
}

}  // namespace

int main(int argc, char** argv) {
    const DeviceInfo device = device_info();
    std::printf("%s; %s\n", device.name.c_str(), device.matmul_path.c_str());
    std::vector<std::string> precisions(argv + 1, argv + argc);
    if (precisions.empty()) precisions = {"fp32", "bf16"};
    for (const Workload& work : workloads())
        for (const std::string& precision : precisions) {
            if (precision == "fp32")
                bench<float>(work);
            else if (precision == "bf16")
                bench<bf16>(work);
            else if (precision == "fp16")
                bench<fp16>(work);
            else
                return std::fprintf(stderr, "unknown precision %s\n", precision.c_str()), 64;
        }
    return 0;
}
