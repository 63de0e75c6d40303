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
constexpr AttentionCase kAttentionCases[] = {{1, 47, 2, 2, 64, 0, 0, false},  {2, 26, 2, 1, 128, 0, 0, false},
                                             {1, 27, 1, 1, 64, 0, 0, true},   {1, 43, 2, 1, 64, 12, 20, false},
                                             {1, 25, 1, 1, 256, 0, 0, false}, {1, 18, 2, 2, 24, 0, 0, false}};

// Sets what the forward and the backward op have in common except their arrays. `keys` has one per sample.
void set_case(auto& op, const AttentionCase& c, const uint64_t* keys) {
    op.batch = c.batch, op.seq_len = c.seq_len;
    op.n_head = c.n_head, op.n_kv_head = c.n_kv_head, op.head_size = c.head_size;
    op.scale = 0.3f, op.window = c.window, op.softcap = c.softcap;
    if (c.drops) op.dropout = {.keys = keys, .threshold = ops::dropout_threshold(0.3)};
}

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
        set_case(op, c, keys.on(device));
        op.out = out, op.lse = lse.on(device), op.qkv = qkv.on(device);
        ops::attention_forward(op, Stream());
    });
}

// One number of the keys, the queries or dout stands out, so that the largest gradient is one of the queries, the keys
// or the values. The number is multiplied by a zero in the scores and in dout V^T.
enum class Part { query, key, value };
template <class T> void check_attention_backward(const AttentionCase& c, Part part, size_t position, int channel) {
    CAPTURE(c.head_size, c.softcap, c.drops, int(part), position, channel);
    const OnDevice<T> device;
    const int heads = c.n_head + 2 * c.n_kv_head, size = c.head_size;
    const size_t positions = size_t(c.batch) * size_t(c.seq_len), attended = size_t(c.n_head * size);
    std::vector<double> values = random_values(positions * size_t(heads * size), 1);
    std::vector<double> gradients = random_values(positions * attended, 2);
    for (size_t i = 0; i < values.size(); i++)
        if (int(i % size_t(size)) == channel) values[i] = 0;
    const size_t row = position * size_t(heads * size) + size_t(channel);
    if (part == Part::value)
        gradients[position * attended + size_t((c.n_head - 1) * size + channel)] = channel ? 1e4 : -1e4;
    else
        values[row + size_t((part == Part::query ? heads - c.n_kv_head - 1 : c.n_head - 1) * size)] = 1e4;
    Stored<T> qkv("qkv", Role::input, values), dout("dout", Role::input, gradients);
    Stored<T> out("out", Role::output, std::vector<double>(positions * attended, 0.0));
    Array<float> lse("lse", Role::output, std::vector<float>(positions * size_t(c.n_head), 0.0f));
    Array<uint64_t> keys("keys", Role::input, std::vector<uint64_t>(size_t(c.batch), 5));
    const auto set = [&](auto& op) {
        set_case(op, c, keys.on(device));
        op.out = out.on(device), op.lse = lse.on(device), op.qkv = qkv.on(device);
    };
    ops::AttentionForward forward{};
    set(forward);
    ops::attention_forward(forward, Stream());
    check_amax<T>("attention_backward", values.size(), [&](View dqkv) {
        ops::AttentionBackward op{};
        set(op);
        op.dqkv = dqkv, op.dout = dout.on(device);
        auto scratch = scratch_of(ops::attention_backward_scratch_bytes(op));
        op.scratch = scratch.on(device);
        ops::attention_backward(op, Stream());
        scratch.fetch();
    });
}

template <class T> void check_attention() {
    for (const AttentionCase& c : kAttentionCases) {
        const size_t last = size_t(c.batch) * size_t(c.seq_len) - 1;
        check_attention<T>(c, 0, 0, 1);
        check_attention<T>(c, last / 2, c.head_size - 1, 1);
        for (const double sign : {1.0, -1.0}) check_attention<T>(c, last, 0, sign);
        for (const Part part : {Part::query, Part::key, Part::value}) {
            check_attention_backward<T>(c, part, last / 2, c.head_size - 1);
            check_attention_backward<T>(c, part, last, 0);
        }
    }
}

}  // namespace

TEMPLATE_TEST_CASE("attention gives the largest magnitude of its output", "[ops]", bf16, fp16) {
    check_attention<TestType>();
    const WithArchKernels used(arch_kernels());
    check_attention<TestType>();
}

// The kernels without and with gradients of weights, and of pairs that are no whole packs. The gradient of a query, a
// key or a value stands out, the last also after the last whole group of heads.
TEMPLATE_TEST_CASE("qk_norm_rope_backward gives the largest magnitude of all gradients", "[ops]", bf16, fp16) {
    using T = TestType;
    const OnDevice<T> device;
    const int seq_len = 33, n_head = 4, n_kv_head = 2, size = 32, heads = n_head + n_kv_head;
    const size_t positions = seq_len, width = size_t((heads + n_kv_head) * size);
    Stored<T> raw("raw", Role::input, random_values(positions * size_t(heads * size), 2));
    Stored<T> weight("weight", Role::input, random_values(size_t(size), 3));
    Array<float> rstd("rstd", Role::input, std::vector<float>(positions * size_t(heads), 0.7f));
    for (const int rotary : {32, 12})
        for (const bool has_norm : {false, true})
            for (const size_t place : {size_t(3), positions / 2 * width + size_t(n_head * size + 5),
                                       positions * width - 1}) {
                CAPTURE(rotary, has_norm, place);
                std::vector<double> values = random_values(positions * width, 1);
                values[place] = 40;
                const std::vector<double> angles = random_values(positions * size_t(rotary), 4);
                Array<float> table("table", Role::input, std::vector<float>(angles.begin(), angles.end()));
                Array<float> dq("dq_weight", Role::output, std::vector<float>(size_t(size), 0.0f));
                Array<float> dk("dk_weight", Role::output, std::vector<float>(size_t(size), 0.0f));
                check_amax<T>("qk_norm_rope_backward", values.size(), [&](View dqkv) {
                    Stored<T> gradients("dqkv", Role::input, values);
                    copy_on_device(dqkv.data, gradients.on(device), values.size() * sizeof(T), Stream());
                    ops::QkNormRopeBackward op{};
                    op.dqkv = dqkv, op.table = table.on(device), op.raw = raw.on(device);
                    if (has_norm) {
                        op.rstd = rstd.on(device), op.q_weight = op.k_weight = weight.on(device);
                        op.dq_weight = dq.on(device), op.dk_weight = dk.on(device);
                    }
                    op.batch = 1, op.seq_len = seq_len;
                    op.n_head = n_head, op.n_kv_head = n_kv_head, op.head_size = size, op.rotary = rotary;
                    auto scratch = scratch_of(ops::qk_norm_rope_backward_scratch_bytes(op));
                    op.scratch = scratch.on(device);
                    ops::qk_norm_rope_backward(op, Stream());
                    scratch.fetch();
                });
            }
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
TEMPLATE_TEST_CASE("norms, activations and dropout give the largest magnitude of their output", "[ops]", bf16, fp16) {
    using T = TestType;
    const OnDevice<T> device;
    for (const auto& [rows, cols] :
         {std::pair(1, 16), {20, 144}, {9, 768}, {3, 1040}, {3, 1600}, {2, 2064}, {1, 6160}})
        for (const size_t place : {size_t(0), size_t(rows) * size_t(cols) / 2, size_t(rows) * size_t(cols) - 1}) {
            const size_t count = size_t(rows) * size_t(cols);
            std::vector<double> values = random_values(count, 1);
            values[place] = place % 2 ? 40 : -40;
            Stored<T> inp("inp", Role::input, values), other("other", Role::input, random_values(count, 2));
            Stored<T> weight("weight", Role::input, random_values(size_t(cols), 3)),
                residual("r", Role::output, values);
            Array<float> mean("mean", Role::output, std::vector<float>(size_t(rows), 0.0f));
            Array<float> rstd("rstd", Role::output, std::vector<float>(size_t(rows), 1.0f));
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
                                         .dweight = nullptr,
                                         .dbias = nullptr,
                                         .scratch = nullptr,
                                         .dout = inp.on(device),
                                         .inp = other.on(device),
                                         .weight = nullptr,
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
            const std::vector<uint64_t> keys(size_t(rows), 5);
            Array<uint64_t> key("keys", Role::input, keys);
            check_amax<T>("dropout", count, [&](View out) {
                ops::dropout({.out = out,
                              .inp = inp.on(device),
                              .mask = {.keys = key.on(device), .threshold = ops::dropout_threshold(0.01)},
                              .count = size_t(cols),
                              .first = 0,
                              .elements = count},
                             Stream());
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
