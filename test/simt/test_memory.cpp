// Faults of memory and of order: out of bounds, after free, misaligned, by the host, races. Each is planted, with a
// correct twin.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>

#include "test/simt/planted.h"
#include "test/simt/sanitizers.h"

namespace {

constexpr int kCount = 1000;  // 4000 bytes: the allocator's alignment leaves 96 after it

struct Access {
    float* out;
    const float* inp;
    int write_at, read_at;
};
void access_kernel(Access op) {
    if (threadIdx.x == 5) op.out[op.write_at] = op.inp[op.read_at];
}

std::string access_faults(int write_at, int read_at, bool freed = false) {
    DeviceArray<float> out(kCount);
    float* inp;
    check_cuda(cudaMalloc(&inp, kCount * 4), "cudaMalloc");
    check_cuda(cudaMemsetAsync(inp, 0, kCount * 4, cuda_stream({})), "cudaMemset");
    if (freed) check_cuda(cudaFree(inp), "cudaFree");
    std::string found = sentences(faults_of(access_kernel, {.name = "access", .blocks = dim3(1), .threads = 32},
                                            {out.data(), inp, write_at, read_at}));
    if (!freed) check_cuda(cudaFree(inp), "cudaFree");
    return found + sentences(simt::take_faults());
}

struct Shared {
    float values[512];
};

// A race is reported once per place in the code. kThreads, the block's size, makes the code of each size different.

// The running thread's index in the grid.
unsigned place() { return blockIdx.x * blockDim.x + threadIdx.x; }

void misaligned_kernel(Planted op) {
    const float4* from = reinterpret_cast<const float4*>(op.out + (op.fault ? 2 : 4));
    reinterpret_cast<float4*>(op.out)[8] = *from;
}

void shared_overrun_kernel(Planted op) {
    Shared& s = shared_memory<Shared>();
    volatile float* values = s.values;
    if (threadIdx.x == 0) values[op.fault ? 512 : 511] = 1;
}

template <int kThreads> void missing_barrier_kernel(Planted op) {
    Shared& s = shared_memory<Shared>();
    s.values[threadIdx.x] = kThreads;
    if (!op.fault) __syncthreads();
    op.out[place()] = s.values[(threadIdx.x + 32) % blockDim.x];
}

// The last block runs first.
void missing_barrier_in_second_block_kernel(Planted op) {
    Shared& s = shared_memory<Shared>();
    s.values[threadIdx.x] = 1;
    if (!op.fault || blockIdx.x + 2 != gridDim.x) __syncthreads();
    op.out[place()] = s.values[(threadIdx.x + 32) % blockDim.x];
}

template <int kThreads> void missing_syncwarp_kernel(Planted op) {
    Shared& s = shared_memory<Shared>();
    s.values[threadIdx.x] = kThreads;
    if (!op.fault) __syncwarp();
    op.out[place()] = s.values[threadIdx.x ^ 1];
}

// A shuffle lets lanes meet but does not order memory.
template <int kThreads> void shuffle_is_no_fence_kernel(Planted op) {
    Shared& s = shared_memory<Shared>();
    s.values[threadIdx.x] = kThreads;
    __shfl_sync(~0u, 0, 0);
    if (!op.fault) __syncwarp();
    op.out[place()] = s.values[threadIdx.x ^ 1];
}

template <int kThreads> void second_barrier_missing_kernel(Planted op) {
    Shared& s = shared_memory<Shared>();
    for (int round = 0; round < 2; round++) {
        if (threadIdx.x == 0) s.values[0] = float(round);
        __syncthreads();
        op.out[place()] = s.values[0] + kThreads;
        if (!op.fault) __syncthreads();
    }
}

template <int kThreads> void blocks_write_one_place_kernel(Planted op) {
    if (threadIdx.x == 0) op.out[op.fault ? 0 : blockIdx.x] = kThreads;
}

template <int kThreads> void block_reads_its_neighbour_kernel(Planted op) {
    const unsigned other = op.fault ? (blockIdx.x + 1) % gridDim.x : blockIdx.x;
    if (threadIdx.x == 0) {
        op.out[blockIdx.x] = kThreads;
        op.out[100 + blockIdx.x] = op.out[other];
    }
}

// The last block to finish sums the values of all blocks: correct only with fences around the counter.
template <int kThreads> void last_block_kernel(Planted op) {
    Shared& s = shared_memory<Shared>();
    unsigned* count = reinterpret_cast<unsigned*>(op.out + 200);
    if (threadIdx.x == 0) {
        op.out[blockIdx.x] = kThreads;
        if (!op.fault) __threadfence();
        s.values[0] = float(atomicAdd(count, 1u));
        if (!op.fault) __threadfence();
    }
    __syncthreads();
    if (s.values[0] == float(gridDim.x - 1) && threadIdx.x == 0) {
        float sum = 0;
        for (unsigned block = 0; block < gridDim.x; block++) sum += op.out[block];
        op.out[300] = sum;
        *count = 0;
    }
}

// Only ThreadSanitizer detects a race; otherwise the kernel must merely run.
void check_race(void (*kernel)(Planted), const Launch& config) {
    if (simt::tsan()) return check_planted(kernel, config, "data race");
    DeviceArray<float> out(std::vector<float>(4096));
    for (bool fault : {false, true}) CHECK(sentences(faults_of(kernel, config, {out.data(), fault})) == "");
}

}  // namespace

TEST_CASE("accesses outside device memory", "[simt]") {
    CHECK(access_faults(0, kCount - 1) == "");
    CHECK(access_faults(kCount - 1, 0) == "");
    CHECK(access_faults(0, kCount + 1024).find("outside device memory") != std::string::npos);
    CHECK(access_faults(kCount + 1024, 0).find("outside device memory") != std::string::npos);
    CHECK(access_faults(-1024, 0).find("outside device memory") != std::string::npos);
    CHECK(access_faults(0, -1024).find("thread (5, 0, 0)") != std::string::npos);
    // One element past the end or before the beginning of the odd-sized array: a write is always detected.
    CHECK(access_faults(kCount, 0) != "");
    CHECK(access_faults(-1, 0) != "");
    if (simt::asan()) CHECK(access_faults(0, kCount) != "");
    CHECK(access_faults(0, 0, true).find("that was freed") != std::string::npos);
}

TEST_CASE("reading one element past the end gives NaN without a sanitizer", "[simt]") {
    if (simt::asan()) return;
    DeviceArray<float> out(kCount), inp(kCount);
    launch(access_kernel, {.name = "access", .blocks = dim3(1), .threads = 32}, Stream(),
           Access{out.data(), inp.data(), 0, kCount});
    CHECK(std::isnan(out.fetch()[0]));
}

namespace {

// Tries it in a child process.
bool host_can_read(const volatile float* memory) {
    const pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, [](int) { _exit(1); });
        _exit(memory[0] == memory[0] ? 0 : 2);
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) && WEXITSTATUS(status) != 1;
}

// The error of a launch whose kernel writes to this address.
std::string refusal(float* out) {
    try {
        launch(access_kernel, {.name = "access", .blocks = dim3(1), .threads = 32}, Stream(), Access{out, out, 0, 1});
    } catch (const Error& error) {
        return error.what();
    }
    return sentences(simt::take_faults());
}

}  // namespace

TEST_CASE("the host cannot access device memory", "[simt]") {
    DeviceArray<float> x(std::vector<float>{1, 2});
    CHECK(!host_can_read(x.data()));
    CHECK(refusal(x.data()) == "");
    CHECK(!host_can_read(x.data()));
    CHECK(x.fetch()[0] == 2);
    CHECK(!host_can_read(x.data()));
    const float of_host = 0;
    CHECK(host_can_read(&of_host));
}

// A limit of the address translation: docs/testing.md.
TEST_CASE("a kernel's addresses of device memory come with its argument", "[simt]") {
    DeviceArray<float> x(std::vector<float>{1, 2});
    DeviceArray<float*> address(std::vector<float*>{x.data()});
    auto kernel = +[](float** op) { **op = 1; };
    launch(kernel, {.name = "deep", .blocks = dim3(1), .threads = 1}, Stream(), address.data());
    CHECK(sentences(simt::take_faults()).find("did not come with the kernel's argument") != std::string::npos);
}

TEST_CASE("a kernel with host addresses is rejected", "[simt]") {
    if (is_clang()) return;  // clang cannot check for them
    static float of_program[2];
    float of_stack[2];
    const auto of_heap = std::make_unique<float[]>(2);
    for (float* memory : {of_program, of_stack, of_heap.get()})
        CHECK(refusal(memory).find(format("kernel access failed: its argument holds %p, an address of host memory",
                                          static_cast<void*>(memory))) == 0);
    float* pinned = nullptr;
    REQUIRE(cudaMallocHost(&pinned, 2 * sizeof(float)) == cudaSuccess);
    pinned[1] = 3;
    CHECK(refusal(pinned) == "");
    CHECK(pinned[0] == 3);
    REQUIRE(cudaFreeHost(pinned) == cudaSuccess);
}

TEST_CASE("fresh memory is full of NaN, in every block", "[simt]") {
    DeviceArray<float> out(64);
    for (float value : out.fetch()) CHECK(std::isnan(value));
    auto kernel = +[](Planted op) {
        Shared& s = shared_memory<Shared>();
        op.out[blockIdx.x * 32 + threadIdx.x] = s.values[threadIdx.x];
        s.values[threadIdx.x] = 1;
    };
    launch(kernel, {.name = "fresh", .blocks = dim3(2), .threads = 32, .shared_bytes = sizeof(Shared)}, Stream(),
           Planted{out.data(), false});
    for (float value : out.fetch()) CHECK(std::isnan(value));
}

// g++ checks the address of each vector; clang copies one with an instruction that faults.
TEST_CASE("a misaligned vector", "[simt]") {
    check_planted(misaligned_kernel, {.name = "misaligned", .blocks = dim3(1), .threads = 1},
                  is_clang() ? "(0: also a misaligned vector)" : "needs an alignment of 16");
}

TEST_CASE("a write past the block's shared memory", "[simt]") {
    check_planted(
        shared_overrun_kernel, {.name = "overrun", .blocks = dim3(2), .threads = 32, .shared_bytes = sizeof(Shared)},
        simt::asan() ? "AddressSanitizer" : "wrote to offset 2048 of its shared memory, which has 2048 bytes");
}

TEST_CASE("races on shared memory", "[simt]") {
    const Launch config{.name = "race", .blocks = dim3(2), .threads = 64, .shared_bytes = sizeof(Shared)};
    check_race(missing_barrier_kernel<64>, config);
    check_race(missing_syncwarp_kernel<64>, config);
    check_race(shuffle_is_no_fence_kernel<64>, config);
    check_race(second_barrier_missing_kernel<64>, config);
}

// Of a grid of large blocks, only the first one and some later ones have an order for each thread, the others for each
// warp.
TEST_CASE("races of large blocks", "[simt]") {
    Launch config{.name = "race", .blocks = dim3(1), .threads = 512, .shared_bytes = sizeof(Shared)};
    check_race(missing_barrier_kernel<512>, config);
    check_race(missing_syncwarp_kernel<512>, config);
    check_race(shuffle_is_no_fence_kernel<512>, config);
    check_race(second_barrier_missing_kernel<512>, config);
    config.blocks = dim3(7);
    check_race(missing_barrier_in_second_block_kernel, config);
    check_race(blocks_write_one_place_kernel<512>, config);
    check_race(block_reads_its_neighbour_kernel<512>, config);
    check_race(last_block_kernel<512>, config);
}

TEST_CASE("races between blocks on global memory", "[simt]") {
    const Launch config{.name = "race", .blocks = dim3(4), .threads = 64, .shared_bytes = sizeof(Shared)};
    check_race(blocks_write_one_place_kernel<64>, config);
    check_race(block_reads_its_neighbour_kernel<64>, config);
    check_race(last_block_kernel<64>, config);
}
