// Kernels around the library's products.
//
// add_bias, times_gelu_gradient: a thread an element, in grid strides; 4 bytes read and sizeof(T) (or twice that)
// moved an element. They run only where the library has no epilogue, or T is float, so they are plain.
// column_sums: a block has 256 rows and 32 lanes' worth of columns (16 bytes a lane where the rows are aligned), a warp
// every eighth of those rows; its row of sums goes to `out`. More than 256 rows leave a matrix of sums, which is summed
// the same way until one row is left. Reads the values once: rows cols sizeof(T) bytes, 1/128 of that for the sums.
// Sums are float; with at most 32 + 8 terms one after the other at each level their error grows with the logarithm.
#include <algorithm>

#include "kernels/cuda/gelu.cuh"
#include "kernels/cuda/matmul_epilogue.h"
#include "kernels/cuda/vector.cuh"
#include "kernels/dispatch.h"
#include "kernels/numeric.h"

namespace {

constexpr int kThreads = 256;
constexpr size_t kMostBlocks = 8192;  // enough for any GPU; the rest in strides

dim3 strided_blocks(size_t count) { return dim3(unsigned(std::min(kMostBlocks, (count + kThreads - 1) / kThreads))); }

__device__ inline size_t first_element() { return size_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline size_t element_stride() { return size_t(gridDim.x) * blockDim.x; }

// The sums are not __restrict__ in these two: they may be the output.
template <class T> __global__ void __launch_bounds__(kThreads) add_bias_kernel(AddBias op) {
    T* out = op.out.as<T>();
    const float* sums = op.sums;
    const T* __restrict__ bias = op.bias.as<T>();
    const size_t count = op.rows * size_t(op.cols);
    for (size_t i = first_element(); i < count; i += element_stride()) {
        const float addend = bias ? to_float(bias[i % size_t(op.cols)]) : 0.0f;
        out[i] = from_float<T>(sums[i] + addend);
    }
}

template <class T> __global__ void __launch_bounds__(kThreads) times_gelu_gradient_kernel(TimesGeluGradient op) {
    T* out = op.out.as<T>();
    const float* sums = op.sums;
    const T* __restrict__ kept = op.kept.as<T>();
    for (size_t i = first_element(); i < op.count; i += element_stride())
        out[i] = from_float<T>(sums[i] * gelu_gradient(to_float(kept[i])));
}

// Four bytes of a random word each: the sum of four uniform numbers is near enough to a normal one.
template <class T> __global__ void __launch_bounds__(kThreads) random_fill_kernel(RandomFill op) {
    T* __restrict__ out = op.out.as<T>();
    for (size_t i = first_element(); i < op.count; i += element_stride()) {
        const uint32_t word = philox(op.seed, 0, i).word[0];
        const int sum = int(word & 255) + int(word >> 8 & 255) + int(word >> 16 & 255) + int(word >> 24);
        out[i] = from_float<T>(float(sum - 510) * (1.0f / 148));  // four bytes have a deviation of 147.8
    }
}

constexpr int kGroupRows = 256, kLanes = 32, kWarps = kThreads / kLanes;

template <class T> struct GroupSums {
    float* out;       // (groups, cols)  = or += by `accumulate`
    const T* values;  // (rows, cols)
    int rows, cols;
    bool accumulate;
};

// The width is that of T's packs where rows are aligned, or 1: the order of a column's sum is the same.
template <int kWidth> struct GroupShared { float sums[kWarps][kLanes * kWidth]; };

// A lane's columns of one row.
template <class T, int kWidth> __device__ inline void add_row(float (&sums)[kWidth], const T* __restrict__ row) {
    if constexpr (kWidth == 1) {
        sums[0] += to_float(*row);
    } else {
        const Floats<T, kWidth> floats = unpack(load_pack<true, T, kWidth>(row));
#pragma unroll
        for (int i = 0; i < kWidth; i++) sums[i] += floats.value[i];
    }
}

template <class T, int kWidth> __global__ void __launch_bounds__(kThreads) group_sums_kernel(GroupSums<T> op) {
    GroupShared<kWidth>& shared = shared_memory<GroupShared<kWidth>>();
    const T* __restrict__ values = op.values;
    float* __restrict__ out = op.out;
    const int lane = int(threadIdx.x) % kLanes, warp = int(threadIdx.x) / kLanes;
    const int block_col = int(blockIdx.x) * kLanes * kWidth, col = block_col + lane * kWidth;
    const int first_row = int(blockIdx.y) * kGroupRows, end_row = min(op.rows, first_row + kGroupRows);

    float sums[kWidth] = {};
    if (col < op.cols) {
#pragma unroll 4
        for (int row = first_row + warp; row < end_row; row += kWarps)
            add_row<T, kWidth>(sums, values + size_t(row) * size_t(op.cols) + col);
    }
#pragma unroll
    for (int i = 0; i < kWidth; i++) shared.sums[warp][lane * kWidth + i] = sums[i];
    __syncthreads();  // all warps' sums are there

    for (int i = int(threadIdx.x); i < kLanes * kWidth && block_col + i < op.cols; i += kThreads) {
        float sum = 0;
#pragma unroll
        for (int from = 0; from < kWarps; from++) sum += shared.sums[from][i];
        float* to = out + size_t(blockIdx.y) * size_t(op.cols) + block_col + i;
        *to = op.accumulate ? *to + sum : sum;
    }
}

int groups_of(int rows) { return (rows + kGroupRows - 1) / kGroupRows; }

template <class T, int kWidth> void launch_group_sums(const GroupSums<T>& op, Stream stream) {
    constexpr int kBlockCols = kLanes * kWidth;
    launch(group_sums_kernel<T, kWidth>,
           {"column_sums", dim3(unsigned((op.cols + kBlockCols - 1) / kBlockCols), unsigned(groups_of(op.rows))),
            kThreads, sizeof(GroupShared<kWidth>)},
           stream, op);
}

template <class T> void group_sums(const GroupSums<T>& op, Stream stream) {
    if (are_aligned(16, {op.values}) && op.cols % kPackSize<T> == 0)
        launch_group_sums<T, kPackSize<T>>(op, stream);
    else
        launch_group_sums<T, 1>(op, stream);
}

}  // namespace

void add_bias(const AddBias& op, Stream stream) {
    ops::dispatch("add_bias", {op.out, op.bias}, [&]<class T>() {
        launch(add_bias_kernel<T>, {"add_bias", strided_blocks(op.rows * size_t(op.cols)), kThreads}, stream, op);
    });
}

void times_gelu_gradient(const TimesGeluGradient& op, Stream stream) {
    ops::dispatch("times_gelu_gradient", {op.out, op.kept}, [&]<class T>() {
        launch(times_gelu_gradient_kernel<T>, {"times_gelu_gradient", strided_blocks(op.count), kThreads}, stream, op);
    });
}

void random_fill(const RandomFill& op, Stream stream) {
    ops::dispatch("random_fill", {op.out}, [&]<class T>() {
        launch(random_fill_kernel<T>, {"random_fill", strided_blocks(op.count), kThreads}, stream, op);
    });
}

void column_sums(const ColumnSums& op, Stream stream) {
    require(op.rows > 0 && op.cols > 0 && groups_of(op.rows) <= 65535,
            "column_sums: rows must be in [1, 65535 * 256] and cols positive, are %d and %d", op.rows, op.cols);
    int rows = groups_of(op.rows);
    float* sums = rows == 1 ? op.out : op.scratch;
    ops::dispatch("column_sums", {op.values}, [&]<class T>() {
        group_sums(GroupSums<T>{.out = sums,
                                .values = op.values.as<T>(),
                                .rows = op.rows,
                                .cols = op.cols,
                                .accumulate = rows == 1 && op.accumulate},
                   stream);
    });
    while (rows > 1) {
        const int groups = groups_of(rows);
        float* next = groups == 1 ? op.out : sums + size_t(rows) * size_t(op.cols);
        group_sums(
            GroupSums<float>{
                .out = next, .values = sums, .rows = rows, .cols = op.cols, .accumulate = groups == 1 && op.accumulate},
            stream);
        rows = groups;
        sums = next;
    }
}

size_t column_sums_scratch_bytes(int rows, int cols) {
    size_t sums = 0;
    for (rows = groups_of(rows); rows > 1; rows = groups_of(rows)) sums += size_t(rows);
    return sums * size_t(cols) * sizeof(float);
}
