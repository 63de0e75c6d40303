// embedding_forward and embedding_backward against ref::.
#include "test/support/device_array.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"

namespace {

struct Shape {
    int batch, seq_len, channels, vocab, n_positions;
    int shift = 0;  // of the arrays, in elements
    ops::ChunkStarts starts = {};
};
// One element; more rows than distinct tokens; sizes that are multiples of nothing; a wide row; a token with hundreds
// of positions in a vocabulary of more than 16 bits; odd addresses; a vocabulary of one; chunks, the same or two.
constexpr Shape kShapes[] = {{1, 1, 1, 5, 1},
                             {2, 5, 7, 5, 9},
                             {3, 33, 64, 257, 40},
                             {1, 64, 132, 1000, 64},
                             {2, 129, 768, 257, 130},
                             {3, 700, 6, 70000, 701},
                             {2, 33, 64, 257, 33, 1},
                             {2, 40, 3, 1, 41},
                             {3, 5, 8, 5, 12, 0, {4, 4}},
                             {4, 5, 7, 5, 30, 0, {20, 3}}};

std::string describe(const Shape& s) {
    return format("batch %d, seq_len %d, channels %d, vocab %d, shift %d, starts %d and %d", s.batch, s.seq_len,
                  s.channels, s.vocab, s.shift, s.starts.first, s.starts.second);
}

// Every third position holds the same token, so that tokens repeat in every shape.
std::vector<int> repeating_tokens(const Shape& s) {
    std::vector<int> tokens = random_integers(size_t(s.batch) * s.seq_len, 1, s.vocab);
    for (size_t i = 0; i < tokens.size(); i += 3) tokens[i] = s.vocab - 1;
    return tokens;
}

// The sum of the parts of an embedding, each rounded to T, in float. Part p of n has the p-th n-th of the tokens; one
// has wpe.
template <class T>
std::vector<T> sum_of_parts(const Shape& s, const ops::EmbeddingForward& whole, int n, const std::string& name) {
    std::vector<float> sum(size_t(s.batch) * s.seq_len * s.channels, -0.0f);
    for (int part = 0; part < n; part++) {
        auto begin = [&](int count, int p) { return count * p / n; };
        Stored<T> out(name.c_str(), Role::output, nans(sum.size()), s.shift);
        ops::EmbeddingForward op = whole;
        const int first = begin(s.vocab, part);
        op.out = out.on(OnDevice<T>());
        op.wte = whole.wte.from(size_t(first) * s.channels);
        if (part != n / 2) op.wpe = nullptr;
        op.part = {.first_token = first, .tokens = begin(s.vocab, part + 1) - first};
        ops::embedding_forward(op, Stream());
        const std::vector<T> added = out.fetch();
        for (size_t i = 0; i < sum.size(); i++) sum[i] += to_float(added[i]);
    }
    std::vector<T> rounded;
    for (float value : sum) rounded.push_back(from_float<T>(value));
    return rounded;
}

// Float sums in the order of positions. `op` is the host's, with its dout rounded to T.
std::vector<float> dwte_in_order(const ops::EmbeddingBackward& op) {
    std::vector<float> dwte(op.dwte, op.dwte + size_t(op.vocab) * op.channels);
    if (!op.accumulate_dwte) std::fill(dwte.begin(), dwte.end(), 0.0f);
    for (size_t i = 0; i < size_t(op.batch) * op.seq_len; i++)
        for (int c = 0; c < op.channels; c++)
            dwte[size_t(op.tokens[i]) * op.channels + c] += float(op.dout.as<double>()[i * op.channels + c]);
    return dwte;
}

std::vector<float> dwpe_in_order(const ops::EmbeddingBackward& op) {
    std::vector<float> dwpe(op.dwpe, op.dwpe + size_t(op.n_positions) * op.channels);
    if (!op.accumulate) std::fill(dwpe.begin(), dwpe.end(), 0.0f);
    auto position = [&](int i) { return op.starts.start(i / op.seq_len, op.batch) + i % op.seq_len; };
    for (size_t i = 0; i < size_t(op.batch) * op.seq_len; i++)
        for (int c = 0; c < op.channels; c++)
            dwpe[size_t(position(int(i))) * op.channels + c] += float(op.dout.as<double>()[i * op.channels + c]);
    return dwpe;
}

}  // namespace

TEMPLATE_TEST_CASE("embedding_forward", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (const Shape& s : kShapes)
        for (const bool has_positions : {false, true}) {
            INFO(describe(s) << ", positions given: " << has_positions);
            const size_t rows = size_t(s.batch) * s.seq_len;
            Stored<T> out("out", Role::output, nans(rows * s.channels), s.shift);
            Array<int> tokens("tokens", Role::input, repeating_tokens(s));
            Array<int> positions("positions", Role::input, random_integers(rows, 4, s.n_positions));
            Stored<T> wte("wte", Role::input, random_values(size_t(s.vocab) * s.channels, 2), s.shift);
            Stored<T> wpe("wpe", Role::input, random_values(size_t(s.n_positions) * s.channels, 3), s.shift);
            auto op = [&]<class Side>(Side side) {
                return ops::EmbeddingForward{.out = out.on(side),
                                             .tokens = tokens.on(side),
                                             .wte = wte.on(side),
                                             .wpe = wpe.on(side),
                                             .batch = s.batch,
                                             .seq_len = s.seq_len,
                                             .channels = s.channels,
                                             .positions = has_positions ? positions.on(side) : nullptr,
                                             .starts = s.starts};
            };
            ops::embedding_forward(op(OnDevice<T>()), Stream());
            ref::embedding_forward(op(OnHost()));
            check_close(out,
                        [&](size_t i) { return stored_error<T>(out.host[i]) + kRoundoff * std::abs(out.host[i]); });
        }
}

// Without position embeddings an output row is the token's row, bit for bit.
TEMPLATE_TEST_CASE("embedding_forward without wpe", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (const Shape& s : kShapes) {
        INFO(describe(s));
        const size_t positions = size_t(s.batch) * s.seq_len, channels = size_t(s.channels);
        Stored<T> out("out", Role::output, nans(positions * channels), s.shift);
        Array<int> tokens("tokens", Role::input, repeating_tokens(s));
        Stored<T> wte("wte", Role::input, random_values(size_t(s.vocab) * channels, 2), s.shift);
        auto op = [&]<class Side>(Side side) {
            return ops::EmbeddingForward{.out = out.on(side),
                                         .tokens = tokens.on(side),
                                         .wte = wte.on(side),
                                         .wpe = nullptr,
                                         .batch = s.batch,
                                         .seq_len = s.seq_len,
                                         .channels = s.channels};
        };
        ops::embedding_forward(op(OnDevice<T>()), Stream());
        ref::embedding_forward(op(OnHost()));
        check_close(out, [](size_t) { return 0; });
    }
}

// Zeros of either sign, too.
TEMPLATE_TEST_CASE("embedding_forward: the parts sum to the whole's bits", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (const Shape& s : kShapes)
        for (int kind = 0; kind < 3; kind++) {
            INFO(describe(s) << (kind == 0 ? ", without wpe" : kind == 1 ? "" : ", positions given"));
            const size_t rows = size_t(s.batch) * s.seq_len;
            std::vector<double> values = random_values(size_t(s.vocab) * s.channels, 2);
            for (size_t i = 0; i < values.size(); i += 3) values[i] = i % 2 ? 0.0 : -0.0;
            Stored<T> out("out", Role::output, nans(rows * s.channels), s.shift),
                wte("wte", Role::input, values, s.shift);
            Stored<T> wpe("wpe", Role::input, random_values(size_t(s.n_positions) * s.channels, 3), s.shift);
            Array<int> tokens("tokens", Role::input, repeating_tokens(s));
            Array<int> positions("positions", Role::input, random_integers(rows, 4, s.n_positions));
            const OnDevice<T> device;
            const ops::EmbeddingForward op{.out = out.on(device),
                                           .tokens = tokens.on(device),
                                           .wte = wte.on(device),
                                           .wpe = kind == 0 ? ConstView() : ConstView(wpe.on(device)),
                                           .batch = s.batch,
                                           .seq_len = s.seq_len,
                                           .channels = s.channels,
                                           .positions = kind == 2 ? positions.on(device) : nullptr,
                                           .starts = s.starts};
            ops::embedding_forward(op, Stream());
            for (int n : {1, 4}) {
                INFO(n << " parts");
                check_same_bits(out, sum_of_parts<T>(s, op, n, "out"));
            }
        }
}

// Rows of tokens of other parts are wpe's.
TEMPLATE_TEST_CASE("embedding_forward of a part", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (const Shape& s : kShapes) {
        INFO(describe(s));
        const size_t rows = size_t(s.batch) * s.seq_len;
        Stored<T> out("out", Role::output, nans(rows * s.channels), s.shift);
        Array<int> tokens("tokens", Role::input, repeating_tokens(s));
        Stored<T> wte("wte", Role::input, random_values(size_t(s.vocab) * s.channels, 2), s.shift);
        Stored<T> wpe("wpe", Role::input, random_values(size_t(s.n_positions) * s.channels, 3), s.shift);
        const int first = s.vocab / 3;
        auto op = [&](auto side) {
            return ops::EmbeddingForward{.out = out.on(side),
                                         .tokens = tokens.on(side),
                                         .wte = ConstView(wte.on(side)).from(size_t(first) * s.channels),
                                         .wpe = wpe.on(side),
                                         .batch = s.batch,
                                         .seq_len = s.seq_len,
                                         .channels = s.channels,
                                         .part = {.first_token = first, .tokens = s.vocab / 2}};
        };
        ops::embedding_forward(op(OnDevice<T>()), Stream());
        ref::embedding_forward(op(OnHost()));
        check_close(out, [&](size_t i) { return stored_error<T>(out.host[i]) + kRoundoff * std::abs(out.host[i]); });
    }
}

// The rows of dwte have the bits of the whole's; dwpe is the whole's.
TEMPLATE_TEST_CASE("embedding_backward of parts", "[ops]", float, bf16, fp16) {
    using T = TestType;
    // Parts of 2^8 and 2^16 tokens: a sort's keys of other parts' tokens need another digit.
    for (const Shape& s : {kShapes[1], kShapes[2], Shape{2, 600, 8, 512, 600}, Shape{1, 50, 1, 131072, 50}})
        for (const bool accumulate : {false, true}) {
            const int parts = accumulate ? 2 : 4;
            INFO(describe(s) << ", accumulate " << accumulate << ", " << parts << " parts");
            const size_t channels = size_t(s.channels), wpe_count = size_t(s.n_positions) * channels;
            Stored<T> dout("dout", Role::input, random_values(size_t(s.batch) * s.seq_len * channels, 6), s.shift);
            Array<int> tokens("tokens", Role::input, repeating_tokens(s));
            // The gradients of tokens [first, first + count).
            auto gradients = [&](int first, int count) {
                std::vector<double> before = random_values(size_t(s.vocab) * channels, 4);
                Array<float> dwte("dwte", Role::output,
                                  std::vector<double>(before.begin() + ptrdiff_t(size_t(first) * channels),
                                                      before.begin() + ptrdiff_t(size_t(first + count) * channels)));
                Array<float> dwpe("dwpe", Role::output, random_values(wpe_count, 5));
                const OnDevice<T> device;
                ops::EmbeddingBackward op{.dwte = dwte.on(device),
                                          .dwpe = dwpe.on(device),
                                          .scratch = nullptr,
                                          .dout = dout.on(device),
                                          .tokens = tokens.on(device),
                                          .batch = s.batch,
                                          .seq_len = s.seq_len,
                                          .channels = s.channels,
                                          .vocab = count,
                                          .n_positions = s.n_positions,
                                          .accumulate = accumulate,
                                          .accumulate_dwte = accumulate,
                                          .first_token = first};
                auto scratch = scratch_of(ops::embedding_backward_scratch_bytes(op));
                op.scratch = scratch.on(device);
                ops::embedding_backward(op, Stream());
                scratch.fetch();
                return std::pair(dwte.fetch(), dwpe.fetch());
            };
            const auto [dwte, dwpe] = gradients(0, s.vocab);
            std::vector<float> joined;
            bool is_same = true;  // a CHECK of the arrays would write them out
            for (int part = 0; part < parts; part++) {
                const int first = s.vocab * part / parts, end = s.vocab * (part + 1) / parts;
                const auto [rows, all_positions] = gradients(first, end - first);
                joined.insert(joined.end(), rows.begin(), rows.end());
                is_same &= all_positions == dwpe;
            }
            is_same &= joined == dwte;
            CHECK(is_same);
        }
}

template <class T>
static void test_embedding_backward(const Shape& s, bool accumulate, bool accumulate_dwte, bool with_dwpe) {
    INFO(describe(s) << ", accumulate " << accumulate << " and " << accumulate_dwte << ", dwpe " << with_dwpe);
    size_t positions = size_t(s.batch) * s.seq_len, wpe_count = size_t(s.n_positions) * s.channels;
    const size_t wte_count = size_t(s.vocab) * s.channels;
    Array<float> dwte("dwte", Role::output, accumulate_dwte ? random_values(wte_count, 4) : nans(wte_count));
    Array<float> dwpe("dwpe", Role::output, accumulate ? random_values(wpe_count, 5) : nans(wpe_count));
    Stored<T> dout("dout", Role::input, random_values(positions * s.channels, 6), s.shift);
    Array<int> tokens("tokens", Role::input, repeating_tokens(s));
    auto op = [&]<class Side>(Side side) {
        return ops::EmbeddingBackward{.dwte = dwte.on(side),
                                      .dwpe = with_dwpe ? dwpe.on(side) : nullptr,
                                      .scratch = nullptr,
                                      .dout = dout.on(side),
                                      .tokens = tokens.on(side),
                                      .batch = s.batch,
                                      .seq_len = s.seq_len,
                                      .channels = s.channels,
                                      .vocab = s.vocab,
                                      .n_positions = s.n_positions,
                                      .accumulate = accumulate,
                                      .accumulate_dwte = accumulate_dwte,
                                      .starts = s.starts};
    };
    // Sums of absolute values: the sums' rounding errors are relative to them.
    std::vector<float> dwte_size = absolute(dwte.host), dwpe_size = absolute(dwpe.host);
    std::vector<double> dout_size = absolute(dout.host);
    const std::vector<float> expected_dwte = dwte_in_order(op(OnHost())),
                             expected_dwpe = with_dwpe ? dwpe_in_order(op(OnHost())) : std::vector<float>();
    auto size_op = op(OnHost());
    size_op.dwte = dwte_size.data(), size_op.dwpe = with_dwpe ? dwpe_size.data() : nullptr,
    size_op.dout = dout_size.data();
    ref::embedding_backward(size_op);

    auto device_op = op(OnDevice<T>());
    auto scratch = scratch_of(ops::embedding_backward_scratch_bytes(device_op));
    device_op.scratch = scratch.on(OnDevice<T>());
    ops::embedding_backward(device_op, Stream());
    ref::embedding_backward(op(OnHost()));
    check_close(dwte, [&](size_t i) {
        return stored_error_fp32(dwte.host[i]) + summation_error(double(positions)) * dwte_size[i];
    });
    check_same_bits(dwte, expected_dwte);
    scratch.fetch();
    if (!with_dwpe) return;
    check_close(
        dwpe, [&](size_t i) { return stored_error_fp32(dwpe.host[i]) + summation_error(s.batch + 1) * dwpe_size[i]; });
    check_same_bits(dwpe, expected_dwpe);
}

TEMPLATE_TEST_CASE("embedding_backward", "[ops]", float, bf16, fp16) {
    for (const Shape& s : kShapes)
        for (bool accumulate : {false, true}) test_embedding_backward<TestType>(s, accumulate, true, true);
}

// With an untied head only the embedding writes dwte; the first micro-step overwrites the last step's values.
TEMPLATE_TEST_CASE("embedding_backward: dwte overwritten, no dwpe", "[ops]", float, bf16, fp16) {
    for (const Shape& s : kShapes) {
        if (s.vocab > 1000 && s.channels > 6) continue;
        test_embedding_backward<TestType>(s, true, false, true);
        for (bool accumulate_dwte : {false, true}) test_embedding_backward<TestType>(s, false, accumulate_dwte, false);
    }
}
