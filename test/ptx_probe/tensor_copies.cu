// Probes of tensor copies (kernels/cuda/hopper/ptx_hopper.cuh): a box of a tensor of two to five dimensions, partly
// outside the tensor, to shared memory, from there to another tensor, and added to it. A load may begin before the
// tensor; a store may only end after it.
#include <bit>

#include "kernels/cuda/launch.cuh"
#include "test/ptx_probe/probe.h"
#include "kernels/cuda/hopper/ptx_hopper.cuh"

namespace {

constexpr int kMaxBoxWords = 256;

struct Shared {
    alignas(1024) uint32_t box[kMaxBoxWords];
    uint64_t bar;
};

// Start of the box in the first tensor and in the second.
template <int kRank> struct Places;
template <> struct Places<2> {
    static __device__ void load(uint32_t to, const void* map, uint32_t bar) { ptx::tma_load(to, map, bar, -4, 3); }
    static __device__ void load_to_all(uint32_t to, const void* map, uint32_t bar) {
        ptx::tma_load_multicast(to, map, bar, 3, 4, 2);
    }
    template <bool kAdd> static __device__ void store(const void* map, uint32_t from) {
        ptx::tma_store<kAdd>(map, from, 16, 5);
    }
};
template <> struct Places<3> {
    static __device__ void load(uint32_t to, const void* map, uint32_t bar) { ptx::tma_load(to, map, bar, 4, -1, 2); }
    static __device__ void load_to_all(uint32_t to, const void* map, uint32_t bar) {
        ptx::tma_load_multicast(to, map, bar, 3, 0, 3, 1);
    }
    template <bool kAdd> static __device__ void store(const void* map, uint32_t from) {
        ptx::tma_store<kAdd>(map, from, 0, 3, 2);
    }
};
template <> struct Places<4> {
    static __device__ void load(uint32_t to, const void* map, uint32_t bar) {
        ptx::tma_load(to, map, bar, 4, 2, -1, 1);
    }
    static __device__ void load_to_all(uint32_t to, const void* map, uint32_t bar) {
        ptx::tma_load_multicast(to, map, bar, 3, 0, 1, 1, 0);
    }
    template <bool kAdd> static __device__ void store(const void* map, uint32_t from) {
        ptx::tma_store<kAdd>(map, from, 4, 1, 2, 1);
    }
};
template <> struct Places<5> {
    static __device__ void load(uint32_t to, const void* map, uint32_t bar) {
        ptx::tma_load(to, map, bar, 0, 2, 1, -1, 1);
    }
    static __device__ void load_to_all(uint32_t to, const void* map, uint32_t bar) {
        ptx::tma_load_multicast(to, map, bar, 3, 4, 1, 0, 0, 1);
    }
    template <bool kAdd> static __device__ void store(const void* map, uint32_t from) {
        ptx::tma_store<kAdd>(map, from, 4, 2, 0, 1, 0);
    }
};

// After the second tensor, stores the data received in shared memory, from each block of a multicast.
template <int kRank, bool kMulticast> __global__ void tensor_copy_kernel(const __grid_constant__ ProbeArgs op) {
    Shared& s = shared_memory<Shared>();
    const uint32_t box = ptx::shared_address(s.box), bar = ptx::shared_address(&s.bar);
    const uint32_t rank = kMulticast ? ptx::cluster_rank() : 0;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(bar, 1);
        ptx::fence_mbarrier_init();
        ptx::mbarrier_arrive_expect_tx(bar, uint32_t(op.box_words) * 4);
    }
    if constexpr (kMulticast) {
        ptx::cluster_arrive();
        ptx::cluster_wait();
    }
    __syncthreads();
    if (threadIdx.x == 0 && rank == 0) {
        if constexpr (kMulticast)
            Places<kRank>::load_to_all(box, &op.from, bar);
        else
            Places<kRank>::load(box, &op.from, bar);
    }
    ptx::mbarrier_wait(bar, 0);
    uint32_t* const came = op.out + op.count + rank * uint32_t(op.box_words);
    for (int i = int(threadIdx.x); i < op.box_words; i += 32) came[i] = s.box[i];
    if constexpr (kMulticast) {
        ptx::cluster_arrive();
        ptx::cluster_wait();
    } else if (threadIdx.x == 0) {
        Places<kRank>::template store<false>(&op.to, box);
        ptx::bulk_commit();
        ptx::bulk_wait<0>();
        Places<kRank>::template store<true>(&op.to, box);
        ptx::bulk_commit();
        ptx::bulk_wait<0>();
    }
    __syncthreads();
}

// Small integers as floats: their sums are exact.
std::vector<uint32_t> whole_floats(int count) {
    std::vector<uint32_t> words = noise_words(count, 11);
    for (uint32_t& word : words) word = std::bit_cast<uint32_t>(float(int(word >> 20) - 2048));
    return words;
}

template <int kRank, bool kMulticast> Probe tensor_copy(const std::string& what, const DenseTensor& shape) {
    const int blocks = kMulticast ? 2 : 1;
    return {.wrapper = (kMulticast ? "tma_load_multicast<" : "tma_load,tma_store<") + what + ">",
            .kernel = tensor_copy_kernel<kRank, kMulticast>,
            .words = shape.words() + blocks * shape.box_words(),
            .blocks = blocks,
            .shared_bytes = sizeof(Shared),
            .input = whole_floats(shape.words()),
            .cluster = blocks,
            .tensor = shape};
}

}  // namespace

std::vector<ProbeGroup> tensor_copy_probes() {
    const DenseTensor two{2, {20, 6}, {8, 4}}, three{3, {8, 5, 3}, {4, 3, 2}}, four{4, {8, 3, 3, 2}, {4, 2, 2, 2}},
        five{5, {8, 3, 2, 2, 2}, {4, 2, 2, 2, 1}};
    return {
        {"tensor_copies",
         {
             tensor_copy<2, false>("2", two),
             tensor_copy<3, false>("3", three),
             tensor_copy<4, false>("4", four),
             tensor_copy<5, false>("5", five),
         }},
        {"tensor_multicast",
         {
             tensor_copy<2, true>("2", two),
             tensor_copy<3, true>("3", three),
             tensor_copy<4, true>("4", four),
             tensor_copy<5, true>("5", five),
         }},
        {"tensor_swizzle",
         {
             tensor_copy<2, false>("2,swizzle_128", {2, {40, 12}, {32, 8}, ptx::SWIZZLE_128}),
             tensor_copy<2, false>("2,swizzle_64", {2, {40, 12}, {16, 8}, ptx::SWIZZLE_64}),
             tensor_copy<2, false>("2,swizzle_32", {2, {40, 12}, {8, 8}, ptx::SWIZZLE_32}),
         }},
    };
}
