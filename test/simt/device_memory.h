// Simulated device memory: each allocation ends at an inaccessible page, and addresses are never reused, so that any
// access past it, before it, or after it was freed is a fault. Fresh memory is full of NaN.
//
// Host code cannot access the addresses that cudaMalloc() returns. Kernels and copies access the memory through a
// second range of addresses, on_device() of the first. A launch translates the kernel's argument to it, and rejects an
// argument that holds an address of host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace simt {

// Capacity of the simulated device: 16 GiB, or the MiB in the environment variable SIMULATED_MEMORY.
size_t device_bytes();

// Null if there is not enough. Aligned to 256 bytes.
void* allocate_device(size_t bytes);
// False if the address is not an allocation's.
bool free_device(void* memory);
size_t used_device_bytes();

// Whether the whole range lies in one allocation, by the host's address.
bool is_device_memory(const void* address, size_t bytes);

// The device's address of it; an address outside device memory is returned unchanged.
char* on_device(const void* address);
// Replaces host addresses of device memory in the bytes of a kernel's argument by device addresses. Returns an address
// of host memory in it that allow_on_device() does not allow, or 0 if there is none.
uintptr_t give_to_device(void* argument, size_t bytes);
void allow_on_device(const void* memory, size_t bytes);
void forbid_on_device(const void* memory);

// Describes an address that could not be accessed.
std::string describe_address(uintptr_t address);

// Records a fault for each allocation with writes around it.
void check_device_memory();

}  // namespace simt
