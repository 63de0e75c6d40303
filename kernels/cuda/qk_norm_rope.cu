// QK norm and rotary position embedding, in place on the query and key heads of qkv.
//   forward   y = head rstd weight, then (y_i cos - y_j sin, y_j cos + y_i sin) with j = i + rotary / 2
//   backward  d = the transposed rotation of the gradient; dhead = rstd (d weight - normed average(d weight normed));
//             dweight (+)= sum of d normed over positions and heads
//
// A team of 1 to 32 adjacent lanes processes a head. A lane holds units of two packs: pack u of the first half of the
// rotated elements and pack u of the second half, so that the rotation needs no other lane. Elements after `rotary`
// form units of two adjacent packs. Moved per 16-bit element: forward 4 bytes, 6 with raw; backward 4, 6 with a norm.
// The table, read once per position and then from the cache, adds 4 rotary bytes per position. The op is
// memory-bound, with only a few FLOPs per element.
// Numerics: float sums over a lane's units, then over the team. If the norm has weights, a block processes a range of
// heads: its lanes sum the gradients of their columns over these heads, then warps and blocks are added in order. The
// order, and so the bits, depend only on shapes and types.
#include <algorithm>

#include "kernels/cuda/amax.cuh"
#include "kernels/cuda/group_totals.h"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"
#include "kernels/shared/qk_norm_rope.h"

namespace ops {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMinHeads = 256;  // per group: its sums, 8 bytes per column, are 1% of its traffic of 6 bytes per element
constexpr int kMaxGroups = 792;  // six on each of 132 SMs
constexpr int kMaxUnits = 2;     // per lane: heads of up to 512 floats or 1024 16-bit elements

template <class Op> __device__ __host__ int heads_of(const Op& op) { return op.n_head + op.n_kv_head; }
template <class Op> size_t all_heads(const Op& op) { return size_t(op.batch) * op.seq_len * size_t(heads_of(op)); }

// ---- layout of a head in a team -------------------------------------------------------------------------------------

template <class T> constexpr int rotated_units(int rotary) { return (rotary / 2 + kPackSize<T> - 1) / kPackSize<T>; }
template <class T> constexpr int units_of(int head_size, int rotary) {
    return rotated_units<T>(rotary) + (head_size - rotary + 2 * kPackSize<T> - 1) / (2 * kPackSize<T>);
}

// The smallest power of two with at most one unit per lane, limited to a warp.
template <class T> int team_size(int head_size, int rotary) {
    int lanes = 1;
    while (lanes < kWarpSize && lanes < units_of<T>(head_size, rotary)) lanes *= 2;
    return lanes;
}

// The columns of a unit: `counts` columns starting at `begins`, at most a pack each; none after the end of the head.
struct Unit {
    int begins[2], counts[2];
    bool rotates;
};

template <class T> __device__ Unit unit_at(int index, int head_size, int rotary) {
    const int half = rotary / 2, rotated = rotated_units<T>(rotary);
    if (index < rotated) {
        const int begin = index * kPackSize<T>, count = min(kPackSize<T>, half - begin);
        return {{begin, half + begin}, {count, count}, true};
    }
    const int begin = rotary + (index - rotated) * 2 * kPackSize<T>;
    auto count = [&](int from) { return max(0, min(kPackSize<T>, head_size - from)); };
    return {{begin, begin + kPackSize<T>}, {count(begin), count(begin + kPackSize<T>)}, false};
}

template <class T> inline constexpr int kUnitSize = 2 * kPackSize<T>;

template <class T> struct Values {
    Floats<T, kPackSize<T>> half[2];

    __device__ float& operator[](int i) { return half[i / kPackSize<T>].value[i % kPackSize<T>]; }
    __device__ float operator[](int i) const { return half[i / kPackSize<T>].value[i % kPackSize<T>]; }
};

template <bool kAligned, class T> __device__ Values<T> load_unit(const T* head, const Unit& unit) {
    Values<T> values{};
#pragma unroll
    for (int part = 0; part < 2; part++)
        if (unit.counts[part] > 0)
            values.half[part] = unpack(load_pack<kAligned>(head + unit.begins[part], unit.counts[part]));
    return values;
}

template <bool kAligned, class T> __device__ void store_unit(T* head, const Unit& unit, const Values<T>& values) {
#pragma unroll
    for (int part = 0; part < 2; part++)
        if (unit.counts[part] > 0)
            store_pack<kAligned>(head + unit.begins[part], pack_floats(values.half[part]), unit.counts[part]);
}

// Cosines and sines of a unit's pairs; 0 after the last pair.
template <class T> struct Angles { float cosine[kPackSize<T>], sine[kPackSize<T>]; };

template <bool kAligned, class T>
__device__ Angles<T> load_angles(const float* __restrict__ table, size_t position, int half, const Unit& unit) {
    const float* from = table + (position * half + unit.begins[0]) * 2;
    Angles<T> angles;
#pragma unroll
    for (int i = 0; i < kPackSize<T>; i += 2) {
        const auto two = unpack(load_pack<kAligned>(from + 2 * i, 2 * (unit.counts[0] - i)));
        angles.cosine[i] = two.value[0], angles.sine[i] = two.value[1];
        angles.cosine[i + 1] = two.value[2], angles.sine[i + 1] = two.value[3];
    }
    return angles;
}

// With kBack, the transposed rotation.
template <bool kBack, class T> __device__ void rotate(Values<T>& x, const Angles<T>& angles) {
#pragma unroll
    for (int i = 0; i < kPackSize<T>; i++) {
        const float cosine = angles.cosine[i], sine = kBack ? -angles.sine[i] : angles.sine[i];
        float &first = x.half[0].value[i], &second = x.half[1].value[i];
        const float turned = fmaf(first, cosine, -second * sine);
        second = fmaf(second, cosine, first * sine);
        first = turned;
    }
}

// The inverse of a scaled rotation is its transpose divided by cos^2 + sin^2. Elements after the unit's end stay 0.
template <class T> __device__ void divide_by_squares(Values<T>& x, const Angles<T>& angles, const Unit& unit) {
#pragma unroll
    for (int i = 0; i < kPackSize<T>; i++) {
        const float square = fmaf(angles.cosine[i], angles.cosine[i], angles.sine[i] * angles.sine[i]);
        const float inverse = i < unit.counts[0] ? 1.0f / square : 0.0f;
        x.half[0].value[i] *= inverse;
        x.half[1].value[i] *= inverse;
    }
}

template <class T> __device__ float dot(const Values<T>& a, const Values<T>& b) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kUnitSize<T>; i++) sum = fmaf(a[i], b[i], sum);
    return sum;
}

template <class T> __device__ uint32_t largest_magnitude(uint32_t largest, const Values<T>& x) {
#pragma unroll
    for (int i = 0; i < kUnitSize<T>; i++) largest = ::largest_magnitude(largest, x[i]);
    return largest;
}

template <class T> __device__ void multiply(Values<T>& x, const Values<T>& by) {
#pragma unroll
    for (int i = 0; i < kUnitSize<T>; i++) x[i] *= by[i];
}
template <class T> __device__ void multiply(Values<T>& x, float by) {
#pragma unroll
    for (int i = 0; i < kUnitSize<T>; i++) x[i] *= by;
}

// Sums over the lanes of a team. All lanes of the warp must call it.
__device__ float team_sum(float value, int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
    return value;
}

// A head, from its number among all query and key heads of the batch.
struct Head {
    size_t row;    // the position in the batch
    int position;  // in the table
    bool is_query;
    size_t in_qkv, alone;  // its offsets in qkv and in raw
};

template <class Op> __device__ Head head_at(const Op& op, unsigned index) {
    const unsigned heads = unsigned(heads_of(op)), row = index / heads, h = index % heads;
    const unsigned b = row / unsigned(op.seq_len);
    int position = op.starts.start(int(b), op.batch) + int(row - b * unsigned(op.seq_len));
    if constexpr (std::is_same_v<Op, QkNormRopeForward>)
        if (op.positions) position = op.positions[row];
    return {row, position, int(h) < op.n_head, (size_t(row) * (heads + unsigned(op.n_kv_head)) + h) * op.head_size,
            size_t(index) * op.head_size};
}

// ---- forward --------------------------------------------------------------------------------------------------------

template <class Op> struct Teams {
    Op op;
    unsigned n_heads;  // in the whole batch
    int lanes;         // per team
    unsigned per_group;
};

template <class T, int kUnits, bool kAligned>
__global__ void __launch_bounds__(kThreads) qk_norm_rope_forward_kernel(Teams<QkNormRopeForward> teams) {
    const QkNormRopeForward& op = teams.op;
    const float* __restrict__ table = op.table;
    const int lane = int(threadIdx.x) % teams.lanes, size = op.head_size;
    const unsigned index = blockIdx.x * unsigned(kThreads / teams.lanes) + threadIdx.x / unsigned(teams.lanes);
    const bool exists = index < teams.n_heads;  // teams after the last head still take part in sums
    const Head at = head_at(op, exists ? index : 0);
    T* head = op.qkv.as<T>() + at.in_qkv;

    Values<T> x[kUnits] = {};
    Unit unit[kUnits];
    float squares = 0;
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
        unit[u] = unit_at<T>(u * teams.lanes + lane, size, op.rotary);
        if (exists) x[u] = load_unit<kAligned>(static_cast<const T*>(head), unit[u]);
        squares += dot(x[u], x[u]);
    }
    float rstd = 1;
    if (op.rstd) rstd = 1.0f / sqrtf(team_sum(squares, teams.lanes) / float(size) + op.eps);
    if (!exists) return;
    if (op.rstd && lane == 0) op.rstd[index] = rstd;

    const T* __restrict__ weight = (at.is_query ? op.q_weight : op.k_weight).template as<T>();
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
        if (op.raw) store_unit<kAligned>(op.raw.as<T>() + at.alone, unit[u], x[u]);
        if (op.rstd) multiply(x[u], rstd);
        if (weight) multiply(x[u], load_unit<kAligned>(weight, unit[u]));
        if (unit[u].rotates)
            rotate<false>(x[u], load_angles<kAligned, T>(table, size_t(at.position), op.rotary / 2, unit[u]));
        store_unit<kAligned>(head, unit[u], x[u]);
    }
}

// ---- backward -------------------------------------------------------------------------------------------------------

// Loads a unit of the gradient before the rotation, and with a norm, of the normalized head.
template <bool kAligned, class T>
__device__ void load_gradient(Values<T>& d, Values<T>& normed, const QkNormRopeBackward& op, const Unit& unit,
                              const Head& at, float rstd) {
    d = load_unit<kAligned>(static_cast<const T*>(op.dqkv.as<T>()) + at.in_qkv, unit);
    const T* from = op.raw ? op.raw.as<T>() + at.alone : op.qkv.as<T>() + at.in_qkv;
    if (op.rstd) normed = load_unit<kAligned>(from, unit);
    if (op.raw) multiply(normed, rstd);
    if (!unit.rotates) return;
    const Angles<T> angles = load_angles<kAligned, T>(op.table, size_t(at.position), op.rotary / 2, unit);
    rotate<true>(d, angles);
    if (!op.rstd || op.raw) return;
    rotate<true>(normed, angles);
    divide_by_squares(normed, angles, unit);
}

// Gradient sums of the query and key weights over a lane's heads.
template <class T, int kUnits> struct WeightSums { Values<T> query[kUnits], key[kUnits]; };

template <class T> __device__ void add_products(Values<T>& sums, const Values<T>& a, const Values<T>& b) {
#pragma unroll
    for (int i = 0; i < kUnitSize<T>; i++) sums[i] = fmaf(a[i], b[i], sums[i]);
}

// Writes the block's sums to the group's place in scratch: sums over the teams of a warp with shuffles, then over the
// warps in order. s_sums is (kWarps, 2, head_size).
template <class T, int kUnits>
__device__ void store_weight_sums(const Teams<QkNormRopeBackward>& teams, const Unit (&unit)[kUnits],
                                  const WeightSums<T, kUnits>& sums, float* s_sums) {
    const int size = teams.op.head_size, warp = int(threadIdx.x) / kWarpSize, lane = int(threadIdx.x) % kWarpSize;
#pragma unroll
    for (int u = 0; u < kUnits; u++)
#pragma unroll
        for (int which = 0; which < 2; which++)
#pragma unroll
            for (int i = 0; i < kUnitSize<T>; i++) {
                const int half = i / kPackSize<T>, column = i % kPackSize<T>;
                float sum = (which == 0 ? sums.query : sums.key)[u][i];
                for (int step = teams.lanes; step < kWarpSize; step *= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
                if (lane < teams.lanes && column < unit[u].counts[half])
                    s_sums[(warp * 2 + which) * size + unit[u].begins[half] + column] = sum;
            }
    __syncthreads();
    float* out = static_cast<float*>(teams.op.scratch) + size_t(blockIdx.x) * 2 * size;
    for (int column = int(threadIdx.x); column < 2 * size; column += kThreads) {
        float sum = 0;
        for (int w = 0; w < kWarps; w++) sum += s_sums[w * 2 * size + column];
        out[column] = sum;
    }
}

// A block processes the heads of a group, one head per team at a time. With kSums, sums the gradients of the weights.
template <class T, int kUnits, bool kAligned, bool kSums>
__global__ void __launch_bounds__(kThreads, 1) qk_norm_rope_backward_kernel(Teams<QkNormRopeBackward> teams) {
    const QkNormRopeBackward& op = teams.op;
    const float* __restrict__ rstds = op.rstd;
    const int lane = int(threadIdx.x) % teams.lanes, size = op.head_size;
    const unsigned per_pass = unsigned(kThreads / teams.lanes), team = threadIdx.x / unsigned(teams.lanes);
    const unsigned begin = blockIdx.x * teams.per_group, end = min(teams.n_heads, begin + teams.per_group);
    Unit unit[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; u++) unit[u] = unit_at<T>(u * teams.lanes + lane, size, op.rotary);

    WeightSums<T, kUnits> sums{};
    uint32_t largest = 0;  // rounded at the end, which keeps the order
    for (unsigned first = begin; first < end; first += per_pass) {
        const bool exists = first + team < end;  // teams after the last head still take part in sums
        const unsigned index = exists ? first + team : begin;
        const Head at = head_at(op, index);
        const float rstd = op.rstd ? rstds[index] : 1.0f;
        Values<T> d[kUnits] = {}, normed[kUnits] = {};
#pragma unroll
        for (int u = 0; u < kUnits && exists; u++) load_gradient<kAligned>(d[u], normed[u], op, unit[u], at, rstd);
        if (op.rstd) {
            const T* __restrict__ weight = (at.is_query ? op.q_weight : op.k_weight).template as<T>();
            float sum = 0;
#pragma unroll
            for (int u = 0; u < kUnits; u++) {
                if constexpr (kSums) {  // two calls, because a reference to either would put the sums in local memory
                    if (at.is_query)
                        add_products(sums.query[u], d[u], normed[u]);
                    else
                        add_products(sums.key[u], d[u], normed[u]);
                }
                if (weight) multiply(d[u], load_unit<kAligned>(weight, unit[u]));
                sum += dot(d[u], normed[u]);
            }
            const float average = team_sum(sum, teams.lanes) / float(size);
#pragma unroll
            for (int u = 0; u < kUnits; u++) {
                multiply(normed[u], -average);
#pragma unroll
                for (int part = 0; part < 2; part++) d[u].half[part] += normed[u].half[part];
                multiply(d[u], rstd);
            }
        }
#pragma unroll
        for (int u = 0; u < kUnits && exists; u++) {
            T* head = op.dqkv.as<T>() + at.in_qkv;
            store_unit<kAligned>(head, unit[u], d[u]);
            if (!op.dqkv.amax) continue;
            largest = largest_magnitude(largest, d[u]);
            head += op.n_kv_head * size;  // of values, from a head of keys
            if (!at.is_query) largest = largest_magnitude(largest, load_unit<kAligned>(head, unit[u]));
        }
    }
    if constexpr (kSums) store_weight_sums(teams, unit, sums, &shared_memory<float>());
    if (!op.dqkv.amax) return;
    if constexpr (kSums) __syncthreads();  // wait until the sums have been read
    largest = std::bit_cast<uint32_t>(to_float(from_float<T>(std::bit_cast<float>(largest))));
    add_to_amax(shared_memory<AmaxShared<kThreads>>(), op.dqkv.amax, largest);
}

// ---- launchers ------------------------------------------------------------------------------------------------------

unsigned heads_per_group(size_t heads) {
    return unsigned(std::max<size_t>(kMinHeads, (heads + kMaxGroups - 1) / kMaxGroups));
}
int n_groups(size_t heads) { return int((heads + heads_per_group(heads) - 1) / heads_per_group(heads)); }

template <class T, class Op> Teams<Op> make_teams(const char* name, const Op& op) {
    require_valid(op);
    require(all_heads(op) < (size_t(1) << 31), "%s: %zu heads per batch, but at most 2147483647 are possible", name,
            all_heads(op));
    require(units_of<T>(op.head_size, op.rotary) <= kMaxUnits * kWarpSize, "%s: heads of %d elements are too large",
            name, op.head_size);
    return {op, unsigned(all_heads(op)), team_size<T>(op.head_size, op.rotary), 0};
}

// Whether all units are whole, aligned packs.
template <class T, class Op> bool is_whole(const Op& op, std::initializer_list<ConstView> arrays) {
    return op.rotary / 2 % kPackSize<T> == 0 && op.head_size % kPackSize<T> == 0 && are_aligned(16, arrays);
}

template <class T, int kUnits, bool kAligned> void launch_backward(Teams<QkNormRopeBackward> teams, Stream stream) {
    const QkNormRopeBackward& op = teams.op;
    const bool with_weights = op.dq_weight || op.dk_weight;
    teams.per_group = with_weights ? heads_per_group(teams.n_heads) : unsigned(kThreads / teams.lanes);
    const dim3 groups = blocks_for(teams.n_heads, teams.per_group);
    const size_t sums_bytes =
        with_weights ? size_t(kWarps) * 2 * op.head_size * sizeof(float) : sizeof(AmaxShared<kThreads>);
    clear_amax("qk_norm_rope_backward", op.dqkv, true, stream);
    launch(
        with_weights ? qk_norm_rope_backward_kernel<T, kUnits, kAligned, true>
                     : qk_norm_rope_backward_kernel<T, kUnits, kAligned, false>,
        {with_weights ? "qk_norm_rope_backward, with weights" : "qk_norm_rope_backward", groups, kThreads, sums_bytes},
        stream, teams);
    if (!with_weights) return;
    group_totals("qk_norm_rope_backward, sums of groups",
                 {.first = op.dq_weight,
                  .second = op.dk_weight,
                  .groups = op.scratch,
                  .n_groups = int(groups.x),
                  .columns = op.head_size,
                  .accumulate = op.accumulate},
                 stream);
}

}  // namespace

void qk_norm_rope_forward(const QkNormRopeForward& op, Stream stream) {
    dispatch("qk_norm_rope_forward", {op.qkv, op.raw, op.q_weight, op.k_weight}, [&]<class T>() {
        const auto teams = make_teams<T>("qk_norm_rope_forward", op);
        if (teams.n_heads == 0) return;
        const bool whole = is_whole<T>(op, {op.qkv, op.raw, op.q_weight, op.k_weight, ConstView(op.table)});
        const bool wide = units_of<T>(op.head_size, op.rotary) > kWarpSize;
        launch(wide    ? qk_norm_rope_forward_kernel<T, kMaxUnits, false>
               : whole ? qk_norm_rope_forward_kernel<T, 1, true>
                       : qk_norm_rope_forward_kernel<T, 1, false>,
               {"qk_norm_rope_forward", blocks_for(teams.n_heads, size_t(kThreads / teams.lanes)), kThreads}, stream,
               teams);
    });
}

void qk_norm_rope_backward(const QkNormRopeBackward& op, Stream stream) {
    dispatch("qk_norm_rope_backward", {op.dqkv, op.qkv, op.raw, op.q_weight, op.k_weight}, [&]<class T>() {
        const auto teams = make_teams<T>("qk_norm_rope_backward", op);
        require(teams.n_heads > 0, "qk_norm_rope_backward: an empty batch");
        const bool whole = is_whole<T>(op, {op.dqkv, op.qkv, op.raw, op.q_weight, op.k_weight, ConstView(op.table)});
        if (units_of<T>(op.head_size, op.rotary) > kWarpSize)
            launch_backward<T, kMaxUnits, false>(teams, stream);
        else if (whole)
            launch_backward<T, 1, true>(teams, stream);
        else
            launch_backward<T, 1, false>(teams, stream);
    });
}

size_t qk_norm_rope_backward_scratch_bytes(const QkNormRopeBackward& op) {
    return size_t(n_groups(all_heads(op))) * 2 * op.head_size * sizeof(float);
}

}  // namespace ops
