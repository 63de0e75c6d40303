// GEMMs with cuBLASLt. Each GEMM of the model is described once and its algorithms are proposed once; both are cached.
// matmul.h describes the effect on the bits of results.
//
// The library is column-major: our row-major (rows, cols) matrix is its (cols, rows) matrix with leading dimension
// cols. This header uses the library's convention: d (m, n) = op(a) (m, k) op(b) (k, n). Matrices have no gaps, op
// transposes or does nothing, sums are float.
#pragma once

#include "kernels/device.h"
#include "kernels/tensor.h"

// The library's operation on the sums before it stores them. Reads bias and aux along m.
enum class Epilogue : int {
    none,
    bias,           // d = sums + bias (m)
    dgelu,          // d = sums gelu'(aux)
    gelu,           // d = gelu(sums + bias (m)), aux = sums + bias; the bits of d differ from activation_forward's
    bias_gradient,  // also bias (n) = sums of op(b) along k, in d's type
};

struct Product {
    View d;       // (m, n), = or += by `accumulate`
    ConstView a;  // (m, k), or (k, m) with transpose_a
    ConstView b;  // (k, n), or (n, k) with transpose_b
    void* bias = nullptr;  // of d's type
    void* aux = nullptr;   // (m, n), of d's type
    bool transpose_a = false, transpose_b = false;
    int m, n, k;
    Epilogue epilogue = Epilogue::none;
    bool accumulate = false;
};

// Queues the GEMM on the stream. Returns false and queues nothing if the library does not support it for these types,
// sizes and addresses.
bool multiply(const Product& product, Stream stream);

// The same for a GEMM without an epilogue. Fails with Exit::os if the library does not support it.
void multiply_plain(const Product& product, Stream stream);

// Returns a float buffer of kMatmulSumsBytes for the stream, for sums that one of our kernels finishes.
float* matmul_sums(Stream stream);
