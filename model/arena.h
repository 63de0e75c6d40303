// One allocation for all device memory of a rank, and its plan: the code that assigns memory runs once without memory
// to compute the sizes, then again over the real allocation.
#pragma once

#include "kernels/tensor.h"

struct MemoryRegion {
    const char* category;  // "weights", "activations", ...: a row in the plan's table
    std::string name;
    size_t bytes;  // rounded up to the arena's alignment
};

class Arena {
public:
    // Without memory, take() returns null and only counts.
    Arena() = default;
    explicit Arena(std::byte* memory) : memory_(memory) {}

    // Returns `count` elements for `name`, aligned to 256 bytes.
    template <class T> T* take(const char* category, std::string name, size_t count) {
        size_t bytes = (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
        T* where = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
        regions_.push_back({category, std::move(name), bytes});
        used_ += bytes;
        return where;
    }
    // The same for a storage type given at run time.
    View take(const char* category, std::string name, size_t count, Dtype dtype) {
        return {take<std::byte>(category, std::move(name), count * size_of(dtype)), dtype};
    }
    size_t bytes() const { return used_; }
    const std::vector<MemoryRegion>& regions() const { return regions_; }

private:
    static constexpr size_t kAlignment = 256;
    std::byte* memory_ = nullptr;
    size_t used_ = 0;
    std::vector<MemoryRegion> regions_;
};
