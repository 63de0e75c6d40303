// Computes GEMM tiles with oneDNN on the calling thread, in the type of the operands with a float result.
#pragma once

#include "kernels/cpu/gemm.h"

// Whether the library has matrix instructions (AMX) for bf16 on this CPU.
bool library_has_matrix_instructions();

// Creates the library's primitive for a tile shape if necessary and returns its scratch size in bytes. Call it for
// every shape before the threads start. Fails with Exit::internal if the library does not support the product.
template <class T> size_t library_scratch_bytes(const Product<T>& product, const Tile& tile);

// Computes a tile of the product. Returns false if memory is insufficient.
template <class T> bool library_product(const Product<T>& product, const Tile& tile, std::byte* scratch);
