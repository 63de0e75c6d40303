// Tiles of matrix products by oneDNN, on the calling thread, in the type of the operands with a float result.
#pragma once

#include "kernels/cpu/gemm.h"

// Whether the library multiplies bf16 by matrix instructions (AMX) on this CPU.
bool library_has_matrix_instructions();

// Makes the library's primitive for a shape of tile, once, and returns the bytes of scratch that it needs. To be called
// for every shape before the threads start. Fails with Exit::internal where the library has no such product.
template <class T> size_t library_scratch_bytes(const Product<T>& product, const Tile& tile);

// tile = its part of the product. Returns false if there was not enough memory.
template <class T> bool library_product(const Product<T>& product, const Tile& tile, std::byte* scratch);
