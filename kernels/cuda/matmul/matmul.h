// Settings and state of the CUDA GEMMs, for the host. Includes no CUDA header. One host thread issues the GEMMs.
//
// The cuBLASLt algorithm of a GEMM determines its bits. It is chosen once per GEMM (types, sizes, layout, epilogue,
// accumulation, alignment): the library's first proposal, or with autotuning the fastest of its proposals on this GPU.
// Timings vary, so two autotuned runs give the same bits only if they use the same choices, from a shared cache file or
// from the checkpoint (text of matmul_choices(), passed to load_matmul_choices() before a resumed run's first GEMM),
// which also works after the loss of the cache. Choices are valid for one GPU name and one version of cuBLASLt.
// Algorithms without a fixed order of sums are used only if a plain GEMM has no other.
#pragma once

#include <cstddef>
#include <string>

// Makes GEMMs of float storage round their operands to TF32 (10 fraction bits). Off by default; sums stay float.
void set_tf32(bool on);

// Enables autotuning: at a GEMM's first use, time the proposals on random numbers in separate memory. Otherwise use the
// first proposal. Off by default.
void set_matmul_tuning(bool on);

// Sets the file for timed choices and reads it. The file is replaced atomically whenever a GEMM is timed. Processes on
// one machine may share it: one process times a GEMM, the others wait and use its choice. "", the default, means no
// file. A file that is damaged or from another GPU or version is ignored and replaced; cuda_matmul_path() reports it.
void set_matmul_cache(const std::string& path);

// Returns all choices made so far, as a text of a few kilobytes.
std::string matmul_choices();

// Uses these choices, even for GEMMs that have already run. Returns why they are ignored, or an empty string.
std::string load_matmul_choices(const std::string& text);

// Returns one line for the log: the GEMM implementation and settings, and why choices were ignored or the file could
// not be written.
std::string cuda_matmul_path();

// Internal device memory of GEMMs per stream: the library's workspace, and float sums for kernels that replace a
// missing epilogue of the library. Allocated at first use and never freed.
inline constexpr size_t kMatmulWorkspaceBytes = size_t(64) << 20;
inline constexpr size_t kMatmulSumsBytes = size_t(16) << 20;
