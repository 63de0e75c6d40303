// The Euclidean norm of all gradients, and whether they are finite. The normalization of a matrix by its norm.
//
// squared_sums: one block per chunk, whose elements wait in registers, in packs of 4 floats, for the largest; 4 bytes
// per element. It adds with atomics, in any order, because its sums are exact. grad_norm_finish: one block, a thread
// per tensor, in an order that depends only on the number of tensors.
//
// frobenius_normalize: the first kernel sums the squares of at most 1024 parts, one block each. In the second, every
// block adds all parts' sums in the same order, and divides its part. Reads inp twice, the second time from L2 if the
// matrix fits there. The order of the sums depends only on `count`. row_normalize does the same with rows as parts, one
// block each; the order depends only on `rows` and `cols`.
#include <cmath>

#include "kernels/base/exact_squares.h"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"
#include "kernels/shared/update_rules.h"

namespace ops {

namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kBatch = 4;  // packs in flight per thread

using SquaredSumsShared = double[kWarps];

// One thread's part of a chunk: packs t, t + 512, ...; a partial last pack is padded with 0.
template <bool kAligned, class T> __device__ double sum_of_squares(const T* __restrict__ values, int count) {
    double sum = 0;
    constexpr int kStep = kThreads * kPackSize<T>;
    for (int first = int(threadIdx.x) * kPackSize<T>; first < count; first += kBatch * kStep) {
        Pack<T> pack[kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; k++) {
            const int i = first + k * kStep;
            pack[k] = load_some<kAligned>(values + i, count - i);
        }
#pragma unroll
        for (int k = 0; k < kBatch; k++) {
            const auto x = unpack(pack[k]);
#pragma unroll
            for (float value : x.value) sum = fma(double(value), double(value), sum);
        }
    }
    return sum;
}

struct ExactShared {
    uint32_t most[kWarps];
    double high[kWarps], middle[kWarps], low[kWarps];
};

template <bool kAligned> __device__ void add_squares(double* sum, const float* __restrict__ values, int count) {
    constexpr int kPacks = kChunkElements / (kThreads * kPackSize<float>);
    ExactShared& shared = shared_memory<ExactShared>();
    Floats<float, kPackSize<float>> x[kPacks];
    uint32_t most = 0;
#pragma unroll
    for (int k = 0; k < kPacks; k++) {
        const int i = (k * kThreads + int(threadIdx.x)) * kPackSize<float>;
        x[k] = unpack(load_some<kAligned>(values + i, count - i));
    }
#pragma unroll
    for (const auto& pack : x)
        for (const float value : pack.value) most = max(most, magnitude(value));
    most = block_reduce(most, shared.most, Max());
    const SquareBins bins(std::bit_cast<float>(most));
    double high = 0, middle = 0, low = 0;
#pragma unroll
    for (const auto& pack : x)
        for (const float value : pack.value) {
            const SquareParts parts(value, bins);
            high += parts.high, middle += parts.middle, low += parts.low;
        }
    high = block_sum(high, shared.high), middle = block_sum(middle, shared.middle), low = block_sum(low, shared.low);
    if (threadIdx.x > 0) return;
    if (most >= kInfinityBits) return add_exactly(sum + kSquareBins, 1, 0);
    add_exactly(sum + bins.first, high, middle), add_exactly(sum + bins.first + 2, low, 0);
}

__global__ void __launch_bounds__(kThreads) squared_sums_kernel(SquaredSums op) {
    const Chunk chunk = op.chunks[blockIdx.x];
    const float* values = op.values + chunk.begin;
    double* sum = op.out + chunk.tensor * kSquareEntries;
    const bool aligned = reinterpret_cast<uintptr_t>(values) % sizeof(Pack<float>) == 0;
    aligned ? add_squares<true>(sum, values, chunk.count) : add_squares<false>(sum, values, chunk.count);
}

struct FinishShared {
    double sum[kWarps];
    int first_non_finite[kWarps];
};

__global__ void __launch_bounds__(kThreads) grad_norm_finish_kernel(GradNormFinish op) {
    FinishShared& s = shared_memory<FinishShared>();
    double sum = 0;
    int first_non_finite = op.n_tensors;
    for (int i = int(threadIdx.x); i < op.n_tensors; i += kThreads) {
        const double tensor = sum_of_bins(op.sums + i * kSquareEntries);
        sum += tensor;
        if (!(tensor < INFINITY)) first_non_finite = min(first_non_finite, i);
    }
    sum = block_sum(sum, s.sum);
    first_non_finite = block_reduce(first_non_finite, s.first_non_finite, Min());
    if (threadIdx.x > 0) return;
    const double loss_scale = *op.loss_scale;
    const double norm = sqrt(sum) / loss_scale;
    double coefficient = 1;
    if (op.clip > 0 && op.clip / (norm + 1e-6) < 1) coefficient = op.clip / (norm + 1e-6);
    *op.out = {.norm = float(norm),
               .scale = float(coefficient / loss_scale),
               .non_finite_tensor = first_non_finite < op.n_tensors ? first_non_finite : -1,
               .reserved = 0};
}

// out (count) = change(inp), by the threads of a block.
template <bool kAligned, class Out, class In, class Change>
__device__ void transform(Out* out, const In* inp, int count, Change change) {
    constexpr int kSize = kPackSize<float>;
    for (int i = int(threadIdx.x) * kSize; i < count; i += kThreads * kSize) {
        auto x = unpack(load_some<kAligned, In, kSize>(inp + i, count - i));
#pragma unroll
        for (int k = 0; k < kSize; k++) x.value[k] = change(x.value[k]);  // nvcc 13.0 drops most of a range-based loop
        store_some<kAligned>(out + i, pack_floats(x.template as<Out>()), count - i);
    }
}

constexpr int kMinPart = 8192;   // elements
constexpr int kMaxParts = 1024;  // few enough that every block can read all their sums

// The parts of a matrix. All begin at whole packs, if the matrix does.
struct Parts {
    int size;  // elements
    int count;

    HOST_DEVICE explicit Parts(size_t elements) {
        const size_t equal = (elements + kMaxParts - 1) / kMaxParts;
        size = equal <= kMinPart ? kMinPart : int((equal + kPackSize<bf16> - 1) / kPackSize<bf16> * kPackSize<bf16>);
        count = int((elements + size - 1) / size);
    }
    // The first element of this block's part, and the number of its elements.
    __device__ size_t begin() const { return size_t(blockIdx.x) * size; }
    __device__ int available(size_t elements) const { return int(min(elements - begin(), size_t(size))); }
};

template <class In, bool kAligned>
__global__ void __launch_bounds__(kThreads) frobenius_sums_kernel(FrobeniusNormalize op) {
    SquaredSumsShared& s_sum = shared_memory<SquaredSumsShared>();
    const Parts parts(op.count);
    const In* inp = op.inp.template as<In>() + parts.begin();
    const double sum = block_sum(sum_of_squares<kAligned>(inp, parts.available(op.count)), s_sum);
    if (threadIdx.x == 0) static_cast<double*>(op.scratch)[blockIdx.x] = sum;
}

template <class Out, class In, bool kAligned>
__global__ void __launch_bounds__(kThreads) frobenius_normalize_kernel(FrobeniusNormalize op) {
    SquaredSumsShared& s_sum = shared_memory<SquaredSumsShared>();
    const Parts parts(op.count);
    const double* __restrict__ sums = static_cast<const double*>(op.scratch);
    double sum = 0;
    for (int i = int(threadIdx.x); i < parts.count; i += kThreads) sum += sums[i];
    const float divisor = frobenius_divisor(block_sum(sum, s_sum), op.eps);
    transform<kAligned>(op.out.template as<Out>() + parts.begin(), op.inp.template as<In>() + parts.begin(),
                        parts.available(op.count), [&](float x) { return x / divisor; });
}

template <class In, bool kAligned> __global__ void __launch_bounds__(kThreads) row_scales_kernel(RowNormalize op) {
    if (op.grad_norm->non_finite_tensor >= 0) return;
    SquaredSumsShared& s_sum = shared_memory<SquaredSumsShared>();
    const In* inp = op.inp.template as<In>() + size_t(blockIdx.x) * size_t(op.cols);
    const double sum = block_sum(sum_of_squares<kAligned>(inp, op.cols), s_sum);
    if (threadIdx.x == 0) static_cast<RowScale*>(op.scratch)[blockIdx.x] = row_scale(op, sum, op.v[blockIdx.x]);
}

template <class Out, class In, bool kAligned>
__global__ void __launch_bounds__(kThreads) row_normalize_kernel(RowNormalize op) {
    if (op.grad_norm->non_finite_tensor >= 0) return;
    SquaredSumsShared& s_sum = shared_memory<SquaredSumsShared>();
    const RowScale* __restrict__ scales = static_cast<const RowScale*>(op.scratch);
    double sum = 0;
    for (int i = int(threadIdx.x); i < op.rows; i += kThreads) sum += scales[i].squared_sum;
    const float scale = op.norm / frobenius_divisor(block_sum(sum, s_sum), op.eps);
    const float factor = scales[blockIdx.x].factor * scale;
    const size_t begin = size_t(blockIdx.x) * size_t(op.cols);
    transform<kAligned>(op.out.template as<Out>() + begin, op.inp.template as<In>() + begin, op.cols,
                        [&](float x) { return x * factor; });
}

}  // namespace

void squared_sums(const SquaredSums& op, Stream stream) {
    if (op.n_chunks <= 0) return;
    launch(squared_sums_kernel, {"squared_sums", blocks_for(size_t(op.n_chunks), 1), kThreads, sizeof(ExactShared)},
           stream, op);
}

void grad_norm_finish(const GradNormFinish& op, Stream stream) {
    launch(grad_norm_finish_kernel, {"grad_norm_finish", dim3(1), kThreads, sizeof(FinishShared)}, stream, op);
}

void frobenius_normalize(const FrobeniusNormalize& op, Stream stream) {
    dispatch("frobenius_normalize", op.out, op.inp, [&]<class Out, class In>() {
        if (op.count == 0) return;
        const Launch config{"frobenius_normalize", blocks_for(size_t(Parts(op.count).count), 1), kThreads,
                            sizeof(SquaredSumsShared)};
        const bool aligned = are_aligned(16, {op.out, op.inp});
        launch(aligned ? frobenius_sums_kernel<In, true> : frobenius_sums_kernel<In, false>, config, stream, op);
        launch(aligned ? frobenius_normalize_kernel<Out, In, true> : frobenius_normalize_kernel<Out, In, false>, config,
               stream, op);
    });
}

void row_normalize(const RowNormalize& op, Stream stream) {
    dispatch("row_normalize", op.out, op.inp, [&]<class Out, class In>() {
        if (op.rows == 0) return;
        const Launch config{"row_normalize", blocks_for(size_t(op.rows), 1), kThreads, sizeof(SquaredSumsShared)};
        const bool aligned = are_aligned(16, {op.out, op.inp}) && op.cols % kPackSize<bf16> == 0;
        launch(aligned ? row_scales_kernel<In, true> : row_scales_kernel<In, false>, config, stream, op);
        launch(aligned ? row_normalize_kernel<Out, In, true> : row_normalize_kernel<Out, In, false>, config, stream,
               op);
    });
}

size_t row_normalize_scratch_bytes(const RowNormalize& op) { return size_t(op.rows) * sizeof(RowScale); }

size_t frobenius_normalize_scratch_bytes(const FrobeniusNormalize& op) {
    return size_t(Parts(op.count).count) * sizeof(double);
}

}  // namespace ops
