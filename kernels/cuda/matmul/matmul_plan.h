// Matrix products by cuBLASLt: each product that the model has is described once, its algorithm chosen once, and both
// kept. matmul.h describes the effect on the bits of results.
//
// The library reads memory column by column, so what is a row-major (rows, cols) matrix to us is a (cols, rows) matrix
// with leading dimension cols to it. This header uses the library's convention: d (m, n) = op(a) (m, k) op(b)
// (k, n), all matrices without gaps, op a transposition or nothing, sums in float.
#pragma once

#include "kernels/device.h"
#include "kernels/numeric.h"

// The library's operation on the sums before it stores them. Bias and aux are read along m.
enum class Epilogue : int {
    none,
    bias,           // d = sums + bias (m)
    dgelu,          // d = sums gelu'(aux)
    gelu,           // d = gelu(sums + bias (m)), aux = sums + bias; measured only: not activation_forward's bits
    bias_gradient,  // besides d: bias (n) = the sums of op(b) along k, of d's type
};

struct Product {
    void* d;        // (m, n), = or += by `accumulate`
    const void* a;  // (m, k), or (k, m) with transpose_a
    const void* b;  // (k, n), or (n, k) with transpose_b
    void* bias = nullptr;
    void* aux = nullptr;  // (m, n), of d's type
    Dtype in, out;        // type of a and b; of d, bias and aux
    bool transpose_a, transpose_b;
    int m, n, k;
    Epilogue epilogue = Epilogue::none;
    bool accumulate = false;
};

// Queues the product on the stream. False, and nothing queued, if the library has no such product for these types,
// sizes and addresses, or if it was timed to be slower than a plain product and a separate kernel for the epilogue.
bool multiply(const Product& product, Stream stream);

// The same for a product without an epilogue. Fails with Exit::os if the library has no such product.
void multiply_plain(const Product& product, Stream stream);

// kMatmulSumsBytes of float numbers on the stream, for sums that are finished by a kernel of ours.
float* matmul_sums(Stream stream);
