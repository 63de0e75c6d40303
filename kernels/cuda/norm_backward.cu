// LayerNorm and RMSNorm, backward. With norm = (inp - mean) rstd and dnorm = dout weight, row by row:
//   dinp (+)= rstd (dnorm - average(dnorm) - norm average(dnorm norm));  dweight (+)= sum of dout norm over the rows;
//   dbias (+)= sum of dout over the rows.
// RMSNorm uses a mean of 0 and has no average(dnorm). An absent weight counts as 1 (norm_parts.cuh). Sums for an absent
// dweight or dbias are not stored.
// A block processes a group of consecutive rows, one per warps_per_row warps at a time. A lane always has the same
// columns and sums its dweight and dbias in registers. Rows pass through a ring in shared memory, and each thread reads
// only the data that it copied. The block's sums go to scratch, and a second kernel adds the groups in order. Moved per
// 16-bit element: 6 bytes, 8 with accumulate_dinp, plus 2 float sums per column and group.
// Numerics: float sums. Groups, and the rows and columns of a lane, depend only on rows and cols, and so do the bits.
#include <algorithm>

#include "kernels/cuda/amax.cuh"
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

constexpr int kStages = 2;    // rows in flight per warp: wait for one while the next is loading
constexpr int kMinRows = 16;  // per group; with fewer, the sums of groups would be a large part of the traffic

// A kernel for rows of up to `packs` packs per lane. Each pack of a 16-bit type has 16 sums in registers, which leave
// room for blocks_per_sm blocks. More groups than that many blocks on 132 SMs process in nearly one or two waves cost
// more. Wide rows have more packs per lane, because each warp of a row repeats the sums over lanes and the barrier.
struct Variant {
    int packs, warps, blocks_per_sm, max_groups;

    constexpr int threads() const { return warps * kWarpSize; }
    template <class T> constexpr int columns(int warps_per_row) const {
        return warps_per_row * packs * kWarpSize * kPackSize<T>;
    }
};
constexpr Variant kThree{.packs = 3, .warps = 8, .blocks_per_sm = 2, .max_groups = 512};
constexpr Variant kFive{.packs = 5, .warps = 4, .blocks_per_sm = 3, .max_groups = 384};
template <int kPacks> inline constexpr Variant kVariant = kPacks == kFive.packs ? kFive : kThree;

// Also for rows that are too wide for both.
template <class T> Variant variant_for(int cols) {
    return cols <= kThree.columns<T>(1) || cols > kFive.columns<T>(kFive.warps) ? kThree : kFive;
}

int rows_per_group(int rows, int max_groups) { return std::max(kMinRows, (rows + max_groups - 1) / max_groups); }
int n_groups(int rows, int per_group) { return (rows + per_group - 1) / per_group; }

template <class T> struct NormBackwardGroups {
    NormBackward op;
    int rows_per_group, n_groups;
    int warps_per_row;  // 1, 2, 4 or 8
};

// ---- the gradient of one row, sums of columns in registers ----------------------------------------------------------

enum RingPart { kDout, kInp, kDinp, kRingParts };

template <class T, int kPacks> struct GroupShared {
    static constexpr int kWarps = kVariant<kPacks>.warps;
    float row_sums[kStages][kWarps][2];  // of dnorm and of dnorm * norm
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
    int slot = warp / warps_per_row;  // of the rows that the block processes at a time
    int first_column = (warp % warps_per_row * kWarpSize + lane) * kPackSize<T>;
    int stride = warps_per_row * kWarpSize * kPackSize<T>;       // from a pack of this lane to the next
    int packs = (op.cols - first_column + stride - 1) / stride;  // of this lane, if positive

    __device__ int column_of(int pack) const { return first_column + pack * stride; }

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
            if (p >= packs) break;
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

// Averages over the columns of a row from the sums of each lane. With several warps per row it has a barrier, so all
// threads of the block must call it equally often. The next iteration writes the other stage's place, and the one
// after that follows the next barrier.
template <class Worker>
__device__ RowAverages row_averages(const Worker& worker, RowAverages sums, bool with_mean, int stage,
                                    float per_column) {
    sums = {with_mean ? warp_sum(sums.dnorm) : 0.0f, warp_sum(sums.dnorm_norm)};
    if (worker.warps_per_row > 1) {
        auto& row_sums = worker.s.row_sums[stage];
        if (worker.lane == 0) {
            if (with_mean) row_sums[worker.warp][0] = sums.dnorm;
            row_sums[worker.warp][1] = sums.dnorm_norm;
        }
        __syncthreads();
        sums = {0, 0};
        const int first = worker.slot * worker.warps_per_row;
        for (int w = first; w < first + worker.warps_per_row; w++) {
            if (with_mean) sums.dnorm += row_sums[w][0];
            sums.dnorm_norm += row_sums[w][1];
        }
    }
    return {sums.dnorm * per_column, sums.dnorm_norm * per_column};
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
        if (p >= worker.packs) break;
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

// Adds the row's largest magnitude to `largest` if it is wanted.
template <bool kAligned, class Worker, class T, int kPacks>
__device__ void store_input_gradient(const Worker& worker, const Pack<T> (&weight)[kPacks], int stage, int row,
                                     float mean, float rstd, RowAverages averages, uint32_t& largest) {
    T* to = worker.op.dinp.template as<T>() + size_t(row) * worker.op.cols;
#pragma unroll
    for (int p = 0; p < kPacks; p++) {
        const int col = worker.column_of(p);
        if (p >= worker.packs) break;
        const auto dout = worker.fetched(stage, kDout, p), inp = worker.fetched(stage, kInp, p), w = unpack(weight[p]);
        Floats<T, kPackSize<T>> dinp{};
        if (worker.op.accumulate_dinp) dinp = worker.fetched(stage, kDinp, p);
#pragma unroll
        for (int i = 0; i < kPackSize<T>; i++) {
            const float norm = (inp.value[i] - mean) * rstd;
            const float centered = fmaf(dout.value[i], w.value[i], -averages.dnorm);
            dinp.value[i] += fmaf(-norm, averages.dnorm_norm, centered) * rstd;
        }
        const Pack<T> pack = pack_floats(dinp);
        store_pack<kAligned>(to + col, pack, worker.op.cols - col);
        if (kGivesAmax<T, kAligned> && worker.op.dinp.amax) largest = largest_magnitude(largest, pack);
    }
}

// Writes the block's column sums, over its slots of rows in order, to the group's place in scratch.
template <class Worker, class T, int kPacks>
__device__ void store_column_sums(const Worker& worker, const ColumnSums<T, kPacks>& sums, int group) {
    const int threads = int(blockDim.x), slots = threads / kWarpSize / worker.warps_per_row, cols = worker.op.cols;
    const int stride = kPacks * worker.stride;  // of a slot

    __syncthreads();  // the sums reuse the memory of the ring
#pragma unroll
    for (int p = 0; p < kPacks; p++)
#pragma unroll
        for (int i = 0; i < kPackSize<T>; i++) {
            worker.s.columns[0][worker.slot * stride + worker.column_of(p) + i] = sums.dweight[p].value[i];
            worker.s.columns[1][worker.slot * stride + worker.column_of(p) + i] = sums.dbias[p].value[i];
        }
    __syncthreads();
    float* out = static_cast<float*>(worker.op.scratch) + size_t(group) * 2 * cols;
    for (int which = worker.op.dweight ? 0 : 1; which < (worker.op.dbias ? 2 : 1); which++)
        for (int c = int(threadIdx.x); c < cols; c += threads) {
            float sum = 0;
            for (int k = 0; k < slots; k++) sum += worker.s.columns[which][k * stride + c];
            out[which * cols + c] = sum;
        }
}

template <class T, int kPacks, bool kAligned, NormParts parts>
__global__ void __launch_bounds__(kVariant<kPacks>.threads(), kAligned ? kVariant<kPacks>.blocks_per_sm : 1)
    norm_backward_kernel(NormBackwardGroups<T> groups) {
    using Worker = GroupWorker<T, kPacks, kAligned>;
    const NormBackward& op = groups.op;
    const T* __restrict__ weight_from = op.weight.as<T>();
    const float* __restrict__ means = op.mean;
    const float* __restrict__ rstds = op.rstd;
    const Worker worker{op, shared_memory<GroupShared<T, kPacks>>(), groups.warps_per_row};
    const int slots = Worker::Shared::kWarps / groups.warps_per_row;
    const bool with_mean = has_mean<parts>(means);
    const float per_column = 1.0f / float(op.cols);
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
    uint32_t largest = 0;
    float next_mean = 0, next_rstd = 0;
    auto fetch = [&](int stage, int row) {
        if (row < end) {
            worker.fetch(stage, row);
            if (with_mean) next_mean = means[row];
            next_rstd = rstds[row];
        }
        ptx::cp_async_commit();
    };
    int stage = 0;
    fetch(stage, begin + worker.slot);
    for (int first = begin; first < end; first += slots, stage ^= 1) {
        const int row = first + worker.slot;
        const float mean = with_mean ? next_mean : 0.0f, rstd = next_rstd;
        fetch(stage ^ 1, row + slots);
        ptx::cp_async_wait<kStages - 1>();
        RowAverages row_sums{0, 0};
        if (row < end) row_sums = add_row<parts>(worker, sums, weight, stage, mean, rstd);
        const RowAverages averages = row_averages(worker, row_sums, with_mean, stage, per_column);
        if (row < end) store_input_gradient<kAligned>(worker, weight, stage, row, mean, rstd, averages, largest);
    }
    ptx::cp_async_wait<0>();
    if (kGivesAmax<T, kAligned> && op.dinp.amax) add_to_amax(op.dinp.amax, largest);
    store_column_sums(worker, sums, int(blockIdx.x));
}

// ---- rows too wide for a block's registers: correct, not fast -------------------------------------------------------

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;

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
    uint32_t largest = 0;
    for (int c = int(threadIdx.x); c < op.cols; c += kThreads) {
        const float value = fmaf(-norm(c), averages.dnorm_norm, dnorm(c) - averages.dnorm) * rstd;
        const T rounded = from_float<T>(op.accumulate_dinp ? to_float(dinp[c]) + value : value);
        dinp[c] = rounded;
        largest = largest_magnitude(largest, to_float(rounded));
    }
    if (op.dinp.amax) add_to_amax(op.dinp.amax, largest);
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

template <class T> bool is_aligned(const NormBackward& op) {
    return op.cols % kPackSize<T> == 0 && are_aligned(16, {op.dinp, op.dout, op.inp, op.weight});
}

template <class T, int kPacks, bool kAligned, NormParts parts>
void launch_groups(const NormBackwardGroups<T>& groups, Stream stream) {
    launch(norm_backward_kernel<T, kPacks, kAligned, parts>,
           {"norm_backward", blocks_for(size_t(groups.n_groups), 1), kVariant<kPacks>.threads(),
            sizeof(GroupShared<T, kPacks>)},
           stream, groups);
}

template <class T, int kPacks> void launch_variant(const NormBackwardGroups<T>& groups, Stream stream) {
    const NormBackward& op = groups.op;
    if (!is_aligned<T>(op)) return launch_groups<T, kPacks, false, NormParts::any>(groups, stream);
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
        clear_amax("norm_backward", op.dinp, is_aligned<T>(op), stream);
        const Variant v = variant_for<T>(op.cols);
        const int per_group = rows_per_group(op.rows, v.max_groups);
        NormBackwardGroups<T> groups{op, per_group, n_groups(op.rows, per_group), 1};
        while (groups.warps_per_row < v.warps && op.cols > v.columns<T>(groups.warps_per_row))
            groups.warps_per_row *= 2;
        if (op.cols > v.columns<T>(groups.warps_per_row))
            launch_wide(groups, stream);
        else if (v.packs == kFive.packs)
            launch_variant<T, kFive.packs>(groups, stream);
        else
            launch_variant<T, kThree.packs>(groups, stream);
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

// Enough for both variants, so that it does not depend on the type: kThree has more groups.
size_t norm_backward_scratch_bytes(const NormBackward& op) {
    return size_t(n_groups(op.rows, rows_per_group(op.rows, kThree.max_groups))) * 2 * op.cols * sizeof(float);
}

}  // namespace ops
