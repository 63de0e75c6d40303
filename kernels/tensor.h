// Arrays in device memory with a runtime storage type. Ops take them as arguments, so code above the launchers needs no
// templates over the type. Such templates start inside kernels/, where a launcher calls dispatch().
#pragma once

#include <string>
#include <vector>

#include "kernels/device.h"
#include "kernels/numeric.h"  // IWYU pragma: export

// An array that an op writes. A view is small and passed by value. The op's member documents the shape.
struct View {
    void* data = nullptr;  // device memory; null for an absent optional array
    Dtype dtype = Dtype::fp32;
    const float* scale = nullptr;  // device memory: the numbers are the elements times this; null: 1
    float* amax = nullptr;         // device memory, for the largest magnitude, by the ops that say so; null: not wanted

    View() = default;
    HOST_DEVICE View(void* memory, Dtype type, const float* of_array = nullptr)
        : data(memory), dtype(type), scale(of_array) {}
    HOST_DEVICE View(std::nullptr_t) {}
    template <class T> HOST_DEVICE View(T* values) : data(values), dtype(dtype_of<T>) {}

    // The elements with their type. The caller must have dispatched on `dtype`.
    template <class T> HOST_DEVICE T* as() const { return static_cast<T*>(data); }
    // The array starting at element `first`. An absent array stays absent.
    HOST_DEVICE View from(size_t first) const {
        View rest = *this;
        rest.data = data ? static_cast<std::byte*>(data) + first * size_of(dtype) : nullptr;
        return rest;
    }
    HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

// An array that an op reads.
struct ConstView {
    const void* data = nullptr;
    Dtype dtype = Dtype::fp32;
    const float* scale = nullptr;
    const float* amax = nullptr;

    ConstView() = default;
    HOST_DEVICE ConstView(const void* memory, Dtype type, const float* of_array = nullptr)
        : data(memory), dtype(type), scale(of_array) {}
    HOST_DEVICE ConstView(std::nullptr_t) {}
    HOST_DEVICE ConstView(View view) : data(view.data), dtype(view.dtype), scale(view.scale), amax(view.amax) {}
    template <class T> HOST_DEVICE ConstView(const T* values) : data(values), dtype(dtype_of<T>) {}

    template <class T> HOST_DEVICE const T* as() const { return static_cast<const T*>(data); }
    HOST_DEVICE ConstView from(size_t first) const {
        ConstView rest = *this;
        rest.data = data ? static_cast<const std::byte*>(data) + first * size_of(dtype) : nullptr;
        return rest;
    }
    HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

// Element i of an array in host memory, without its scale.
inline double element(ConstView array, size_t i) {
    switch (array.dtype) {
        case Dtype::fp32: return array.as<float>()[i];
        case Dtype::bf16: return to_float(array.as<bf16>()[i]);
        case Dtype::fp16: return to_float(array.as<fp16>()[i]);
        case Dtype::fp64: return array.as<double>()[i];
        case Dtype::e4m3: return to_float(array.as<e4m3>()[i]);
        case Dtype::e5m2: return to_float(array.as<e5m2>()[i]);
    }
    return 0;
}

// Returns the first `count` elements of an array in host memory as floats.
inline std::vector<float> host_floats(ConstView array, size_t count) {
    std::vector<float> values(count);
    for (size_t i = 0; i < count; i++) values[i] = float(element(array, i));
    return values;
}

// The same for an array in device memory. Waits for the device.
inline std::vector<float> floats_of(ConstView array, size_t count) {
    std::vector<std::byte> bytes(count * size_of(array.dtype));
    copy_to_host(bytes.data(), array.data, bytes.size(), Stream{});
    synchronize(Stream{});
    return host_floats({bytes.data(), array.dtype}, count);
}

// Copies `count` floats to the start of an array of fp32 or bf16 in device memory, rounded to nearest even.
inline void set_floats(View array, const float* values, size_t count) {
    if (array.dtype == Dtype::fp32) return copy_to_device(array.data, values, count * sizeof(float), Stream{});
    std::vector<bf16> rounded(count);
    for (size_t i = 0; i < count; i++) rounded[i] = from_float<bf16>(values[i]);
    copy_to_device(array.data, rounded.data(), count * sizeof(bf16), Stream{});
}

// A part of a tensor as a matrix: the first dimension counts its rows, the other dimensions together its columns. A
// scalar has one element.
struct Box {
    size_t row = 0, rows = 0;  // rows [row, row + rows)
    size_t col = 0, cols = 0;
    bool operator==(const Box&) const = default;
    size_t count() const { return rows * cols; }
};

// A tensor with its name in files and the part of it in this process's memory. The model lists its state in this form;
// checkpoints, safetensors files and Hugging Face directories save and load it.
struct NamedTensor {
    std::string name;           // unique in a list: "master.h.0.qkv.weight", "m.wte"
    std::vector<size_t> shape;  // of the whole tensor in the file, outermost first; empty for a scalar
    View values = {};           // device memory of the local elements; null if there are none
    size_t first = 0;           // local elements: [first, first + count) of the flattened tensor, in the device's order
    size_t count = 0;
    bool transposed = false;  // the device stores the two dimensions in reverse order (safetensors files only)
    // If not empty, the local elements are a range of the boxes' elements, box after box and row after row.
    // Safetensors files are only loaded in this way.
    std::vector<Box> boxes = {};
};
