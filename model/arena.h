// One allocation for all device memory of a rank, one for its host memory, and their plan: the code that assigns memory
// runs once without memory to compute the sizes, then again over the real allocations.
#pragma once

#include "kernels/tensor.h"

struct MemoryRegion {
    const char* category;  // "weights", "activations", ...: a row in the plan's table
    std::string name;
    size_t bytes;  // rounded up to the arena's alignment
    bool is_on_host = false;
};

class Arena {
public:
    // Without memory, take() returns null and only counts.
    Arena() = default;
    // `host`: memory of host_alloc(), if an array is on the host.
    explicit Arena(std::byte* device, std::byte* host = nullptr) : device_{device}, host_{host} {}

    // Returns `count` elements for `name`, aligned to 256 bytes.
    template <class T> T* take(const char* category, std::string name, size_t count, bool is_on_host = false) {
        Memory& memory = is_on_host ? host_ : device_;
        size_t bytes = (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
        T* where = memory.begin ? reinterpret_cast<T*>(memory.begin + memory.used) : nullptr;
        regions_.push_back({category, std::move(name), bytes, is_on_host});
        memory.used += bytes;
        return where;
    }
    // The same for a storage type given at run time.
    View take(const char* category, std::string name, size_t count, Dtype dtype, bool is_on_host = false) {
        return {take<std::byte>(category, std::move(name), count * size_of(dtype), is_on_host), dtype};
    }
    const std::vector<MemoryRegion>& regions() const { return regions_; }
    bool has_memory() const { return device_.begin || host_.begin; }

private:
    static constexpr size_t kAlignment = 256;
    struct Memory {
        std::byte* begin = nullptr;
        size_t used = 0;
    };
    Memory device_, host_;
    std::vector<MemoryRegion> regions_;
};
