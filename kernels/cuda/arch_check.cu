// Host code; no kernel.
#include <cmath>

#include "kernels/base/check.h"
#include "kernels/cuda/arch_check.h"

namespace {

std::vector<std::byte> fetch(const CheckArray& array) {
    std::vector<std::byte> bytes(array.count * size_of(array.dtype));
    copy_to_host(bytes.data(), array.memory.data(), bytes.size(), {});
    synchronize({});
    return bytes;
}

template <class T> void fill(std::vector<std::byte>& bytes, uint64_t seed) {
    T* const values = reinterpret_cast<T*>(bytes.data());
    for (size_t i = 0; i < bytes.size() / sizeof(T); i++)
        values[i] = from_float<T>(2 * uniform_from_bits(philox(seed, 0, i).word[0]) - 1);
}

}  // namespace

CheckArray random_array(Dtype dtype, size_t count, uint64_t seed) {
    std::vector<std::byte> bytes(count * size_of(dtype));
    switch (dtype) {
        case Dtype::fp32: fill<float>(bytes, seed); break;
        case Dtype::bf16: fill<bf16>(bytes, seed); break;
        case Dtype::fp16: fill<fp16>(bytes, seed); break;
        default: fail(Exit::internal, "random_array: %s", name_of(dtype));
    }
    CheckArray array(dtype, count);
    copy_to_device(array.memory.data(), bytes.data(), bytes.size(), {});
    return array;
}

DeviceBuffer device_ints(const std::vector<int>& values) {
    DeviceBuffer memory(values.size() * sizeof(int));
    copy_to_device(memory.data(), values.data(), memory.bytes(), {});
    return memory;
}

std::string difference(const std::string& name, const CheckArray& actual, const CheckArray& expected, double relative,
                       double absolute) {
    const std::vector<std::byte> ours = fetch(actual), theirs = fetch(expected);
    double most = 1;  // deviations are measured in allowed ones
    size_t at = actual.count;
    for (size_t i = 0; i < actual.count; i++) {
        const double a = element({ours.data(), actual.dtype}, i), e = element({theirs.data(), expected.dtype}, i);
        const double deviation = std::abs(a - e) / (relative * std::abs(e) + absolute);
        if (deviation <= most) continue;
        if (!(deviation < INFINITY)) {  // or not a number
            at = i;
            break;
        }
        most = deviation, at = i;
    }
    if (at == actual.count) return "";
    return format("%s: element %zu is %g, but %g with the portable kernel", name.c_str(), at,
                  element({ours.data(), actual.dtype}, at), element({theirs.data(), expected.dtype}, at));
}
