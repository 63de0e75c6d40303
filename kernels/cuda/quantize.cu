// Conversion to 8 bits for GEMMs.
//
// abs_max: each thread reads packs of 8 numbers, each block adds its maximum with one atomic instruction; a maximum
// does not depend on the order. quantize: a block converts a tile of 64 rows and 128 columns, a thread 4 rows of 8
// columns: it stores rows of 8 bytes, and columns of 4 bytes in shared memory, from which the block stores rows of the
// transpose. Shared memory is addressed so that a warp's stores meet in at most two words per bank. Memory traffic per
// element: abs_max 2 bytes, quantize 3, or 4 with both outputs. Issue slots: about 15 per element for the conversion; a
// multiprocessor of an H200 receives 20 bytes per clock, which is 5 elements in 16 slots of its 4 schedulers, each for
// 32 elements. So both are limited by memory.
#include "kernels/cuda/amax.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"
#include "kernels/shared/fp8_scale.h"

namespace ops {

namespace {

constexpr int kThreads = 256;
constexpr int kPack = 8;  // numbers of 16 bits in an access
constexpr int kMaxBlocks = 1024;
constexpr int kTileRows = 64, kTileCols = 128, kRowsOfThread = 4;
constexpr int kWordsOfColumn = kTileRows / 4;
static_assert(kThreads == kTileRows / kRowsOfThread * (kTileCols / kPack));

template <class T> __global__ void __launch_bounds__(kThreads) abs_max_kernel(AbsMax op) {
    auto& s = shared_memory<AmaxShared<kThreads>>();
    const T* __restrict__ inp = op.inp.as<T>();
    uint32_t largest = 0;
    const size_t step = size_t(gridDim.x) * kThreads * kPack;
    for (size_t i = (size_t(blockIdx.x) * kThreads + threadIdx.x) * kPack; i < op.count; i += step)
        largest = largest_magnitude(largest, load_some<true, T, kPack>(inp + i, op.count - i));
    add_to_amax(s, op.out, largest);
}

struct Columns {
    uint32_t word[kTileCols * kWordsOfColumn];  // of 4 rows
};

// The place of a word of a column in shared memory.
__device__ __forceinline__ int place_of(int col, int word) {
    return col * kWordsOfColumn + (word ^ (col / kPack % kWordsOfColumn));
}

template <class Out, class T> __global__ void __launch_bounds__(kThreads) quantize_kernel(Quantize op) {
    auto& s = shared_memory<Columns>();
    const float scale = fp8_scale<Out>(*op.amax), inverse = inverse_of_scale(scale);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *op.scale = scale;
    const int first_row = int(blockIdx.y) * kTileRows, first_col = int(blockIdx.x) * kTileCols;
    const int row = int(threadIdx.x) / (kTileCols / kPack) * kRowsOfThread;
    const int col = int(threadIdx.x) % (kTileCols / kPack) * kPack;
    uint32_t columns[kPack] = {};
    int saturated = 0;
    if (first_row + row < op.rows && first_col + col < op.cols) {
#pragma unroll
        for (int r = 0; r < kRowsOfThread; r++) {
            const size_t at = size_t(first_row + row + r) * op.cols + first_col + col;
            const auto values = unpack(load_pack<true, T, kPack>(op.inp.as<T>() + at));
            Pack<Out, kPack> packed{};
#pragma unroll
            for (int k = 0; k < kPack; k++) {
                const float value = values.value[k] * inverse;
                const uint32_t bits = from_float<Out>(value).bits;
                saturated += fabsf(value) > largest_of<Out>;
                packed.word[k / 4] |= bits << (k % 4 * 8);
                columns[k] |= bits << (r * 8);
            }
            if (op.out) store_pack<true>(op.out.as<Out>() + at, packed);
        }
    }
    if (op.saturated && saturated > 0) atomicAdd(op.saturated, double(saturated));
    if (!op.transposed) return;
#pragma unroll
    for (int k = 0; k < kPack; k++) s.word[place_of(col + k, row / kRowsOfThread)] = columns[k];
    __syncthreads();
    constexpr int kPacksOfColumn = kTileRows / 16;
    for (int i = int(threadIdx.x); i < kTileCols * kPacksOfColumn; i += kThreads) {
        const int c = i / kPacksOfColumn, r = i % kPacksOfColumn * 16;
        if (first_col + c >= op.cols || first_row + r >= op.rows) continue;
        Pack<Out, 16> packed;
#pragma unroll
        for (int word = 0; word < 4; word++) packed.word[word] = s.word[place_of(c, r / 4 + word)];
        store_pack<true>(op.transposed.as<Out>() + size_t(first_col + c) * op.rows + first_row + r, packed);
    }
}

// Calls body.operator()<T>() for the types of 16 bits.
template <class Body> void dispatch_16_bits(const char* op, ConstView inp, Body&& body) {
    dispatch(op, {inp}, [&]<class T>() {
        if constexpr (sizeof(T) == 2)
            body.template operator()<T>();
        else
            fail(Exit::internal, "%s does not support %s", op, name_of(inp.dtype));
    });
}

}  // namespace

void abs_max(const AbsMax& op, Stream stream) {
    clear_amax(op.out, stream);
    dispatch_16_bits("abs_max", op.inp, [&]<class T>() {
        require(are_aligned(16, {op.inp}), "abs_max: an array is not aligned to 16 bytes");
        const unsigned blocks = std::min(blocks_for(op.count, size_t(kThreads) * kPack).x, unsigned(kMaxBlocks));
        launch(abs_max_kernel<T>, {"abs_max", dim3(blocks), kThreads, sizeof(AmaxShared<kThreads>)}, stream, op);
    });
}

void quantize(const Quantize& op, Stream stream) {
    require(op.rows % 16 == 0 && op.cols % 16 == 0,
            "quantize: %d rows and %d columns, but both must be multiples of 16", op.rows, op.cols);
    require(are_aligned(16, {op.inp, op.out, op.transposed}), "quantize: an array is not aligned to 16 bytes");
    const auto tiles = [](int count, int size) { return unsigned((count + size - 1) / size); };
    dispatch_fp8("quantize", storage_type("quantize", {op.out, op.transposed}), [&]<class Out>() {
        dispatch_16_bits("quantize", op.inp, [&]<class T>() {
            launch(quantize_kernel<Out, T>,
                   {"quantize", dim3(tiles(op.cols, kTileCols), tiles(op.rows, kTileRows)), kThreads, sizeof(Columns)},
                   stream, op);
        });
    });
}

}  // namespace ops
