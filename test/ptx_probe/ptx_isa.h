// The semantics of the instructions in kernels/cuda/ptx.cuh: a function per instruction, with its operands in the order
// of the text. Written from the PTX ISA's description, not from the twins. build/ptx_probe_text executes the text of
// the wrappers with these functions (translate_ptx.py) and must store the same words as build/ptx_probe_simt.
#pragma once

#include <cudaTypedefs.h>

#include <array>
#include <deque>
#include <map>
#include <type_traits>
#include <vector>

#include "test/simt/ptx_twins.h"

namespace isa {

// ---- operands ----

template <class T> struct Address { T value; };  // [a]
struct Sink {};                                  // _

template <class T> Address<T> at(T value) { return {value}; }
template <class... T> auto all(T&... each) { return std::array{&each...}; }  // {a, b}

// Whether nvcc accepts an expression of this type for a constraint.
template <char kLetter, class T> constexpr bool fits() {
    if (kLetter == 'f') return std::is_same_v<T, float>;
    const bool is_whole = std::is_integral_v<T> || std::is_pointer_v<T>;
    return is_whole && (kLetter == 'n' || sizeof(T) == (kLetter == 'h' ? 2 : kLetter == 'r' ? 4 : 8));
}
template <char kLetter, class T> constexpr T read(T value) {
    static_assert(fits<kLetter, T>());
    return value;
}
template <char kLetter, class T> T& updated(T& place) {
    static_assert(fits<kLetter, T>());
    return place;
}
template <char kLetter, class T> T& written(T& place) {
    static_assert(fits<kLetter, T>());
    std::memset(&place, 0xa5, sizeof(T));
    return place;
}

// ---- mma.sync: the fragments of "Matrix fragments for mma.m16n8k16 with floating point type" ----

struct MmaLane {
    float a[8], b[4], c[4];
};

template <class T, size_t kWords> void unpack_words(float* elements, const std::array<const uint32_t*, kWords>& words) {
    for (size_t i = 0; i < 2 * kWords; i++) elements[i] = to_float(T{uint16_t(*words[i / 2] >> 16 * (i % 2))});
}

template <class T>
void multiply(std::array<float*, 4> d, std::array<const uint32_t*, 4> a, std::array<const uint32_t*, 2> b,
              std::array<const float*, 4> c) {
    MmaLane mine;
    unpack_words<T>(mine.a, a);
    unpack_words<T>(mine.b, b);
    for (int i = 0; i < 4; i++) mine.c[i] = *c[size_t(i)];
    simt::meet(
        ~0u, reinterpret_cast<uint64_t>(&mine),
        [](simt::Meeting& meeting) {
            double left[16][16], right[16][8];
            for (int lane = 0; lane < 32; lane++) {
                const MmaLane& of = *reinterpret_cast<const MmaLane*>(meeting.in[lane]);
                const int group = lane >> 2, in_group = lane % 4;
                for (int i = 0; i < 8; i++)
                    left[i < 2 || (i >= 4 && i < 6) ? group : group + 8][in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0)] =
                        double(of.a[i]);
                for (int i = 0; i < 4; i++) right[in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0)][group] = double(of.b[i]);
            }
            for (int lane = 0; lane < 32; lane++)
                for (int i = 0; i < 4; i++) {
                    float& element = reinterpret_cast<MmaLane*>(meeting.in[lane])->c[i];
                    const int row = i < 2 ? lane >> 2 : (lane >> 2) + 8, column = lane % 4 * 2 + (i & 1);
                    double sum = double(element);
                    for (int k = 0; k < 16; k++) sum += left[row][k] * right[k][column];
                    element = float(sum);
                }
        },
        "mma.sync");
    for (int i = 0; i < 4; i++) *d[size_t(i)] = mine.c[i];
}
template <class... Operands> void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(const Operands&... operands) {
    multiply<bf16>(operands...);
}
template <class... Operands> void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(const Operands&... operands) {
    multiply<fp16>(operands...);
}

// ---- ldmatrix: threads 0-7, 8-15, 16-23, 24-31 hold the addresses of the rows of the matrices in turn ----

template <size_t kMatrices>
void ldmatrix_sync_aligned_m8n8_xN_shared_b16(std::array<uint32_t*, kMatrices> r, Address<uint32_t> p) {
    const int lane = simt::lane();
    for (int i = 0; i < int(kMatrices); i++) {
        const uint32_t row = __shfl_sync(~0u, p.value, 8 * i + lane / 4);
        std::memcpy(r[size_t(i)], simt::shared_pointer(row) + lane % 4 * 4, 4);
    }
}
template <size_t kMatrices>
void ldmatrix_sync_aligned_m8n8_xN_trans_shared_b16(std::array<uint32_t*, kMatrices> r, Address<uint32_t> p) {
    const int lane = simt::lane();
    for (int i = 0; i < int(kMatrices); i++)
        for (int half = 0; half < 2; half++) {
            const uint32_t row = __shfl_sync(~0u, p.value, 8 * i + lane % 4 * 2 + half);
            std::memcpy(reinterpret_cast<char*>(r[size_t(i)]) + 2 * half, simt::shared_pointer(row) + lane / 4 * 2, 2);
        }
}

// ---- cp.async [dst], [src], cp-size, src-size: at the wait, the rest of cp-size becomes 0 ----

struct Copy {
    char* to;
    const char* from;
    int bytes, used;
};
struct Copies {
    std::deque<std::vector<Copy>> groups;
    std::vector<Copy> open;
};
inline Copies& copies_of_thread() {
    static std::map<const void*, Copies> of_threads;
    return of_threads[&simt::me()];
}
inline void carry_out(const std::vector<Copy>& copies) {
    for (const Copy& copy : copies) {
        std::memset(copy.to, 0, size_t(copy.bytes));
        std::memcpy(copy.to, copy.from, size_t(copy.used));
    }
}
inline void cp_async_ca_shared_global(Address<uint32_t> to, Address<const void*> from, int bytes, int used) {
    copies_of_thread().open.push_back(
        {simt::shared_pointer(to.value), static_cast<const char*>(from.value), bytes, used});
}
inline void cp_async_cg_shared_global(Address<uint32_t> to, Address<const void*> from, int bytes, int used) {
    if (bytes != 16) simt::fault("cp.async.cg copies 16 bytes only");
    cp_async_ca_shared_global(to, from, bytes, used);
}
inline void cp_async_commit_group() {
    copies_of_thread().groups.push_back(std::move(copies_of_thread().open));
    copies_of_thread().open.clear();
}
inline void cp_async_wait_group(int keep) {
    auto& groups = copies_of_thread().groups;
    for (; int(groups.size()) > keep; groups.pop_front()) carry_out(groups.front());
}
inline void cp_async_wait_all() {
    cp_async_commit_group();
    cp_async_wait_group(0);
}

// ---- bar.sync a, b: barrier, number of threads ----

inline void bar_sync(int barrier, int threads) {
    simt::arrive_at_barrier(barrier, threads, simt::Await::yes, "bar.sync");
}
inline void bar_arrive(int barrier, int threads) {
    simt::arrive_at_barrier(barrier, threads, simt::Await::no, "bar.arrive");
}

// ---- cvt.x2 d, a, b: a becomes the upper half of d, b the lower; ex2.ftz flushes subnormal inputs and results ----

inline uint32_t nearest_bf16(float x) {
    if (x != x) return 0x7fff;
    const uint32_t bits = __float_as_uint(x), below = bits & 0xffffu, kept = bits >> 16;
    return kept + (below > 0x8000u || (below == 0x8000u && (kept & 1u)));
}
inline uint32_t nearest_fp16(float x) {
    if (x != x) return 0x7fff;
    const _Float16 half = _Float16(x);
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}
inline void cvt_rn_bf16x2_f32(uint32_t& d, float a, float b) { d = nearest_bf16(a) << 16 | nearest_bf16(b); }
inline void cvt_rn_f16x2_f32(uint32_t& d, float a, float b) { d = nearest_fp16(a) << 16 | nearest_fp16(b); }
inline void ex2_approx_ftz_f32(float& d, float a) {
    const double power = std::pow(2.0, std::fabs(a) < 0x1p-126f ? 0.0 : double(a));
    d = power < 0x1p-126 ? 0.0f : float(power);
}

}  // namespace isa
