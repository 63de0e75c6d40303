// CUDA's built-ins compared with plain formulas: shuffles of every kind and width, votes, reductions, atomics, partial
// warps, indices.
#include <algorithm>
#include <bit>

#include "test/simt/planted.h"

namespace {

constexpr unsigned kAll = ~0u;

struct Results {
    int* out;  // (what, 32)
    int width;
};

void shuffles_kernel(Results op) {
    const int lane = int(threadIdx.x), value = 100 + lane;
    int* out = op.out + lane;
    out[0 * 32] = __shfl_sync(kAll, value, 5, op.width);
    out[1 * 32] = __shfl_xor_sync(kAll, value, 3, op.width);
    out[2 * 32] = __shfl_up_sync(kAll, value, 3, op.width);
    out[3 * 32] = __shfl_down_sync(kAll, value, 3, op.width);
    out[4 * 32] = int(__shfl_sync(kAll, double(value), lane + 1, op.width));
    if (lane % 2)
        out[5 * 32] = __shfl_xor_sync(0xaaaaaaaau, value, 2);
    else
        out[5 * 32] = __shfl_xor_sync(0x55555555u, value, 4);
}

void votes_kernel(Results op) {
    const int lane = int(threadIdx.x), vote = lane % 3 == 0;
    int* out = op.out + lane;
    out[0 * 32] = int(__ballot_sync(kAll, vote));
    out[1 * 32] = __any_sync(kAll, lane == 31) + 2 * __any_sync(kAll, 0);
    out[2 * 32] = __all_sync(kAll, lane < 32) + 2 * __all_sync(kAll, vote);
    out[3 * 32] = int(__match_any_sync(kAll, lane / 4));
    out[4 * 32] = __reduce_add_sync(kAll, lane) + __reduce_max_sync(kAll, -lane) + __reduce_min_sync(kAll, -lane);
    out[5 * 32] = int(__reduce_and_sync(kAll, 0xf0u | unsigned(lane)) + __reduce_or_sync(kAll, unsigned(lane)) +
                      __reduce_xor_sync(kAll, unsigned(lane)));
    out[6 * 32] = __syncthreads_count(vote) + 100 * __syncthreads_or(lane == 7) + 1000 * __syncthreads_and(lane < 31);
}

}  // namespace

TEST_CASE("shuffles return the lanes' values", "[simt]") {
    for (int width : {32, 16, 8, 4}) {
        DeviceArray<int> out(6 * 32);
        CHECK(sentences(faults_of(shuffles_kernel, {.name = "shuffles", .blocks = dim3(1), .threads = 32},
                                  {out.data(), width})) == "");
        const std::vector<int> got = out.fetch();
        for (int lane = 0; lane < 32; lane++) {
            const int begin = lane / width * width, end = begin + width;
            auto check = [&](int what, int from) {
                INFO("width " << width << ", lane " << lane << ", shuffle " << what);
                CHECK(got[size_t(what) * 32 + size_t(lane)] == 100 + from);
            };
            check(0, begin + 5 % width);
            check(1, (lane ^ 3) < end ? lane ^ 3 : lane);
            check(2, lane - 3 >= begin ? lane - 3 : lane);
            check(3, lane + 3 < end ? lane + 3 : lane);
            check(4, begin + (lane + 1) % width);
            check(5, lane % 2 ? lane ^ 2 : lane ^ 4);
        }
    }
}

TEST_CASE("votes and reductions count the lanes", "[simt]") {
    DeviceArray<int> out(7 * 32);
    CHECK(sentences(faults_of(votes_kernel, {.name = "votes", .blocks = dim3(1), .threads = 32}, {out.data(), 32})) ==
          "");
    const std::vector<int> got = out.fetch();
    unsigned ballot = 0;
    for (int lane = 0; lane < 32; lane += 3) ballot |= 1u << lane;
    for (int lane = 0; lane < 32; lane++) {
        auto at = [&](int what) { return got[size_t(what) * 32 + size_t(lane)]; };
        CHECK(unsigned(at(0)) == ballot);
        CHECK(at(1) == 1);
        CHECK(at(2) == 1);
        CHECK(unsigned(at(3)) == 0xfu << lane / 4 * 4);
        CHECK(at(4) == 31 * 16 + 0 - 31);
        CHECK(at(5) == 0xf0 + 31 + 0);
        CHECK(at(6) == 11 + 100);
    }
}

namespace {

struct Grid3 {
    unsigned* count;  // (2)
    int* seen;        // (blocks, threads)
};
void indices_kernel(Grid3 op) {
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    op.seen[block * blockDim.x + threadIdx.x] = int(block * 1000 + threadIdx.x);
    atomicAdd(op.count, 1u);
    if (threadIdx.x >= 40) return;  // a partial warp ends early and is not waited for
    const unsigned mask = threadIdx.x < 32 ? kAll : 0xffu;
    if (__all_sync(mask, 1)) atomicMax(op.count + 1, block);
    __syncwarp(mask);
}

struct Atomics {
    int* out;
    unsigned* wrapped;
};
void atomics_kernel(Atomics op) {
    const int t = int(blockIdx.x * blockDim.x + threadIdx.x);
    atomicAdd(op.out + 0, t);
    atomicSub(op.out + 1, t);
    atomicMax(op.out + 2, t);
    atomicMin(op.out + 3, -t);
    atomicOr(op.out + 4, 1 << t % 16);
    atomicXor(op.out + 5, t);
    atomicAnd(op.out + 6, ~(1 << t % 8));
    for (int old = op.out[7], seen;; old = seen)  // a lock-free product
        if ((seen = atomicCAS(op.out + 7, old, old + 2)) == old) break;
    atomicInc(op.wrapped, 9u);
}

}  // namespace

TEST_CASE("every thread of a grid runs once, also in partial warps", "[simt]") {
    const dim3 blocks(3, 2, 2);
    const int threads = 45, block_count = 12;
    DeviceArray<unsigned> count(std::vector<unsigned>(2));
    DeviceArray<int> seen(size_t(block_count) * threads);
    CHECK(sentences(faults_of(indices_kernel, {.name = "indices", .blocks = blocks, .threads = threads},
                              {count.data(), seen.data()})) == "");
    CHECK(count.fetch() == std::vector<unsigned>{unsigned(block_count * threads), unsigned(block_count - 1)});
    const std::vector<int> got = seen.fetch();
    for (int i = 0; i < block_count * threads; i++) CHECK(got[size_t(i)] == i / threads * 1000 + i % threads);
}

TEST_CASE("integer atomics of many blocks", "[simt]") {
    DeviceArray<int> out(std::vector<int>{0, 0, 0, 0, 0, 0, 0xff, 0});
    DeviceArray<unsigned> wrapped(std::vector<unsigned>{0});
    const int threads = 48, blocks = 5, n = threads * blocks;
    launch(atomics_kernel, {.name = "atomics", .blocks = dim3(blocks), .threads = threads}, Stream(),
           Atomics{out.data(), wrapped.data()});
    simt::take_faults();  // the plain read of out[7] is a deliberate race: the CAS corrects it
    int all = 0;
    for (int t = 0; t < n; t++) all ^= t;
    CHECK(out.fetch() == std::vector<int>{n * (n - 1) / 2, -n * (n - 1) / 2, n - 1, 1 - n, 0xffff, all, 0, 2 * n});
    CHECK(wrapped.fetch()[0] == unsigned(n % 10));
}

TEST_CASE("the order of blocks and warps follows the seed", "[simt]") {
    auto order = [](uint64_t seed) {
        simt::WithOptions scope({.seed = seed});
        DeviceArray<unsigned> count(std::vector<unsigned>{0});
        DeviceArray<int> places(16);
        auto kernel = +[](Grid3 op) {
            if (threadIdx.x == 0) op.seen[atomicAdd(op.count, 1u)] = int(blockIdx.x);
        };
        launch(kernel, {.name = "order", .blocks = dim3(16), .threads = 32}, Stream(),
               Grid3{count.data(), places.data()});
        return places.fetch();
    };
    std::vector<int> last_first(16);
    for (int i = 0; i < 16; i++) last_first[size_t(i)] = 15 - i;
    CHECK(order(0) == last_first);
    CHECK(order(5) != last_first);
    std::vector<int> sorted = order(6);
    std::sort(sorted.begin(), sorted.end());
    std::reverse(sorted.begin(), sorted.end());
    CHECK(sorted == last_first);
}
