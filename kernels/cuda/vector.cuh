// Packs: adjacent elements moved by one access of up to 128 bits and kept in registers in the storage type.
//
// Kernels are written in terms of packs. If the addresses allow it, a kernel is instantiated with kAligned; otherwise
// it moves the same elements one by one. So the order of sums, and the bits, do not depend on addresses.
#pragma once

#include <bit>
#include <initializer_list>

#include "kernels/cuda/launch.cuh"  // IWYU pragma: export
#include "kernels/cuda/ptx.cuh"
#include "kernels/tensor.h"

// The number of elements of T in 128 bits.
template <class T> inline constexpr int kPackSize = 16 / int(sizeof(T));

template <class T, int kSize = kPackSize<T>> struct Pack {
    static constexpr int kWords = kSize * int(sizeof(T)) / 4;
    static_assert(kWords == 1 || kWords == 2 || kWords == 4, "a pack is one access of 4, 8 or 16 bytes");
    uint32_t word[kWords];
};

// The type for an access of kWords words of 32 bits.
template <int kWords>
using AccessType = std::conditional_t<kWords == 1, unsigned, std::conditional_t<kWords == 2, uint2, uint4>>;

// The elements of a pack one by one.
template <class T, int kSize> struct Elements { T value[kSize]; };

// Loads the first `available` elements at `from`; the others are 0. With kAligned, all of them must exist.
template <bool kAligned, class T, int kSize = kPackSize<T>>
__device__ inline Pack<T, kSize> load_pack(const T* from, int available = kSize) {
    using P = Pack<T, kSize>;
    if constexpr (kAligned) {
        return std::bit_cast<P>(*reinterpret_cast<const AccessType<P::kWords>*>(from));
    } else {
        Elements<T, kSize> elements{};
#pragma unroll
        for (int i = 0; i < kSize; i++)
            if (i < available) elements.value[i] = from[i];
        return std::bit_cast<P>(elements);
    }
}

// Stores the first `available` elements. With kAligned, stores all of them.
template <bool kAligned, class T, int kSize>
__device__ inline void store_pack(T* to, const Pack<T, kSize>& pack, int available = kSize) {
    using P = Pack<T, kSize>;
    if constexpr (kAligned) {
        *reinterpret_cast<AccessType<P::kWords>*>(to) = std::bit_cast<AccessType<P::kWords>>(pack);
    } else {
        const auto elements = std::bit_cast<Elements<T, kSize>>(pack);
#pragma unroll
        for (int i = 0; i < kSize; i++)
            if (i < available) to[i] = elements.value[i];
    }
}

// The same for a pack that may reach beyond the end of an array: with kAligned, one access if all its elements exist.
template <bool kAligned, class T, int kSize = kPackSize<T>, class Count>
__device__ inline Pack<T, kSize> load_some(const T* from, Count available) {
    if (kAligned && available >= kSize) return load_pack<kAligned, T, kSize>(from);
    return load_pack<false, T, kSize>(from, int(min(available, Count(kSize))));
}
template <bool kAligned, class T, int kSize, class Count>
__device__ inline void store_some(T* to, const Pack<T, kSize>& pack, Count available) {
    if (kAligned && available >= kSize)
        store_pack<kAligned>(to, pack);
    else
        store_pack<false>(to, pack, int(min(available, Count(kSize))));
}

// The elements of a pack as floats.
template <class T, int kSize> struct Floats {
    float value[kSize];

    // The same numbers, for packing as another type.
    template <class To> __device__ Floats<To, kSize> as() const { return std::bit_cast<Floats<To, kSize>>(*this); }
};

template <class T, int kSize> __device__ inline void operator+=(Floats<T, kSize>& sum, const Floats<T, kSize>& addend) {
#pragma unroll
    for (int i = 0; i < kSize; i++) sum.value[i] += addend.value[i];
}

__device__ inline void unpack_word(uint32_t word, const float*, float* to) { to[0] = std::bit_cast<float>(word); }
__device__ inline void unpack_word(uint32_t word, const bf16*, float* to) {
    to[0] = std::bit_cast<float>(word << 16);
    to[1] = std::bit_cast<float>(word & 0xffff0000u);
}
__device__ inline void unpack_word(uint32_t word, const fp16*, float* to) {
    to[0] = to_float(fp16{uint16_t(word)});
    to[1] = to_float(fp16{uint16_t(word >> 16)});
}

template <class T, int kSize> __device__ inline Floats<T, kSize> unpack(const Pack<T, kSize>& pack) {
    Floats<T, kSize> floats;
#pragma unroll
    for (int w = 0; w < Pack<T, kSize>::kWords; w++)
        unpack_word(pack.word[w], static_cast<const T*>(nullptr), floats.value + w * 4 / int(sizeof(T)));
    return floats;
}

// Rounds to T.
template <class T, int kSize> __device__ inline Pack<T, kSize> pack_floats(const Floats<T, kSize>& floats) {
    Pack<T, kSize> pack;
#pragma unroll
    for (int w = 0; w < Pack<T, kSize>::kWords; w++)
        if constexpr (sizeof(T) == sizeof(float))
            pack.word[w] = std::bit_cast<uint32_t>(floats.value[w]);
        else
            pack.word[w] = ptx::pack<T>(floats.value[2 * w], floats.value[2 * w + 1]);
    return pack;
}

// ---- for launchers --------------------------------------------------------------------------------------------------

// Whether every array is aligned to `bytes` bytes. An absent array counts as aligned.
inline bool are_aligned(size_t bytes, std::initializer_list<ConstView> arrays) {
    for (const ConstView& array : arrays)
        if (reinterpret_cast<uintptr_t>(array.data) % bytes != 0) return false;
    return true;
}

// The number of blocks for `count` pieces of work with `per_block` pieces per block.
inline dim3 blocks_for(size_t count, size_t per_block) {
    const size_t blocks = (count + per_block - 1) / per_block;
    require(blocks < (size_t(1) << 31), "a launch of %zu blocks; the maximum is 2147483647", blocks);
    return dim3(unsigned(blocks));
}
