// Kernels around the library's GEMMs.
//
// add_bias, times_activation_gradient: 4 elements per thread, with grid strides. Reads 4 bytes and moves 1 or 2
// sizeof(T) bytes per element; the GEMM has left the sums in the L2 cache.
// column_sums: a block sums 256 rows of 32 lanes' columns (16 bytes per lane if rows are aligned), a warp every eighth
// row; its row of sums goes to `out`. With more than 256 rows, the matrix of sums is summed the same way until one row
// is left. Reads the values once: rows cols sizeof(T) bytes, plus 1/128 of that for the sums. Sums are float. A level
// adds at most 32 + 8 terms sequentially, so the error grows with the logarithm of the number of rows.
#include <algorithm>

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/matmul/matmul_epilogue.h"
#include "kernels/cuda/vector.cuh"
#include "kernels/numeric.h"
#include "kernels/shared/dispatch.h"

namespace {

constexpr int kThreads = 256;
constexpr size_t kMaxBlocks = 8192;  // enough for any GPU; threads loop over the rest

dim3 strided_blocks(size_t count) { return dim3(unsigned(std::min(kMaxBlocks, (count + kThreads - 1) / kThreads))); }

__device__ inline size_t first_element() { return size_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline size_t element_stride() { return size_t(gridDim.x) * blockDim.x; }

constexpr int kQuad = 4;  // elements per thread and iteration

// In these two kernels the sums are not __restrict__, because they may alias the output.
template <class T, bool kRelu2, bool kAligned> __global__ void __launch_bounds__(kThreads) add_bias_kernel(AddBias op) {
    T* out = op.out.as<T>();
    const float* sums = op.sums;
    const T* __restrict__ bias = op.bias.as<T>();
    const size_t count = op.rows * size_t(op.cols);
    for (size_t i = first_element() * kQuad; i < count; i += element_stride() * kQuad) {
        const int available = int(min(size_t(kQuad), count - i));
        Floats<T, kQuad> x = unpack(load_pack<kAligned, float, kQuad>(sums + i, available)).template as<T>();
#pragma unroll
        for (int k = 0; k < kQuad; k++) {
            x.value[k] += bias ? to_float(bias[(i + k) % size_t(op.cols)]) : 0.0f;
            if (kRelu2) x.value[k] = activation<ActivationFunction::relu2>(x.value[k]);
        }
        store_pack<kAligned>(out + i, pack_floats(x), available);
    }
}

template <class T, ActivationFunction function, bool kAligned>
__global__ void __launch_bounds__(kThreads) times_activation_gradient_kernel(TimesGradient op) {
    T* out = op.out.as<T>();
    const float* sums = op.sums;
    const T* __restrict__ kept_numbers = op.kept.as<T>();
    for (size_t i = first_element() * kQuad; i < op.count; i += element_stride() * kQuad) {
        const int available = int(min(size_t(kQuad), op.count - i));
        Floats<T, kQuad> x = unpack(load_pack<kAligned, float, kQuad>(sums + i, available)).template as<T>();
        const auto kept = unpack(load_pack<kAligned, T, kQuad>(kept_numbers + i, available));
#pragma unroll
        for (int k = 0; k < kQuad; k++) x.value[k] *= gradient_from_kept<function>(kept.value[k]);
        store_pack<kAligned>(out + i, pack_floats(x), available);
    }
}

constexpr int kGroupRows = 256, kLanes = 32, kWarps = kThreads / kLanes;

template <class T> struct GroupSums {
    float* out;       // (groups, cols)  = or += by `accumulate`
    const T* values;  // (rows, cols)
    int rows, cols;
    bool accumulate;
};

// The width is a pack of T if rows are aligned, otherwise 1. The order of a column's sum is the same.
template <int kWidth> struct GroupShared { float sums[kWarps][kLanes * kWidth]; };

template <class T, int kWidth> __global__ void __launch_bounds__(kThreads) group_sums_kernel(GroupSums<T> op) {
    GroupShared<kWidth>& shared = shared_memory<GroupShared<kWidth>>();
    const T* __restrict__ values = op.values;
    float* __restrict__ out = op.out;
    const int lane = int(threadIdx.x) % kLanes, warp = int(threadIdx.x) / kLanes;
    const int block_col = int(blockIdx.x) * kLanes * kWidth, col = block_col + lane * kWidth;
    const int first_row = int(blockIdx.y) * kGroupRows, end_row = min(op.rows, first_row + kGroupRows);

    Floats<T, kWidth> sums{};
    if (col < op.cols) {
#pragma unroll 4
        for (int row = first_row + warp; row < end_row; row += kWarps) {
            const T* from = values + size_t(row) * size_t(op.cols) + col;
            if constexpr (kWidth == 1)
                sums.value[0] += to_float(*from);
            else
                sums += unpack(load_pack<true, T, kWidth>(from));
        }
    }
#pragma unroll
    for (int i = 0; i < kWidth; i++) shared.sums[warp][lane * kWidth + i] = sums.value[i];
    __syncthreads();  // wait for the sums of all warps

    for (int i = int(threadIdx.x); i < kLanes * kWidth && block_col + i < op.cols; i += kThreads) {
        float sum = 0;
#pragma unroll
        for (int from = 0; from < kWarps; from++) sum += shared.sums[from][i];
        float* to = out + size_t(blockIdx.y) * size_t(op.cols) + block_col + i;
        *to = op.accumulate ? *to + sum : sum;
    }
}

int groups_of(int rows) { return (rows + kGroupRows - 1) / kGroupRows; }

template <class T> void group_sums(const GroupSums<T>& op, Stream stream) {
    const bool whole = are_aligned(16, {op.values}) && op.cols % kPackSize<T> == 0;
    const int block_cols = kLanes * (whole ? kPackSize<T> : 1);
    const dim3 blocks(unsigned((op.cols + block_cols - 1) / block_cols), unsigned(groups_of(op.rows)));
    launch(whole ? group_sums_kernel<T, kPackSize<T>> : group_sums_kernel<T, 1>,
           {"column_sums", blocks, kThreads, size_t(kWarps * block_cols) * sizeof(float)}, stream, op);
}

}  // namespace

// Whether all accesses of a quad are vector accesses.
template <class T> bool has_whole_quads(View out, const float* sums, ConstView other, size_t count) {
    return count % kQuad == 0 && are_aligned(kQuad * sizeof(T), {out, other}) && are_aligned(16, {sums});
}

void add_bias(const AddBias& op, Stream stream) {
    const char* name = op.relu2 ? "add_bias_relu2" : "add_bias";
    ops::dispatch(name, {op.out, op.bias}, [&]<class T>() {
        const size_t count = op.rows * size_t(op.cols);
        const bool whole = has_whole_quads<T>(op.out, op.sums, nullptr, count);
        auto kernel = op.relu2 ? (whole ? add_bias_kernel<T, true, true> : add_bias_kernel<T, true, false>)
                               : (whole ? add_bias_kernel<T, false, true> : add_bias_kernel<T, false, false>);
        launch(kernel, {name, strided_blocks((count + kQuad - 1) / kQuad), kThreads}, stream, op);
    });
}

void times_activation_gradient(const TimesGradient& op, Stream stream) {
    constexpr const char* kName = "times_activation_gradient";
    ops::dispatch(kName, {op.out, op.kept}, op.activation, [&]<class T, ActivationFunction function>() {
        const bool whole = has_whole_quads<T>(op.out, op.sums, op.kept, op.count);
        launch(whole ? times_activation_gradient_kernel<T, function, true>
                     : times_activation_gradient_kernel<T, function, false>,
               {kName, strided_blocks((op.count + kQuad - 1) / kQuad), kThreads}, stream, op);
    });
}

void column_sums(const ColumnSums& op, Stream stream) {
    require(op.rows > 0 && op.cols > 0 && groups_of(op.rows) <= 65535,
            "column_sums: %d rows and %d cols; rows must be in [1, 65535 * 256], cols positive", op.rows, op.cols);
    const int groups = groups_of(op.rows);
    ops::dispatch("column_sums", {op.values}, [&]<class T>() {
        group_sums(GroupSums<T>{.out = groups == 1 ? op.out : op.scratch,
                                .values = op.values.as<T>(),
                                .rows = op.rows,
                                .cols = op.cols,
                                .accumulate = groups == 1 && op.accumulate},
                   stream);
    });
    if (groups == 1) return;
    ColumnSums sums_of_groups = op;
    sums_of_groups.values = op.scratch;
    sums_of_groups.rows = groups;
    sums_of_groups.scratch += size_t(groups) * size_t(op.cols);
    column_sums(sums_of_groups, stream);
}

size_t column_sums_scratch_bytes(int rows, int cols) {
    size_t sums = 0;
    for (rows = groups_of(rows); rows > 1; rows = groups_of(rows)) sums += size_t(rows);
    return sums * size_t(cols) * sizeof(float);
}
