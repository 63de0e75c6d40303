// The guarantees of device.h, on every device.
#include <array>
#include <numeric>

#include "kernels/ops.h"
#include "test/support/expect_error.h"

namespace {

std::vector<unsigned char> bytes_of_pattern(size_t count, unsigned seed) {
    std::vector<unsigned char> bytes(count);
    for (size_t i = 0; i < count; i++) bytes[i] = static_cast<unsigned char>((i * 2654435761u + seed) >> 13);
    return bytes;
}

}  // namespace

TEST_CASE("device memory is aligned and zero", "[device]") {
    for (size_t bytes : {size_t(1), size_t(4097), (size_t(1) << 21) + 1}) {
        DeviceBuffer buffer(bytes), neighbour(bytes);
        CHECK(reinterpret_cast<uintptr_t>(buffer.data()) % 256 == 0);
        std::vector<unsigned char> content(bytes, 1);
        copy_to_host(content.data(), buffer.data(), bytes, Stream());
        synchronize(Stream());
        CHECK(std::accumulate(content.begin(), content.end(), 0) == 0);
    }
}

TEST_CASE("running out of device memory is reported in one sentence with the number of bytes", "[device]") {
    for (size_t bytes : {size_t(1) << 46, SIZE_MAX - 5}) {
        expect_error(Exit::os, {"memory", std::to_string(bytes)}, [&] { device_alloc(bytes); });
        DeviceBuffer after(1000);  // the device remains usable
        CHECK(after.data() != nullptr);
    }
}

// Larger than any staging buffer, odd in size, from and to odd addresses.
TEST_CASE("data copied to the device and back is unchanged", "[device]") {
    for (size_t count : {size_t(1), size_t(255), (size_t(1) << 20) + 3, (size_t(37) << 20) + 5}) {
        const std::vector<unsigned char> sent = bytes_of_pattern(count + 1, unsigned(count));
        std::vector<unsigned char> received(count + 2, 7);
        DeviceBuffer buffer(count + 3);
        unsigned char* device = static_cast<unsigned char*>(buffer.data()) + 3;
        copy_to_device(device, sent.data() + 1, count, Stream());
        copy_to_host(received.data() + 1, device, count, Stream());
        synchronize(Stream());
        CHECK(std::equal(sent.begin() + 1, sent.end(), received.begin() + 1));
        CHECK(received.front() == 7);
        CHECK(received.back() == 7);
    }
}

// Sizes up to and beyond the CPU's block size, odd addresses, in stream order.
TEST_CASE("a copy on the device writes its destination and nothing else", "[device]") {
    for (size_t count : {size_t(1), size_t(4099), (size_t(3) << 20) + 5}) {
        const std::vector<unsigned char> sent = bytes_of_pattern(count, unsigned(count));
        std::vector<unsigned char> received(count + 6);
        DeviceBuffer from(count + 1), to(count + 6);
        unsigned char* source = static_cast<unsigned char*>(from.data()) + 1;
        copy_to_device(source, sent.data(), count, Stream());
        copy_on_device(static_cast<unsigned char*>(to.data()) + 3, source, count, Stream());
        copy_to_host(received.data(), to.data(), count + 6, Stream());
        synchronize(Stream());
        CHECK(std::equal(sent.begin(), sent.end(), received.begin() + 3));
        CHECK(std::accumulate(received.begin(), received.begin() + 3, 0) == 0);
        CHECK(std::accumulate(received.end() - 3, received.end(), 0) == 0);
    }
}

TEST_CASE("recorded work is carried out in every call", "[device]") {
    DeviceBuffer sum(sizeof(float)), term(2 * sizeof(float));
    Recording recording;
    float total = 0;
    for (int i = 1; i <= 5; i++) {
        const float value = float(i);
        copy_to_device(term.data(), &value, sizeof(float), Stream());
        recording.run(Stream(), [&] {
            ops::add({.out = View(sum.data(), Dtype::fp32), .inp = ConstView(term.data(), Dtype::fp32), .count = 1},
                     Stream());
            copy_on_device(static_cast<float*>(term.data()) + 1, sum.data(), sizeof(float), Stream());
        });
        copy_to_host(&total, static_cast<float*>(term.data()) + 1, sizeof(float), Stream());
        synchronize(Stream());
        CHECK(total == float(i * (i + 1) / 2));
    }
}

// From the end of each row of the source to the end of each row of the target.
TEST_CASE("rows are copied", "[device]") {
    struct Case {
        size_t bytes, to_step, from_step, rows;
    };
    for (const auto& [bytes, to_step, from_step, rows] :
         {Case{1, 1, 1, 1}, {6, 6, 20, 300}, {6, 20, 6, 300}, {6, 32, 20, 300}, {4096, 5000, 4096, 9}}) {
        const std::vector<unsigned char> sent = bytes_of_pattern(from_step * rows, unsigned(from_step));
        std::vector<unsigned char> received(to_step * rows + 1), expected(received.size());
        DeviceBuffer from(sent.size()), to(received.size());
        copy_to_device(from.data(), sent.data(), sent.size(), Stream());
        copy_rows_on_device(static_cast<unsigned char*>(to.data()) + to_step - bytes, to_step,
                            static_cast<unsigned char*>(from.data()) + from_step - bytes, from_step, bytes, rows,
                            Stream());
        copy_to_host(received.data(), to.data(), received.size(), Stream());
        synchronize(Stream());
        for (size_t row = 0; row < rows; row++)
            std::copy_n(sent.begin() + ptrdiff_t((row + 1) * from_step - bytes), bytes,
                        expected.begin() + ptrdiff_t((row + 1) * to_step - bytes));
        CHECK(received == expected);
    }
}

// More copies than can be in flight at a time, with work in between: each takes effect at its position in the stream,
// and its source may be overwritten at once.
TEST_CASE("copies and ops on a stream happen in order", "[device]") {
    constexpr size_t kCount = 1000;
    DeviceBuffer buffer(kCount * sizeof(float));
    float* device = static_cast<float*>(buffer.data());
    std::vector<float> before(20), after(20), last(20);
    for (size_t i = 0; i < before.size(); i++) {
        float sent = float(i) + 0.5f;
        copy_to_device(device + i, &sent, sizeof(float), Stream());
        sent = -1;
        copy_to_host(&before[i], device + i, sizeof(float), Stream());
        ops::fill({.out = device, .count = kCount, .value = float(100 + i)}, Stream());
        copy_to_host(&after[i], device + kCount - 1, sizeof(float), Stream());
        copy_to_host(&last[0], device, sizeof(float), Stream());  // all copies have the same target: the last one wins
    }
    synchronize(Stream());
    for (size_t i = 0; i < before.size(); i++) {
        CHECK(before[i] == float(i) + 0.5f);
        CHECK(after[i] == float(100 + i));
    }
    CHECK(last[0] == 119);
}

TEST_CASE("the device has a name and memory", "[device]") {
    const DeviceInfo info = device_info();
    CHECK(!info.name.empty());
    CHECK(info.free_bytes > size_t(1) << 28);
    CHECK(!info.matmul_path.empty());
}
