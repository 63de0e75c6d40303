// cross_entropy of rows that do not fit into the shared memory of one block: a cluster of blocks per row.
//
//     row       | columns of block 0 | of block 1 | ... |      each block keeps its columns in its shared memory
//     1st pass    (max, sum) of each block's columns
//     exchange    each thread reads the sums of all blocks through distributed shared memory and adds them in order
//     2nd pass    gradients of each block's columns, from its shared memory
//
// A block works as the portable kernel does on a row with its columns only (cross_entropy.cuh). So a row is read once
// and written once, 4 bytes per 16-bit element. The portable kernel reads it twice: rows of 151,936 columns in flight
// on 132 SMs take 80 MB, more than the L2 cache of an H200. Two blocks per SM; up to 8 blocks per row, the largest
// cluster that every GPU accepts, hold 404,000 columns of 16 bits. Instructions per element: as in the portable
// kernel. Numerics: as in the portable kernel, except for the order of a row's sum.
#include "kernels/cuda/arch_check.h"
#include "kernels/cuda/cross_entropy.cuh"
#include "kernels/cuda/hopper/cross_entropy_sm90.h"
#include "kernels/cuda/hopper/ptx_hopper.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/reduce.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/shared/dispatch.h"
#include "kernels/shared/vocabulary.h"

namespace ops {

namespace {

constexpr int kMaxBlocks = 8;  // of a cluster

struct ClusterCrossEntropy {
    CrossEntropy op;
    int columns, blocks;  // of each block except the last, whole packs; of a row
};

struct BlockSums {
    float max, sum, target;  // the target's logit after the soft cap; 0 if another block has it
};

template <class T> struct ClusterShared : CrossEntropyShared<T, true> { BlockSums of_block; };

// Adds the sums of all blocks of a row.
template <class Shared> __device__ BlockSums combine_blocks(const Shared& s, int blocks) {
    const BlockSums& mine = s.of_block;
    const auto number = [](const float& here, int block) {
        return ptx::load_cluster(ptx::mapa(ptx::shared_address(&here), uint32_t(block)));
    };
    BlockSums all{kLowest, 0, 0};
    for (int block = 0; block < blocks; block++) all.max = fmaxf(all.max, number(mine.max, block));
    for (int block = 0; block < blocks; block++) {
        all.sum += number(mine.sum, block) * exp_below(number(mine.max, block), all.max * kLog2E);
        all.target += number(mine.target, block);
    }
    return all;
}

template <class T, class Cap>
__global__ void __launch_bounds__(kRowThreads, 2) cross_entropy_sm90_kernel(ClusterCrossEntropy args) {
    if constexpr (ptx::kHasHopper) {
        auto& s = shared_memory<ClusterShared<T>>();
        const Cap cap(args.op.softcap);
        const int block = int(ptx::cluster_rank()), row = int(blockIdx.x) / args.blocks, first = block * args.columns;
        const int target = args.op.targets[row];
        CrossEntropy op = args.op;  // of this block's columns
        op.vocab = min(op.vocab - first, args.columns);
        op.padded_vocab = block == args.blocks - 1 ? op.padded_vocab - first : args.columns;
        T* logits = op.logits.as<T>() + size_t(row) * args.op.padded_vocab + first;
        if (target < 0) {
            if (op.write_dlogits) zero_packs<true>(logits, int(threadIdx.x), op.padded_vocab);
            if (block == 0 && threadIdx.x == 0) op.loss[row] = 0;
            return;
        }
        const int column = index_in_part(target, first, op.vocab);
        // Must be read before the barriers of block_softmax; after them, another thread overwrites it.
        const float target_logit = column >= 0 ? cap(to_float(logits[column])).value : 0.0f;
        const Softmax part = block_softmax(softmax_of_packs<true, true>(cap, logits, op.vocab, s.staged), s);
        if (threadIdx.x == 0) s.of_block = {part.max, part.sum, target_logit};
        ptx::cluster_arrive();
        ptx::cluster_wait();  // wait for the sums of all blocks
        const BlockSums sums = combine_blocks(s, args.blocks);
        ptx::cluster_arrive();  // this thread does not read other blocks' memory anymore
        if (op.write_dlogits) write_gradient<true, true>(cap, op, logits, column, {sums.max, sums.sum}, s.staged);
        if (block == 0 && threadIdx.x == 0) op.loss[row] = row_loss({sums.max, sums.sum}, sums.target);
        ptx::cluster_wait();  // other blocks may still read this block's memory
    }
}

template <class T> bool run(const CrossEntropy& op, Stream stream) {
    const int packs = packs_of<T>(op.vocab), blocks = (packs + kMaxStagedPacks<T> - 1) / kMaxStagedPacks<T>;
    if (blocks < 2 || blocks > kMaxBlocks) return false;
    const ClusterCrossEntropy args{op, (packs + blocks - 1) / blocks * kPackSize<T>, blocks};
    launch(op.softcap > 0 ? cross_entropy_sm90_kernel<T, SoftCap> : cross_entropy_sm90_kernel<T, NoCap>,
           {.name = "cross_entropy_sm90",
            .blocks = blocks_for(size_t(op.rows) * size_t(blocks), 1),
            .threads = kRowThreads,
            .shared_bytes = sizeof(ClusterShared<T>),
            .cluster = blocks},
           stream, args);
    return true;
}

}  // namespace

bool cross_entropy_sm90(const CrossEntropy& op, Stream stream) {
    bool is_done = false;
    dispatch("cross_entropy", {op.logits}, [&]<class T>() {
        if (!op.sums && op.rows > 0 && has_aligned_rows<T>(op)) is_done = run<T>(op, stream);
    });
    return is_done;
}

std::string cross_entropy_sm90_difference() {
    constexpr int kRows = 3, kVocab = 52'003, kPadded = 52'008;
    const DeviceBuffer targets = device_ints({kVocab - 1, -1, 17});
    for (const Dtype dtype : {Dtype::bf16, Dtype::fp16}) {
        const CheckArray logits = random_array(dtype, kRows * kPadded, 1),
                         same = random_array(dtype, kRows * kPadded, 1);
        const CheckArray loss(Dtype::fp32, kRows), expected_loss(Dtype::fp32, kRows);
        CrossEntropy op{.logits = logits.view(),
                        .loss = loss.view().as<float>(),
                        .targets = static_cast<const int*>(targets.data()),
                        .loss_scale = nullptr,
                        .rows = kRows,
                        .vocab = kVocab,
                        .padded_vocab = kPadded,
                        .grad_scale = 1000,
                        .write_dlogits = true};
        if (!cross_entropy_sm90(op, {})) return "it rejects rows of 52,003 columns";
        op.logits = same.view(), op.loss = expected_loss.view().as<float>();
        cross_entropy(op, {});
        const double rounding = dtype == Dtype::bf16 ? 0x1p-7 : 0x1p-10;
        for (const std::string& found : {difference("loss", loss, expected_loss, 1e-6, 1e-6),
                                         difference("gradient", logits, same, rounding, 1e-5)})
            if (!found.empty()) return name_of(dtype) + (" " + found);
    }
    return "";
}

}  // namespace ops
