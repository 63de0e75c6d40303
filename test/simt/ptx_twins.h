// Twins of the wrappers in kernels/cuda/ptx.cuh in plain C++ for the simulator; ptx.cuh documents names and contracts.
// Asynchronous work is done as late as its rules allow, and memory that it will write is poisoned (NaN) until then.
#pragma once

#include "kernels/numeric.h"
#include "test/simt/intrinsics.h"

namespace ptx {

inline uint32_t shared_address(const void* p) { return simt::shared_address(p); }

// The element of type T in the low or high half of a register.
template <class T> float element(uint32_t pair, int half) { return to_float(T{uint16_t(pair >> 16 * half)}); }

struct MmaOperands {
    const uint32_t *a, *b;
    const float* c;
    float* d;
};

// Products are exact in float, and sums are taken in the order of k. Hardware truncates differently: compare within a
// tolerance.
template <class T> void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b, const float* c) {
    static_assert(dtype_of<T> != Dtype::fp32, "tensor cores take bf16 or fp16");
    simt::Quiet quiet;
    MmaOperands mine{a, b, c, d};
    simt::meet(
        ~0u, reinterpret_cast<uint64_t>(&mine),
        [](simt::Meeting& meeting) {
            auto of = [&](int lane) -> const MmaOperands& {
                return *reinterpret_cast<const MmaOperands*>(meeting.in[lane]);
            };
            float left[16][16], right[16][8], sum[16][8];
            for (int r = 0; r < 16; r++)
                for (int k = 0; k < 16; k++)
                    left[r][k] = element<T>(of(r % 8 * 4 + k % 8 / 2).a[r / 8 + k / 8 * 2], k % 2);
            for (int k = 0; k < 16; k++)
                for (int n = 0; n < 8; n++) right[k][n] = element<T>(of(n * 4 + k % 8 / 2).b[k / 8], k % 2);
            for (int r = 0; r < 16; r++) {
                for (int n = 0; n < 8; n++) sum[r][n] = of(r % 8 * 4 + n / 2).c[r / 8 * 2 + n % 2];
                for (int k = 0; k < 16; k++)
                    for (int n = 0; n < 8; n++) sum[r][n] += left[r][k] * right[k][n];
            }
            for (int r = 0; r < 16; r++)
                for (int n = 0; n < 8; n++) of(r % 8 * 4 + n / 2).d[r / 8 * 2 + n % 2] = sum[r][n];
        },
        "mma.sync");
}

// One row of an 8x8 matrix.
struct MatrixRow {
    uint16_t element[8];
};
// A lane's operands of ldmatrix and stmatrix: its row, if it has one, and its registers.
struct MatrixLane {
    MatrixRow row;
    uint32_t* r;
};

// Calls f(register, half, element) for each element of the matrices in the lane's registers.
template <int kMatrices, bool kTranspose, class F> void each_element(simt::Meeting& meeting, F f) {
    auto of = [&](int lane) -> MatrixLane& { return *reinterpret_cast<MatrixLane*>(meeting.in[lane]); };
    for (int lane = 0; lane < 32; lane++)
        for (int matrix = 0; matrix < kMatrices; matrix++)
            for (int half = 0; half < 2; half++) {
                const int along = lane / 4, pair = lane % 4 * 2 + half;
                const int row = kTranspose ? pair : along, column = kTranspose ? along : pair;
                f(of(lane).r[matrix], half, of(8 * matrix + row).row.element[column]);
            }
}

inline char* matrix_row(uint32_t address, const char* what) {
    if (address % 16)
        simt::fault(format("%s: the row at shared address 0x%x is not aligned to 16 bytes", what, address));
    return simt::shared_pointer(address);
}

template <bool kTranspose = false> void ldmatrix_x4(uint32_t* r, uint32_t address) {
    MatrixLane mine{{}, r};
    const char* row = matrix_row(address, "ldmatrix");
    simt::saw_read(row, sizeof mine.row);
    simt::Quiet quiet;
    std::memcpy(&mine.row, row, sizeof mine.row);
    simt::meet(
        ~0u, reinterpret_cast<uint64_t>(&mine),
        [](simt::Meeting& meeting) {
            each_element<4, kTranspose>(meeting, [](uint32_t& pair, int half, uint16_t element) {
                pair = half ? (pair & 0xffffu) | uint32_t(element) << 16 : element;
            });
        },
        "ldmatrix");
}

// sm_90 and later.
template <int kMatrices, bool kTranspose = false> void stmatrix(uint32_t address, const uint32_t* r) {
    static_assert(kMatrices == 1 || kMatrices == 2 || kMatrices == 4);
    MatrixLane mine{{}, const_cast<uint32_t*>(r)};
    const bool has_row = simt::lane() < 8 * kMatrices;
    char* row = has_row ? matrix_row(address, "stmatrix") : nullptr;
    {
        simt::Quiet quiet;
        simt::meet(
            ~0u, reinterpret_cast<uint64_t>(&mine),
            [](simt::Meeting& meeting) {
                each_element<kMatrices, kTranspose>(meeting, [](uint32_t& pair, int half, uint16_t& element) {
                    element = uint16_t(pair >> 16 * half);
                });
            },
            "stmatrix");
        if (has_row) std::memcpy(row, &mine.row, sizeof mine.row);
        simt::meet(
            ~0u, 0, [](simt::Meeting&) {}, "stmatrix");
    }
    if (has_row) simt::saw_write(row, sizeof mine.row);
}

// Compiled once, in tensor_cores.cpp: a sanitizer would make them ten times slower without finding anything.
extern template void mma_m16n8k16<bf16>(float*, const uint32_t*, const uint32_t*, const float*);
extern template void mma_m16n8k16<fp16>(float*, const uint32_t*, const uint32_t*, const float*);
extern template void ldmatrix_x4<false>(uint32_t*, uint32_t);
extern template void ldmatrix_x4<true>(uint32_t*, uint32_t);

// ---- cp.async: NaN now, the copy at the wait ----

void copy_async(uint32_t to, const void* from, int bytes, int used);
void cp_async_commit();
void cp_async_wait_for(int keep);

template <int kBytes = 16> void cp_async(uint32_t to, const void* from, int used = kBytes) {
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
    copy_async(to, from, kBytes, used);
}
template <int kKeep> void cp_async_wait() { cp_async_wait_for(kKeep); }
void cp_async_wait_all();

// ---- barriers and arithmetic ----

inline void bar_sync(int id, int threads) { simt::arrive_at_barrier(id, threads, simt::Await::yes, "bar.sync"); }
inline void bar_arrive(int id, int threads) { simt::arrive_at_barrier(id, threads, simt::Await::no, "bar.arrive"); }

// cvt returns the same NaN for every NaN.
inline uint32_t to_bf16x2(float low, float high) {
    auto half = [](float x) { return uint32_t(std::isnan(x) ? 0x7fff : from_float<bf16>(x).bits); };
    return half(low) | half(high) << 16;
}
inline uint32_t to_fp16x2(float low, float high) {
    auto half = [](float x) { return uint32_t(std::isnan(x) ? 0x7fff : from_float<fp16>(x).bits); };
    return half(low) | half(high) << 16;
}
inline float exp2_approx(float x) {
    const float y = std::exp2(x);
    return std::abs(y) < 0x1p-126f ? 0 : y;
}

}  // namespace ptx
