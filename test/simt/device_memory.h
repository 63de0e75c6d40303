// Simulated device memory: each allocation ends at a page that cannot be touched, and addresses are never used again,
// so that reading or writing past it, before it, or after it was freed is a fault. Fresh memory is full of NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace simt {

// What the simulated device has.
inline constexpr size_t kDeviceBytes = size_t(16) << 30;

// Null if there is not enough. Aligned to 256 bytes.
void* allocate_device(size_t bytes);
// False if it is not the address of an allocation.
bool free_device(void* memory);
size_t used_device_bytes();

// Allocations fail where more would be in use; kDeviceBytes at first.
void limit_device_bytes(size_t bytes);

// Whether all of it lies in one allocation.
bool is_device_memory(const void* address, size_t bytes);

// What is known of an address that could not be accessed.
std::string describe_address(uintptr_t address);

// Records a fault for each allocation whose surroundings were written.
void check_device_memory();

}  // namespace simt
