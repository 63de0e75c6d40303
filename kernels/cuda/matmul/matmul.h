// Settings and state of CUDA's matrix products, for the host. No CUDA include. One host thread drives the products.
//
// Which algorithm cuBLASLt uses for a product decides its bits. It is chosen once per product (types, sizes, layout,
// epilogue, = or +=, alignment) and kept: without tuning the library's first proposal, with tuning the fastest of its
// proposals on this GPU. Timings differ from run to run, so a tuned run gives the bits of another only if both use the
// same choices: by the same cache file, or, which also survives a lost cache, by the text of matmul_choices() in the
// checkpoint and load_matmul_choices() before a resumed run's first product. Choices hold for one GPU name and one
// version of cuBLASLt. Algorithms that add parts of a sum in an order of their own are never used.
#pragma once

#include <cstddef>
#include <string>

// Products of float storage round their factors to TF32 (10 fraction bits). Off by default; the sum stays float.
void set_tf32(bool on);

// Whether proposals are timed (once, at a product's first use, on random numbers in memory of the tuner's own) or the
// first one is taken. Off by default.
void set_matmul_tuning(bool on);

// The file that keeps timed choices: read now, added to whenever a product is timed, replaced as a whole. Processes on
// one machine may share it: one of them times a product, the others wait and take its choice. "" for no file, the
// default. A file that is damaged or of another GPU or version is ignored and replaced; cuda_matmul_path() says so.
void set_matmul_cache(const std::string& path);

// All choices made so far, as text of a few kilobytes.
std::string matmul_choices();

// Adopts choices, also for products that were used before. Returns why they are ignored, or an empty string.
std::string load_matmul_choices(const std::string& text);

// What carries out products and how, and why choices were ignored or the file could not be written: one line for the
// log.
std::string cuda_matmul_path();

// Device memory that products take for themselves, for each stream: the library's workspace, and where sums stay in
// float until they are finished because the library lacks an epilogue. Allocated at first use, for good.
inline constexpr size_t kMatmulWorkspaceBytes = size_t(64) << 20;
inline constexpr size_t kMatmulSumsBytes = size_t(16) << 20;
