// Which implementation computes matrix products on this machine: decided by the CPU's features, never by timing, so
// that equal machines give equal bits.
#include "kernels/base/check.h"
#include "kernels/cpu/lanes.h"
#include "kernels/cpu/onednn.h"

static const char* name_of(ProductPath path) {
    switch (path) {
        case ProductPath::library: return "oneDNN (AMX)";
        case ProductPath::bf16_panels: return "bf16 panels (AVX512-BF16)";
        case ProductPath::float_panels: break;
    }
    return "fp32 panels";
}

// Panels of bf16 have AVX512-BF16's dot product of two in the place of a multiply-add. Where that runs at the same rate
// (Zen 5: 1000 for 500 GFLOP/s on two cores) products take little more than half the time; where it runs at half the
// rate nothing is lost. Without the instruction they take more operations than panels of float.
ProductPath fastest_product_path(Dtype dtype) {
    if (dtype != Dtype::bf16) return ProductPath::float_panels;
    if (library_has_matrix_instructions()) return ProductPath::library;
    return kTargetMultipliesBf16 ? ProductPath::bf16_panels : ProductPath::float_panels;
}

std::string matmul_path() {
    const auto who = [](Dtype dtype) { return name_of(fastest_product_path(dtype)); };
    return format("fp32: %s, bf16: %s, fp16: %s", who(Dtype::fp32), who(Dtype::bf16), who(Dtype::fp16));
}
