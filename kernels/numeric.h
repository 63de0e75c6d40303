// Number types and counter-based random numbers, the same on host and device.
//
// Storage types only hold numbers; arithmetic uses float. Load with to_float(), store with from_float<T>(). Conversions
// round to nearest even, preserve NaN and infinity, and have no branches, so loops over them vectorize.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

// Whether the target CPU of this file has AVX512-BF16. Not inline, because CUDA sources are compiled for any CPU.
#ifdef __AVX512BF16__
constexpr bool kTargetMultipliesBf16 = true;
#else
constexpr bool kTargetMultipliesBf16 = false;
#endif

struct bf16 {  // 1 sign, 8 exponent, 7 fraction bits
    uint16_t bits;
};
struct fp16 {  // IEEE binary16: 1 sign, 5 exponent, 10 fraction bits
    uint16_t bits;
};
// The 8-bit types of tensor cores (Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433, section 3).
struct e4m3 {  // 1 sign, 4 exponent, 3 fraction bits; the largest number is 448; no infinity, one NaN per sign
    uint8_t bits;
};
struct e5m2 {  // 1 sign, 5 exponent, 2 fraction bits, the high byte of an fp16; the largest number is 57344
    uint8_t bits;
};

// Storage types. Only GEMMs and quantize() support the types of 8 bits. fp64 occurs only in files and in the reference
// implementation of the tests; no op supports it.
enum class Dtype : int { fp32, bf16, fp16, fp64, e4m3, e5m2 };

template <class T> inline constexpr Dtype dtype_of = T::not_a_storage_type;
template <> inline constexpr Dtype dtype_of<float> = Dtype::fp32;
template <> inline constexpr Dtype dtype_of<bf16> = Dtype::bf16;
template <> inline constexpr Dtype dtype_of<fp16> = Dtype::fp16;
template <> inline constexpr Dtype dtype_of<double> = Dtype::fp64;
template <> inline constexpr Dtype dtype_of<e4m3> = Dtype::e4m3;
template <> inline constexpr Dtype dtype_of<e5m2> = Dtype::e5m2;

inline constexpr size_t size_of(Dtype dtype) {
    switch (dtype) {
        case Dtype::fp32: return 4;
        case Dtype::bf16: return 2;
        case Dtype::fp16: return 2;
        case Dtype::fp64: return 8;
        case Dtype::e4m3: return 1;
        case Dtype::e5m2: return 1;
    }
    return 0;
}
inline constexpr const char* name_of(Dtype dtype) {
    constexpr const char* kNames[] = {"fp32", "bf16", "fp16", "fp64", "e4m3", "e5m2"};
    return kNames[int(dtype)];
}
// Whether it is a type of 8 bits.
inline constexpr bool is_fp8(Dtype dtype) { return dtype == Dtype::e4m3 || dtype == Dtype::e5m2; }

HOST_DEVICE inline float to_float(float x) { return x; }

HOST_DEVICE inline float to_float(bf16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }

HOST_DEVICE inline float to_float(fp16 x) {
    uint32_t magnitude = uint32_t(x.bits & 0x7fffu) << 13;
    // Scaling by 2^112 changes the exponent bias from 15 to 127 and also converts subnormals.
    uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
    uint32_t infinite_or_nan = magnitude | 0x7f800000u;
    uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
    return std::bit_cast<float>((magnitude >= 0x0f800000u ? infinite_or_nan : finite) | sign);
}

HOST_DEVICE inline float to_float(e4m3 x) {
    const uint32_t magnitude = uint32_t(x.bits & 0x7fu), sign = uint32_t(x.bits & 0x80u) << 24;
    // Scaling by 2^120 changes the exponent bias from 7 to 127 and also converts subnormals.
    const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 20) * 0x1p120f);
    return std::bit_cast<float>((magnitude == 0x7fu ? 0x7fc00000u : finite) | sign);
}

HOST_DEVICE inline float to_float(e5m2 x) { return to_float(fp16{uint16_t(x.bits << 8)}); }

template <class T> HOST_DEVICE T from_float(float x);

template <> HOST_DEVICE inline float from_float<float>(float x) { return x; }

template <> HOST_DEVICE inline bf16 from_float<bf16>(float x) {
    uint32_t bits = std::bit_cast<uint32_t>(x);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet_nan = (bits >> 16) | 0x40u;
    return {uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded)};
}

// Rounds to one of the two neighbors of x, to each with a probability that makes x the mean of the results: adds
// `random`, uniform in 0 .. 2^16 - 1, to the bits that bf16 cuts off. Numbers of bf16, infinities and NaN stay what
// they are. Finite numbers beyond bf16's largest become the largest. A float stays as it is.
template <class T> HOST_DEVICE T round_stochastically(float x, uint32_t random);

template <> HOST_DEVICE inline float round_stochastically<float>(float x, uint32_t) { return x; }

template <> HOST_DEVICE inline bf16 round_stochastically<bf16>(float x, uint32_t random) {
    const uint32_t bits = std::bit_cast<uint32_t>(x), magnitude = bits & 0x7fffffffu;
    const uint32_t quiet = magnitude > 0x7f800000u ? 0x40u : 0u;  // a NaN in the low bits alone would become infinity
    return {uint16_t(magnitude < 0x7f7f0000u ? (bits + random) >> 16 : bits >> 16 | quiet)};
}

template <> HOST_DEVICE inline fp16 from_float<fp16>(float x) {
    uint32_t bits = std::bit_cast<uint32_t>(x);
    uint32_t magnitude = bits & 0x7fffffffu;
    // Below 2^-14 the result is subnormal: adding 1/2 leaves its rounded bits in the low bits of the sum.
    uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
    result = magnitude >= 0x477ff000u ? 0x7c00u : result;  // 65520 and above round to infinity
    result = magnitude > 0x7f800000u ? 0x7e00u : result;
    return {uint16_t(result | ((bits >> 16) & 0x8000u))};
}

// Rounds to a sign, a biased exponent and kFraction bits. Numbers beyond `largest`, and infinities, become `largest`,
// as PTX's conversions with .satfinite do; a NaN becomes 0x7f.
template <int kFraction, int kBias> HOST_DEVICE inline uint8_t round_to_8_bits(float x, float largest) {
    constexpr uint32_t kSmallestNormal = (128 - kBias) << 23, kCut = 23 - kFraction;
    // A float whose last bit is the smallest subnormal: adding it leaves the rounded bits in the low bits of the sum.
    constexpr uint32_t kSubnormal = uint32_t(127 + 24 - kBias - kFraction) << 23;
    const uint32_t bits = std::bit_cast<uint32_t>(x), unlimited = bits & 0x7fffffffu;
    const uint32_t limit = std::bit_cast<uint32_t>(largest), magnitude = unlimited < limit ? unlimited : limit;
    const uint32_t subnormal =
        std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + std::bit_cast<float>(kSubnormal)) - kSubnormal;
    const uint32_t rounding = (1u << (kCut - 1)) - 1u + ((magnitude >> kCut) & 1u);
    const uint32_t normal = (magnitude - (uint32_t(127 - kBias) << 23) + rounding) >> kCut;
    const uint32_t finite = magnitude < kSmallestNormal ? subnormal : normal;
    return uint8_t((unlimited > 0x7f800000u ? 0x7fu : finite) | (bits >> 24 & 0x80u));
}

template <class T> inline constexpr float largest_of = T::has_no_largest_number;
template <> inline constexpr float largest_of<e4m3> = 448;
template <> inline constexpr float largest_of<e5m2> = 57344;

template <> HOST_DEVICE inline e4m3 from_float<e4m3>(float x) { return {round_to_8_bits<3, 7>(x, largest_of<e4m3>)}; }
template <> HOST_DEVICE inline e5m2 from_float<e5m2>(float x) { return {round_to_8_bits<2, 15>(x, largest_of<e5m2>)}; }

// Philox4x32-10: ten rounds of a keyed bijection on 128-bit counters (Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", SC 2011). Stateless: the caller passes the counter, so the order of calls does not matter.
struct Philox {
    uint32_t word[4];
};

HOST_DEVICE inline Philox philox(uint64_t key, uint64_t counter_high, uint64_t counter_low) {
    uint32_t c0 = uint32_t(counter_low), c1 = uint32_t(counter_low >> 32);
    uint32_t c2 = uint32_t(counter_high), c3 = uint32_t(counter_high >> 32);
    uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = uint64_t(0xd2511f53u) * c0, p1 = uint64_t(0xcd9e8d57u) * c2;
        uint32_t n0 = uint32_t(p1 >> 32) ^ c1 ^ k0, n2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
        c1 = uint32_t(p1), c3 = uint32_t(p0), c0 = n0, c2 = n2;
        k0 += 0x9e3779b9u, k1 += 0xbb67ae85u;
    }
    return {{c0, c1, c2, c3}};
}

// The purpose of a random number. It is the high half of the Philox counter, so purposes never share numbers.
enum class RandomPurpose : uint64_t {
    init = 1,
    permutation = 2,
    sampling = 3,
    bpe_dropout = 4,
    dropout = 5,
    rounding = 6
};

// A uniform number in (0, 1) from 32 random bits; never 0 or 1.
HOST_DEVICE inline float uniform_from_bits(uint32_t bits) { return (float(bits >> 9) + 0.5f) * 0x1p-23f; }
