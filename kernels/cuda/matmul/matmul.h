// Settings and state of the CUDA GEMMs, for the host. Includes no CUDA header. One host thread issues the GEMMs.
//
// The cuBLASLt algorithm of a GEMM determines its bits. Each GEMM (types, sizes, layout, epilogue, accumulation,
// alignment) uses the library's first proposal with a fixed order of sums, so the same GPU and version of the library
// give the same bits. Choices, made by timing once, replace first proposals. Algorithms without a fixed order are used
// only if a plain GEMM has no other.
#pragma once

#include <cstddef>
#include <string>

struct MatmulSettings {
    bool tf32 = false;  // GEMMs of float storage round their operands to TF32 (10 fraction bits); sums are float
    bool gelu_epilogue = false;  // 16-bit GEMMs with a bias may apply gelu_new to their sums before they are rounded
    bool time_gemms = false;  // choose the fastest proposal at a GEMM's first use; overwrites its outputs several times
};
MatmulSettings& matmul_settings();

// Returns the choices of all GEMMs so far as text, and uses such a text for later GEMMs; "" removes all choices. Fails
// with Exit::config if the text was made with another GPU or version of the library.
std::string matmul_choices();
void use_matmul_choices(const std::string& text);

// Returns one line for the log: the GEMM implementation and settings, and how many GEMMs have no algorithm with a fixed
// order of sums.
std::string cuda_matmul_path();

// Internal device memory of GEMMs per stream: the library's workspace, and float sums for kernels that replace a
// missing epilogue of the library. Allocated at first use and never freed.
inline constexpr size_t kMatmulWorkspaceBytes = size_t(64) << 20;
inline constexpr size_t kMatmulSumsBytes = size_t(16) << 20;
