// qk_norm_rope_forward and qk_norm_rope_backward against ref::.
#include "test/support/device_array.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"

namespace {

struct Shape {
    int batch, seq_len, n_head, n_kv_head, head_size, rotary;
    int shift = 0;  // of the arrays, in elements
    ops::ChunkStarts starts = {};
    size_t rows() const { return size_t(batch) * seq_len; }
    int heads() const { return n_head + n_kv_head; }
};

// The parts of the op: RoPE, a norm, and the norm's weights that exist.
struct Parts {
    bool rope, norm, q_weight, k_weight;
    bool keeps_raw = q_weight || k_weight;
};
constexpr float kEps = 0.0625f;  // large enough to show in every type

// Borders between a GPU's kernels: whole and partial packs in the rotated halves and after them, teams of 1 to 32
// lanes, several units per lane, odd addresses, several groups of heads and more groups than a warp adds. Chunks, the
// same or two.
template <class T> std::vector<Shape> all_shapes() {
    constexpr int kWide = sizeof(T) == 4 ? 410 : 900;  // more than one unit per lane
    return {{2, 5, 4, 2, 64, 64},
            {1, 3, 3, 1, 96, 96},
            {2, 3, 2, 2, 7, 6},
            {1, 9, 6, 2, 20, 8},
            {2, 3, 3, 1, 64, 16},
            {3, 5, 5, 1, 128, 128},
            {1, 3, 2, 1, 256, 256},
            {1, 2, 2, 1, kWide, kWide - 82},
            {1, 3, 1, 1, 1, 0},
            {2, 3, 3, 1, 64, 64, 1},
            {2, 97, 4, 2, 8, 4},
            {3, 3, 2, 2, 7, 6, 0, {5, 5}},
            {4, 3, 2, 1, 12, 8, 0, {7, 1}}};
}
std::vector<Parts> all_parts() {
    return {{true, false, false, false}, {false, true, false, false},  {true, true, false, false},
            {true, true, true, true},    {false, true, true, true},    {true, true, true, false},
            {true, true, false, true},   {false, false, false, false}, {true, true, false, false, true}};
}

std::string describe(const Shape& s, const Parts& p) {
    return format(
        "batch %d, seq_len %d, heads %d and %d of %d, rotary %d, shift %d, "
        "starts %d and %d; rope %d, norm %d, weights %d %d",
        s.batch, s.seq_len, s.n_head, s.n_kv_head, s.head_size, s.rotary, s.shift, s.starts.first, s.starts.second,
        p.rope, p.norm, p.q_weight, p.k_weight);
}

constexpr int kMorePositions = 7;  // in the table than in a sequence

// Cosines and sines of unrelated angles, scaled so that cos^2 + sin^2 is not 1.
std::vector<double> random_table(int positions, int half) {
    const std::vector<double> angles = random_values(size_t(positions) * half, 9, 4);
    std::vector<double> table;
    for (double angle : angles) table.insert(table.end(), {1.25 * std::cos(angle), 1.25 * std::sin(angle)});
    return table;
}

template <class T> struct Arrays {
    Shape s;
    Parts parts;
    int rotary = parts.rope ? s.rotary : 0;
    bool has_positions;  // else from the chunks' starts
    size_t count = s.rows() * (s.heads() + s.n_kv_head) * s.head_size;
    Stored<T> qkv{"qkv", Role::output, random_values(count, 1, 2, 0.5), s.shift};
    Stored<T> raw{"raw", Role::output, nans(s.rows() * s.heads() * s.head_size), s.shift};
    Array<float> rstd{"rstd", Role::output, nans(s.rows() * s.heads()), s.shift};
    Stored<T> q_weight{"q_weight", Role::input, random_values(s.head_size, 2, 0.5, 1), s.shift};
    Stored<T> k_weight{"k_weight", Role::input, random_values(s.head_size, 3, 0.5, -1), s.shift};
    Array<float> table{"table", Role::input, random_table(s.seq_len + kMorePositions, rotary / 2), s.shift};
    Array<int> positions{"positions", Role::input, random_integers(s.rows(), 6, s.seq_len + kMorePositions)};

    Arrays(const Shape& shape, const Parts& of, bool given_positions = false)
        : s(shape), parts(of), has_positions(given_positions) {}

    template <class Side> auto forward(Side side) {
        return ops::QkNormRopeForward{.qkv = qkv.on(side),
                                      .raw = parts.keeps_raw ? View(raw.on(side)) : nullptr,
                                      .rstd = parts.norm ? rstd.on(side) : nullptr,
                                      .q_weight = parts.q_weight ? ConstView(q_weight.on(side)) : nullptr,
                                      .k_weight = parts.k_weight ? ConstView(k_weight.on(side)) : nullptr,
                                      .table = rotary > 0 ? table.on(side) : nullptr,
                                      .batch = s.batch,
                                      .seq_len = s.seq_len,
                                      .n_head = s.n_head,
                                      .n_kv_head = s.n_kv_head,
                                      .head_size = s.head_size,
                                      .rotary = rotary,
                                      .eps = kEps,
                                      .positions = has_positions ? positions.on(side) : nullptr,
                                      .starts = s.starts};
    }

    // Element i of qkv: its column in the head, the number of its head, and its position.
    struct Place {
        int column, head, position;
        size_t row;
    };
    Place place_of(size_t i) const {
        const size_t head = i / s.head_size, heads = s.heads() + s.n_kv_head, row = head / heads;
        const int start = s.starts.start(int(row / s.seq_len), s.batch);
        const int position = has_positions ? positions.host[row] : start + int(row % s.seq_len);
        return {int(i % s.head_size), int(head % heads), position, row};
    }
    bool is_value(size_t i) const { return place_of(i).head >= s.heads(); }
    // The other element of the pair, or i itself.
    size_t partner(size_t i) const {
        const int c = place_of(i).column, half = rotary / 2;
        return c >= rotary ? i : c < half ? i + half : i - half;
    }
    double cosine(size_t i) const { return entry(i, 0, 1); }
    double sine(size_t i) const { return entry(i, 1, 0); }
    double entry(size_t i, int which, double without) const {
        const Place at = place_of(i);
        if (at.column >= rotary) return without;
        const size_t pair = size_t(at.position) * (rotary / 2) + at.column % (rotary / 2);
        return std::abs(table.host[2 * pair + which]);
    }
    // The sum of the absolute values that make up element i of the rotated array x.
    double turned(const std::vector<double>& x, size_t i) const {
        return std::abs(x[i]) * cosine(i) + std::abs(x[partner(i)]) * sine(i);
    }
};

template <class T> void test_forward(const Shape& s, const Parts& parts, bool has_positions) {
    Arrays<T> arrays(s, parts, has_positions), straight(s, {false, parts.norm, parts.q_weight, parts.k_weight});
    ref::qk_norm_rope_forward(straight.forward(OnHost()));  // before the rotation
    ops::qk_norm_rope_forward(arrays.forward(OnDevice<T>()), Stream());
    ref::qk_norm_rope_forward(arrays.forward(OnHost()));
    const double rstd_error = parts.norm ? summation_error(s.head_size) + kFunctionError : 0;
    check_close(arrays.qkv, [&](size_t i) {
        if (arrays.is_value(i)) return 0.0;
        return arrays.turned(straight.qkv.host, i) * (rstd_error + 5 * kRoundoff) + stored_error<T>(arrays.qkv.host[i]);
    });
    if (parts.keeps_raw) check_close(arrays.raw, [](size_t) { return 0.0; });
    if (parts.norm)
        check_close(arrays.rstd, [&](size_t i) {
            return rstd_error * arrays.rstd.host[i] + stored_error_fp32(arrays.rstd.host[i]);
        });
}

template <class T> void test_backward(const Shape& s, const Parts& parts, bool accumulate) {
    Arrays<T> forward(s, parts);
    ref::qk_norm_rope_forward(forward.forward(OnHost()));
    Stored<T> qkv("qkv", Role::input, forward.qkv.host, s.shift), raw("raw", Role::input, forward.raw.host, s.shift);
    Array<float> rstd("rstd", Role::input, forward.rstd.host, s.shift);
    Stored<T> dqkv("dqkv", Role::output, random_values(forward.count, 4), s.shift);
    const std::vector<double> before = accumulate ? random_values(s.head_size, 5) : nans(s.head_size);
    Array<float> dq_weight("dq_weight", Role::output, before), dk_weight("dk_weight", Role::output, before);
    auto op = [&]<class Side>(Side side) {
        const ops::QkNormRopeForward done = forward.forward(side);
        return ops::QkNormRopeBackward{.dqkv = dqkv.on(side),
                                       .dq_weight = parts.q_weight ? dq_weight.on(side) : nullptr,
                                       .dk_weight = parts.k_weight ? dk_weight.on(side) : nullptr,
                                       .scratch = nullptr,
                                       .qkv = qkv.on(side),
                                       .raw = parts.keeps_raw ? ConstView(raw.on(side)) : nullptr,
                                       .rstd = parts.norm ? rstd.on(side) : nullptr,
                                       .q_weight = done.q_weight,
                                       .k_weight = done.k_weight,
                                       .table = done.table,
                                       .batch = s.batch,
                                       .seq_len = s.seq_len,
                                       .n_head = s.n_head,
                                       .n_kv_head = s.n_kv_head,
                                       .head_size = s.head_size,
                                       .rotary = done.rotary,
                                       .accumulate = accumulate,
                                       .starts = s.starts};
    };

    // Bounds. All values before the sums are a dozen roundings of `d`, the rotated gradient, and of `normed`.
    constexpr double kRoundings = 16 * kRoundoff;
    std::vector<double> bound(forward.count), dq_bound(s.head_size), dk_bound(s.head_size);
    const double sum_error = summation_error(double(s.rows()) * s.heads() + 1) + kRoundings;
    for (size_t head = 0; head < forward.count; head += s.head_size) {
        if (forward.is_value(head)) continue;
        const auto at = forward.place_of(head);
        const size_t alone = at.row * s.heads() + at.head;
        const bool is_query = at.head < s.n_head;
        const double factor = parts.norm ? rstd.host[alone] : 1;
        auto weight = [&](int c) {
            if (is_query) return parts.q_weight ? std::abs(forward.q_weight.host[c]) : 1;
            return parts.k_weight ? std::abs(forward.k_weight.host[c]) : 1;
        };
        auto d = [&](int c) { return forward.turned(dqkv.host, head + c); };
        auto normed = [&](int c) {
            if (!parts.norm) return 0.0;
            if (parts.keeps_raw) return std::abs(raw.host[alone * s.head_size + c]) * factor;
            const size_t i = head + c;
            return forward.turned(qkv.host, i) / (std::pow(forward.cosine(i), 2) + std::pow(forward.sine(i), 2));
        };
        double average = 0;
        for (int c = 0; c < s.head_size; c++) {
            average += d(c) * weight(c) * normed(c) / s.head_size;
            (is_query ? dq_bound : dk_bound)[c] += sum_error * d(c) * normed(c);
        }
        for (int c = 0; c < s.head_size; c++)
            bound[head + c] = factor * (normed(c) * average * summation_error(s.head_size) +
                                        (d(c) * weight(c) + normed(c) * average) * kRoundings);
    }

    auto device_op = op(OnDevice<T>());
    auto scratch = scratch_of(ops::qk_norm_rope_backward_scratch_bytes(device_op));
    device_op.scratch = scratch.on(OnDevice<T>());
    ops::qk_norm_rope_backward(device_op, Stream());
    ref::qk_norm_rope_backward(op(OnHost()));
    check_close(dqkv, [&](size_t i) { return forward.is_value(i) ? 0.0 : bound[i] + stored_error<T>(dqkv.host[i]); });
    auto check_weight = [&](const Array<float>& dweight, const std::vector<double>& bounds) {
        check_close(dweight, [&](size_t c) {
            return bounds[c] + (accumulate ? sum_error * std::abs(before[c]) : 0) + stored_error_fp32(dweight.host[c]);
        });
    };
    if (parts.q_weight) check_weight(dq_weight, dq_bound);
    if (parts.k_weight) check_weight(dk_weight, dk_bound);
    scratch.fetch();
}

}  // namespace

TEMPLATE_TEST_CASE("qk_norm_rope_forward", "[ops]", float, bf16, fp16) {
    for (const Shape& s : all_shapes<TestType>())
        for (const Parts& parts : all_parts()) {
            INFO(describe(s, parts));
            test_forward<TestType>(s, parts, s.head_size % 3 != 0);
        }
}

TEMPLATE_TEST_CASE("qk_norm_rope_backward", "[ops]", float, bf16, fp16) {
    for (const Shape& s : all_shapes<TestType>())
        for (const Parts& parts : all_parts()) {
            INFO(describe(s, parts));
            test_backward<TestType>(s, parts, s.seq_len > 3);
        }
    const Shape many_groups{4, 353, 4, 2, 2, 2};
    test_backward<TestType>(many_groups, {true, true, true, true}, true);
}

// A quarter turn of the first pair and no turn of the second, computed by hand.
TEST_CASE("qk_norm_rope_forward pairs the halves of a head", "[ops]") {
    Array<float> qkv("qkv", Role::output, std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12});
    Array<float> table("table", Role::input, std::vector<float>{0, 1, 1, 0});
    ops::qk_norm_rope_forward({.qkv = qkv.on(OnDevice<float>()),
                               .raw = nullptr,
                               .rstd = nullptr,
                               .q_weight = nullptr,
                               .k_weight = nullptr,
                               .table = table.on(OnDevice<float>()),
                               .batch = 1,
                               .seq_len = 1,
                               .n_head = 1,
                               .n_kv_head = 1,
                               .head_size = 4,
                               .rotary = 4},
                              Stream());
    check_same_bits(qkv, {-3, 2, 1, 4, -7, 6, 5, 8, 9, 10, 11, 12});
}
