// Like ptx_isa.h for the instructions in ptx_hopper.cuh. The simulator's asynchronous units execute them; the functions
// here define the meaning of each operand.
#pragma once

#include "test/ptx_probe/ptx_isa.h"
#include "test/simt/hopper_twins.h"

namespace isa {

// [tensorMap, {coordinates}]
template <size_t kRank> struct TensorAddress {
    const void* map;
    int place[5];
};
template <size_t kRank> TensorAddress<kRank> at(const void* map, std::array<const int*, kRank> coordinates) {
    TensorAddress<kRank> address{map, {}};
    for (size_t i = 0; i < kRank; i++) address.place[i] = *coordinates[i];
    return address;
}

// ---- stmatrix [p], r ----

template <size_t kMatrices>
void stmatrix_sync_aligned_m8n8_xN_shared_b16(Address<uint32_t> p, std::array<const uint32_t*, kMatrices> r) {
    const int lane = simt::lane();
    for (int i = 0; i < int(kMatrices); i++) {
        const uint32_t row = __shfl_sync(~0u, p.value, 8 * i + lane / 4);
        std::memcpy(simt::shared_pointer(row) + lane % 4 * 4, r[size_t(i)], 4);
    }
}
template <size_t kMatrices>
void stmatrix_sync_aligned_m8n8_xN_trans_shared_b16(Address<uint32_t> p, std::array<const uint32_t*, kMatrices> r) {
    const int lane = simt::lane();
    for (int i = 0; i < int(kMatrices); i++)
        for (int half = 0; half < 2; half++) {
            const uint32_t row = __shfl_sync(~0u, p.value, 8 * i + lane % 4 * 2 + half);
            std::memcpy(simt::shared_pointer(row) + lane / 4 * 2,
                        reinterpret_cast<const char*>(r[size_t(i)]) + 2 * half, 2);
        }
}

// ---- mbarrier ----

inline void mbarrier_init_shared_cta_b64(Address<uint32_t> bar, uint32_t count) {
    ptx::mbarrier_init(bar.value, count);
}
inline void mbarrier_inval_shared_cta_b64(Address<uint32_t> bar) { ptx::mbarrier_inval(bar.value); }
inline void fence_mbarrier_init_release_cluster() {}
inline void fence_proxy_async_shared_cta() { ptx::fence_proxy_async(); }
inline void mbarrier_expect_tx_relaxed_cta_shared_cta_b64(Address<uint32_t> bar, uint32_t bytes) {
    ptx::mbarrier_expect_tx(bar.value, bytes);
}
inline void mbarrier_arrive_release_cta_shared_cta_b64(Sink, Address<uint32_t> bar, uint32_t count) {
    ptx::mbarrier_arrive(bar.value, count);
}
inline void mbarrier_arrive_release_cluster_shared_cluster_b64(Sink, Address<uint32_t> bar, uint32_t count) {
    ptx::mbarrier_arrive(bar.value, count);
}
inline void mbarrier_arrive_expect_tx_release_cta_shared_cta_b64(Sink, Address<uint32_t> bar, uint32_t bytes) {
    ptx::mbarrier_arrive_expect_tx(bar.value, bytes);
}
inline void mapa_shared_cluster_u32(uint32_t& d, uint32_t address, uint32_t block) {
    d = (address & simt::kOffsetMask) | block << simt::kRankShift;
}
inline void mbarrier_test_wait_parity_shared_cta_b64(bool& is_over, Address<uint32_t> bar, uint32_t parity) {
    is_over = ptx::mbarrier_test_wait(bar.value, parity);
}
inline void mbarrier_try_wait_parity_shared_cta_b64(bool& is_over, Address<uint32_t> bar, uint32_t parity) {
    is_over = ptx::mbarrier_try_wait(bar.value, parity);
}

// ---- predicates and special registers ----

inline void setp_ne_b32(bool& p, int a, int b) { p = a != b; }
inline void selp_u32(uint32_t& d, uint32_t a, uint32_t b, bool p) { d = p ? a : b; }
inline void mov_u32(uint32_t& d, uint32_t a) { d = a; }
inline void elect_sync(Sink, bool& p, uint32_t mask) {
    if (mask != ~0u) simt::fault("elect.sync of a part of the warp");
    p = simt::lane() == 0;
}
inline void ld_shared_cluster_f32(float& d, Address<uint32_t> address) {
    std::memcpy(&d, simt::shared_pointer(address.value), sizeof d);
}
inline uint32_t cluster_ctarank() { return uint32_t(simt::me().block->rank); }
inline uint32_t clusterid_x() { return simt::me().block->index.x / uint32_t(simt::machine().cluster); }

// ---- cp.async.bulk: loads signal the mbarrier, the last operand or the one before the mask; stores use groups ----

template <size_t kRank>
void cp_async_bulk_tensor_Nd_shared_cluster_global_mbarrier_complete_tx_bytes(Address<uint32_t> to,
                                                                              const TensorAddress<kRank>& from,
                                                                              Address<uint32_t> bar) {
    ptx::tensor_load(to.value, from.map, bar.value, -1, from.place, kRank);
}
template <size_t kRank>
void cp_async_bulk_tensor_Nd_shared_cluster_global_mbarrier_complete_tx_bytes_multicast_cluster(
    Address<uint32_t> to, const TensorAddress<kRank>& from, Address<uint32_t> bar, uint16_t blocks) {
    ptx::tensor_load(to.value, from.map, bar.value, blocks, from.place, kRank);
}
template <size_t kRank>
void cp_async_bulk_tensor_Nd_global_shared_cta_bulk_group(const TensorAddress<kRank>& to, Address<uint32_t> from) {
    ptx::tensor_store(to.map, from.value, false, to.place, kRank);
}
template <size_t kRank>
void cp_reduce_async_bulk_tensor_Nd_global_shared_cta_add_bulk_group(const TensorAddress<kRank>& to,
                                                                     Address<uint32_t> from) {
    ptx::tensor_store(to.map, from.value, true, to.place, kRank);
}
inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(Address<uint32_t> to,
                                                                           Address<const void*> from, uint32_t bytes,
                                                                           Address<uint32_t> bar) {
    ptx::bulk_load(to.value, from.value, bytes, bar.value);
}
inline void cp_async_bulk_global_shared_cta_bulk_group(Address<void*> to, Address<uint32_t> from, uint32_t bytes) {
    ptx::bulk_store(to.value, from.value, bytes);
}
inline void cp_async_bulk_commit_group() { ptx::bulk_commit(); }
inline void cp_async_bulk_wait_group(int keep) { ptx::bulk_wait_for(keep, false); }
inline void cp_async_bulk_wait_group_read(int keep) { ptx::bulk_wait_for(keep, true); }

// ---- wgmma.mma_async d, a, b, scale-d, imm-scale-a, imm-scale-b, imm-trans-a, imm-trans-b ----

inline void wgmma_fence_sync_aligned() { ptx::wgmma_fence(); }
inline void wgmma_commit_group_sync_aligned() { ptx::wgmma_commit(); }
inline void wgmma_wait_group_sync_aligned(int keep) { ptx::wgmma_wait_for(keep); }

template <int kN> float* accumulators(const std::array<float*, size_t(kN / 2)>& d) {
    for (int i = 0; i < kN / 2; i++)
        if (d[size_t(i)] != d[0] + i) simt::fault("wgmma: accumulators in another order than in the array");
    return d[0];
}
template <int kN, bool kIsBf16>
void issue(const std::array<float*, size_t(kN / 2)>& d, uint64_t a, uint64_t b, bool scale_d, int scale_a, int scale_b,
           int trans_a, int trans_b) {
    if (scale_a != 1 || scale_b != 1) simt::fault("wgmma: a scale of other than 1");
    ptx::issue_wgmma({accumulators<kN>(d), kN, scale_d, trans_a != 0, trans_b != 0, false, kIsBf16, a, b, {}});
}
template <int kN, bool kIsBf16>
void issue(const std::array<float*, size_t(kN / 2)>& d, const std::array<const uint32_t*, 4>& a, uint64_t b,
           bool scale_d, int scale_a, int scale_b, int trans_b) {
    if (scale_a != 1 || scale_b != 1) simt::fault("wgmma: a scale of other than 1");
    ptx::issue_wgmma(
        {accumulators<kN>(d), kN, scale_d, false, trans_b != 0, true, kIsBf16, 0, b, {*a[0], *a[1], *a[2], *a[3]}});
}
template <int kN, class... Operands>
void wgmma_mma_async_sync_aligned_m64nNk16_f32_bf16_bf16(const Operands&... operands) {
    issue<kN, true>(operands...);
}
template <int kN, class... Operands>
void wgmma_mma_async_sync_aligned_m64nNk16_f32_f16_f16(const Operands&... operands) {
    issue<kN, false>(operands...);
}

// ---- the rest ----

inline void barrier_cluster_arrive_release_aligned() { ptx::cluster_arrive(); }
inline void barrier_cluster_wait_acquire_aligned() { ptx::cluster_wait(); }
inline void setmaxnreg_inc_sync_aligned_u32(int registers) {
    if (registers % 8 || registers < 24 || registers > 256) simt::fault("setmaxnreg: no multiple of 8 of 24 to 256");
}
inline void setmaxnreg_dec_sync_aligned_u32(int registers) { setmaxnreg_inc_sync_aligned_u32(registers); }

}  // namespace isa
