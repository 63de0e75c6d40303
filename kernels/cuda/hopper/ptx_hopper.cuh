// Instructions of sm_90a: mbarriers, tensor copies (TMA), warpgroup products (wgmma), clusters. On other architectures,
// this file can be included, but its use does not compile: a kernel's body is for kHasHopper only.
//
// The exact rules that the simulator checks:
//   mbarrier   init(count) starts phase 0. A phase ends when no arrival is pending and all expected bytes have landed;
//              then the parity flips. wait(parity) returns when the phase of that parity is over: consumers of the
//              first fill wait for 0; waiting for 1 on a fresh barrier returns at once.
//   TMA        a box is laid out innermost dimension first; the swizzle XORs bits 4 to 6 of the shared address with
//              bits 7 to 9 (128 B), 4 to 5 with 7 to 8 (64 B), 4 with 7 (32 B). Outside the tensor, loads give 0 but
//              count, and stores are dropped. Each block of a multicast expects all bytes itself.
//   wgmma      fence before the first of a batch, commit, wait: until then neither the accumulators, the registers of
//              A nor the operands in shared memory may change. D (64, N): warp w has rows 16w + g (+ 8),
//              d[4j + i] is row 16w + g + 8(i/2), column 8j + 2q + i%2, with g = lane/4, q = lane%4.
//   proxies    generic writes reach TMA stores and wgmma only through fence_proxy_async; the mbarrier alone orders
//              data loaded by TMA.
#pragma once

#include "kernels/cuda/ptx.cuh"  // IWYU pragma: export

namespace ptx {

// Whether this compilation is for sm_90a.
#if defined(SIMT) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool kHasHopper = true;
#else
inline constexpr bool kHasHopper = false;
#endif

}  // namespace ptx

#ifdef __CUDACC__
#define PTX __device__ __forceinline__

namespace ptx {

enum Swizzle { SWIZZLE_NONE = 0, SWIZZLE_128 = 1, SWIZZLE_64 = 2, SWIZZLE_32 = 3 };  // as in a wgmma descriptor

// The inverse of ldmatrix.
template <int kMatrices, bool kTranspose = false> PTX void stmatrix(uint32_t address, const uint32_t* r) {
    static_assert(kMatrices == 1 || kMatrices == 2 || kMatrices == 4);
    if constexpr (kMatrices == 1 && !kTranspose)
        asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(address), "r"(r[0]) : "memory");
    if constexpr (kMatrices == 1 && kTranspose)
        asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(r[0]) : "memory");
    if constexpr (kMatrices == 2 && !kTranspose)
        asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r[0]), "r"(r[1])
                     : "memory");
    if constexpr (kMatrices == 2 && kTranspose)
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r[0]),
                     "r"(r[1])
                     : "memory");
    if constexpr (kMatrices == 4 && !kTranspose)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                     "r"(r[1]), "r"(r[2]), "r"(r[3])
                     : "memory");
    if constexpr (kMatrices == 4 && kTranspose)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                     "r"(r[1]), "r"(r[2]), "r"(r[3])
                     : "memory");
}

// ---- mbarriers ----

PTX void mbarrier_init(uint32_t bar, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
PTX void mbarrier_inval(uint32_t bar) { asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(bar) : "memory"); }
PTX void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
PTX void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
PTX void mbarrier_expect_tx(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
PTX void mbarrier_arrive(uint32_t bar, uint32_t count = 1) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
PTX void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}
// The same address in another block of the cluster.
PTX uint32_t mapa(uint32_t address, uint32_t rank) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
PTX void mbarrier_arrive_cluster(uint32_t bar, uint32_t rank, uint32_t count = 1) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(mapa(bar, rank)), "r"(count)
                 : "memory");
}
PTX bool mbarrier_test_wait(uint32_t bar, uint32_t parity) {
    uint32_t is_over;
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(is_over)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return is_over;
}
PTX bool mbarrier_try_wait(uint32_t bar, uint32_t parity) {
    uint32_t is_over;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(is_over)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return is_over;
}
PTX void mbarrier_wait(uint32_t bar, uint32_t parity) {
    while (!mbarrier_try_wait(bar, parity)) {}
}

// ---- tensor copies: coordinates innermost first; loads signal the mbarrier, stores are waited for in groups ----
// A store's coordinates are not negative.

PTX void tma_load(uint32_t to, const void* map, uint32_t bar, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            to),
        "l"(map), "r"(bar), "r"(c0), "r"(c1)
        : "memory");
}
PTX void tma_load_multicast(uint32_t to, const void* map, uint32_t bar, uint16_t mask, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%4, %5}], [%2], %3;" ::"r"(to),
        "l"(map), "r"(bar), "h"(mask), "r"(c0), "r"(c1)
        : "memory");
}
template <bool kAdd = false> PTX void tma_store(const void* map, uint32_t from, int c0, int c1) {
    if constexpr (!kAdd)
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                     "r"(from), "r"(c0), "r"(c1)
                     : "memory");
    else
        asm volatile(
            "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
            "r"(from), "r"(c0), "r"(c1)
            : "memory");
}
PTX void tma_load(uint32_t to, const void* map, uint32_t bar, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(to),
        "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}
PTX void tma_load_multicast(uint32_t to, const void* map, uint32_t bar, uint16_t mask, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(to),
        "l"(map), "r"(bar), "h"(mask), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}
template <bool kAdd = false> PTX void tma_store(const void* map, uint32_t from, int c0, int c1, int c2) {
    if constexpr (!kAdd)
        asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                     "r"(from), "r"(c0), "r"(c1), "r"(c2)
                     : "memory");
    else
        asm volatile(
            "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
            "r"(from), "r"(c0), "r"(c1), "r"(c2)
            : "memory");
}
PTX void tma_load(uint32_t to, const void* map, uint32_t bar, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
PTX void tma_load_multicast(uint32_t to, const void* map, uint32_t bar, uint16_t mask, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(to),
        "l"(map), "r"(bar), "h"(mask), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
template <bool kAdd = false> PTX void tma_store(const void* map, uint32_t from, int c0, int c1, int c2, int c3) {
    if constexpr (!kAdd)
        asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                     "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                     : "memory");
    else
        asm volatile(
            "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
            "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
            : "memory");
}
PTX void tma_load(uint32_t to, const void* map, uint32_t bar, int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
        "[%2];" ::"r"(to),
        "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}
PTX void tma_load_multicast(uint32_t to, const void* map, uint32_t bar, uint16_t mask, int c0, int c1, int c2, int c3,
                            int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(to),
        "l"(map), "r"(bar), "h"(mask), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}
template <bool kAdd = false>
PTX void tma_store(const void* map, uint32_t from, int c0, int c1, int c2, int c3, int c4) {
    if constexpr (!kAdd)
        asm volatile(
            "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
            "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
            : "memory");
    else
        asm volatile(
            "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(
                map),
            "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
            : "memory");
}
PTX void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
}
PTX void bulk_store(void* to, uint32_t from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
PTX void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kKeep> PTX void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kKeep) : "memory"); }
// Waits until the sources have been read, not until the destinations are written.
template <int kKeep> PTX void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kKeep) : "memory");
}

// ---- warpgroup products: 64 rows, kN columns, 16 deep ----

// An operand in shared memory. K-major: element (row, k) of a span of S = 128, 64 or 32 bytes lies at row%8 S +
// row/8 stride + 2k; MN-major: (mn, k) at k%8 S + k/8 stride + mn/(S/2) leading + mn%(S/2) 2; all swizzled afterwards.
PTX uint64_t wgmma_descriptor(uint32_t address, uint32_t leading, uint32_t stride, Swizzle mode) {
    return uint64_t((address & 0x3ffffu) >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 |
           uint64_t(mode) << 62;
}
PTX void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PTX void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kKeep> PTX void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kKeep) : "memory");
}
// Call it after a wait for products whose accumulators d are: the compiler must not move their uses before the wait.
template <int kCount> PTX void hold_registers(float* d) {
#pragma unroll
    for (int i = 0; i < kCount; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#include "kernels/cuda/hopper/ptx_wgmma.cuh"  // IWYU pragma: export

// ---- clusters and registers ----

PTX uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
PTX uint32_t cluster_id() {
    uint32_t id;
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(id));
    return id;
}
// A number in shared memory of the block of the cluster that mapa() chose.
PTX float load_cluster(uint32_t address) {
    float value;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}
PTX void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
PTX void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
template <int kRegisters> PTX void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> PTX void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
// True in one lane of the warp.
PTX bool elect_one() {
    uint32_t is_elected;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(is_elected));
    return is_elected;
}

}  // namespace ptx

#undef PTX
#else
#include <simt/hopper_twins.h>
#endif
