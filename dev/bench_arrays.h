// Device arrays with random content, as in training: GEMMs of zeros are faster.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "kernels/ops.h"

// Arrays that are freed together.
class Arrays {
public:
    template <class T> T* make(size_t count, float deviation = 1.0f) {
        T* values = static_cast<T*>(make_scratch(count * sizeof(T)));
        const size_t fresh = std::min(count, kNoise);
        ops::normal_fill({noise(), fresh, 7, next_++, deviation, 0}, Stream{});
        ops::cast(ops::Cast{values, noise(), fresh}, Stream{});
        repeat(values, fresh, count);
        return values;
    }
    // Squares of random numbers, half of them 0, like the output of relu2.
    template <class T> T* make_relu2(size_t count) {
        std::mt19937 random(7);
        std::normal_distribution<float> normal;
        std::vector<T> squares(std::min(count, kNoise));
        for (T& value : squares) {
            const float x = std::max(normal(random), 0.0f);
            value = from_float<T>(x * x);
        }
        T* values = static_cast<T*>(make_scratch(count * sizeof(T)));
        copy_to_device(values, squares.data(), squares.size() * sizeof(T), Stream{});
        synchronize(Stream{});
        repeat(values, squares.size(), count);
        return values;
    }
    template <class T> T* put(const std::vector<T>& host) {
        void* values = make_scratch(host.size() * sizeof(T));
        copy_to_device(values, host.data(), host.size() * sizeof(T), Stream{});
        synchronize(Stream{});
        return static_cast<T*>(values);
    }
    // Zeros.
    void* make_scratch(size_t bytes) {
        buffers_.emplace_back(std::max<size_t>(bytes, 1));
        return buffers_.back().data();
    }

private:
    // Repeated to fill an array.
    static constexpr size_t kNoise = 1 << 16;
    float* noise() {
        if (!noise_.data()) noise_ = DeviceBuffer(kNoise * sizeof(float));
        return static_cast<float*>(noise_.data());
    }

    // Fills an array with copies of its first `done` elements.
    template <class T> static void repeat(T* values, size_t done, size_t count) {
        for (; done < count; done += std::min(done, count - done))
            copy_on_device(values + done, values, std::min(done, count - done) * sizeof(T), Stream{});
        synchronize(Stream{});
    }

    std::vector<DeviceBuffer> buffers_;
    DeviceBuffer noise_;
    uint32_t next_ = 0;
};
