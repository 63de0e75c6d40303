// The variables and functions that CUDA gives to kernels.
#pragma once

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "test/simt/collectives.h"
#include "test/simt/vector_types.h"

// Variables, not macros, because their names are also names of members.
inline const uint3& threadIdx = simt::machine().thread_index;
inline const uint3& blockIdx = simt::machine().block_index;
inline const dim3& blockDim = simt::machine().block_dim;
inline const dim3& gridDim = simt::machine().grid_dim;
inline constexpr int warpSize = 32;

// ---- barriers, votes, shuffles, reductions ----

inline void __syncthreads() { simt::sync_block(); }
inline void __syncwarp(unsigned mask = ~0u) { simt::sync_warp(mask); }

namespace simt {

int votes_of_block(bool vote, const char* what);

template <class T> uint64_t to_slot(T value) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
    uint64_t slot = 0;
    std::memcpy(&slot, &value, sizeof value);
    return slot;
}
template <class T> T from_slot(uint64_t slot) {
    T value;
    std::memcpy(&value, &slot, sizeof value);
    return value;
}

// Every lane receives the value of lane `from` in its own segment. That lane must participate.
template <class T> T shuffle(uint32_t mask, T value, int from, int width, const char* what) {
    if (width < 1 || width > kWarpLanes || (width & (width - 1))) fault(format("%s: width %d", what, width));
    if (from >= 0 && !(mask >> from & 1))
        fault(format("%s reads lane %d, which mask 0x%08x leaves out", what, from, mask));
    struct Parcel {
        uint64_t value;
        int from;
    } parcel{to_slot(value), from};
    const uint64_t slot = meet(
        mask, reinterpret_cast<uint64_t>(&parcel),
        [mask](Meeting& meeting) {
            each_lane(mask, [&](int lane) {
                const int source = reinterpret_cast<const Parcel*>(meeting.in[lane])->from;
                meeting.out[lane] = reinterpret_cast<const Parcel*>(meeting.in[source])->value;
            });
        },
        what);
    return from_slot<T>(slot);
}

inline int lane() { return me().lane(); }

// The values of all lanes of the mask, combined in the order of lanes.
template <class T, class Operation> T reduce_lanes(uint32_t mask, T value, Operation operation, const char* what) {
    const uint64_t slot = meet(
        mask, to_slot(value),
        [&](Meeting& meeting) {
            T sum = from_slot<T>(meeting.in[__builtin_ctz(mask)]);
            each_lane(mask & (mask - 1), [&](int lane) { sum = operation(sum, from_slot<T>(meeting.in[lane])); });
            each_lane(mask, [&](int lane) { meeting.out[lane] = to_slot(sum); });
        },
        what);
    return from_slot<T>(slot);
}

}  // namespace simt

template <class T> T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    return simt::shuffle(mask, value, (simt::lane() & ~(width - 1)) + (from & (width - 1)), width, "__shfl_sync");
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    const int lane = simt::lane(), from = lane ^ lanes, end = (lane & ~(width - 1)) + width;
    return simt::shuffle(mask, value, from < end ? from : lane, width, "__shfl_xor_sync");
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    const int lane = simt::lane(), from = lane + int(lanes), end = (lane & ~(width - 1)) + width;
    return simt::shuffle(mask, value, from < end ? from : lane, width, "__shfl_down_sync");
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    const int lane = simt::lane(), from = lane - int(lanes), begin = lane & ~(width - 1);
    return simt::shuffle(mask, value, from >= begin ? from : lane, width, "__shfl_up_sync");
}

inline unsigned __ballot_sync(unsigned mask, int vote) {
    return simt::reduce_lanes<uint32_t>(
        mask, vote ? 1u << simt::lane() : 0u, [](uint32_t a, uint32_t b) { return a | b; }, "__ballot_sync");
}
inline int __any_sync(unsigned mask, int vote) {
    return simt::reduce_lanes<int>(
        mask, vote != 0, [](int a, int b) { return a | b; }, "__any_sync");
}
inline int __all_sync(unsigned mask, int vote) {
    return simt::reduce_lanes<int>(
        mask, vote != 0, [](int a, int b) { return a & b; }, "__all_sync");
}
// Which lanes run together is not guaranteed: only the calling lane is certain.
inline unsigned __activemask() { return 1u << simt::lane(); }

template <class T> unsigned __match_any_sync(unsigned mask, T value) {
    return unsigned(simt::meet(
        mask, simt::to_slot(value),
        [mask](simt::Meeting& meeting) {
            simt::each_lane(mask, [&](int lane) {
                meeting.out[lane] = 0;
                simt::each_lane(mask, [&](int other) {
                    if (meeting.in[other] == meeting.in[lane]) meeting.out[lane] |= 1u << other;
                });
            });
        },
        "__match_any_sync"));
}

template <class T> T __reduce_add_sync(unsigned mask, T value) {
    static_assert(std::is_integral_v<T> && sizeof(T) == 4);
    return T(simt::reduce_lanes<uint32_t>(
        mask, uint32_t(value), [](uint32_t a, uint32_t b) { return a + b; }, "__reduce_add_sync"));
}
template <class T> T __reduce_min_sync(unsigned mask, T value) {
    static_assert(std::is_integral_v<T> && sizeof(T) == 4);
    return simt::reduce_lanes<T>(
        mask, value, [](T a, T b) { return a < b ? a : b; }, "__reduce_min_sync");
}
template <class T> T __reduce_max_sync(unsigned mask, T value) {
    static_assert(std::is_integral_v<T> && sizeof(T) == 4);
    return simt::reduce_lanes<T>(
        mask, value, [](T a, T b) { return a < b ? b : a; }, "__reduce_max_sync");
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value) {
    return simt::reduce_lanes<uint32_t>(
        mask, value, [](uint32_t a, uint32_t b) { return a & b; }, "__reduce_and_sync");
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
    return simt::reduce_lanes<uint32_t>(
        mask, value, [](uint32_t a, uint32_t b) { return a | b; }, "__reduce_or_sync");
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned value) {
    return simt::reduce_lanes<uint32_t>(
        mask, value, [](uint32_t a, uint32_t b) { return a ^ b; }, "__reduce_xor_sync");
}

inline int __syncthreads_count(int vote) { return simt::votes_of_block(vote != 0, "__syncthreads_count"); }
inline int __syncthreads_or(int vote) { return simt::votes_of_block(vote != 0, "__syncthreads_or") > 0; }
inline int __syncthreads_and(int vote) { return simt::votes_of_block(vote == 0, "__syncthreads_and") == 0; }

// ---- memory ----

template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldca(const T* p) { return *p; }
template <class T> T __ldlu(const T* p) { return *p; }
template <class T> void __stcs(T* p, std::type_identity_t<T> value) { *p = value; }
template <class T> void __stcg(T* p, std::type_identity_t<T> value) { *p = value; }
template <class T> void __stwt(T* p, std::type_identity_t<T> value) { *p = value; }
template <class T> void __stwb(T* p, std::type_identity_t<T> value) { *p = value; }
inline size_t __cvta_generic_to_shared(const void* p) { return simt::shared_address(p); }

namespace simt {

// Atomics order only themselves, unless a fence comes before (release) or after them (acquire).
void before_atomic(const void* address);
void after_atomic(const void* address);
void thread_fence();

template <class T>
inline constexpr bool is_atomic = std::is_same_v<T, int> || std::is_same_v<T, unsigned> ||
                                  std::is_same_v<T, unsigned long long> || std::is_same_v<T, double>;

template <class T, class Operation> T atomic(T* p, Operation operation) {
    static_assert(is_atomic<T>,
                  "kernels have atomics of integers, and of doubles for exact sums: others would depend on "
                  "the order of blocks");
    before_atomic(p);
    std::atomic_ref<T> value(*p);
    T old = value.load(std::memory_order_relaxed);
    while (!value.compare_exchange_strong(old, operation(old), std::memory_order_relaxed)) {}
    after_atomic(p);
    return old;
}

}  // namespace simt

inline void __threadfence() { simt::thread_fence(); }
inline void __threadfence_block() { simt::thread_fence(); }
inline void __threadfence_system() { simt::thread_fence(); }

template <class T> T atomicAdd(T* p, std::type_identity_t<T> x) {
    return simt::atomic(p, [x](T old) { return T(old + x); });
}
template <class T> T atomicSub(T* p, std::type_identity_t<T> x) {
    return simt::atomic(p, [x](T old) { return T(old - x); });
}
template <class T> T atomicExch(T* p, std::type_identity_t<T> x) {
    return simt::atomic(p, [x](T) { return x; });
}
template <class T> T atomicMin(T* p, std::type_identity_t<T> x) {
    return simt::atomic(p, [x](T old) { return x < old ? x : old; });
}
template <class T> T atomicMax(T* p, std::type_identity_t<T> x) {
    return simt::atomic(p, [x](T old) { return x > old ? x : old; });
}
template <class T> T atomicAnd(T* p, std::type_identity_t<T> x) {
    return simt::atomic(p, [x](T old) { return T(old & x); });
}
template <class T> T atomicOr(T* p, std::type_identity_t<T> x) {
    return simt::atomic(p, [x](T old) { return T(old | x); });
}
template <class T> T atomicXor(T* p, std::type_identity_t<T> x) {
    return simt::atomic(p, [x](T old) { return T(old ^ x); });
}
template <class T> T atomicCAS(T* p, std::type_identity_t<T> compare, std::type_identity_t<T> x) {
    return simt::atomic(p, [=](T old) { return old == compare ? x : old; });
}
// Wraps to 0 after `last`.
inline unsigned atomicInc(unsigned* p, unsigned last) {
    return simt::atomic(p, [last](unsigned old) { return old >= last ? 0 : old + 1; });
}

// ---- arithmetic ----

template <class A, class B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>)
        return std::fmin(T(a), T(b));
    else
        return T(a) < T(b) ? T(a) : T(b);
}
template <class A, class B>
requires(std::is_arithmetic_v<A>&& std::is_arithmetic_v<B>) constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>)
        return std::fmax(T(a), T(b));
    else
        return T(a) < T(b) ? T(b) : T(a);
}

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }

inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }  // NaN gives 0

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(unsigned(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __umulhi(unsigned x, unsigned y) { return unsigned(uint64_t(x) * y >> 32); }
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; bit++) reversed |= (x >> bit & 1) << (31 - bit);
    return reversed;
}
// Byte i of the result is the byte of y:x that nibble i of the selector selects.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = uint64_t(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= unsigned(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return result;
}

[[noreturn]] inline void __trap() { simt::fault("__trap"); }
