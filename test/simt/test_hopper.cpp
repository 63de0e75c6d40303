// The twins of sm_90's instructions: every wrapper once in one kernel, layouts of wgmma operands compared with plain
// loops, and planted faults of asynchronous work.
#include <cmath>
#include <random>

#include "kernels/cuda/hopper/ptx_hopper.cuh"
#include "test/simt/planted.h"

namespace {

using Map = ptx::TensorMap;

std::vector<bf16> random_bf16(size_t count, unsigned seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    std::vector<bf16> values(count);
    for (bf16& value : values) value = from_float<bf16>(normal(generator));
    return values;
}

Map map_of(void* base, uint64_t columns, uint64_t rows, uint32_t box_columns, uint32_t box_rows, int swizzle) {
    Map map;
    const uint64_t size[] = {columns, rows}, strides[] = {columns * 2};
    const uint32_t box[] = {box_columns, box_rows};
    REQUIRE(ptx::make_tensor_map(&map, 2, 2, base, size, strides, box, swizzle));
    return map;
}

// ---- one warpgroup's product of tiles loaded by TMA, in each swizzle and major ----

struct LayoutShared {
    alignas(1024) char a[65536], b[65536];
    uint64_t bar;
};
struct Layout {
    float* out;  // (64, n)
    Map a, b;
    bool planted_bytes;  // expect too few
};

template <int kN, int kMode, int kTransposeA, int kTransposeB> void layout_kernel(Layout op) {
    constexpr int kSpan = kMode == 0 ? 16 : 256 >> kMode, kElements = kSpan / 2, kDepth = 64;
    auto& s = shared_memory<LayoutShared>();
    const uint32_t a = ptx::shared_address(s.a), b = ptx::shared_address(s.b), bar = ptx::shared_address(&s.bar);
    const int t = int(threadIdx.x), lane = t % 32, warp = t / 32;
    if (t == 0) {
        ptx::mbarrier_init(bar, 1);
        ptx::fence_proxy_async();
    }
    __syncthreads();
    if (t == 0) {  // a tile is several columns of (rows x span)
        auto load = [&](uint32_t to, const Map& map, bool transposed, int rows) {
            const int major = transposed ? rows : kDepth, minor = transposed ? kDepth : rows;
            for (int x = 0; x < major; x += kElements)
                ptx::tma_load(to + uint32_t(x / kElements * minor * kSpan), &map, bar, x, 0);
        };
        ptx::mbarrier_arrive_expect_tx(bar, uint32_t((64 + kN) * kDepth * 2 - (op.planted_bytes ? 16 : 0)));
        load(a, op.a, kTransposeA, 64);
        load(b, op.b, kTransposeB, kN);
    }
    ptx::mbarrier_wait(bar, 0);
    float d[kN / 2];
    ptx::wgmma_fence();
    for (int k = 0; k < kDepth; k += 16) {
        auto descriptor = [&](uint32_t base, bool transposed, int rows) {
            const auto mode = static_cast<ptx::Swizzle>(kMode);
            const uint32_t column = uint32_t(rows * kSpan), eight = 8 * kSpan, depth = kDepth * kSpan;
            if (transposed)  // without swizzle the two offsets are exchanged
                return ptx::wgmma_descriptor(base + uint32_t(k * kSpan), kMode ? depth : eight, kMode ? eight : depth,
                                             mode);
            if (kMode)
                return ptx::wgmma_descriptor(base + uint32_t(k / kElements) * column + uint32_t(k % kElements * 2), 16,
                                             eight, mode);
            return ptx::wgmma_descriptor(base + uint32_t(k / 8) * column, column, eight, mode);
        };
        ptx::wgmma<kN, bf16, kTransposeA, kTransposeB>(d, descriptor(a, kTransposeA, 64),
                                                       descriptor(b, kTransposeB, kN), k > 0);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    for (int i = 0; i < kN / 2; i++)
        op.out[(16 * warp + lane / 4 + i / 2 % 2 * 8) * kN + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}

template <int kN, int kMode, int kTransposeA, int kTransposeB> void check_layout() {
    constexpr unsigned kElements = (kMode == 0 ? 16 : 256 >> kMode) / 2;
    if (kTransposeB && kN % kElements) return;
    INFO("n " << kN << ", swizzle " << kMode << ", transposed " << kTransposeA << kTransposeB);
    const auto a = random_bf16(64 * 64, 1), b = random_bf16(size_t(kN) * 64, 2);
    DeviceArray<bf16> a_device(a), b_device(b);
    DeviceArray<float> out(64 * kN);
    auto map = [](bf16* base, bool transposed, unsigned rows) {
        const unsigned columns = transposed ? rows : 64, count = transposed ? 64 : rows;
        return map_of(base, columns, count, kElements, count, kMode);
    };
    Layout op{out.data(), map(a_device.data(), kTransposeA, 64), map(b_device.data(), kTransposeB, kN), false};
    CHECK(sentences(faults_of(
              layout_kernel<kN, kMode, kTransposeA, kTransposeB>,
              {.name = "layout", .blocks = dim3(1), .threads = 128, .shared_bytes = sizeof(LayoutShared)}, op)) == "");
    const std::vector<float> got = out.fetch();
    size_t wrong = 0;
    for (size_t i = 0; i < 64; i++)
        for (size_t j = 0; j < kN; j++) {
            double sum = 0;
            for (size_t k = 0; k < 64; k++)
                sum += double(to_float(kTransposeA ? a[k * 64 + i] : a[i * 64 + k])) *
                       double(to_float(kTransposeB ? b[k * kN + j] : b[j * 64 + k]));
            wrong += !(std::abs(got[i * kN + j] - sum) < 1e-3);
        }
    CHECK(wrong == 0);
}

template <int kN> void check_layouts() {
    check_layout<kN, 0, 0, 0>();
    check_layout<kN, 1, 0, 0>();
    check_layout<kN, 2, 0, 0>();
    check_layout<kN, 3, 0, 0>();
    check_layout<kN, 0, 1, 1>();
    check_layout<kN, 1, 1, 1>();
    check_layout<kN, 2, 1, 1>();
    check_layout<kN, 3, 1, 1>();
    check_layout<kN, 1, 1, 0>();
    check_layout<kN, 1, 0, 1>();
}

}  // namespace

TEST_CASE("wgmma reads tiles as TMA writes them", "[simt]") {
    const simt::WithOptions sm_90(simt::with_capability(90));
    check_layouts<8>();
    check_layouts<64>();
    check_layouts<256>();
}

TEST_CASE("an mbarrier that expects another number of bytes than land", "[simt]") {
    const simt::WithOptions sm_90(simt::with_capability(90));
    const auto a = random_bf16(64 * 64, 1);
    DeviceArray<bf16> device(a);
    DeviceArray<float> out(64 * 64);
    const Map map = map_of(device.data(), 64, 64, 64, 64, ptx::SWIZZLE_128);
    const std::string found =
        sentences(faults_of(layout_kernel<64, 1, 0, 0>,
                            {.name = "bytes", .blocks = dim3(1), .threads = 128, .shared_bytes = sizeof(LayoutShared)},
                            Layout{out.data(), map, map, true}));
    CHECK(found.find("128 threads wait in mbarrier wait") != std::string::npos);
}

// ---- faults of the ring on which later kernels are based: load by TMA, store by TMA ----

namespace {

enum class Plant {
    none,
    no_fence,
    no_wait,
    store_not_waited,
    store_before,
    store_shifted,
    wrong_parity,
    too_many_arrivals
};

struct RingShared {
    alignas(128) bf16 tile[64 * 64], staging[64 * 64];
    uint64_t full;
};
struct Ring {
    Map in, out;
    Plant plant;
};

// Doubles a tile: TMA in, generic arithmetic, TMA out.
void ring_kernel(Ring op) {
    auto& s = shared_memory<RingShared>();
    const uint32_t full = ptx::shared_address(&s.full);
    const int row = int(blockIdx.x) * 64;
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(full, 1);
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::mbarrier_arrive_expect_tx(full, sizeof s.tile);
        if (op.plant == Plant::too_many_arrivals) ptx::mbarrier_arrive(full, 1);
        ptx::tma_load(ptx::shared_address(s.tile), &op.in, full, 0, row);
    }
    if (op.plant != Plant::no_wait) ptx::mbarrier_wait(full, op.plant == Plant::wrong_parity ? 1 : 0);
    for (unsigned i = threadIdx.x; i < 64 * 64; i += blockDim.x)
        s.staging[i] = from_float<bf16>(2 * to_float(s.tile[i]));
    if (op.plant != Plant::no_fence) ptx::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::tma_store(&op.out, ptx::shared_address(s.staging) + (op.plant == Plant::store_shifted ? 16 : 0), 0,
                       op.plant == Plant::store_before ? row - 1 : row);
        ptx::bulk_commit();
        if (op.plant != Plant::store_not_waited) ptx::bulk_wait<0>();
    }
}

struct RingResult {
    std::string faults;
    size_t wrong = 0;
};

RingResult run_ring(Plant plant, bool strict_proxy = false) {
    simt::Options scoped = simt::options();
    scoped.strict_proxy = scoped.strict_proxy || strict_proxy;
    const simt::WithOptions scope(scoped);
    const auto in = random_bf16(128 * 64, 3);
    DeviceArray<bf16> in_device(in), out(128 * 64);
    Ring op{map_of(in_device.data(), 64, 128, 64, 64, 0), map_of(out.data(), 64, 128, 64, 64, 0), plant};
    RingResult result;
    result.faults = sentences(faults_of(
        ring_kernel, {.name = "ring", .blocks = dim3(2), .threads = 128, .shared_bytes = sizeof(RingShared)}, op));
    const auto got = out.fetch();
    for (size_t i = 0; i < got.size(); i++) result.wrong += !(to_float(got[i]) == 2 * to_float(in[i]));
    return result;
}

}  // namespace

TEST_CASE("a tile through TMA and back, and its planted faults", "[simt]") {
    for (bool strict : {false, true}) {
        const RingResult good = run_ring(Plant::none, strict);
        CHECK(good.faults == "");
        CHECK(good.wrong == 0);
    }
    // ThreadSanitizer reports a race only once, the first time.
    const RingResult no_fence = run_ring(Plant::no_fence, true);
    CHECK(no_fence.wrong > 0);
    CHECK((no_fence.faults.find("data race") != std::string::npos) == simt::tsan());
    const RingResult no_wait = run_ring(Plant::no_wait);
    CHECK((no_wait.wrong > 0 || no_wait.faults != ""));
    CHECK(run_ring(Plant::store_not_waited).faults.find("still reads shared memory") != std::string::npos);
    CHECK(run_ring(Plant::store_before).faults.find("begins before the tensor") != std::string::npos);
    CHECK(run_ring(Plant::store_shifted).faults.find("not aligned to 128 bytes") != std::string::npos);
    const RingResult parity = run_ring(Plant::wrong_parity);
    CHECK((parity.wrong > 0 || parity.faults != ""));
    CHECK(run_ring(Plant::too_many_arrivals).faults.find("more arrivals") != std::string::npos);
    CHECK(run_ring(Plant::none).faults == "");
}

// ---- the order of two stores to one place: only a wait determines it ----

namespace {

struct OrderShared {
    alignas(128) float first[64], second[64];
};
struct TwoStores {
    Map out;
    bool fault;
};

void two_stores_kernel(TwoStores op) {
    auto& s = shared_memory<OrderShared>();
    s.first[threadIdx.x] = 1;
    s.second[threadIdx.x] = 2;
    ptx::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x > 0) return;
    ptx::tma_store(&op.out, ptx::shared_address(s.first), 0, 0);
    ptx::bulk_commit();
    if (op.fault)
        ptx::bulk_wait_read<0>();
    else
        ptx::bulk_wait<0>();
    ptx::tma_store<true>(&op.out, ptx::shared_address(s.second), 0, 0);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
}

}  // namespace

TEST_CASE("a sum is stored, and an addition to it is not ordered after the store", "[simt]") {
    if (simt::options().seed) return;  // then either order is possible
    for (bool fault : {false, true}) {
        const DeviceArray<float> out(std::vector<float>(64));
        TwoStores op{{}, fault};
        const uint64_t size[] = {64, 1}, strides[] = {256};
        const uint32_t box[] = {64, 1};
        REQUIRE(ptx::make_tensor_map(&op.out, 4, 2, out.data(), size, strides, box, ptx::SWIZZLE_NONE));
        CHECK(sentences(faults_of(
                  two_stores_kernel,
                  {.name = "stores", .blocks = dim3(1), .threads = 64, .shared_bytes = sizeof(OrderShared)}, op)) ==
              "");
        CHECK((out.fetch()[63] == 3) == !fault);
    }
}

// ---- clusters: each block passes its number to the next by an arrival at that block's mbarrier ----

namespace {

struct ClusterShared {
    uint64_t bar;
};
void cluster_kernel(Planted op) {
    auto& s = shared_memory<ClusterShared>();
    const uint32_t bar = ptx::shared_address(&s.bar), rank = ptx::cluster_rank();
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(bar, 32);
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_arrive();
    ptx::cluster_wait();
    ptx::mbarrier_arrive_cluster(bar, op.fault ? 0 : (rank + 1) % 4);
    ptx::mbarrier_wait(bar, 0);
    if (ptx::elect_one()) op.out[blockIdx.x] = float(rank + 10 * ptx::cluster_id());
    ptx::cluster_arrive();
    ptx::cluster_wait();
}

// Reads the neighbor's number, and ends before the neighbor has read this block's.
void neighbors_kernel(Planted op) {
    auto& s = shared_memory<ClusterShared>();
    float& number = *reinterpret_cast<float*>(&s);
    const uint32_t rank = ptx::cluster_rank();
    if (threadIdx.x == 0) number = float(rank);
    ptx::cluster_arrive();
    ptx::cluster_wait();
    if (threadIdx.x == 0) op.out[blockIdx.x] = ptx::load_cluster(ptx::mapa(ptx::shared_address(&number), rank ^ 1));
    ptx::cluster_arrive();
    if (!op.fault) ptx::cluster_wait();
}

void stmatrix_kernel(Planted op) {
    auto& s = shared_memory<RingShared>();
    uint32_t r[4];
    for (unsigned i = 0; i < 4; i++) r[i] = threadIdx.x * 4 + i;
    const uint32_t at = ptx::shared_address(&s.tile[threadIdx.x * 8]);
    ptx::stmatrix<4, true>(at + (op.fault ? 8 : 0), r);
    __syncwarp();
    uint32_t back[4];
    ptx::ldmatrix_x4<true>(back, at);
    for (unsigned i = 0; i < 4; i++) op.out[threadIdx.x * 4 + i] = float(back[i]);
}

}  // namespace

TEST_CASE("blocks of a cluster reach each other's mbarriers", "[simt]") {
    const Launch config{
        .name = "cluster", .blocks = dim3(8), .threads = 32, .shared_bytes = sizeof(ClusterShared), .cluster = 4};
    check_planted(cluster_kernel, config, "mbarrier");
    DeviceArray<float> out(8);
    CHECK(sentences(faults_of(cluster_kernel, config, {out.data(), false})) == "");
    for (size_t i = 0; i < 8; i++) CHECK(out.fetch()[i] == float(i % 4 + 10 * (i / 4)));
}

TEST_CASE("a block's shared memory ends with it", "[simt]") {
    // With a seed, the fault of one cluster appears in about half of the orders: 64 clusters always show it.
    const Launch config{
        .name = "neighbors", .blocks = dim3(128), .threads = 32, .shared_bytes = sizeof(ClusterShared), .cluster = 2};
    check_planted(neighbors_kernel, config, "of the cluster has ended");
    DeviceArray<float> out(128);
    faults_of(neighbors_kernel, config, {out.data(), false});
    const std::vector<float> ranks = out.fetch();
    for (size_t i = 0; i < ranks.size(); i++) CHECK(ranks[i] == float((i + 1) % 2));
}

TEST_CASE("stmatrix is the inverse of ldmatrix", "[simt]") {
    const Launch config{.name = "stmatrix", .blocks = dim3(1), .threads = 32, .shared_bytes = sizeof(RingShared)};
    check_planted(stmatrix_kernel, config, "stmatrix: the row at");
    DeviceArray<float> out(128);
    faults_of(stmatrix_kernel, config, {out.data(), false});
    const auto got = out.fetch();
    for (size_t i = 0; i < 128; i++) CHECK(got[i] == float(i));
}

// ---- registers of A that change before the product has read them ----

namespace {

struct RegistersShared {
    alignas(1024) char b[64 * 128];
};
void registers_kernel(Planted op) {
    auto& s = shared_memory<RegistersShared>();
    for (unsigned i = threadIdx.x; i < sizeof s.b; i += blockDim.x) s.b[i] = 0;
    ptx::fence_proxy_async();
    __syncthreads();
    uint32_t a[4] = {};
    float d[32];
    ptx::wgmma_fence();
    ptx::wgmma<64, bf16>(d, a, ptx::wgmma_descriptor(ptx::shared_address(s.b), 16, 1024, ptx::SWIZZLE_128), 0);
    ptx::wgmma_commit();
    if (op.fault) a[1] = 1;
    ptx::wgmma_wait<0>();
    op.out[threadIdx.x] = d[0] + float(a[1]);
}

}  // namespace

TEST_CASE("registers of A change while a wgmma reads them", "[simt]") {
    check_planted(registers_kernel,
                  {.name = "registers", .blocks = dim3(1), .threads = 128, .shared_bytes = sizeof(RegistersShared)},
                  "registers of A were written");
}
