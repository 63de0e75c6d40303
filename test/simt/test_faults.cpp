// Faults of threads that must meet: each is planted in a small kernel and reported; its correct twin is not.
#include "test/simt/planted.h"

namespace {

void skipped_barrier_kernel(Planted op) {
    if (!op.fault || threadIdx.x < 32) __syncthreads();
}

void barrier_after_return_kernel(Planted op) {
    if (op.fault && threadIdx.x == 70) return;
    __syncthreads();
}

void barrier_in_half_a_warp_kernel(Planted op) {
    if (op.fault && threadIdx.x % 32 < 16) __syncwarp();
    __syncthreads();
    if (op.fault && threadIdx.x % 32 >= 16) __syncwarp();
}

void shuffle_with_ended_lanes_kernel(Planted op) {
    if (threadIdx.x >= 16) return;
    op.out[threadIdx.x] = __shfl_xor_sync(op.fault ? ~0u : 0xffffu, 1.0f, 8);
}

void vote_of_missing_lanes_kernel(Planted op) {  // 48 threads: the second warp has 16 lanes
    const unsigned mask = op.fault || threadIdx.x < 32 ? ~0u : 0xffffu;
    op.out[threadIdx.x] = float(__any_sync(mask, 1));
}

void shuffle_without_itself_kernel(Planted op) {
    op.out[threadIdx.x] = __shfl_down_sync(op.fault ? 0xfffffffeu : ~0u, 1.0f, 1);
}

void shuffle_from_outside_kernel(Planted op) {
    if (threadIdx.x < 8) op.out[threadIdx.x] = __shfl_sync(0xffu, 1.0f, op.fault ? 9 : 7);
}

void lanes_that_never_come_kernel(Planted op) {
    if (op.fault && threadIdx.x % 32 >= 16)
        __syncthreads();
    else
        op.out[threadIdx.x] = __shfl_xor_sync(op.fault ? ~0u : 0xffffffffu, 1.0f, 1);
    if (!op.fault) __syncthreads();
}

void different_masks_kernel(Planted op) {
    // All lanes arrive, each with a mask that includes it: a lane that ended first would be a different fault.
    const unsigned mask = op.fault && threadIdx.x % 2 && threadIdx.x != 31 ? 0x7fffffffu : ~0u;
    op.out[threadIdx.x] = float(__ballot_sync(mask, 1));
}

void different_collectives_kernel(Planted op) {
    if (op.fault && threadIdx.x % 2)
        op.out[threadIdx.x] = __shfl_xor_sync(~0u, 1.0f, 1);
    else
        op.out[threadIdx.x] = op.fault ? __shfl_down_sync(~0u, 1.0f, 1) : __shfl_xor_sync(~0u, 1.0f, 1);
}

void named_barrier_too_many_kernel(Planted op) { ptx::bar_sync(1, op.fault ? 96 : 64); }

void named_barrier_counts_kernel(Planted op) { ptx::bar_sync(2, op.fault && threadIdx.x >= 32 ? 32 * 3 : 64); }

void named_barrier_part_of_warp_kernel(Planted op) { ptx::bar_sync(3, op.fault ? 63 : 64); }

void named_barrier_left_kernel(Planted op) {
    ptx::bar_arrive(4, 64);
    if (!op.fault || threadIdx.x < 64) ptx::bar_arrive(4, 64);
}

void trap_kernel(Planted op) {
    if (op.fault && threadIdx.x == 3) __trap();
}

}  // namespace

TEST_CASE("a barrier that not all threads reach", "[simt]") {
    check_planted(skipped_barrier_kernel, {.name = "skipped", .blocks = dim3(2), .threads = 64}, "__syncthreads");
    check_planted(barrier_after_return_kernel, {.name = "returned", .blocks = dim3(2), .threads = 128},
                  "__syncthreads");
    check_planted(named_barrier_too_many_kernel, {.name = "named", .blocks = dim3(1), .threads = 64},
                  "deadlock: no thread can run; 64 threads wait in bar.sync");
    check_planted(named_barrier_counts_kernel, {.name = "counts", .blocks = dim3(1), .threads = 64}, "barrier 2 for");
    check_planted(named_barrier_part_of_warp_kernel, {.name = "part", .blocks = dim3(1), .threads = 64},
                  "no number of whole warps");
    check_planted(named_barrier_left_kernel, {.name = "left", .blocks = dim3(1), .threads = 96},
                  "32 arrivals are left at barrier 4");
}

TEST_CASE("a deadlock report lists the waiting threads", "[simt]") {
    check_planted(barrier_in_half_a_warp_kernel, {.name = "half", .blocks = dim3(1), .threads = 64},
                  "__syncwarp with mask 0xffffffff");
    check_planted(lanes_that_never_come_kernel, {.name = "never", .blocks = dim3(1), .threads = 32},
                  "deadlock: no thread can run; 16 threads wait in __shfl_xor_sync with mask 0xffffffff");
}

TEST_CASE("a shuffle or vote with an inactive lane", "[simt]") {
    check_planted(shuffle_with_ended_lanes_kernel, {.name = "ended", .blocks = dim3(1), .threads = 32},
                  "__shfl_xor_sync with mask 0xffffffff");
    check_planted(vote_of_missing_lanes_kernel, {.name = "missing", .blocks = dim3(1), .threads = 48},
                  "which names lane 16: it has ended or does not exist");
    check_planted(shuffle_without_itself_kernel, {.name = "itself", .blocks = dim3(1), .threads = 32},
                  "leaves out the calling lane 0");
    check_planted(shuffle_from_outside_kernel, {.name = "outside", .blocks = dim3(1), .threads = 32},
                  "reads lane 9, which mask 0x000000ff leaves out");
    check_planted(different_masks_kernel, {.name = "masks", .blocks = dim3(1), .threads = 32}, "in one warp");
    check_planted(different_collectives_kernel, {.name = "kinds", .blocks = dim3(1), .threads = 32}, "in one warp");
}

TEST_CASE("a fault reports kernel, block and thread, and fails the call that waits", "[simt]") {
    launch(trap_kernel, {.name = "trapped", .blocks = dim3(1), .threads = 32}, Stream(), Planted{nullptr, true});
    REQUIRE(cudaStreamSynchronize(cuda_stream({})) == cudaErrorLaunchFailure);
    CHECK(std::string(cudaGetErrorString(cudaErrorLaunchFailure)) ==
          "trapped: block (0, 0, 0), thread (3, 0, 0): __trap");
    CHECK(cudaStreamSynchronize(cuda_stream({})) == cudaSuccess);
}

namespace {

struct Nothing {
    int unused;
};
void nothing_kernel(Nothing) {}
struct Big {
    float values[1000];
};
void big_kernel(Nothing) { shared_memory<Big>().values[threadIdx.x] = 1; }

template <int kThreads> void __launch_bounds__(kThreads, 2) bounded_kernel(Nothing) {}

std::string launch_error(const Launch& config, void (*kernel)(Nothing) = nothing_kernel) {
    try {
        launch(kernel, config, Stream(), Nothing{});
    } catch (const Error& error) {
        return error.what();
    }
    return sentences(simt::take_faults());
}

}  // namespace

TEST_CASE("a launch within and beyond the limits of sm_90", "[simt]") {
    const simt::WithOptions sm_90(simt::with_capability(90));
    CHECK(launch_error({.name = "n", .blocks = dim3(1), .threads = 1024}) == "");
    CHECK(launch_error({.name = "n", .blocks = dim3(1), .threads = 1025}).find("invalid configuration") !=
          std::string::npos);
    CHECK(launch_error({.name = "n", .blocks = dim3(0), .threads = 32}).find("invalid configuration") !=
          std::string::npos);
    CHECK(launch_error({.name = "n", .blocks = dim3(1, 65536), .threads = 32}).find("invalid configuration") !=
          std::string::npos);
    CHECK(launch_error({.name = "n", .blocks = dim3(1), .threads = 32, .shared_bytes = 227 * 1024}) == "");
    CHECK(launch_error({.name = "n", .blocks = dim3(1), .threads = 32, .shared_bytes = 227 * 1024 + 1})
              .find("invalid argument") != std::string::npos);
    CHECK(launch_error({.name = "n", .blocks = dim3(6), .threads = 32, .cluster = 2}) == "");
    CHECK(launch_error({.name = "n", .blocks = dim3(5), .threads = 32, .cluster = 2}).find("invalid configuration") !=
          std::string::npos);
    // The error has the kernel's name and this line's file.
    CHECK(launch_error({.name = "n", .blocks = dim3(1), .threads = 1025}).find("kernel n failed") == 0);
    CHECK(launch_error({.name = "n", .blocks = dim3(1), .threads = 1025}).find("test_faults.cpp:") !=
          std::string::npos);
    // More than 48 KiB of shared memory must be requested.
    cudaLaunchConfig_t config{.gridDim = 1, .blockDim = 32, .dynamicSmemBytes = 49 * 1024};
    CHECK(cudaLaunchKernelEx(&config, big_kernel, Nothing{}) == cudaErrorInvalidValue);
    // A kernel that uses more than its launch provides.
    CHECK(sentences(faults_of(big_kernel, {.name = "b", .blocks = dim3(1), .threads = 32, .shared_bytes = 4000},
                              Nothing{})) == "");
    CHECK(sentences(
              faults_of(big_kernel, {.name = "b", .blocks = dim3(1), .threads = 32, .shared_bytes = 3999}, Nothing{}))
              .find("4000 bytes, its launch gives 3999") != std::string::npos);
}

TEST_CASE("a launch with more threads than the kernel's bound", "[simt]") {
    if (is_clang()) return;  // clang does not record it
    CHECK(launch_error({.name = "n", .blocks = dim3(1), .threads = 96}, bounded_kernel<96>) == "");
    CHECK(launch_error({.name = "n", .blocks = dim3(1), .threads = 97}, bounded_kernel<96>)
              .find("kernel n failed: 97 threads in a block, the kernel's launch bound is 96") == 0);
    CHECK(launch_error({.name = "n", .blocks = dim3(1), .threads = 1024}, bounded_kernel<1024>) == "");
    CHECK(launch_error({.name = "n", .blocks = dim3(1), .threads = 1024}, bounded_kernel<512>).find("is 512") !=
          std::string::npos);
}

TEST_CASE("a block has the shared memory of the simulated GPU", "[simt]") {
    const simt::WithOptions sm_89(simt::with_capability(89));
    CHECK(launch_error({.name = "n", .blocks = dim3(1), .threads = 32, .shared_bytes = 99 * 1024}) == "");
    CHECK(launch_error({.name = "n", .blocks = dim3(1), .threads = 32, .shared_bytes = 99 * 1024 + 1})
              .find("invalid argument") != std::string::npos);
    int bytes = 0;
    CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0) == cudaSuccess);
    CHECK(bytes == 99 * 1024);
}
