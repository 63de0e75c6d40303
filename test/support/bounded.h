// A number with a bound on the error that float arithmetic makes in it, for tolerances of formulas.
#pragma once

#include "test/support/tolerance.h"

// Every operation adds one rounding to the errors of its operands, to first order.
struct Bounded {
    double value, error = 0;

    Bounded(double exact = 0) : value(exact) {}
    static Bounded rounded(double value, double error) {
        Bounded result(value);
        result.error = error + kRoundoff * std::abs(value);
        return result;
    }
};
inline Bounded operator-(Bounded a) { return Bounded::rounded(-a.value, a.error); }
inline Bounded operator+(Bounded a, Bounded b) { return Bounded::rounded(a.value + b.value, a.error + b.error); }
inline Bounded operator-(Bounded a, Bounded b) { return Bounded::rounded(a.value - b.value, a.error + b.error); }
inline Bounded operator*(Bounded a, Bounded b) {
    return Bounded::rounded(a.value * b.value, std::abs(a.value) * b.error + std::abs(b.value) * a.error);
}
inline Bounded operator/(Bounded a, Bounded b) {
    const double quotient = a.value / b.value;
    return Bounded::rounded(quotient, (a.error + std::abs(quotient) * b.error) / std::abs(b.value));
}
inline Bounded sqrt(Bounded a) {
    const double root = std::sqrt(a.value);
    return Bounded::rounded(root, root > 0 ? a.error / (2 * root) : std::sqrt(a.error));
}
// Unknown, within [-1, 1], if the sign of the exact value is.
inline Bounded sign(Bounded a) {
    Bounded result(double(a.value > 0) - double(a.value < 0));
    if (std::abs(a.value) <= a.error) result.error = 2;
    return result;
}
