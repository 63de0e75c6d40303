// Probes of kernels/cuda/hopper/ptx_hopper.cuh, except tensor copies.
#include "kernels/cuda/launch.cuh"
#include "test/ptx_probe/probe.h"
#include "kernels/cuda/hopper/ptx_hopper.cuh"

namespace {

__device__ uint32_t canonical(float x) { return x != x ? 0x7fc00000u : __float_as_uint(x + 0.0f); }

// A small integer in -8 .. 7.
template <class T> __device__ T small_integer(uint32_t noise) {
    return from_float<T>(float(int(noise >> 13 & 15u) - 8));
}

struct Rows {
    uint32_t words[32][4];  // 32 rows of 8 16-bit elements
};

template <int kMatrices, bool kTranspose> __global__ void stmatrix_kernel(ProbeArgs op) {
    Rows& s = shared_memory<Rows>();
    for (int i = 0; i < 4; i++) s.words[threadIdx.x][i] = 0;
    __syncthreads();
    uint32_t r[kMatrices];
    for (int i = 0; i < kMatrices; i++) r[i] = op.in[kMatrices * threadIdx.x + i];
    ptx::stmatrix<kMatrices, kTranspose>(ptx::shared_address(s.words[(threadIdx.x * 5 + 3) % 32]), r);
    __syncthreads();
    for (int i = 0; i < 4; i++) op.out[4 * threadIdx.x + i] = s.words[threadIdx.x][i];
}

// The phases of a barrier that expects two arrivals, as one thread sees them.
__global__ void mbarrier_kernel(ProbeArgs op) {
    struct Shared {
        uint64_t bar;
    };
    const uint32_t bar = ptx::shared_address(&shared_memory<Shared>().bar);
    if (threadIdx.x != 0) return;
    uint32_t* out = op.out;
    ptx::mbarrier_init(bar, 2);
    ptx::fence_mbarrier_init();
    for (uint32_t phase = 0; phase < 3; phase++) {
        *out++ = ptx::mbarrier_test_wait(bar, phase & 1);
        *out++ = ptx::mbarrier_test_wait(bar, ~phase & 1);
        if (phase == 1) {
            ptx::mbarrier_arrive(bar, 2);
        } else {
            ptx::mbarrier_arrive(bar);
            *out++ = ptx::mbarrier_test_wait(bar, phase & 1);
            ptx::mbarrier_arrive(bar);
        }
        *out++ = ptx::mbarrier_test_wait(bar, phase & 1);
        while (!ptx::mbarrier_try_wait(bar, phase & 1)) {}
        ptx::mbarrier_wait(bar, phase & 1);
    }
    ptx::mbarrier_inval(bar);
}

// Copies 512 bytes from global to shared memory, announced in both ways, and back to another place.
__global__ void bulk_kernel(ProbeArgs op) {
    struct Shared {
        alignas(16) uint32_t words[2][128], back[128];
        uint64_t bar;
    };
    Shared& s = shared_memory<Shared>();
    const uint32_t bar = ptx::shared_address(&s.bar);
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(bar, 1);
        ptx::fence_mbarrier_init();
        ptx::fence_proxy_async();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::mbarrier_arrive_expect_tx(bar, 512);
        ptx::bulk_load(ptx::shared_address(s.words[0]), op.in, 512, bar);
    }
    ptx::mbarrier_wait(bar, 0);
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::mbarrier_expect_tx(bar, 512);
        ptx::bulk_load(ptx::shared_address(s.words[1]), op.in + 128, 512, bar);
        ptx::mbarrier_arrive(bar);
    }
    ptx::mbarrier_wait(bar, 1);
    for (int i = int(threadIdx.x); i < 128; i += 32) s.back[i] = s.words[0][i] ^ s.words[1][127 - i];
    ptx::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::bulk_store(op.out, ptx::shared_address(s.back), 512);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
        ptx::bulk_store(op.out + 128, ptx::shared_address(s.words[1]), 256);
        ptx::bulk_commit();
        ptx::bulk_wait<0>();
    }
    __syncthreads();
}

// Blocks of a cluster signal each other.
__global__ void cluster_kernel(ProbeArgs op) {
    struct Shared {
        uint64_t bar;
    };
    const uint32_t bar = ptx::shared_address(&shared_memory<Shared>().bar), rank = ptx::cluster_rank();
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(bar, 3);
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (threadIdx.x == 0) ptx::mbarrier_arrive_cluster(bar, rank ^ 1, 3);
    ptx::mbarrier_wait(bar, 0);
    uint32_t* out = op.out + 4 * (32 * blockIdx.x + threadIdx.x);
    out[0] = rank;
    out[1] = ptx::cluster_id();
    out[2] = (ptx::mapa(bar, rank ^ 1) & 0xffffffu) == (ptx::mapa(bar, rank) & 0xffffffu);
    out[3] = ptx::mapa(bar, rank ^ 1) != ptx::mapa(bar, rank);
    ptx::cluster_arrive();
    ptx::cluster_wait();
}

// Each lane stores a number, and reads the number of another lane in the other block.
__global__ void load_cluster_kernel(ProbeArgs op) {
    struct Shared {
        float numbers[32];
    };
    Shared& s = shared_memory<Shared>();
    const uint32_t rank = ptx::cluster_rank(), lane = threadIdx.x;
    s.numbers[lane] = float(100 * rank + lane);
    ptx::cluster_arrive();
    ptx::cluster_wait();
    const uint32_t there = ptx::mapa(ptx::shared_address(&s.numbers[(lane * 5 + 3) % 32]), rank ^ 1);
    op.out[32 * blockIdx.x + lane] = __float_as_uint(ptx::load_cluster(there));
    ptx::cluster_arrive();
    ptx::cluster_wait();
}

__global__ void elect_one_kernel(ProbeArgs op) { op.out[threadIdx.x] = __popc(__ballot_sync(~0u, ptx::elect_one())); }

// One warpgroup releases registers, two acquire them.
__global__ void __launch_bounds__(384, 1) registers_kernel(ProbeArgs op) {
    if (threadIdx.x < 128)
        ptx::setmaxnreg_dec<40>();
    else
        ptx::setmaxnreg_inc<232>();
    op.out[threadIdx.x] = op.in[threadIdx.x] + 1;
}

__global__ void descriptor_kernel(ProbeArgs op) {
    const uint64_t descriptor = ptx::wgmma_descriptor(16 * op.in[0] % 0x40000, 1024, 512, ptx::SWIZZLE_64);
    op.out[0] = uint32_t(descriptor);
    op.out[1] = uint32_t(descriptor >> 32);
}

// Offset of an element in a tile of kRows (of M or N) times 64 (of K), before and after the swizzle.
template <int kRows, int kMode, bool kIsTransposed> struct Tile {
    static constexpr int kSpan = 256 >> kMode, kElements = kSpan / 2, kDepth = 64;
    static constexpr int kSpans = kIsTransposed ? (kRows + kElements - 1) / kElements : kDepth / kElements;
    static constexpr int kBytes = kSpans * kSpan * (kIsTransposed ? kDepth : kRows);
    static constexpr uint32_t kLeading = kIsTransposed ? kDepth * kSpan : 0, kStride = 8 * kSpan;

    static __device__ int offset(int row, int k) {
        const int across = kIsTransposed ? row : k, along = kIsTransposed ? k : row;
        const int plain =
            across / kElements * kSpan * (kIsTransposed ? kDepth : kRows) + along * kSpan + across % kElements * 2;
        return plain ^ (plain >> 3 & (kSpan - 16));
    }
    // The descriptor for columns k .. k + 15.
    static __device__ uint64_t descriptor(const char* tile, int k) {
        const int begin = kIsTransposed ? k * kSpan : k / kElements * kSpan * kRows + k % kElements * 2;
        return ptx::wgmma_descriptor(ptx::shared_address(tile) + uint32_t(begin), kLeading, kStride,
                                     ptx::Swizzle(kMode));
    }
    template <class T> static __device__ void fill(char* tile, const uint32_t* noise) {
        for (int i = int(threadIdx.x); i < kRows * kDepth; i += 128)
            *reinterpret_cast<T*>(tile + offset(i / kDepth, i % kDepth)) = small_integer<T>(noise[i]);
    }
};

// Products of (64, 64) and (64, kN)^T: added to integers, then overwriting them.
template <class T, int kN, int kMode, int kTransposeA, int kTransposeB>
__global__ void __launch_bounds__(128) wgmma_kernel(ProbeArgs op) {
    using A = Tile<64, kMode, kTransposeA != 0>;
    using B = Tile<kN, kMode, kTransposeB != 0>;
    struct Shared {
        alignas(1024) char a[A::kBytes];
        alignas(1024) char b[B::kBytes];
    };
    Shared& s = shared_memory<Shared>();
    A::template fill<T>(s.a, op.in);
    B::template fill<T>(s.b, op.in + 64 * 64);
    ptx::fence_proxy_async();
    __syncthreads();
    float d[kN / 2];
    for (int i = 0; i < kN / 2; i++) d[i] = float(int(threadIdx.x) * 3 - i);
    for (int scale = 1; scale >= 0; scale--) {
        ptx::wgmma_fence();
        for (int k = 0; k < 64; k += 16)
            ptx::wgmma<kN, T, kTransposeA, kTransposeB>(d, A::descriptor(s.a, k), B::descriptor(s.b, k), scale || k);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        uint32_t* out = op.out + (scale * 128 + int(threadIdx.x)) * (kN / 2);
        for (int i = 0; i < kN / 2; i++) out[i] = canonical(d[i]);
    }
}

// The same with A in registers.
template <class T, int kN, int kTransposeB>
__global__ void __launch_bounds__(128) wgmma_registers_kernel(ProbeArgs op) {
    using B = Tile<kN, 1, kTransposeB != 0>;
    struct Shared {
        alignas(1024) char b[B::kBytes];
    };
    Shared& s = shared_memory<Shared>();
    B::template fill<T>(s.b, op.in + 64 * 64);
    uint32_t a[4][4];
    for (int i = 0; i < 16; i++) {
        const uint32_t *noise = op.in + 2 * (16 * threadIdx.x + i), high = small_integer<T>(noise[1]).bits;
        a[i / 4][i % 4] = small_integer<T>(noise[0]).bits | high << 16;
    }
    ptx::fence_proxy_async();
    __syncthreads();
    float d[kN / 2];
    for (int i = 0; i < kN / 2; i++) d[i] = float(int(threadIdx.x) - 2 * i);
    ptx::wgmma_fence();
    for (int k = 0; k < 64; k += 16) ptx::wgmma<kN, T, kTransposeB>(d, a[k / 16], B::descriptor(s.b, k), 1);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    for (int i = 0; i < kN / 2; i++) op.out[int(threadIdx.x) * (kN / 2) + i] = canonical(d[i]);
}

template <class T, int kN, int kMode, int kTransposeA, int kTransposeB> Probe product(const std::string& types) {
    const size_t bytes =
        1024 + size_t(Tile<64, kMode, kTransposeA != 0>::kBytes) + size_t(Tile<kN, kMode, kTransposeB != 0>::kBytes);
    return {"wgmma<" + types + ">",       wgmma_kernel<T, kN, kMode, kTransposeA, kTransposeB>, 128 * kN, 128, 1,
            (bytes + 1023) / 1024 * 1024, noise_words(64 * 64 + kN * 64, uint32_t(kN + kMode))};
}
template <class T, int kN, int kTransposeB> Probe product_of_registers(const std::string& types) {
    const size_t bytes = size_t(Tile<kN, 1, kTransposeB != 0>::kBytes);
    return {"wgmma<" + types + ",A_in_registers>", wgmma_registers_kernel<T, kN, kTransposeB>,  64 * kN, 128, 1,
            (bytes + 1023) / 1024 * 1024,          noise_words(64 * 64 + kN * 64, uint32_t(kN))};
}

}  // namespace

std::vector<ProbeGroup> hopper_probes() {
    const std::vector<uint32_t> rows = noise_words(128, 7);
    return {
        {"stmatrix",
         {
             {"stmatrix<1,false>", stmatrix_kernel<1, false>, 128, 32, 1, sizeof(Rows), rows},
             {"stmatrix<2,false>", stmatrix_kernel<2, false>, 128, 32, 1, sizeof(Rows), rows},
             {"stmatrix<4,false>", stmatrix_kernel<4, false>, 128, 32, 1, sizeof(Rows), rows},
             {"stmatrix<1,true>", stmatrix_kernel<1, true>, 128, 32, 1, sizeof(Rows), rows},
             {"stmatrix<2,true>", stmatrix_kernel<2, true>, 128, 32, 1, sizeof(Rows), rows},
             {"stmatrix<4,true>", stmatrix_kernel<4, true>, 128, 32, 1, sizeof(Rows), rows},
         }},
        {"mbarrier",
         {
             {"mbarrier", mbarrier_kernel, 11, 32, 1, 8},
         }},
        {"bulk",
         {
             {"bulk_load,bulk_store", bulk_kernel, 192, 32, 1, 1552, noise_words(256, 8)},
         }},
        {"cluster",
         {
             {"cluster,mapa,mbarrier_arrive_cluster", cluster_kernel, 512, 32, 4, 8, {}, 2},
             {"load_cluster", load_cluster_kernel, 128, 32, 4, 128, {}, 2},
         }},
        {"registers",
         {
             {"elect_one", elect_one_kernel, 32},
             {"setmaxnreg", registers_kernel, 384, 384, 1, 0, noise_words(384, 9)},
         }},
        {"wgmma_sizes",
         {
             {"wgmma_descriptor", descriptor_kernel, 2, 1, 1, 0, {0x1234}},
             product<bf16, 8, 1, 0, 0>("bf16,8,swizzle_128"),
             product<bf16, 16, 1, 0, 0>("bf16,16,swizzle_128"),
             product<bf16, 32, 1, 0, 0>("bf16,32,swizzle_128"),
             product<bf16, 64, 1, 0, 0>("bf16,64,swizzle_128"),
             product<bf16, 96, 1, 0, 0>("bf16,96,swizzle_128"),
             product<bf16, 192, 1, 0, 0>("bf16,192,swizzle_128"),
             product<bf16, 256, 1, 0, 0>("bf16,256,swizzle_128"),
         }},
        {"wgmma_layouts",
         {
             product<bf16, 64, 1, 1, 0>("bf16,64,swizzle_128,A_transposed"),
             product<bf16, 64, 1, 0, 1>("bf16,64,swizzle_128,B_transposed"),
             product<bf16, 128, 1, 1, 1>("bf16,128,swizzle_128,both_transposed"),
             product<bf16, 64, 2, 0, 0>("bf16,64,swizzle_64"),
             product<bf16, 64, 2, 1, 1>("bf16,64,swizzle_64,both_transposed"),
             product<bf16, 64, 3, 0, 0>("bf16,64,swizzle_32"),
             product<bf16, 64, 3, 1, 1>("bf16,64,swizzle_32,both_transposed"),
             product<fp16, 128, 1, 0, 1>("fp16,128,swizzle_128,B_transposed"),
         }},
        {"wgmma_registers",
         {
             product_of_registers<bf16, 64, 0>("bf16,64"),
             product_of_registers<bf16, 128, 1>("bf16,128,B_transposed"),
             product_of_registers<fp16, 256, 0>("fp16,256"),
         }},
    };
}
