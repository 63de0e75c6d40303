// LayerNorm and RMSNorm, backward. With norm = (inp - mean) rstd and dnorm = dout weight, row by row:
//   dinp (+)= rstd (dnorm - average(dnorm) - norm average(dnorm norm));  dweight (+)= sum of dout norm over the rows;
//   dbias (+)= sum of dout over the rows.
// RMSNorm uses a mean of 0 and has no average(dnorm). An absent weight counts as 1 (norm_parts.cuh). Sums for an absent
// dweight or dbias are not stored.
// A block processes a group of consecutive rows, 8 / warps_per_row of them at a time. A lane always has the same
// columns and sums its dweight and dbias in registers. Rows pass through a ring in shared memory, and each thread reads
// only the data that it copied. The block's sums go to scratch, and a second kernel adds the groups in order. Moved per
// 16-bit element: 6 bytes, 8 with accumulate_dinp, plus 2 float sums per column and group.
// Numerics: float sums. Groups, and the rows and columns of a lane, depend only on rows and cols, and so do the bits.
#include <algorithm>

#include "kernels/cuda/group_totals.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/norm_parts.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"

namespace ops {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kStages = 2;    // rows in flight per warp: wait for one while the next is loading
constexpr int kMaxPacks = 3;  // per row and lane: 2 * 3 * 8 sums (16-bit types) leave registers for two blocks of 256
constexpr int kMinRows = 16;  // per group; with fewer, the sums of groups would be a large part of the traffic
constexpr int kMaxGroups = 512;  // nearly two waves of two blocks on each of 132 SMs; more groups cost more

int rows_per_group(int rows) { return std::max(kMinRows, (rows + kMaxGroups - 1) / kMaxGroups); }
int n_groups(int rows) { return (rows + rows_per_group(rows) - 1) / rows_per_group(rows); }

template <class T> struct NormBackwardGroups {
    NormBackward op;
    int rows_per_group, n_groups;
    int warps_per_row;  // 1, 2, 4 or 8
};

// ---- the gradient of one row, sums of columns in registers ----------------------------------------------------------

enum RingPart { kDout, kInp, kDinp, kRingParts };

template <class T, int kPacks> struct GroupShared {
    float row_sums[2][kWarps][2];  // of dnorm and of dnorm * norm; by parity of the iteration, by warp
    union {
        Pack<T> ring[kStages][kRingParts][kWarps][kPacks][kWarpSize];
        float columns[2][kWarps * kPacks * kWarpSize * kPackSize<T>];  // dweight, dbias; by slot of rows, by column
    };
};

template <class T, int kPacks, bool kAligned> struct GroupWorker {
    using Shared = GroupShared<T, kPacks>;
    const NormBackward& op;
    Shared& s;
    int warps_per_row;
    int warp = int(threadIdx.x) / kWarpSize, lane = int(threadIdx.x) % kWarpSize;
    int part = warp % warps_per_row;  // part of the row's columns

    __device__ int column_of(int pack) const {
        return ((pack * warps_per_row + part) * kWarpSize + lane) * kPackSize<T>;
    }

    // Starts the copy of a row's packs to this thread's places in the ring.
    __device__ void fetch(int stage, int row) const {
        const size_t begin = size_t(row) * op.cols;
        fetch(stage, kDout, op.dout.as<T>() + begin);
        fetch(stage, kInp, op.inp.as<T>() + begin);
        if (op.accumulate_dinp) fetch(stage, kDinp, static_cast<const T*>(op.dinp.as<T>()) + begin);
    }
    __device__ void fetch(int stage, int which, const T* from) const {
#pragma unroll
        for (int p = 0; p < kPacks; p++) {
            const int col = column_of(p);
            if (col >= op.cols) continue;
            Pack<T>& to = s.ring[stage][which][warp][p][lane];
            if constexpr (kAligned)
                ptx::cp_async<16>(ptx::shared_address(&to), from + col);
            else
                to = load_pack<false>(from + col, op.cols - col);
        }
    }
    __device__ Floats<T, kPackSize<T>> fetched(int stage, int which, int pack) const {
        return unpack(s.ring[stage][which][warp][pack][lane]);
    }
};

struct RowAverages {
    float dnorm, dnorm_norm;
};

// Sums over the warps that share a row. With several warps it has a barrier, so all threads of the block must call it
// equally often. The next iteration writes the other parity, and the one after that follows the next barrier.
template <class Shared>
__device__ RowAverages row_averages(Shared& s, RowAverages sums, bool with_mean, int warps_per_row, int iteration,
                                    int cols) {
    sums = {with_mean ? warp_sum(sums.dnorm) : 0.0f, warp_sum(sums.dnorm_norm)};
    if (warps_per_row > 1) {
        const int warp = int(threadIdx.x) / kWarpSize, first = warp / warps_per_row * warps_per_row;
        auto& row_sums = s.row_sums[iteration % 2];
        if (threadIdx.x % kWarpSize == 0) {
            if (with_mean) row_sums[warp][0] = sums.dnorm;
            row_sums[warp][1] = sums.dnorm_norm;
        }
        __syncthreads();
        sums = {0, 0};
        for (int w = first; w < first + warps_per_row; w++) {
            if (with_mean) sums.dnorm += row_sums[w][0];
            sums.dnorm_norm += row_sums[w][1];
        }
    }
    return {sums.dnorm / float(cols), sums.dnorm_norm / float(cols)};
}

// A lane's column sums over its rows.
template <class T, int kPacks> struct ColumnSums { Floats<T, kPackSize<T>> dweight[kPacks], dbias[kPacks]; };

// Adds the row to the column sums and returns the row's sums over this lane's columns.
template <NormParts parts, class Worker, class T, int kPacks>
__device__ RowAverages add_row(const Worker& worker, ColumnSums<T, kPacks>& sums, const Pack<T> (&weight)[kPacks],
                               int stage, float mean, float rstd) {
    RowAverages row{0, 0};
    const bool with_mean = has_mean<parts>(worker.op.mean), with_bias = has<parts>(worker.op.dbias);
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
        if (worker.column_of(p) >= worker.op.cols) continue;
        const auto dout = worker.fetched(stage, kDout, p), inp = worker.fetched(stage, kInp, p), w = unpack(weight[p]);
#pragma unroll
        for (int i = 0; i < kPackSize<T>; i++) {
            const float norm = (inp.value[i] - mean) * rstd;
            const float dnorm = dout.value[i] * w.value[i];  // 0 after the end of the row, because dout is 0 there
            if (with_bias) sums.dbias[p].value[i] += dout.value[i];
            sums.dweight[p].value[i] = fmaf(dout.value[i], norm, sums.dweight[p].value[i]);
            if (with_mean) row.dnorm += dnorm;
            row.dnorm_norm = fmaf(dnorm, norm, row.dnorm_norm);
        }
    }
    return row;
}

template <bool kAligned, class Worker, class T, int kPacks>
__device__ void store_input_gradient(const Worker& worker, const Pack<T> (&weight)[kPacks], int stage, int row,
                                     float mean, float rstd, RowAverages averages) {
    T* to = worker.op.dinp.template as<T>() + size_t(row) * worker.op.cols;
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
        const int col = worker.column_of(p);
        if (col >= worker.op.cols) continue;
        const auto dout = worker.fetched(stage, kDout, p), inp = worker.fetched(stage, kInp, p), w = unpack(weight[p]);
        Floats<T, kPackSize<T>> dinp{};
        if (worker.op.accumulate_dinp) dinp = worker.fetched(stage, kDinp, p);
#pragma unroll
        for (int i = 0; i < kPackSize<T>; i++) {
            const float norm = (inp.value[i] - mean) * rstd;
            const float centered = fmaf(dout.value[i], w.value[i], -averages.dnorm);
            dinp.value[i] += fmaf(-norm, averages.dnorm_norm, centered) * rstd;
        }
        store_pack<kAligned>(to + col, pack_floats(dinp), worker.op.cols - col);
    }
}

// Writes the block's column sums, over its slots of rows in order, to the group's place in scratch.
template <class Worker, class T, int kPacks>
__device__ void store_column_sums(const Worker& worker, const ColumnSums<T, kPacks>& sums, int group) {
    const int slots = kWarps / worker.warps_per_row, cols = worker.op.cols;
    const int stride = worker.warps_per_row * kPacks * kWarpSize * kPackSize<T>;  // of a slot
    const int slot = worker.warp / worker.warps_per_row;
    __syncthreads();  // the sums reuse the memory of the ring
#pragma unroll
    for (int p = 0; p < kPacks; p++)
#pragma unroll
        for (int i = 0; i < kPackSize<T>; i++) {
            worker.s.columns[0][slot * stride + worker.column_of(p) + i] = sums.dweight[p].value[i];
            worker.s.columns[1][slot * stride + worker.column_of(p) + i] = sums.dbias[p].value[i];
        }
    __syncthreads();
    float* out = static_cast<float*>(worker.op.scratch) + size_t(group) * 2 * cols;
    for (int which = worker.op.dweight ? 0 : 1; which < (worker.op.dbias ? 2 : 1); which++)
        for (int c = int(threadIdx.x); c < cols; c += kThreads) {
            float sum = 0;
            for (int k = 0; k < slots; k++) sum += worker.s.columns[which][k * stride + c];
            out[which * cols + c] = sum;
        }
}

template <class T, int kPacks, bool kAligned, NormParts parts>
__global__ void __launch_bounds__(kThreads, 2) norm_backward_kernel(NormBackwardGroups<T> groups) {
    using Worker = GroupWorker<T, kPacks, kAligned>;
    const NormBackward& op = groups.op;
    const T* __restrict__ weight_from = op.weight.as<T>();
    const float* __restrict__ means = op.mean;
    const float* __restrict__ rstds = op.rstd;
    const Worker worker{op, shared_memory<GroupShared<T, kPacks>>(), groups.warps_per_row};
    const int slots = kWarps / groups.warps_per_row;
    const bool with_mean = has_mean<parts>(means);
    const int begin = int(blockIdx.x) * groups.rows_per_group;
    const int end = min(op.rows, begin + groups.rows_per_group);

    Pack<T> weight[kPacks];
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
        weight[p] = has<parts>(weight_from) ? Pack<T>{} : repeated<T>(1);
        if (has<parts>(weight_from) && worker.column_of(p) < op.cols)
            weight[p] = load_pack<kAligned>(weight_from + worker.column_of(p), op.cols - worker.column_of(p));
    }

    ColumnSums<T, kPacks> sums{};
    float next_mean = 0, next_rstd = 0;
    auto fetch = [&](int iteration) {
        const int row = begin + iteration * slots + worker.warp / groups.warps_per_row;
        if (row < end) {
            worker.fetch(iteration % kStages, row);
            if (with_mean) next_mean = means[row];
            next_rstd = rstds[row];
        }
        ptx::cp_async_commit();
    };
    fetch(0);
    for (int iteration = 0; begin + iteration * slots < end; iteration++) {
        const float mean = with_mean ? next_mean : 0.0f, rstd = next_rstd;
        fetch(iteration + 1);
        ptx::cp_async_wait<kStages - 1>();
        const int row = begin + iteration * slots + worker.warp / groups.warps_per_row, stage = iteration % kStages;
        RowAverages row_sums{0, 0};
        if (row < end) row_sums = add_row<parts>(worker, sums, weight, stage, mean, rstd);
        const RowAverages averages =
            row_averages(worker.s, row_sums, with_mean, groups.warps_per_row, iteration, op.cols);
        if (row < end) store_input_gradient<kAligned>(worker, weight, stage, row, mean, rstd, averages);
    }
    ptx::cp_async_wait<0>();
    store_column_sums(worker, sums, int(blockIdx.x));
}

// ---- rows too wide for a block's registers: correct, not fast -------------------------------------------------------

struct WideShared {
    float dnorm[kWarps], dnorm_norm[kWarps];
};

template <class T> __global__ void __launch_bounds__(kThreads) norm_backward_wide_input_kernel(NormBackward op) {
    WideShared& s = shared_memory<WideShared>();
    const size_t begin = size_t(blockIdx.x) * op.cols;
    const T* __restrict__ dout = op.dout.as<T>() + begin;
    const T* __restrict__ inp = op.inp.as<T>() + begin;
    const T* __restrict__ weight = op.weight.as<T>();
    T* dinp = op.dinp.as<T>() + begin;
    const bool has_mean = op.mean;
    const float mean = has_mean ? op.mean[blockIdx.x] : 0.0f, rstd = op.rstd[blockIdx.x];
    auto norm = [&](int c) { return (to_float(inp[c]) - mean) * rstd; };
    auto dnorm = [&](int c) { return to_float(dout[c]) * (weight ? to_float(weight[c]) : 1.0f); };
    RowAverages sums{0, 0};
    for (int c = int(threadIdx.x); c < op.cols; c += kThreads) {
        sums.dnorm += dnorm(c);
        sums.dnorm_norm = fmaf(dnorm(c), norm(c), sums.dnorm_norm);
    }
    const RowAverages averages{has_mean ? block_sum(sums.dnorm, s.dnorm) / float(op.cols) : 0.0f,
                               block_sum(sums.dnorm_norm, s.dnorm_norm) / float(op.cols)};
    for (int c = int(threadIdx.x); c < op.cols; c += kThreads) {
        const float value = fmaf(-norm(c), averages.dnorm_norm, dnorm(c) - averages.dnorm) * rstd;
        dinp[c] = from_float<T>(op.accumulate_dinp ? to_float(dinp[c]) + value : value);
    }
}

// The grid is (blocks of columns, groups). A thread sums one column over the group's rows.
template <class T>
__global__ void __launch_bounds__(kThreads) norm_backward_wide_columns_kernel(NormBackwardGroups<T> groups) {
    const NormBackward& op = groups.op;
    const T* __restrict__ dout = op.dout.as<T>();
    const T* __restrict__ inp = op.inp.as<T>();
    const int c = int(blockIdx.x) * kThreads + int(threadIdx.x), group = int(blockIdx.y);
    if (c >= op.cols) return;
    const int begin = group * groups.rows_per_group, end = min(op.rows, begin + groups.rows_per_group);
    float dweight = 0, dbias = 0;
    for (int row = begin; row < end; row++) {
        const float g = to_float(dout[size_t(row) * op.cols + c]);
        const float mean = op.mean ? op.mean[row] : 0.0f;
        const float norm = (to_float(inp[size_t(row) * op.cols + c]) - mean) * op.rstd[row];
        dbias += g;
        dweight = fmaf(g, norm, dweight);
    }
    float* out = static_cast<float*>(op.scratch) + size_t(group) * 2 * op.cols;
    out[c] = dweight;
    out[op.cols + c] = dbias;
}

// ---- launchers ------------------------------------------------------------------------------------------------------

template <class T> constexpr int columns_per_warp(int packs) { return packs * kWarpSize * kPackSize<T>; }

template <class T, int kPacks, bool kAligned, NormParts parts>
void launch_groups(const NormBackwardGroups<T>& groups, Stream stream) {
    launch(norm_backward_kernel<T, kPacks, kAligned, parts>,
           {"norm_backward", blocks_for(size_t(groups.n_groups), 1), kThreads, sizeof(GroupShared<T, kPacks>)}, stream,
           groups);
}

template <class T, int kPacks> void launch_aligned_groups(const NormBackwardGroups<T>& groups, Stream stream) {
    const NormBackward& op = groups.op;
    switch (norm_parts(op.mean, bool(op.weight), op.dbias)) {
        case NormParts::all: return launch_groups<T, kPacks, true, NormParts::all>(groups, stream);
        case NormParts::no_mean: return launch_groups<T, kPacks, true, NormParts::no_mean>(groups, stream);
        case NormParts::any: return launch_groups<T, kPacks, true, NormParts::any>(groups, stream);
    }
}

template <class T> void launch_wide(const NormBackwardGroups<T>& groups, Stream stream) {
    const NormBackward& op = groups.op;
    launch(norm_backward_wide_input_kernel<T>,
           {"norm_backward, dinp of wide rows", blocks_for(size_t(op.rows), 1), kThreads, sizeof(WideShared)}, stream,
           op);
    launch(norm_backward_wide_columns_kernel<T>,
           {"norm_backward, columns of wide rows",
            dim3(blocks_for(size_t(op.cols), kThreads).x, unsigned(groups.n_groups)), kThreads},
           stream, groups);
}

}  // namespace

void norm_backward(const NormBackward& op, Stream stream) {
    dispatch("norm_backward", {op.dinp, op.dout, op.inp, op.weight}, [&]<class T>() {
        require(op.rows > 0 && op.cols > 0, "norm_backward: rows and cols are %d and %d, but must be positive", op.rows,
                op.cols);
        require(bool(op.weight) == bool(op.dweight), "norm_backward: weight requires dweight and vice versa");
        NormBackwardGroups<T> groups{op, rows_per_group(op.rows), n_groups(op.rows), 1};
        while (groups.warps_per_row < kWarps && op.cols > groups.warps_per_row * columns_per_warp<T>(kMaxPacks))
            groups.warps_per_row *= 2;
        const bool aligned = op.cols % kPackSize<T> == 0 && are_aligned(16, {op.dinp, op.dout, op.inp, op.weight});
        if (op.cols > groups.warps_per_row * columns_per_warp<T>(kMaxPacks))
            launch_wide(groups, stream);
        else if (!aligned)
            launch_groups<T, kMaxPacks, false, NormParts::any>(groups, stream);
        else if (op.cols > groups.warps_per_row * columns_per_warp<T>(2))
            launch_aligned_groups<T, kMaxPacks>(groups, stream);
        else
            launch_aligned_groups<T, 2>(groups, stream);
        group_totals("norm_backward, sums of groups",
                     {.first = op.dweight,
                      .second = op.dbias,
                      .groups = op.scratch,
                      .n_groups = groups.n_groups,
                      .columns = op.cols,
                      .accumulate = op.accumulate},
                     stream);
    });
}

size_t norm_backward_scratch_bytes(const NormBackward& op) {
    return size_t(n_groups(op.rows)) * 2 * op.cols * sizeof(float);
}

}  // namespace ops
