// Ops on chunks of sequences against the same ops on the whole sequences.
#include "test/support/device_array.h"
#include "test/support/random_values.h"

namespace {

// Sequences of 2 ranks * kChunk positions. Rank r has chunks r and 2 ranks - 1 - r of each, and its batch holds the
// first chunks of all sequences, then the second ones.
constexpr int kChunk = 3;
struct Division {
    int batch, ranks;

    int seq_len() const { return 2 * ranks * kChunk; }
    size_t rows() const { return size_t(batch) * seq_len(); }
    ops::ChunkStarts starts(int rank) const { return {rank * kChunk, (2 * ranks - 1 - rank) * kChunk}; }
    // The part of all sequences that starts at a position. A row has `cols` values.
    template <class Value> std::vector<Value> chunks(const std::vector<Value>& whole, int start, size_t cols) const {
        std::vector<Value> values;
        for (int b = 0; b < batch; b++) {
            const auto begin = whole.begin() + ptrdiff_t(cols * (size_t(b) * seq_len() + start));
            values.insert(values.end(), begin, begin + ptrdiff_t(cols * kChunk));
        }
        return values;
    }
    template <class Value> std::vector<Value> batch_of(const std::vector<Value>& whole, int rank, size_t cols) const {
        std::vector<Value> values = chunks(whole, starts(rank).first, cols);
        const std::vector<Value> second = chunks(whole, starts(rank).second, cols);
        values.insert(values.end(), second.begin(), second.end());
        return values;
    }
};
constexpr Division kDivisions[] = {{1, 2}, {3, 2}, {1, 4}, {3, 4}};

// Calls test(division, rank) for all ranks of all divisions.
template <class Test> void for_each_rank(Test test) {
    for (const Division& division : kDivisions)
        for (int rank = 0; rank < division.ranks; rank++) {
            INFO("batch " << division.batch << ", rank " << rank << " of " << division.ranks);
            test(division, rank);
        }
}

// Multiples of 1/4 in [-2, 2], without 0: float sums of products of four are exact.
std::vector<double> quarters(size_t count, uint64_t seed) {
    std::vector<double> values;
    for (int integer : random_integers(count, seed, 16))
        values.push_back((integer < 8 ? integer - 8 : integer - 7) / 4.0);
    return values;
}

// ---- embedding ------------------------------------------------------------------------------------------------------

constexpr int kVocab = 11, kChannels = 5;

template <class T> struct Embedding {
    Stored<T> wte{"wte", Role::input, random_values(size_t(kVocab) * kChannels, 1)};
    Stored<T> wpe;

    explicit Embedding(int n_positions) : wpe("wpe", Role::input, random_values(size_t(n_positions) * kChannels, 2)) {}

    std::vector<T> forward(const std::vector<int>& tokens, int seq_len, ops::ChunkStarts starts) {
        Stored<T> out("out", Role::output, nans(tokens.size() * kChannels));
        Array<int> given("tokens", Role::input, tokens);
        const OnDevice<T> device;
        ops::embedding_forward({.out = out.on(device),
                                .tokens = given.on(device),
                                .wte = wte.on(device),
                                .wpe = wpe.on(device),
                                .batch = int(tokens.size()) / seq_len,
                                .seq_len = seq_len,
                                .channels = kChannels,
                                .starts = starts},
                               Stream());
        return out.fetch();
    }
};

// Returns dwpe, with n_positions rows.
template <class T>
std::vector<float> position_gradients(const std::vector<double>& dout, int seq_len, ops::ChunkStarts starts,
                                      const std::vector<double>& before, bool accumulate) {
    const size_t rows = dout.size() / kChannels;
    Stored<T> given("dout", Role::input, dout);
    Array<float> dwte("dwte", Role::output, nans(size_t(kVocab) * kChannels)), dwpe("dwpe", Role::output, before);
    Array<int> tokens("tokens", Role::input, random_integers(rows, 3, kVocab));
    const OnDevice<T> device;
    ops::EmbeddingBackward op{.dwte = dwte.on(device),
                              .dwpe = dwpe.on(device),
                              .scratch = nullptr,
                              .dout = given.on(device),
                              .tokens = tokens.on(device),
                              .batch = int(rows) / seq_len,
                              .seq_len = seq_len,
                              .channels = kChannels,
                              .vocab = kVocab,
                              .n_positions = int(before.size()) / kChannels,
                              .accumulate = accumulate,
                              .accumulate_dwte = false,
                              .starts = starts};
    auto scratch = scratch_of(ops::embedding_backward_scratch_bytes(op));
    op.scratch = scratch.on(device);
    ops::embedding_backward(op, Stream());
    scratch.fetch();
    return dwpe.fetch();
}

// ---- QK norm and RoPE -----------------------------------------------------------------------------------------------

constexpr int kHeads = 2, kKvHeads = 1, kSize = 6, kRotary = 4;
constexpr size_t kQkvCols = (kHeads + 2 * kKvHeads) * kSize, kRawCols = (kHeads + kKvHeads) * kSize;

// RoPE alone; with a norm of rotated keys; with a norm that has weights.
enum class Norm { none, plain, weights };

template <class T> struct Rope {
    Norm norm;
    int seq_len;
    Stored<T> q_weight{"q_weight", Role::input, quarters(kSize, 4)};
    Stored<T> k_weight{"k_weight", Role::input, quarters(kSize, 5)};
    Array<float> table;
    OnDevice<T> device = {};

    Rope(Norm which, int length, int positions)
        : norm(which), seq_len(length), table("table", Role::input, quarters(size_t(positions) * kRotary, 6)) {}

    // The results of a batch, and the sums of gradients.
    struct Results {
        std::vector<T> rows, raw;
        std::vector<float> rstd, dq_weight, dk_weight;
    };

    Results forward(const std::vector<double>& qkv, ops::ChunkStarts starts) {
        const size_t rows = qkv.size() / kQkvCols;
        const bool has_weights = norm == Norm::weights;
        Stored<T> rotated("qkv", Role::output, qkv), raw("raw", Role::output, nans(rows * kRawCols));
        Array<float> rstd("rstd", Role::output, nans(rows * kRawCols / kSize));
        ops::qk_norm_rope_forward({.qkv = rotated.on(device),
                                   .raw = has_weights ? View(raw.on(device)) : nullptr,
                                   .rstd = norm != Norm::none ? rstd.on(device) : nullptr,
                                   .q_weight = has_weights ? ConstView(q_weight.on(device)) : nullptr,
                                   .k_weight = has_weights ? ConstView(k_weight.on(device)) : nullptr,
                                   .table = table.on(device),
                                   .batch = int(rows) / seq_len,
                                   .seq_len = seq_len,
                                   .n_head = kHeads,
                                   .n_kv_head = kKvHeads,
                                   .head_size = kSize,
                                   .rotary = kRotary,
                                   .eps = 0.5f,
                                   .starts = starts},
                                  Stream());
        return {rotated.fetch(), raw.fetch(), rstd.fetch(), {}, {}};
    }

    // `raw`: the heads before the op, or with Norm::plain, after it. The others: of the same rows.
    Results backward(const std::vector<double>& dqkv, const std::vector<double>& qkv, const std::vector<double>& raw,
                     const std::vector<double>& rstd, ops::ChunkStarts starts) {
        const size_t rows = dqkv.size() / kQkvCols;
        const bool has_weights = norm == Norm::weights;
        Stored<T> gradient("dqkv", Role::output, dqkv), results("qkv", Role::input, qkv);
        Stored<T> heads("raw", Role::input, raw);
        Array<float> given("rstd", Role::input, rstd);
        Array<float> dq_weight("dq_weight", Role::output, nans(kSize)),
            dk_weight("dk_weight", Role::output, nans(kSize));
        ops::QkNormRopeBackward op{.dqkv = gradient.on(device),
                                   .dq_weight = has_weights ? dq_weight.on(device) : nullptr,
                                   .dk_weight = has_weights ? dk_weight.on(device) : nullptr,
                                   .scratch = nullptr,
                                   .qkv = results.on(device),
                                   .raw = has_weights ? ConstView(heads.on(device)) : nullptr,
                                   .rstd = norm != Norm::none ? given.on(device) : nullptr,
                                   .q_weight = has_weights ? ConstView(q_weight.on(device)) : nullptr,
                                   .k_weight = has_weights ? ConstView(k_weight.on(device)) : nullptr,
                                   .table = table.on(device),
                                   .batch = int(rows) / seq_len,
                                   .seq_len = seq_len,
                                   .n_head = kHeads,
                                   .n_kv_head = kKvHeads,
                                   .head_size = kSize,
                                   .rotary = kRotary,
                                   .accumulate = false,
                                   .starts = starts};
        auto scratch = scratch_of(ops::qk_norm_rope_backward_scratch_bytes(op));
        op.scratch = scratch.on(device);
        ops::qk_norm_rope_backward(op, Stream());
        scratch.fetch();
        return {gradient.fetch(), {}, {}, dq_weight.fetch(), dk_weight.fetch()};
    }
};

}  // namespace

TEMPLATE_TEST_CASE("embedding_forward of chunks has the bits of the whole", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for_each_rank([](const Division& division, int rank) {
        const int seq_len = division.seq_len();
        const std::vector<int> all = random_integers(division.rows(), 3, kVocab);
        Embedding<T> embedding(seq_len);
        const std::vector<T> expected = division.batch_of(embedding.forward(all, seq_len, {}), rank, kChannels);
        const std::vector<int> tokens = division.batch_of(all, rank, 1);
        const ops::ChunkStarts starts = division.starts(rank);
        CHECK(have_same_bits(embedding.forward(tokens, kChunk, starts), expected));
    });
}

// A position is in one rank's chunks only, so the sum over the ranks is the whole.
TEMPLATE_TEST_CASE("embedding_backward of chunks has the whole's rows of dwpe", "[ops]", float, bf16, fp16) {
    for_each_rank([](const Division& division, int rank) {
        const int seq_len = division.seq_len(), n_positions = seq_len + 2;
        const std::vector<double> dout = random_values(division.rows() * kChannels, 7);
        for (bool accumulate : {false, true}) {
            INFO("accumulate " << accumulate);
            const size_t count = size_t(n_positions) * kChannels;
            const std::vector<double> before = accumulate ? random_values(count, 8) : nans(count);
            std::vector<float> expected = position_gradients<TestType>(dout, seq_len, {}, before, accumulate);
            const auto [first, second] = division.starts(rank);
            for (int i = 0; i < n_positions * kChannels; i++) {
                const int position = i / kChannels;
                const bool is_in_chunk = (first <= position && position < first + kChunk) ||
                                         (second <= position && position < second + kChunk);
                if (!is_in_chunk) expected[i] = accumulate ? float(before[i]) : 0;
            }
            const std::vector<double> part = division.batch_of(dout, rank, kChannels);
            CHECK(have_same_bits(position_gradients<TestType>(part, kChunk, division.starts(rank), before, accumulate),
                                 expected));
        }
    });
}

TEMPLATE_TEST_CASE("qk_norm_rope_forward of chunks has the bits of the whole", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (const Norm norm : {Norm::none, Norm::plain, Norm::weights})
        for_each_rank([&](const Division& division, int rank) {
            INFO("norm " << int(norm));
            const int seq_len = division.seq_len();
            const std::vector<double> qkv = random_values(division.rows() * kQkvCols, 7);
            const auto whole = Rope<T>(norm, seq_len, seq_len).forward(qkv, {});
            const auto part =
                Rope<T>(norm, kChunk, seq_len).forward(division.batch_of(qkv, rank, kQkvCols), division.starts(rank));
            CHECK(have_same_bits(part.rows, division.batch_of(whole.rows, rank, kQkvCols)));
            CHECK(have_same_bits(part.raw, division.batch_of(whole.raw, rank, kRawCols)));
            CHECK(have_same_bits(part.rstd, division.batch_of(whole.rstd, rank, kRawCols / kSize)));
        });
}

// The gradients of the weights are sums without rounding.
TEMPLATE_TEST_CASE("qk_norm_rope_backward of chunks has the bits of the whole", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (const Norm norm : {Norm::none, Norm::plain, Norm::weights})
        for (const Division& division : kDivisions) {
            const int seq_len = division.seq_len();
            const std::vector<double> dqkv = quarters(division.rows() * kQkvCols, 7),
                                      qkv = quarters(division.rows() * kQkvCols, 8),
                                      raw = quarters(division.rows() * kRawCols, 9),
                                      rstd = quarters(division.rows() * kRawCols / kSize, 10);
            const auto whole = Rope<T>(norm, seq_len, seq_len).backward(dqkv, qkv, raw, rstd, {});
            std::vector<float> dq_weight(kSize), dk_weight(kSize);
            for (int rank = 0; rank < division.ranks; rank++) {
                INFO("norm " << int(norm) << ", batch " << division.batch << ", rank " << rank << " of "
                             << division.ranks);
                const auto part =
                    Rope<T>(norm, kChunk, seq_len)
                        .backward(division.batch_of(dqkv, rank, kQkvCols), division.batch_of(qkv, rank, kQkvCols),
                                  division.batch_of(raw, rank, kRawCols),
                                  division.batch_of(rstd, rank, kRawCols / kSize), division.starts(rank));
                CHECK(have_same_bits(part.rows, division.batch_of(whole.rows, rank, kQkvCols)));
                for (int c = 0; c < kSize; c++) {
                    dq_weight[c] += part.dq_weight[c];
                    dk_weight[c] += part.dk_weight[c];
                }
            }
            if (norm != Norm::weights) continue;
            CHECK(dq_weight == whole.dq_weight);
            CHECK(dk_weight == whole.dk_weight);
        }
}

// An op has one chunk of each sample, whole or from an element after its first.
TEMPLATE_TEST_CASE("dropout of chunks keeps the whole's elements", "[ops]", float, bf16, fp16) {
    using T = TestType;
    constexpr size_t kCols = 200;  // a chunk has more elements than the CPU's op processes at a time
    for_each_rank([](const Division& division, int rank) {
        std::vector<uint64_t> samples;
        for (int b = 0; b < division.batch; b++) samples.push_back(ops::dropout_key(7, uint64_t(b)));
        Array<uint64_t> keys("keys", Role::input, samples);
        auto dropped = [&](const std::vector<double>& values, size_t count, size_t first, size_t start) {
            Stored<T> inp("inp", Role::input, values), out("out", Role::output, nans(values.size()));
            const OnDevice<T> device;
            ops::dropout({.out = out.on(device),
                          .inp = inp.on(device),
                          .mask = {.keys = keys.on(device), .threshold = ops::dropout_threshold(0.3), .place = 9 << 16},
                          .count = count,
                          .first = first,
                          .elements = values.size(),
                          .start = start},
                         Stream());
            return out.fetch();
        };
        const std::vector<double> values = random_values(division.rows() * kCols, 1);
        const std::vector<T> whole = dropped(values, division.seq_len() * kCols, 0, 0);
        const auto [first_start, second_start] = division.starts(rank);
        for (int start : {first_start, second_start})
            for (int first : {0, 16}) {
                std::vector<double> part = division.chunks(values, start, kCols);
                std::vector<T> expected = division.chunks(whole, start, kCols);
                part.erase(part.begin(), part.begin() + first);
                expected.erase(expected.begin(), expected.begin() + first);
                CHECK(have_same_bits(dropped(part, kChunk * kCols, size_t(first), start * kCols), expected));
            }
    });
}
