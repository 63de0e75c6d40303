// The choice of the GEMM implementation. It depends on the CPU's features and not on timings, so that equal machines
// give equal bits.
#include "kernels/base/check.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/onednn.h"
#include "kernels/numeric.h"

static const char* name_of(ProductPath path) {
    constexpr const char* kNames[] = {"fp32 panels", "bf16 panels (AVX512-BF16)", "oneDNN (AMX)"};
    return kNames[int(path)];
}

// bf16 panels use the pairwise dot product of AVX512-BF16 instead of multiply-adds. If it runs at the same rate (Zen 5:
// 1000 instead of 500 GFLOP/s on two cores), GEMMs take little more than half the time; at half the rate they are not
// slower. Without the instruction, bf16 panels need more operations than float panels.
ProductPath fastest_product_path(Dtype dtype) {
    if (dtype != Dtype::bf16) return ProductPath::float_panels;
    if (library_has_matrix_instructions()) return ProductPath::library;
    return kTargetMultipliesBf16 ? ProductPath::bf16_panels : ProductPath::float_panels;
}

std::string matmul_path() {
    const auto who = [](Dtype dtype) { return name_of(fastest_product_path(dtype)); };
    return format("fp32: %s, bf16: %s, fp16: %s", who(Dtype::fp32), who(Dtype::bf16), who(Dtype::fp16));
}
