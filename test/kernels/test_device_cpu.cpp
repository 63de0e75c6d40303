// The CPU as a device: its description and its memory.
#include <algorithm>

#include "kernels/comm.h"
#include "test/support/expect_error.h"

TEST_CASE("device memory is aligned, zero and writable to its last byte", "[cpu]") {
    for (size_t bytes : {size_t(1), size_t(4097), (size_t(1) << 21) + 1}) {
        DeviceBuffer buffer(bytes), neighbour(bytes);
        unsigned char* memory = static_cast<unsigned char*>(buffer.data());
        CHECK(reinterpret_cast<uintptr_t>(memory) % 256 == 0);
        size_t not_zero = 0;
        for (size_t i = 0; i < bytes; i++) not_zero += memory[i] != 0;
        CHECK(not_zero == 0);
        std::fill_n(memory, bytes, 0xff);
        CHECK(static_cast<unsigned char*>(neighbour.data())[0] == 0);
    }
}

TEST_CASE("running out of memory is reported in one sentence with the number of bytes", "[cpu]") {
    for (size_t bytes : {size_t(1) << 46, SIZE_MAX - 5})
        expect_error(Exit::os, {"memory", std::to_string(bytes)}, [&] { device_alloc(bytes); });
}

TEST_CASE("the device describes itself", "[cpu]") {
    const DeviceInfo info = device_info();
    CHECK(info.threads >= 1);
    CHECK(info.free_bytes > size_t(1) << 28);
    CHECK(info.name.find(std::to_string(info.threads) + " thread") != std::string::npos);
    CHECK(info.name.find(':') == std::string::npos);
    for (const char* precision : {"fp32: ", "bf16: ", "fp16: "})
        CHECK(info.matmul_path.find(precision) != std::string::npos);
}

TEST_CASE("a single rank never waits", "[cpu]") {
    const Comm comm = comm_single();
    CHECK(comm.rank == 0);
    CHECK(comm.size == 1);
    double values[] = {1, 2};
    wait(all_reduce_sum(values, 2, comm, Stream()), comm, Stream());
    CHECK(values[0] == 1);
    CHECK(values[1] == 2);
    float floats[] = {3, 4};
    reduce_scatter_sum({.out = floats, .scratch = nullptr, .inp = floats, .count = 2}, comm, Stream());
    all_gather(floats, floats, sizeof(floats), comm, Stream());
    CHECK(floats[1] == 4);
    CHECK(comm_totals(comm).bytes_sent == 0);
    CHECK(all_reduce_max(-3, comm) == -3);
}
