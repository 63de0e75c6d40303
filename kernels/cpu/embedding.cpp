// Token and position embedding. Forward is a gather. Backward is a gather too: a counting sort groups the positions by
// token, then one thread sums each row of a gradient in the order of positions.
#include <utility>

#include "kernels/cpu/parallel.h"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"
#include "kernels/shared/vocabulary.h"

namespace ops {

namespace {

template <class T> void add_row(float* sum, const T* row, int channels) {
#pragma omp simd
    for (int c = 0; c < channels; c++) sum[c] += to_float(row[c]);
}

// Not inlined: inside the loop over positions the compiler does not vectorize it for fp16.
template <class T> [[gnu::noinline]] void store_sum(T* out, const T* a, const T* b, int channels) {
#pragma omp simd
    for (int c = 0; c < channels; c++) out[c] = from_float<T>(to_float(a[c]) + to_float(b[c]));
}

// The positions of each token.
struct PositionsByToken {
    int* end;       // (vocab), end of the token's positions in `order`; they start at the previous token's end
    int* order;     // (batch * seq_len), positions sorted by token, ascending within a token
    int* distinct;  // (n_distinct), the tokens that occur
    int n_distinct = 0;

    int begin(int token) const { return token ? end[token - 1] : 0; }
};

size_t n_scratch_ints(const EmbeddingBackward& op) { return size_t(op.vocab) + 2 * size_t(op.batch) * op.seq_len; }

// Leaves out the positions whose tokens are not in the part. Tokens are rows of dwte.
PositionsByToken sort_positions(const EmbeddingBackward& op) {
    const int n_positions = op.batch * op.seq_len;
    int* end = static_cast<int*>(op.scratch);
    PositionsByToken positions{.end = end, .order = end + op.vocab, .distinct = end + op.vocab + n_positions};
    std::fill(end, end + op.vocab, 0);
    auto row_of = [&](int i) { return index_in_part(op.tokens[i], op.first_token, op.vocab); };
    for (int i = 0; i < n_positions; i++)
        if (const int row = row_of(i); row >= 0) end[row]++;
    int total = 0;
    for (int token = 0; token < op.vocab; token++) {
        if (end[token]) positions.distinct[positions.n_distinct++] = token;
        total += std::exchange(end[token], total);
    }
    for (int i = 0; i < n_positions; i++)
        if (const int row = row_of(i); row >= 0) positions.order[end[row]++] = i;
    return positions;
}

template <class T> void token_gradients(const EmbeddingBackward& op) {
    const PositionsByToken positions = sort_positions(op);
    auto add_rows_of = [&](int token) {
        float* row = op.dwte + size_t(token) * op.channels;
        for (int p = positions.begin(token); p < positions.end[token]; p++)
            add_row(row, op.dout.as<T>() + size_t(positions.order[p]) * op.channels, op.channels);
    };
    if (op.accumulate_dwte)
        return parallel_blocks(positions.n_distinct, 1, [&](size_t i, size_t) { add_rows_of(positions.distinct[i]); });
    constexpr size_t kTokens = 16;  // per task; most tokens do not occur
    parallel_blocks(size_t(op.vocab), kTokens, [&](size_t begin, size_t end) {
        std::fill(op.dwte + begin * op.channels, op.dwte + end * op.channels, 0.0f);
        for (size_t token = begin; token < end; token++) add_rows_of(int(token));
    });
}

template <class T> void position_gradients(const EmbeddingBackward& op) {
    parallel_for(op.n_positions, [&](size_t position) {
        float* row = op.dwpe + position * op.channels;
        if (!op.accumulate) std::fill(row, row + op.channels, 0.0f);
        for (int b = 0; b < op.batch; b++) {
            const int t = int(position) - op.starts.start(b, op.batch);
            if (t < 0 || t >= op.seq_len) continue;
            add_row(row, op.dout.as<T>() + (size_t(b) * op.seq_len + t) * op.channels, op.channels);
        }
    });
}

}  // namespace

void embedding_forward(const EmbeddingForward& op, Stream) {
    dispatch("embedding_forward", {op.out, op.wte, op.wpe}, [&]<class T>() {
        parallel_for(size_t(op.batch) * op.seq_len, [&](size_t i) {
            T* out = op.out.as<T>() + i * op.channels;
            const int row = index_in_part(op.tokens[i], op.part.first_token, op.part.tokens);
            const T* token = op.wte.as<T>() + size_t(std::max(row, 0)) * op.channels;
            const int b = int(i) / op.seq_len, t = int(i) % op.seq_len;
            const size_t at = size_t(op.positions ? op.positions[i] : op.starts.start(b, op.batch) + t);
            const T* position = op.wpe.as<T>() + (op.wpe ? at * op.channels : 0);
            if (row >= 0 && op.wpe) return store_sum(out, token, position, op.channels);
            if (row >= 0 || op.wpe)
                std::copy_n(row >= 0 ? token : position, op.channels, out);
            else
                std::fill_n(out, op.channels, from_float<T>(-0.0f));
        });
    });
}

void embedding_backward(const EmbeddingBackward& op, Stream) {
    dispatch("embedding_backward", {op.dout}, [&]<class T>() {
        token_gradients<T>(op);
        if (op.dwpe) position_gradients<T>(op);
    });
}

size_t embedding_backward_scratch_bytes(const EmbeddingBackward& op) { return n_scratch_ints(op) * sizeof(int); }

}  // namespace ops
