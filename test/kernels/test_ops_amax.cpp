// The largest magnitudes (amax) that ops give with their output.
#include <functional>

#include "test/support/arch_kernels.h"
#include "test/support/device_array.h"
#include "test/support/random_values.h"

namespace {

// Requires that an op gives the largest magnitude of what it writes. Run with an amax of NaN, so it does not only grow.
template <class T> void check_amax(const std::string& op, size_t count, const std::function<void(View)>& run) {
    INFO(op << ", " << count << " numbers");
    const OnDevice<T> device;
    Stored<T> out("out", Role::output, random_values(count, 9, 0.01));
    Array<float> amax("amax", Role::output, std::vector<float>{NAN});
    View view = out.on(device);
    view.amax = amax.on(device);
    run(view);
    double most = 0;
    for (const T number : out.fetch()) most = std::max(most, double(std::abs(to_float(number))));
    CHECK(double(amax.fetch()[0]) == most);
}

}  // namespace

namespace {

struct AttentionCase {
    int batch, seq_len, n_head, n_kv_head, head_size, window;
    float softcap;
    bool drops;
};
// For each kernel: for heads of 64 and 128, the portable ones without and with other features, and the general one.
constexpr AttentionCase kAttentionCases[] = {{1, 80, 2, 2, 64, 0, 0, false},  {2, 70, 2, 1, 128, 0, 0, false},
                                             {1, 45, 2, 2, 64, 0, 0, true},   {1, 100, 2, 1, 64, 30, 20, false},
                                             {1, 40, 1, 1, 256, 0, 0, false}, {2, 33, 3, 3, 24, 0, 0, false}};

// The value in this channel of this position stands out: all, some or few queries see it. Queries have a sign, so that
// the last one gives its own value a smaller weight than rows after the last position do, with one of both.
template <class T> void check_attention(const AttentionCase& c, size_t position, int channel, double sign) {
    CAPTURE(c.head_size, c.softcap, c.drops, position, channel, sign);
    const OnDevice<T> device;
    const int width = (c.n_head + 2 * c.n_kv_head) * c.head_size;
    const size_t positions = size_t(c.batch) * size_t(c.seq_len);
    std::vector<double> values = random_values(positions * size_t(width), 1);
    for (size_t i = 0; i < values.size(); i++)
        if (int(i % size_t(width)) < c.n_head * c.head_size) values[i] *= sign;
    values[position * size_t(width) + size_t(width - c.head_size + channel)] = channel ? 1e4 : -1e4;
    Stored<T> qkv("qkv", Role::input, values);
    Array<float> lse("lse", Role::output, std::vector<float>(positions * size_t(c.n_head), 0.0f));
    Array<uint64_t> keys("keys", Role::input, std::vector<uint64_t>(size_t(c.batch), 5));
    check_amax<T>("attention_forward", positions * size_t(c.n_head * c.head_size), [&](View out) {
        ops::AttentionForward op{};
        op.out = out, op.lse = lse.on(device), op.qkv = qkv.on(device);
        op.batch = c.batch, op.seq_len = c.seq_len;
        op.n_head = c.n_head, op.n_kv_head = c.n_kv_head, op.head_size = c.head_size;
        op.scale = 0.3f, op.window = c.window, op.softcap = c.softcap;
        if (c.drops) op.dropout = {.keys = keys.on(device), .threshold = ops::dropout_threshold(0.3)};
        ops::attention_forward(op, Stream());
    });
}

template <class T> void check_attention() {
    for (const AttentionCase& c : kAttentionCases) {
        const size_t last = size_t(c.batch) * size_t(c.seq_len) - 1;
        check_attention<T>(c, 0, 0, 1);
        check_attention<T>(c, last / 2, c.head_size - 1, 1);
        for (const double sign : {1.0, -1.0}) check_attention<T>(c, last, 0, sign);
    }
}

}  // namespace

TEMPLATE_TEST_CASE("attention gives the largest magnitude of its output", "[ops]", bf16, fp16) {
    check_attention<TestType>();
    const WithArchKernels used(arch_kernels());
    check_attention<TestType>();
}

TEMPLATE_TEST_CASE("a GEMM gives the largest magnitude of its output", "[ops]", bf16, fp16) {
    using T = TestType;
    const OnDevice<T> device;
    const int rows = 33, n = 48, k = 16;
    for (const ActivationFunction function : {ActivationFunction::none, ActivationFunction::gelu_new,
                                              ActivationFunction::silu, ActivationFunction::relu2}) {
        CAPTURE(int(function));
        Stored<T> inp("inp", Role::input, random_values(size_t(rows * k), 1));
        Stored<T> weight("weight", Role::input, random_values(size_t(n * k), 2));
        Stored<T> bias("bias", Role::input, random_values(size_t(n), 3));
        Stored<T> sums("sums", Role::output, random_values(size_t(rows * n), 4));
        const bool keeps = function == ActivationFunction::gelu_new || function == ActivationFunction::silu;
        check_amax<T>("matmul_forward", size_t(rows * n), [&](View out) {
            ops::matmul_forward({.out = out,
                                 .pre_activation = keeps ? sums.on(device) : nullptr,
                                 .inp = inp.on(device),
                                 .weight = weight.on(device),
                                 .bias = bias.on(device),
                                 .rows = rows,
                                 .n = n,
                                 .k = k,
                                 .activation = function},
                                Stream());
        });
    }
}

// Widths of each kernel of norms, whole and partly used packs of a warp. One magnitude stands out at a time, anywhere.
TEMPLATE_TEST_CASE("norms and activations give the largest magnitude of their output", "[ops]", bf16, fp16) {
    using T = TestType;
    const OnDevice<T> device;
    for (const auto& [rows, cols] :
         {std::pair(1, 16), {48, 144}, {19, 768}, {7, 1040}, {5, 1600}, {3, 2064}, {1, 6160}})
        for (const size_t place : {size_t(0), size_t(rows) * size_t(cols) / 2, size_t(rows) * size_t(cols) - 1}) {
            const size_t count = size_t(rows) * size_t(cols);
            std::vector<double> values = random_values(count, 1);
            values[place] = place % 2 ? 40 : -40;
            Stored<T> inp("inp", Role::input, values), other("other", Role::input, random_values(count, 2));
            Stored<T> weight("weight", Role::input, random_values(size_t(cols), 3)),
                residual("r", Role::output, values);
            Array<float> mean("mean", Role::output, std::vector<float>(size_t(rows), 0.0f));
            Array<float> rstd("rstd", Role::output, std::vector<float>(size_t(rows), 1.0f));
            Array<float> dweight("dweight", Role::output, std::vector<float>(size_t(cols), 0.0f));
            for (const bool has_branch : {false, true})
                check_amax<T>("residual_norm_forward", count, [&](View out) {
                    ops::residual_norm_forward({.residual = has_branch ? residual.on(device) : nullptr,
                                                .out = out,
                                                .mean = mean.on(device),
                                                .rstd = rstd.on(device),
                                                .inp = inp.on(device),
                                                .branch = has_branch ? ConstView(other.on(device)) : nullptr,
                                                .weight = weight.on(device),
                                                .bias = weight.on(device),
                                                .rows = rows,
                                                .cols = cols,
                                                .eps = 1e-5f},
                                               Stream());
                });
            for (const bool accumulate : {false, true})
                check_amax<T>("norm_backward", count, [&](View dinp) {
                    ops::NormBackward op{.dinp = dinp,
                                         .dweight = dweight.on(device),
                                         .dbias = nullptr,
                                         .scratch = nullptr,
                                         .dout = inp.on(device),
                                         .inp = other.on(device),
                                         .weight = weight.on(device),
                                         .mean = nullptr,
                                         .rstd = rstd.on(device),
                                         .rows = rows,
                                         .cols = cols,
                                         .accumulate_dinp = accumulate,
                                         .accumulate = false};
                    auto scratch = scratch_of(ops::norm_backward_scratch_bytes(op));
                    op.scratch = scratch.on(device);
                    ops::norm_backward(op, Stream());
                    scratch.fetch();
                });
            check_amax<T>("activation_forward", count, [&](View out) {
                ops::activation_forward({.out = out, .inp = inp.on(device), .count = count}, Stream());
            });
            const int hidden = cols / 2;  // gate and up are halves of a row
            check_amax<T>("gated_activation_forward", size_t(rows) * size_t(hidden), [&](View out) {
                ops::gated_activation_forward({.out = out,
                                               .inp = inp.on(device),
                                               .rows = rows,
                                               .hidden = hidden,
                                               .activation = ActivationFunction::silu},
                                              Stream());
            });
            check_amax<T>("gated_activation_backward", count, [&](View dinp) {
                ops::gated_activation_backward({.dinp = dinp,
                                                .dout = other.on(device),
                                                .inp = inp.on(device),
                                                .rows = rows,
                                                .hidden = hidden,
                                                .activation = ActivationFunction::silu},
                                               Stream());
            });
        }
}
