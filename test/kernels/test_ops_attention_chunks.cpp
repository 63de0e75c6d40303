// Attention to one chunk of keys after another, as on the ranks of a ring, against ref::'s attention to whole
// sequences.
#include <memory>

#include "test/support/attention.h"
#include "test/support/device_array.h"
#include "test/support/expect_error.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"

namespace {

using namespace attention;

// The order of the chunks of keys for a chunk of queries. A ring starts with the queries' own chunk.
enum class Order { ascending, ring, middle_first };

std::vector<int> chunks_in_order(Order order, int last) {
    std::vector<int> chunks;
    for (int i = 0; i <= last; i++)
        chunks.push_back(order == Order::ascending ? i : order == Order::ring ? last - i : (i + last / 2) % (last + 1));
    return chunks;
}

struct ChunkShape {
    Shape s;  // of the whole sequences
    int chunks;
    Order order;

    int seq_len() const { return s.seq_len / chunks; }
    int query_width() const { return s.n_head * s.head_size; }
    int kv_width() const { return 2 * s.n_kv_head * s.head_size; }
    int row_width() const { return query_width() + kv_width(); }
};

// Every kernel, with and without shared keys; windows, documents, soft caps and dropout across chunks; chunks that a
// window or a document hides, seen first, in between and last; chunks that end inside a tile, or fill several blocks.
constexpr ChunkShape kShapes[] = {{{1, 128, 2, 2, 64, 1}, 2, Order::ascending},
                                  {{1, 288, 1, 1, 64, 4}, 2, Order::ring},
                                  {{2, 160, 3, 1, 64, 4, 90, 3, 71, 0.2}, 2, Order::ring},
                                  {{2, 64, 4, 2, 64, 1, 20, 0, 25, 0.3}, 4, Order::ascending},
                                  {{1, 128, 1, 1, 64, 1, 0, 0, 40, 0.2}, 8, Order::middle_first},
                                  {{1, 160, 2, 1, 128, 4, 100, 3, 0, 0.2}, 2, Order::ascending},
                                  {{2, 128, 2, 1, 128, 1, 0, 0, 41}, 2, Order::ring},
                                  {{1, 64, 2, 2, 96, 1, 20, 0, 0, 0.2}, 4, Order::middle_first},
                                  {{1, 64, 2, 1, 256, 4, 30, 3, 41, 0.2}, 2, Order::ascending},
                                  {{2, 64, 2, 1, 20, 4, 30, 3, 41, 0.2}, 4, Order::middle_first},
                                  {{1, 128, 1, 1, 16, 1}, 8, Order::ring}};

std::string describe(const ChunkShape& c) {
    return attention::describe(c.s) + format(", %d chunks, order %d", c.chunks, int(c.order));
}

// Columns [first, first + width) of rows of `step` elements: the rows of one chunk of every sequence.
template <class V>
std::vector<V> chunk_of(const std::vector<V>& values, const ChunkShape& c, int chunk, int step, int first, int width) {
    std::vector<V> rows;
    for (int b = 0; b < c.s.batch; b++)
        for (int t = chunk * c.seq_len(); t < (chunk + 1) * c.seq_len(); t++) {
            const auto row = values.begin() + ptrdiff_t(b * c.s.seq_len + t) * step + first;
            rows.insert(rows.end(), row, row + width);
        }
    return rows;
}

// The same of an array (batch, n_head, seq_len).
template <class V> std::vector<V> chunk_of_heads(const std::vector<V>& values, ChunkShape c, int chunk) {
    c.s.batch *= c.s.n_head;
    return chunk_of(values, c, chunk, 1, 0, 1);
}

// The columns of queries, or of keys and values, in rows of all three.
template <class V> std::vector<V> queries_of(const std::vector<V>& rows, const ChunkShape& c, int chunk) {
    return chunk_of(rows, c, chunk, c.row_width(), 0, c.query_width());
}
template <class V> std::vector<V> keys_of(const std::vector<V>& rows, const ChunkShape& c, int chunk) {
    return chunk_of(rows, c, chunk, c.row_width(), c.query_width(), c.kv_width());
}

// Whether the device has these bits for all elements.
template <class T, class Host> bool are_all(const Array<T, Host>& array, T value) {
    const std::vector<T> values = array.fetch(), expected(values.size(), value);
    return std::memcmp(values.data(), expected.data(), values.size() * sizeof(T)) == 0;
}

constexpr double kUntouched = -7;  // of every type

template <class T> struct Outputs {
    std::vector<T> out;
    std::vector<float> lse;
    std::vector<T> dquery;
};

// Whole sequences on the host, and ops on their chunks on the device.
template <class T> class Chunks {
public:
    explicit Chunks(const ChunkShape& shape) : c(shape), whole_(shape.s) {
        for (int chunk = 0; chunk < c.chunks; chunk++) {
            const std::vector<double> kv = keys_of(whole_.forward.qkv.host, c, chunk);
            kv_.push_back(std::make_unique<Stored<T>>("kv", Role::input, kv));
            dkv_.push_back(std::make_unique<Array<float>>("dkv", Role::output, nans(kv.size())));
        }
    }

    // Runs the ops of every chunk of queries, and compares with ref::.
    void check() {
        const ops::AttentionBackward op = whole_.op(OnHost());
        const std::vector<double>& qkv = whole_.forward.qkv.host;
        const std::vector<double> of_out = out_bounds<T>(c.s, qkv.data(), op.dropout),
                                  of_dqkv = dqkv_bounds<T>(c.s, op);
        ref::attention_backward(op);
        for (int chunk = 0; chunk < c.chunks; chunk++) {
            INFO("queries of chunk " << chunk);
            const Outputs<T> got = run(chunk);
            const std::vector<double> bounds = out_chunk(of_out, chunk),
                                      out = out_chunk(whole_.forward.out.host, chunk);
            check_close("out", got.out, out, [&](size_t i) { return bounds[i] + stored_error<T>(out[i]); });
            const std::vector<float> lse = chunk_of_heads(whole_.forward.lse.host, c, chunk);
            check_close("lse", got.lse, lse, [&](size_t i) {
                const int row = int(i) / c.seq_len(), t = chunk * c.seq_len() + int(i) % c.seq_len();
                return row_error(c.s, qkv.data(), row / c.s.n_head, row % c.s.n_head, t).lse +
                       stored_error_fp32(lse[i]);
            });
            const std::vector<double> query_bounds = queries_of(of_dqkv, c, chunk);
            const std::vector<double> dquery = queries_of(whole_.dqkv.host, c, chunk);
            check_close("dquery", got.dquery, dquery,
                        [&](size_t i) { return query_bounds[i] + stored_error<T>(dquery[i]); });
        }
        for (int chunk = 0; chunk < c.chunks; chunk++) {
            INFO("keys of chunk " << chunk);
            const std::vector<double> bounds = keys_of(of_dqkv, c, chunk), dkv = keys_of(whole_.dqkv.host, c, chunk);
            check_close("dkv", dkv_[size_t(chunk)]->fetch(), dkv,
                        [&](size_t i) { return bounds[i] + stored_error<float>(dkv[i]); });
        }
    }

    // Runs the ops of a chunk of queries for the chunks of keys up to it.
    Outputs<T> run(int chunk) {
        const OnDevice<T> device;
        const size_t rows = size_t(c.s.batch) * size_t(c.seq_len()), queries = rows * size_t(c.query_width());
        Stored<T> qkv("qkv", Role::input, chunk_of(whole_.forward.qkv.host, c, chunk, c.row_width(), 0, c.row_width()));
        Array<int> first_keys("first_key", Role::input,
                              chunk_of(AttentionArrays<T>::first_keys_of(c.s), c, chunk, 1, 0, 1));
        const int* first_key = c.s.document ? first_keys.on(device) : nullptr;

        Stored<T> out("out", Role::output, nans(queries));
        Array<float> lse("lse", Role::output, nans(rows * size_t(c.s.n_head)));
        Array<float> sums("running.out", Role::output, nans(queries));
        Array<float> max("running.max", Role::output, nans(rows * size_t(c.s.n_head)));
        Array<float> sum("running.sum", Role::output, nans(rows * size_t(c.s.n_head)));
        ops::AttentionForward forward = whole_.forward.forward_op(device);
        forward.out = out.on(device);
        forward.lse = lse.on(device);
        forward.qkv = qkv.on(device);
        forward.seq_len = c.seq_len();
        forward.first_key = first_key;
        if (chunk > 0) forward.running = {sums.on(device), max.on(device), sum.on(device)};
        for_each_chunk(chunk, [&](int, const ops::KeyChunk& keys) {
            forward.chunk = keys;
            CHECK((are_all(out, ref::store<T>(NAN)) && are_all(lse, NAN)));
            const std::vector<float> before[] = {sums.fetch(), max.fetch(), sum.fetch()};
            ops::attention_forward(forward, Stream());
            if (!keys.is_last) return;
            check_same_bits(sums, before[0]);
            check_same_bits(max, before[1]);
            check_same_bits(sum, before[2]);
        });

        Stored<T> dqkv("dqkv", Role::output, std::vector<double>(qkv.host.size(), kUntouched));
        Stored<T> dout("dout", Role::input, out_chunk(whole_.dout.host, chunk));
        Stored<T> exact_out("out", Role::input, out_chunk(whole_.out.host, chunk));
        Array<float> exact_lse("lse", Role::input, chunk_of_heads(whole_.lse.host, c, chunk));
        Array<float> dquery("dquery", Role::output, nans(queries));
        ops::AttentionBackward backward = whole_.op(device);
        backward.dqkv = dqkv.on(device);
        backward.dout = dout.on(device);
        backward.qkv = qkv.on(device);
        backward.out = exact_out.on(device);
        backward.lse = exact_lse.on(device);
        backward.seq_len = c.seq_len();
        backward.first_key = first_key;
        if (chunk > 0) backward.dquery = dquery.on(device);
        for_each_chunk(chunk, [&](int number, const ops::KeyChunk& keys) {
            auto scratch = scratch_of(ops::attention_backward_scratch_bytes(backward));
            backward.scratch = scratch.on(device);
            backward.chunk = keys;
            backward.dkv = dkv_[size_t(number)]->on(device);
            backward.accumulate_dkv = chunk > number;  // the queries of the keys' own chunk come first
            CHECK(are_all(dqkv, ref::store<T>(kUntouched)));
            const std::vector<float> before = dquery.fetch();
            ops::attention_backward(backward, Stream());
            scratch.fetch();
            if (keys.is_last) check_same_bits(dquery, before);
        });
        const std::vector<T> rows_of_dqkv = dqkv.fetch();
        ChunkShape alone = c;
        alone.s.seq_len = c.seq_len(), alone.chunks = 1;
        const std::vector<T> rest = keys_of(rows_of_dqkv, alone, 0);
        CHECK(have_same_bits(rest, std::vector<T>(rest.size(), ref::store<T>(kUntouched))));
        return {out.fetch(), lse.fetch(), queries_of(rows_of_dqkv, alone, 0)};
    }

    // The op on the whole sequences.
    Outputs<T> run_whole() {
        whole_.run_on_device();
        ops::attention_forward(whole_.forward.forward_op(OnDevice<T>()), Stream());
        return {whole_.forward.out.fetch(), whole_.forward.lse.fetch(), whole_.dqkv.fetch()};
    }

    template <class V> std::vector<V> out_chunk(const std::vector<V>& rows, int chunk) const {
        return chunk_of(rows, c, chunk, c.query_width(), 0, c.query_width());
    }

    const ChunkShape c;

private:
    template <class Visit> void for_each_chunk(int last, Visit visit) {
        const std::vector<int> chunks = chunks_in_order(c.order, last);
        for (int number : chunks)
            visit(number, ops::KeyChunk{.kv = kv_[size_t(number)]->on(OnDevice<T>()),
                                        .start = number * c.seq_len(),
                                        .distance = (last - number) * c.seq_len(),
                                        .is_first = number == chunks.front(),
                                        .is_last = number == chunks.back()});
    }

    BackwardArrays<T> whole_;
    std::vector<std::unique_ptr<Stored<T>>> kv_;
    std::vector<std::unique_ptr<Array<float>>> dkv_;
};

}  // namespace

TEMPLATE_TEST_CASE("attention to chunks of keys", "[ops]", float, bf16, fp16) {
    for (const ChunkShape& c : kShapes) {
        INFO(describe(c));
        Chunks<TestType>(c).check();
    }
}

// The CPU's tiles of queries and keys are the same if chunks have a multiple of 64 positions.
TEMPLATE_TEST_CASE("attention to chunks in ascending order has the bits of the whole on a CPU", "[ops]", float, bf16,
                   fp16) {
    if (device_info().threads == 0) return;
    for (const Shape& s :
         {Shape{2, 256, 4, 2, 64, 4}, Shape{1, 256, 2, 1, 80, 4, 70, 3, 90, 0.2}, Shape{1, 512, 2, 2, 16, 1, 150}})
        for (int chunks : {2, 4}) {
            const ChunkShape c = {s, chunks, Order::ascending};
            INFO(describe(c));
            Chunks<TestType> run(c);
            const Outputs<TestType> whole = run.run_whole();
            for (int chunk = 0; chunk < chunks; chunk++) {
                const Outputs<TestType> got = run.run(chunk);
                CHECK(have_same_bits(got.out, run.out_chunk(whole.out, chunk)));
                CHECK(have_same_bits(got.lse, chunk_of_heads(whole.lse, c, chunk)));
                CHECK(have_same_bits(got.dquery, queries_of(whole.dquery, c, chunk)));
            }
        }
}

TEST_CASE("attention rejects chunks at wrong places, and several chunks without memory for sums", "[ops]") {
    float memory = 0;
    ops::AttentionForward op{.out = &memory,
                             .lse = &memory,
                             .qkv = &memory,
                             .batch = 1,
                             .seq_len = 32,
                             .n_head = 1,
                             .n_kv_head = 1,
                             .head_size = 16,
                             .scale = 1};
    for (const auto& [start, distance] : {std::pair{8, 0}, std::pair{-16, 0}, std::pair{0, 40}, std::pair{0, 16}}) {
        op.chunk = {.kv = &memory, .start = start, .distance = distance};
        expect_error(Exit::internal, {std::to_string(start), std::to_string(distance), "multiples of 16", "32"},
                     [&] { ops::attention_forward(op, Stream()); });
    }
    op.chunk = {.kv = &memory, .is_last = false};
    expect_error(Exit::internal, {"no memory"}, [&] { ops::attention_forward(op, Stream()); });
}
