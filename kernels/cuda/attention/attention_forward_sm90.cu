// attention_forward for sm_90a: out = softmax(scale Q K^T, causal) V with the online softmax, TMA and wgmma.
//
// A thread block per multiprocessor takes tasks (class Tasks): 192 rows of the queries of a key-value head (heads of
// 128: 128 rows), 64 for each of three (two) consumer warpgroups. Tiles of 128 keys and values pass through a ring of
// four (two) stages; keys and values have separate barriers. A warp of 16 rows has adjacent positions of one head
// (QueryRows), so windows, documents and groups of heads cost no more than the masks of tiles that are seen in part.
//
//   producer    warp 0: K V K V ...  warp 1: Q of each consumer  warp 2: what each consumer's warp does in the task
//                    | full               ^ empty
//   consumer 0  ..| S1 O0 |   exp S1     | S2 O1 |   exp S2     | ..      S = Q K^T, from shared memory
//   consumer 1  ..        | S1 O0 |   exp S1     | S2 O1 | ..             O += P V, P = exp(S - max) from registers
//   consumer 2  ..exp S0          | S1 O0 |   exp S1     | ..
//
// Consumers issue the products of a step in turn (class Turns), so that the tensor cores work for one while the others
// compute exponentials. In a step, a consumer starts the scores of a tile and then the product of the tile before, and
// computes the exponentials as soon as the scores are complete. The output leaves through shared memory and TMA, while
// the producer already loads the next task.
// Per step of a warpgroup: 512 clocks of the tensor cores (heads of 128: 1,024); 452 (506) issue slots of each of the
// four schedulers, and 196 more with masks; 528 clocks of the units for exponentials. So heads of 64 are bound by all
// three at once, heads of 128 by the tensor cores. (Counted in SASS of nvcc 13.0; no GPU has run this yet.)
// Registers: 128 per thread at launch, 160 for consumers, 32 for the producer (heads of 128: 168, 232, 40). Shared
// memory: 177 KiB (193 KiB). Bytes: qkv, out and lse once from memory if the keys and values of the heads in progress
// stay in the L2 cache, from which they are read again for each task. FLOPs: 2 batch n_head head_size seq_len^2, of
// which whole tiles compute 12 % more with 1,024 positions (heads of 128, which skip the unseen half of a last tile,
// 6 %).
// Numerics as in attention_forward.cu: scores, maxima, sums and out are float; P is rounded to T before it multiplies
// the values, lse uses the unrounded numbers. Sums over keys are in the order of tiles. All ops process the same tiles
// in the same order, so that a query's bits depend on nothing that it does not see, and tasks may go to any block.
#include "kernels/cuda/amax.cuh"
#include "kernels/cuda/attention/attention_forward_sm90.cuh"
#include "kernels/cuda/attention/attention_masks.cuh"
#include "kernels/cuda/attention/attention_sm90.cuh"
#include "kernels/cuda/attention/attention_sm90.h"
#include "kernels/cuda/attention/attention_softmax.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/ops.h"
#include "kernels/shared/attention_layout.h"
#include "kernels/shared/dispatch.h"

namespace ops {

namespace {

using namespace sm90;

// Scores (64, 8 kN) of the first keys of a tile, in registers of a whole tile.
template <int kN> using Scores = float[1][kN][4];
template <int kN> __device__ __forceinline__ Scores<kN>& part(Scores<kKeys / 8>& scores) {
    return reinterpret_cast<Scores<kN>&>(scores);
}

// scores = Q K^T.
template <class T, int kHeadSize, int kN>
__device__ __forceinline__ void start_scores(Scores<kN>& scores, uint32_t query, uint32_t key) {
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; k++)
        ptx::wgmma<8 * kN, T>(&scores[0][0][0], Sm90Tile<kUnit, kHeadSize>::along_columns(query, 0, k),
                              Sm90Tile<kKeys, kHeadSize>::along_columns(key, 0, k), k > 0);
    ptx::wgmma_commit();
}

// out (64, kHeadSize) += weights V, of the first 8 kN keys of a tile.
template <class T, int kHeadSize, int kN>
__device__ __forceinline__ void start_output(float (&out)[1][kHeadSize / 8][4],
                                             const uint32_t (&weights)[kKeys / 16][4], uint32_t value) {
#pragma unroll
    for (int k = 0; k < kN / 2; k++)
        ptx::wgmma<kHeadSize, T, 1>(&out[0][0][0], weights[k], Sm90Tile<kKeys, kHeadSize>::along_rows(value, k));
    ptx::wgmma_commit();
}

// The weights as A operands of a product.
template <class T, int kN>
__device__ __forceinline__ void pack_weights(uint32_t (&weights)[kKeys / 16][4], const Scores<kN>& scores) {
#pragma unroll
    for (int k = 0; k < kN / 2; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float(&w)[4] = scores[0][2 * k + i / 2];
            weights[k][i] = ptx::pack<T>(w[i % 2 * 2], w[i % 2 * 2 + 1]);
        }
}

// Stores the warp's rows of the output and of the log-sum-exp. The warp uses its rows of the consumer's tile.
template <class T, int kHeadSize>
__device__ __forceinline__ void finish_unit(uint32_t tile, const ForwardSm90& op, const WarpTask& task,
                                            const LaneQueries& queries, const OnlineSoftmax<1>& softmax,
                                            const float (&out)[1][kHeadSize / 8][4]) {
    using Tile = Sm90Tile<kUnit, kHeadSize>;
    const AttentionLayout at(op.op);
    // Not threadIdx.x % 32, so that the compiler does not keep addresses in registers from one unit to the next.
    const int lane = int(threadIdx.x) - task.first_thread, row = lane % 16;
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float sum = lanes_reduce<4>(softmax.sum[0][half], Sum());
        factor[half] = __fdividef(1.0f, sum);
        if (lane % 4 == 0 && queries.position[half] < at.seq_len)
            op.op.lse[at.lse(task.batch, task.head, queries.position[half])] =
                softmax.max[0][half] * op.op.scale + logf(sum);
    }
    if (op.op.out.amax) {
        uint32_t largest = 0;
#pragma unroll
        for (int half = 0; half < 2; half++)
            if (queries.position[half] < at.seq_len) largest = largest_stored<T>(largest, out[0], half, factor[half]);
        add_to_amax(op.op.out.amax, largest);
    }
    const uint32_t rows = tile + Tile::offset(int(threadIdx.x) / 32 % 4 * kRunRows);
    // Packs are swizzled as in tile_offset(). One XOR on the place of column 0 of a box gives column 16 k.
    const uint32_t first = rows + uint32_t(row * kBoxRowBytes + ((lane / 16 ^ row % 8) * 16));
    if (lane == 0) ptx::bulk_wait_read<0>();
    __syncwarp();  // wait until the previous output has been read
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; k++) {
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float(&o)[4] = out[0][2 * k + i / 2];
            r[i] = ptx::pack<T>(o[i % 2 * 2] * factor[i % 2], o[i % 2 * 2 + 1] * factor[i % 2]);
        }
        ptx::stmatrix<4>((first ^ uint32_t(k % 4 * 32)) + Tile::offset(0, 16 * k), r);
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane != 0 || task.position >= at.seq_len) return;
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; box++)
        ptx::tma_store(&op.out_map, rows + box * Tile::kBoxBytes, task.head * kHeadSize + box * kBoxColumns,
                       task.position, task.batch);
    ptx::bulk_commit();
}

// Loads the keys and values of all tasks. One thread.
template <class T, int kHeadSize>
__device__ __forceinline__ void load_tiles(Shared<T, kHeadSize>& s, const ForwardSm90& op) {
    using Tile = Sm90Tile<kKeys, kHeadSize>;
    const AttentionLayout at(op.op);
    RingPlace<Shape<kHeadSize>::kStages> place;
    Tasks tasks(op);
    for (Task task; tasks.next(task);) {
        const VisibleKeys visible(op.op, task.batch);
        const QueryRows<kRunRows, true> rows(at, task.kv_head, task.begin);
        const KeyTiles tiles = tiles_of_block<true>(rows, task.count * kUnit, kKeys, visible, at.seq_len);
        const int key_column = (at.n_head + task.kv_head) * kHeadSize;
        const int value_column = key_column + at.n_kv_head * kHeadSize;
        for (int tile = tiles.begin; tile < tiles.end; tile++) {
            Tile::load(ptx::shared_address(s.key[place.stage]), op.key_map, s.keys.begin_fill(place, Tile::kBytes),
                       key_column, tile * kKeys, task.batch);
            Tile::load(ptx::shared_address(s.value[place.stage]), op.key_map, s.values.begin_fill(place, Tile::kBytes),
                       value_column, tile * kKeys, task.batch);
            place.advance();
        }
    }
}

// Loads the queries of all tasks. One thread.
template <class T, int kHeadSize>
__device__ __forceinline__ void load_queries(Shared<T, kHeadSize>& s, const ForwardSm90& op) {
    constexpr int kConsumers = Shape<kHeadSize>::kConsumers;
    using Tile = Sm90Tile<kUnit, kHeadSize>;
    const AttentionLayout at(op.op);
    RingPlace<1> place[kConsumers];
    Tasks tasks(op);
    for (Task task; tasks.next(task);) {
        const QueryRows<kRunRows, true> rows(at, task.kv_head, task.begin);
#pragma unroll
        for (int consumer = 0; consumer < kConsumers; consumer++) {
            if (consumer >= task.count) break;
            Tile::load_queries(ptx::shared_address(s.query[consumer]), op.query_map,
                               s.queries[consumer].begin_fill(place[consumer], Tile::kBytes), rows, consumer * kUnit,
                               task.batch);
            place[consumer].advance();
        }
    }
}

// Tells the consumers' warps their parts of all tasks. A lane for each of them.
template <class T, int kHeadSize>
__device__ __forceinline__ void assign_tasks(Shared<T, kHeadSize>& s, const ForwardSm90& op) {
    const int lane = int(threadIdx.x) % 32;
    RingPlace<kTaskStages> place;
    Tasks tasks(op);
    for (bool is_left = true; is_left; place.advance()) {
        Task task;
        is_left = tasks.next(task);
        s.tasks.wait_empty(place);
        s.task[place.stage][lane] =
            is_left ? WarpTask::of(op, task, lane / kWarps, lane % kWarps, Shape<kHeadSize>::kHasHalfTiles)
                    : WarpTask::none();
        ptx::mbarrier_arrive(ptx::shared_address(&s.tasks.full[place.stage]));
    }
}

// A consumer's view of the rings. Their places are numbers of fills, which takes fewer registers than RingPlaces.
template <class T, int kHeadSize> class Inputs {
public:
    __device__ __forceinline__ Inputs(Shared<T, kHeadSize>& s, int consumer)
        : s_(s), consumer_(consumer), is_first_lane_(threadIdx.x % kWarpSize == 0) {}

    // The task stays in shared memory, for the sake of registers.
    __device__ __forceinline__ const WarpTask& wait_task() {
        const RingPlace<kTaskStages> at = place<kTaskStages>(tasks_);
        s_.tasks.wait_full(at);
        return s_.task[at.stage][threadIdx.x / kWarpSize - kWarps];
    }
    __device__ __forceinline__ void release_task() {
        __syncwarp();  // wait until all lanes have read it
        if (is_first_lane_) s_.tasks.release(place<kTaskStages>(tasks_));
        tasks_++;
    }
    // The tile of fill `fill`; the task's queries.
    __device__ __forceinline__ uint32_t key(uint32_t fill) const { return address(s_.key[place<kStages>(fill).stage]); }
    __device__ __forceinline__ uint32_t value(uint32_t fill) const {
        return address(s_.value[place<kStages>(fill).stage]);
    }
    __device__ __forceinline__ uint32_t query() const { return address(s_.query[consumer_]); }

    __device__ __forceinline__ void wait_key(uint32_t fill) { s_.keys.wait_full(place<kStages>(fill)); }
    __device__ __forceinline__ void wait_value(uint32_t fill) { s_.values.wait_full(place<kStages>(fill)); }
    __device__ __forceinline__ void wait_query() { s_.queries[consumer_].wait_full(place<1>(units_)); }
    __device__ __forceinline__ void release_key(uint32_t fill) {
        if (is_first_lane_) s_.keys.release(place<kStages>(fill));
    }
    __device__ __forceinline__ void release_value(uint32_t fill) {
        if (is_first_lane_) s_.values.release(place<kStages>(fill));
    }
    __device__ __forceinline__ void release_query() {
        if (is_first_lane_) s_.queries[consumer_].release(place<1>(units_));
        units_++;
    }

private:
    static constexpr int kStages = Shape<kHeadSize>::kStages;
    template <int kCount> __device__ __forceinline__ static RingPlace<kCount> place(uint32_t fill) {
        return {fill % kCount, fill / kCount % 2};
    }
    template <class Tile> __device__ __forceinline__ static uint32_t address(const Tile& tile) {
        return ptx::shared_address(&tile);
    }

    Shared<T, kHeadSize>& s_;
    int consumer_;
    bool is_first_lane_;
    uint32_t tasks_ = 0, units_ = 0;  // numbers of tasks and of the consumer's units before this one
};

// Processes a consumer's units of all tasks.
template <class T, int kHeadSize>
__device__ __forceinline__ void consume(Shared<T, kHeadSize>& s, const ForwardSm90& op, int consumer) {
    Inputs<T, kHeadSize> inputs(s, consumer);
    Turns<Shape<kHeadSize>::kConsumers> turns(consumer);
    const float scale_log2 = op.op.scale * kLog2E;
    uint32_t fill = 0;  // number of the next tile, over all tasks
    // Passes tiles that this unit does not see.
    const auto skip = [&](int count) {
        for (; count > 0; count--, fill++) {
            inputs.wait_key(fill);
            inputs.wait_value(fill);
            turns.take();
            turns.pass();
            inputs.release_key(fill);
            inputs.release_value(fill);
        }
    };
    for (;;) {
        const WarpTask& task = inputs.wait_task();
        if (task.batch < 0) break;
        skip(task.skipped_before);
        const int begin = task.begin, whole_end = task.whole_end;
        if (begin == whole_end) {
            inputs.release_task();
            continue;
        }
        const LaneQueries queries(op, task);
        Scores<kKeys / 8> all_scores;
        float out[1][kHeadSize / 8][4] = {}, rescale[1][2];
        uint32_t weights[kKeys / 16][4];
        OnlineSoftmax<1> softmax(-0x1p100f);
        // Releases the operands of a tile's scores.
        const auto release_operands = [&](int tile) {
            inputs.release_key(fill);
            if (tile + 1 >= whole_end && tile + 1 == task.end) inputs.release_query();
        };
        const auto add_scores = [&]<int kN>(Scores<kN>& scores, int tile) {
            ptx::hold_registers<4 * kN>(&scores[0][0][0]);
            queries.mask(scores, tile * kKeys);
            add_to_softmax(softmax, rescale, scores, scale_log2);
            // For the next step. The loop in here also keeps ptxas from moving the next wgmma_wait before the
            // exponentials, which should overlap with the product.
            inputs.wait_value(fill);
        };
        // A tile's scores, and the product with the values of the tile before.
        const auto step = [&]<int kN>(Scores<kN>& scores, int tile) {
            fill++;
            inputs.wait_key(fill);
            turns.take();
            ptx::wgmma_fence();
            start_scores<T, kHeadSize>(scores, inputs.query(), inputs.key(fill));
            start_output<T, kHeadSize, kKeys / 8>(out, weights, inputs.value(fill - 1));
            turns.pass();
            ptx::wgmma_wait<1>();
            release_operands(tile);
            add_scores(scores, tile);
            ptx::wgmma_wait<0>();
            ptx::hold_registers<kHeadSize / 2>(&out[0][0][0]);
            inputs.release_value(fill - 1);
            scale_rows(out, rescale);
            pack_weights<T>(weights, scores);
        };

        inputs.wait_query();
        inputs.wait_key(fill);
        turns.take();
        ptx::wgmma_fence();
        start_scores<T, kHeadSize>(all_scores, inputs.query(), inputs.key(fill));
        turns.pass();
        ptx::wgmma_wait<0>();
        release_operands(begin);
        add_scores(all_scores, begin);
        pack_weights<T>(weights, all_scores);
        for (int tile = begin + 1; tile < whole_end; tile++) step(all_scores, tile);
        // The product with the values of the last tile.
        const auto finish = [&]<int kN>(Scores<kN>&) {
            ptx::wgmma_fence();
            start_output<T, kHeadSize, kN>(out, weights, inputs.value(fill));
            ptx::wgmma_wait<0>();
            ptx::hold_registers<kHeadSize / 2>(&out[0][0][0]);
        };
        if (Shape<kHeadSize>::kHasHalfTiles && whole_end < task.end) {
            auto& scores = part<kKeys / 16>(all_scores);
            step(scores, whole_end);
            finish(scores);
        } else {
            finish(all_scores);
        }
        inputs.release_value(fill);
        fill++;
        finish_unit<T, kHeadSize>(ptx::shared_address(s.out[consumer]), op, task, queries, softmax, out);
        const int skipped_behind = task.skipped_behind;
        inputs.release_task();
        skip(skipped_behind);
    }
    turns.end();
    if (threadIdx.x % kWarpSize == 0) ptx::bulk_wait_read<0>();
}

template <class T, int kHeadSize>
__global__ void __launch_bounds__(Shape<kHeadSize>::kThreads, 1)
    attention_forward_sm90_kernel(const __grid_constant__ ForwardSm90 op) {
    if constexpr (ptx::kHasHopper) {
        using S = Shape<kHeadSize>;
        auto& s = shared_memory<Shared<T, kHeadSize>>();
        if (threadIdx.x == 0) {
            s.keys.init(S::kConsumers * kWarps);
            s.values.init(S::kConsumers * kWarps);
#pragma unroll
            for (int consumer = 0; consumer < S::kConsumers; consumer++) s.queries[consumer].init(kWarps);
            s.tasks.init(S::kConsumers * kWarps, S::kConsumers * kWarps);
            ptx::fence_mbarrier_init();
        }
        __syncthreads();
        const int warpgroup = __shfl_sync(kAllLanes, int(threadIdx.x) / kWarpgroupThreads, 0);
        if (warpgroup == 0) {
            ptx::setmaxnreg_dec<S::kProducerRegisters>();
            if (threadIdx.x == 0) load_tiles(s, op);
            if (threadIdx.x == kWarpSize) load_queries(s, op);
            const int lane = int(threadIdx.x) - 2 * kWarpSize;
            if (0 <= lane && lane < S::kConsumers * kWarps) assign_tasks(s, op);
        } else {
            ptx::setmaxnreg_inc<S::kConsumerRegisters>();
            consume(s, op, warpgroup - 1);
        }
    }
}

int multiprocessors() {
    static const int count = [] {
        int device = 0, value = 0;
        check_cuda(cudaGetDevice(&device), "cudaGetDevice");
        check_cuda(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
        return value;
    }();
    return count;
}

template <class T, int kHeadSize> void launch_forward(const AttentionForward& op, Stream stream) {
    using S = Shape<kHeadSize>;
    const AttentionLayout at(op);
    ForwardSm90 launched{};
    launched.op = op;
    launched.key_map = make_attention_map(op.qkv, at.qkv_step(), op, kKeys);
    launched.query_map = make_attention_map(op.qkv, at.qkv_step(), op, kRunRows);
    launched.out_map = make_attention_map(op.out, at.out_step(), op, kRunRows);
    launched.units = (QueryRows<kRunRows, true>::count(at) + kUnit - 1) / kUnit;
    launched.tasks = (launched.units + S::kConsumers - 1) / S::kConsumers;
    launched.heads = op.batch * op.n_kv_head;
    const int blocks = std::min(launched.heads * launched.tasks, multiprocessors());
    const int unpaired =
        std::min((launched.heads + 1) / 2, (3 * blocks + 2 * launched.tasks - 1) / (2 * launched.tasks));
    launched.paired_heads = ((launched.heads + 1) / 2 - unpaired) * 2;
    clear_amax("attention_forward", op.out, true, stream);
    launch(attention_forward_sm90_kernel<T, kHeadSize>,
           {"attention_forward_sm90", dim3(unsigned(blocks)), S::kThreads, sizeof(Shared<T, kHeadSize>)}, stream,
           launched);
}

}  // namespace

bool attention_forward_sm90(const AttentionForward& op, Stream stream) {
    if (op.dropout || op.softcap > 0 || op.chunk || !are_aligned(16, {op.qkv, op.out})) return false;
    if (op.head_size != 64 && op.head_size != 128) return false;
    bool is_taken = false;
    dispatch("attention_forward", {op.out, op.qkv}, [&]<class T>() {
        if constexpr (sizeof(T) == 2) {
            is_taken = true;
            op.head_size == 64 ? launch_forward<T, 64>(op, stream) : launch_forward<T, 128>(op, stream);
        }
    });
    return is_taken;
}

}  // namespace ops
