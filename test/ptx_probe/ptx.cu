// Probes of kernels/cuda/ptx.cuh.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "test/ptx_probe/probe.h"

namespace {

__device__ uint32_t canonical(float x) { return x != x ? 0x7fc00000u : __float_as_uint(x + 0.0f); }

// Two small integers in -8 .. 8, in one register.
template <class T> __device__ uint32_t integer_pair(uint32_t noise) {
    const float low = float(int(noise >> 8 & 15u) - 8), high = float(int(noise >> 20 & 15u) - 7);
    return uint32_t(from_float<T>(low).bits) | uint32_t(from_float<T>(high).bits) << 16;
}

__global__ void shared_address_kernel(ProbeArgs op) {
    struct Shared {
        uint32_t words[64];
    };
    Shared& s = shared_memory<Shared>();
    op.out[threadIdx.x] = ptx::shared_address(&s.words[2 * threadIdx.x]) - ptx::shared_address(&s);
    op.out[32 + threadIdx.x] = ptx::shared_address(&s) % 1024;
}

// Ten words of noise for each lane: a (4), b (2), c (4). Fragments are filled without regard to rows and columns, so
// any error in a mapping shows.
template <class T> __global__ void mma_kernel(ProbeArgs op) {
    const uint32_t* in = op.in + 10 * threadIdx.x;
    uint32_t a[4], b[2];
    float c[4], d[4];
    for (int i = 0; i < 4; i++) a[i] = integer_pair<T>(in[i]);
    for (int i = 0; i < 2; i++) b[i] = integer_pair<T>(in[4 + i]);
    for (int i = 0; i < 4; i++) c[i] = float(int(in[6 + i] >> 16) - 32768);
    ptx::mma_m16n8k16<T>(d, a, b, c);
    for (int i = 0; i < 4; i++) op.out[4 * threadIdx.x + i] = canonical(d[i]);
    ptx::mma_m16n8k16<T>(d, a, b, d);  // in place
    for (int i = 0; i < 4; i++) op.out[128 + 4 * threadIdx.x + i] = canonical(d[i]);
    // Infinity and NaN: 0 times infinity in some rows, infinities of one sign in other rows.
    if (threadIdx.x == 5) a[0] = uint32_t(from_float<T>(INFINITY).bits) << 16;
    if (threadIdx.x == 9) a[3] = from_float<T>(-INFINITY).bits;
    if (threadIdx.x == 14) b[1] = from_float<T>(NAN).bits;
    ptx::mma_m16n8k16<T>(d, a, b, c);
    for (int i = 0; i < 4; i++) op.out[256 + 4 * threadIdx.x + i] = canonical(d[i]);
}

struct Rows {
    uint32_t words[32][4];  // 32 rows of 8 16-bit elements
};

// Rows in a permuted order, to check that the addresses are used.
template <bool kTranspose> __global__ void ldmatrix_kernel(ProbeArgs op) {
    Rows& s = shared_memory<Rows>();
    for (int i = 0; i < 4; i++) s.words[threadIdx.x][i] = op.in[4 * threadIdx.x + i];
    __syncthreads();
    uint32_t r[4];
    ptx::ldmatrix_x4<kTranspose>(r, ptx::shared_address(&s.words[(threadIdx.x * 5 + 3) % 32]));
    for (int i = 0; i < 4; i++) op.out[4 * threadIdx.x + i] = r[i];
}

// Whole pieces, then pieces that are used partly or not at all.
template <int kBytes> __global__ void cp_async_kernel(ProbeArgs op) {
    struct Shared {
        uint32_t whole[32][kBytes / 4], part[32][kBytes / 4];
    };
    constexpr int kWords = kBytes / 4;
    Shared& s = shared_memory<Shared>();
    const uint32_t* from = op.in + kWords * threadIdx.x;
    for (int i = 0; i < kWords; i++) s.part[threadIdx.x][i] = 0xffffffffu;
    ptx::cp_async<kBytes>(ptx::shared_address(s.whole[threadIdx.x]), from);
    ptx::cp_async<kBytes>(ptx::shared_address(s.part[threadIdx.x]), from, int(threadIdx.x) % (kBytes + 1));
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    const int other = (threadIdx.x + 7) % 32;
    for (int i = 0; i < kWords; i++) {
        op.out[kWords * threadIdx.x + i] = s.whole[other][i];
        op.out[32 * kWords + kWords * threadIdx.x + i] = s.part[other][i];
    }
}

// Three groups, waited for in turn; then one copy that is not in any group.
__global__ void cp_async_groups_kernel(ProbeArgs op) {
    Rows& s = shared_memory<Rows>();
    uint32_t* mine = s.words[threadIdx.x];
    for (int group = 0; group < 3; group++) {
        ptx::cp_async<4>(ptx::shared_address(mine + group), op.in + 4 * threadIdx.x + group);
        ptx::cp_async_commit();
    }
    ptx::cp_async_wait<2>();
    op.out[4 * threadIdx.x] = mine[0];
    ptx::cp_async_wait<1>();
    op.out[4 * threadIdx.x + 1] = mine[1];
    ptx::cp_async_wait<0>();
    op.out[4 * threadIdx.x + 2] = mine[2];
    ptx::cp_async<4>(ptx::shared_address(mine + 3), op.in + 4 * threadIdx.x + 3);
    ptx::cp_async_wait_all();
    op.out[4 * threadIdx.x + 3] = mine[3];
}

// Three warps pass a number on: the first to the second by bar_arrive, the second to the third by bar_sync.
__global__ void barriers_kernel(ProbeArgs op) {
    struct Shared {
        uint32_t first[32], second[32];
    };
    Shared& s = shared_memory<Shared>();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0) {
        s.first[lane] = op.in[lane];
        ptx::bar_arrive(1, 64);
    } else if (warp == 1) {
        ptx::bar_sync(1, 64);
        s.second[lane] = s.first[31 - lane] + 1;
        ptx::bar_sync(15, 64);
    } else {
        ptx::bar_sync(15, 64);
        op.out[lane] = s.second[(lane + 9) % 32] + 1;
    }
}

using Conversion = uint32_t (*)(float, float);
__device__ uint32_t convert_bf16x2(float low, float high) { return ptx::to_bf16x2(low, high); }
__device__ uint32_t convert_fp16x2(float low, float high) { return ptx::to_fp16x2(low, high); }

// Each input once in the low half and once in the high half, next to another one.
template <Conversion convert> __global__ void conversion_kernel(ProbeArgs op) {
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < op.count) op.out[i] = convert(__uint_as_float(op.in[i]), __uint_as_float(op.in[(i + 137) % op.count]));
}
template <class T> __global__ void pack_kernel(ProbeArgs op) {
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < op.count) op.out[i] = ptx::pack<T>(__uint_as_float(op.in[i]), __uint_as_float(op.in[(i + 137) % op.count]));
}

// For integers, infinities and NaN the result; otherwise whether it is within 2^-22, or 0 for subnormal results.
__global__ void exp2_kernel(ProbeArgs op) {
    const int i = int(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= op.count) return;
    const float x = __uint_as_float(op.in[i]), y = ptx::exp2_approx(x);
    const double right = exp2(double(x));
    const bool exact = x != x || x == floorf(x);
    const bool close = right < 0x1p-126   ? y == 0
                       : right >= 0x1p128 ? y == INFINITY
                                          : fabs(y - right) <= 0x1p-22 * right;
    op.out[i] = exact ? canonical(y) : uint32_t(close);
}

// Every sign and exponent with fractions around the precision of halves: ties of both kinds and their neighbors, the
// smallest and largest, NaN with payloads, infinity.
std::vector<uint32_t> interesting_floats() {
    std::vector<uint32_t> floats;
    for (uint32_t sign_exponent = 0; sign_exponent < 512; sign_exponent++)
        for (uint32_t fraction :
             {0x000000u, 0x000001u, 0x000fffu, 0x001000u, 0x001001u, 0x002fffu, 0x003000u, 0x003001u, 0x007fffu,
              0x008000u, 0x008001u, 0x010000u, 0x017fffu, 0x018000u, 0x018001u, 0x3fffffu, 0x400000u, 0x400001u,
              0x7fefffu, 0x7ff000u, 0x7ff001u, 0x7f7fffu, 0x7f8000u, 0x7fffffu, 0x555555u, 0x2aaaaau})
            floats.push_back(sign_exponent << 23 | fraction);
    return floats;
}

std::vector<uint32_t> exponents() {
    std::vector<uint32_t> floats = {0x80000000u, 0x7f800000u, 0xff800000u, 0x7fc00000u, 0x00000001u, 0x80000001u};
    auto add = [&](float x) { floats.push_back(std::bit_cast<uint32_t>(x)); };
    for (int i = -160; i <= 140; i++) add(float(i));
    for (int i = -2600; i <= 2600; i++) add(float(i) / 20.3f);
    for (int i = 1; i <= 60; i++) add(std::ldexp(1.7f, -i)), add(-std::ldexp(1.3f, -i));
    return floats;
}

Probe over(const std::string& wrapper, void (*kernel)(ProbeArgs), std::vector<uint32_t> input) {
    const int count = int(input.size());
    return {wrapper, kernel, count, 256, (count + 255) / 256, 0, std::move(input)};
}

}  // namespace

std::vector<ProbeGroup> ptx_probes() {
    const std::vector<uint32_t> rows = noise_words(128, 1);
    return {
        {"fragments",
         {
             {"shared_address", shared_address_kernel, 64, 32, 1, 256},
             {"mma_m16n8k16<bf16>", mma_kernel<bf16>, 384, 32, 1, 0, noise_words(320, 2)},
             {"mma_m16n8k16<fp16>", mma_kernel<fp16>, 384, 32, 1, 0, noise_words(320, 3)},
             {"ldmatrix_x4<false>", ldmatrix_kernel<false>, 128, 32, 1, sizeof(Rows), rows},
             {"ldmatrix_x4<true>", ldmatrix_kernel<true>, 128, 32, 1, sizeof(Rows), rows},
         }},
        {"copies",
         {
             {"cp_async<4>", cp_async_kernel<4>, 64, 32, 1, 256, noise_words(32, 4)},
             {"cp_async<8>", cp_async_kernel<8>, 128, 32, 1, 512, noise_words(64, 5)},
             {"cp_async<16>", cp_async_kernel<16>, 256, 32, 1, 1024, noise_words(128, 6)},
             {"cp_async_commit,cp_async_wait,cp_async_wait_all", cp_async_groups_kernel, 128, 32, 1, sizeof(Rows),
              rows},
         }},
        {"barriers",
         {
             {"bar_sync,bar_arrive", barriers_kernel, 32, 96, 1, 256, rows},
         }},
        {"conversions",
         {
             over("to_bf16x2", conversion_kernel<convert_bf16x2>, interesting_floats()),
             over("to_fp16x2", conversion_kernel<convert_fp16x2>, interesting_floats()),
             over("pack<bf16>", pack_kernel<bf16>, interesting_floats()),
             over("pack<fp16>", pack_kernel<fp16>, interesting_floats()),
             over("exp2_approx", exp2_kernel, exponents()),
         }},
    };
}
