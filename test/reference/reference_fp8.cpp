// Conversion to 8 bits (Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433, table 1).
#include "kernels/base/check.h"
#include "kernels/numeric.h"
#include "kernels/ops.h"
#include "test/reference/reference.h"

namespace ref {

Fp8Format fp8_format(Dtype type) {
    if (type == Dtype::e4m3) return {3, 7, 448};
    require(type == Dtype::e5m2, "%s is not a type of 8 bits", name_of(type));
    return {2, 15, 57344};
}

double fp8_magnitude(const Fp8Format& format, int bits) {
    const int exponent = bits >> format.fraction_bits, fraction = bits & ((1 << format.fraction_bits) - 1);
    const double digits = fraction + (exponent > 0 ? 1 << format.fraction_bits : 0);
    return std::ldexp(digits, std::max(exponent, 1) - format.bias - format.fraction_bits);
}

int nearest_fp8(const Fp8Format& format, double x) {
    const double magnitude = std::min(std::abs(x), format.largest);
    int best = 0;
    for (int bits = 1; bits < 128 && fp8_magnitude(format, bits) <= format.largest; bits++) {
        const double before = std::abs(fp8_magnitude(format, best) - magnitude);
        const double now = std::abs(fp8_magnitude(format, bits) - magnitude);
        if (now < before || (now == before && bits % 2 == 0)) best = bits;
    }
    return best + (std::signbit(x) ? 128 : 0);
}

void abs_max(const ops::AbsMax& op) {
    double most = 0;
    for (size_t i = 0; i < op.count; i++) {
        const double x = std::abs(element(op.inp, i));
        if (!(x <= most)) most = x;
        if (std::isnan(most)) break;
    }
    *op.out = float(most);
}

void quantize(const ops::Quantize& op) {
    const View one = op.out ? op.out : op.transposed;
    const Fp8Format format = fp8_format(one.dtype);
    int exponent = *op.amax == 0 ? 0 : -126;
    while (std::ldexp(*op.amax, -exponent) > format.largest) exponent++;
    *op.scale = float(std::ldexp(1, exponent));
    for (int row = 0; row < op.rows; row++)
        for (int col = 0; col < op.cols; col++) {
            const size_t i = size_t(row) * size_t(op.cols) + size_t(col);
            const double number = std::ldexp(element(op.inp, i), -exponent);
            const auto bits = uint8_t(nearest_fp8(format, number));
            if (op.saturated && std::abs(number) > format.largest) (*op.saturated)++;
            if (op.out) op.out.as<uint8_t>()[i] = bits;
            if (op.transposed) op.transposed.as<uint8_t>()[size_t(col) * size_t(op.rows) + size_t(row)] = bits;
        }
}

}  // namespace ref
