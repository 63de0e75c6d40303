// Twins of the wrappers in kernels/cuda/hopper/ptx_hopper.cuh in plain C++ for the simulator: mbarrier, tensor copies
// (TMA), warpgroup products (wgmma), clusters. That file documents names and contracts.
//
// Late and poisoned: memory that an asynchronous unit will write is NaN as soon as the operation is issued. Tensor
// copies land only when no thread can run (or at random with a seed), bulk stores read their source when they are
// waited for, products read shared memory and write accumulators when they are waited for.
#pragma once

#include "test/simt/ptx_twins.h"
#include "test/simt/tensor_map.h"

namespace ptx {

// ---- proxies ----

void fence_proxy_async();
inline void fence_mbarrier_init() {}  // visibility in the whole cluster; not modeled

// ---- mbarrier ----

void mbarrier_init(uint32_t bar, uint32_t count);
void mbarrier_inval(uint32_t bar);
void mbarrier_expect_tx(uint32_t bar, uint32_t bytes);
void mbarrier_arrive(uint32_t bar, uint32_t count = 1);
void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes);
bool mbarrier_test_wait(uint32_t bar, uint32_t parity);
void mbarrier_wait(uint32_t bar, uint32_t parity);
inline bool mbarrier_try_wait(uint32_t bar, uint32_t parity) {  // may suspend the thread: here until the phase ends
    mbarrier_wait(bar, parity);
    return true;
}
inline uint32_t mapa(uint32_t address, uint32_t rank) {
    return (address & simt::kOffsetMask) | rank << simt::kRankShift;
}
inline float load_cluster(uint32_t address) { return *reinterpret_cast<const float*>(simt::shared_pointer(address)); }
inline void mbarrier_arrive_cluster(uint32_t bar, uint32_t rank, uint32_t count = 1) {
    mbarrier_arrive(mapa(bar, rank), count);
}

// ---- tensor copies; a negative mask means the block itself ----

void tensor_load(uint32_t to, const void* map, uint32_t bar, int mask, const int* at, int rank);
void tensor_store(const void* map, uint32_t from, bool add, const int* at, int rank);

template <class... Coordinates> void tma_load(uint32_t to, const void* map, uint32_t bar, Coordinates... coordinates) {
    const int at[5] = {coordinates...};
    tensor_load(to, map, bar, -1, at, sizeof...(coordinates));
}
template <class... Coordinates>
void tma_load_multicast(uint32_t to, const void* map, uint32_t bar, uint16_t mask, Coordinates... coordinates) {
    const int at[5] = {coordinates...};
    tensor_load(to, map, bar, mask, at, sizeof...(coordinates));
}
template <bool kAdd = false, class... Coordinates>
void tma_store(const void* map, uint32_t from, Coordinates... coordinates) {
    const int at[5] = {coordinates...};
    tensor_store(map, from, kAdd, at, sizeof...(coordinates));
}
void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t bar);
void bulk_store(void* to, uint32_t from, uint32_t bytes);
void bulk_commit();
void bulk_wait_for(int keep, bool reads_only);
template <int kKeep> void bulk_wait() { bulk_wait_for(kKeep, false); }
template <int kKeep> void bulk_wait_read() { bulk_wait_for(kKeep, true); }

// ---- warpgroup products ----

struct Wgmma {
    float* d;
    int n, scale_d;
    bool transpose_a, transpose_b, a_in_registers, is_bf16;
    uint64_t a, b;
    uint32_t registers[4];
    const uint32_t* source = nullptr;  // of them, which must not change before the wait; or null
};
void issue_wgmma(const Wgmma& product);
void wgmma_fence();
void wgmma_commit();
void wgmma_wait_for(int keep);
template <int kKeep> void wgmma_wait() { wgmma_wait_for(kKeep); }
template <int> void hold_registers(float*) {}

inline uint64_t wgmma_descriptor(uint32_t address, uint32_t leading, uint32_t stride, Swizzle mode) {
    return uint64_t((address & 0x3ffffu) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 |
           uint64_t(mode) << 62;
}
template <int kN, class T, int kTransposeA = 0, int kTransposeB = 0>
void wgmma(float* d, uint64_t a, uint64_t b, int scale_d = 1) {
    issue_wgmma(
        {d, kN, scale_d, kTransposeA != 0, kTransposeB != 0, false, dtype_of<T> == Dtype::bf16, a, b, {}, nullptr});
}
template <int kN, class T, int kTransposeB = 0> void wgmma(float* d, const uint32_t* a, uint64_t b, int scale_d = 1) {
    issue_wgmma(
        {d, kN, scale_d, false, kTransposeB != 0, true, dtype_of<T> == Dtype::bf16, 0, b, {a[0], a[1], a[2], a[3]}, a});
}

// ---- clusters and the rest ----

void cluster_arrive();
void cluster_wait();
inline uint32_t cluster_rank() { return uint32_t(simt::me().block->rank); }
inline uint32_t cluster_id() { return simt::me().block->index.x / uint32_t(simt::machine().cluster); }
template <int> void setmaxnreg_inc() {}
template <int> void setmaxnreg_dec() {}
inline bool elect_one() { return simt::lane() == 0; }

}  // namespace ptx
