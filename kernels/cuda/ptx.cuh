// sm_80 instructions without a C++ equivalent: tensor cores, their loads, asynchronous copies, conversions.
//
// Shared memory addresses are the 32-bit addresses of shared_address(). A fragment is a local array in registers: index
// it only with constants. Lane l holds, with g = l / 4 and q = l % 4 (PTX ISA, "Matrix fragments for mma.m16n8k16"),
// two 16-bit elements per register, the lower index in the low half:
//   A (16, 16): a[r/8 + 2*(k/8)] holds rows g, g + 8 and columns 2q, 2q + 1 (+ 8)
//   B (16, 8):  b[k/8] holds rows 2q, 2q + 1 (+ 8) of column g
//   C (16, 8):  c[2*(r/8) + n%2] holds rows g, g + 8 and columns 2q, 2q + 1
// So C of two adjacent MMAs is A of the next.
#pragma once

#include <cuda_runtime.h>

#include "kernels/numeric.h"

#ifdef __CUDACC__
#define PTX __device__ __forceinline__

namespace ptx {

PTX uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// ---- products on tensor cores: d = a b + c, accumulated in float ----

template <class T> PTX void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b, const float* c) {
    static_assert(dtype_of<T> != Dtype::fp32, "tensor cores need bf16 or fp16");
    if constexpr (dtype_of<T> == Dtype::bf16)
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
              "f"(c[3]));
    else
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%10, %11, %12, %13};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]),
              "f"(c[3]));
}

// ---- four 8x8 matrices of 16-bit elements from shared memory to fragments ----
// Lanes 8i .. 8i + 7 pass the addresses of the rows of matrix i, aligned to 16 bytes. Lane l receives row g, columns 2q
// and 2q + 1; with kTranspose, rows 2q and 2q + 1 of column g. Synchronizes the warp, but is not a memory fence.

template <bool kTranspose = false> PTX void ldmatrix_x4(uint32_t* r, uint32_t address) {
    if constexpr (kTranspose)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address)
                     : "memory");
}

// ---- asynchronous copies from global to shared memory ----
// kBytes is 4, 8 or 16; both addresses must be aligned to it. Bytes from `used` on become 0 and are not read. The copy
// is complete after the issuing thread's wait; other threads need a barrier after that.

template <int kBytes = 16> PTX void cp_async(uint32_t to, const void* from, int used = kBytes) {
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
    if constexpr (kBytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(used) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes), "r"(used)
                     : "memory");
}
PTX void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the kKeep newest groups are in flight.
template <int kKeep> PTX void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(kKeep) : "memory"); }
PTX void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- barriers 1 .. 15 of a block, for `threads` threads in whole warps ----

PTX void bar_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
PTX void bar_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- arithmetic ----

// Two floats rounded to nearest even in one register, the first in the low half.
PTX uint32_t to_bf16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
PTX uint32_t to_fp16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
// 2^x with a relative error of 2^-22 and subnormal results flushed to 0; exact at integers.
PTX float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace ptx

#undef PTX
#else
#include <simt/ptx_twins.h>
#endif

namespace ptx {

// Packs two floats as the storage type T.
template <class T> __device__ __forceinline__ uint32_t pack(float low, float high) {
    static_assert(dtype_of<T> != Dtype::fp32, "floats need no packing");
    if constexpr (dtype_of<T> == Dtype::bf16)
        return to_bf16x2(low, high);
    else
        return to_fp16x2(low, high);
}

}  // namespace ptx
