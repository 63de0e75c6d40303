// Simulated device memory: each allocation ends at a page that cannot be touched, and addresses are never used again,
// so that reading or writing past it, before it, or after it was freed is a fault. Fresh memory is full of NaN.
//
// Host code can never access the addresses that cudaMalloc() gives. Kernels and copies access the memory at on_device()
// of them, a second range of addresses. A launch puts these into the kernel's argument, and refuses an argument that
// holds an address of host memory.
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

// Whether all of it lies in one allocation, by the host's address.
bool is_device_memory(const void* address, size_t bytes);

// Where the device accesses it; an address that is none of device memory stays.
char* on_device(const void* address);
// Replaces the addresses of device memory in the bytes of a kernel's argument by those where the device accesses it.
// Returns an address of host memory that stands there and that allow_on_device() does not name, 0 if there is none.
uintptr_t give_to_device(void* argument, size_t bytes);
void allow_on_device(const void* memory, size_t bytes);
void forbid_on_device(const void* memory);

// What is known of an address that could not be accessed.
std::string describe_address(uintptr_t address);

// Records a fault for each allocation whose surroundings were written.
void check_device_memory();

}  // namespace simt
