// One linear layer's three GEMMs on simulated CUDA compared with ref::, for tests of their execution.
#pragma once

#include "kernels/cuda/matmul/matmul.h"
#include "kernels/ops.h"
#include "test/simt/cublas_lt.h"
#include "test/support/device_array.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"

// Resets the GEMM settings when the scope ends.
struct WithDefaults {
    simt::WithCublasLt library;
    ~WithDefaults() {
        matmul_settings() = {};
        use_matmul_choices("");
    }
};

struct LayerShape {
    int rows, n, k;
};

// With a shift every array begins that many elements after an aligned address.
template <class T> class Layer {
public:
    explicit Layer(const LayerShape& s, size_t shift = 0)
        : s_(s),
          shift_(shift),
          inp_("inp", Role::input, random_values(shift + size_t(s.rows) * s.k, 1)),
          weight_("weight", Role::input, random_values(shift + size_t(s.n) * s.k, 2)),
          bias_("bias", Role::input, random_values(shift + size_t(s.n), 3)),
          dout_("dout", Role::input, random_values(shift + size_t(s.rows) * s.n, 4)),
          before_("before", Role::input, random_values(shift + size_t(s.rows) * s.k, 5, 3)) {}

    // out, and optionally pre_activation.
    void check_forward(bool with_bias, bool with_gelu, Stream stream = {}) {
        const size_t count = size_t(s_.rows) * s_.n;
        Stored<T> out("out", Role::output, unwritten(count)),
            pre_activation("pre_activation", Role::output, unwritten(count));
        auto op = [&]<class Side>(Side side) {
            return ops::MatmulForward{.out = at(out, side),
                                      .pre_activation = with_gelu ? at(pre_activation, side) : nullptr,
                                      .inp = at(inp_, side),
                                      .weight = at(weight_, side),
                                      .bias = with_bias ? at(bias_, side) : nullptr,
                                      .rows = s_.rows,
                                      .n = s_.n,
                                      .k = s_.k,
                                      .activation = activation_if(with_gelu)};
        };
        ops::matmul_forward(op(OnDevice<T>()), stream);
        synchronize(stream);
        ref::matmul_forward(op(OnHost()));
        // GELU's slope is below 1.13; a library may apply it to the unrounded sum, which changes it by as much.
        const double slope = with_gelu ? 2 * 1.13 : 1;
        auto bound = [&](const Stored<T>& sums, size_t i) {
            return stored_error<T>(sums.host[i]) + sum_error(s_.k) + stored_error<T>(out.host[i]);
        };
        check_close(out, [&](size_t i) {
            return slope * bound(with_gelu ? pre_activation : out, i) + 1e-6 * std::abs(out.host[i]);
        });
        if (with_gelu) check_close(pre_activation, [&](size_t i) { return bound(pre_activation, i); });
        result_ = bytes_of(out) + (with_gelu ? bytes_of(pre_activation) : std::string());
    }

    void check_backward_input(bool with_gelu, Stream stream = {}) {
        Stored<T> dinp("dinp", Role::output, unwritten(size_t(s_.rows) * s_.k));
        auto op = [&]<class Side>(Side side) {
            return ops::MatmulBackwardInput{.dinp = at(dinp, side),
                                            .dout = at(dout_, side),
                                            .weight = at(weight_, side),
                                            .kept = with_gelu ? at(before_, side) : nullptr,
                                            .rows = s_.rows,
                                            .n = s_.n,
                                            .k = s_.k,
                                            .activation = activation_if(with_gelu)};
        };
        ops::matmul_backward_input(op(OnDevice<T>()), stream);
        synchronize(stream);
        ref::matmul_backward_input(op(OnHost()));
        const auto rounding = with_gelu && sizeof(T) == 2 ? gelu_gradient_stored_error<T> : stored_error<T>;
        check_close(dinp, [&](size_t i) { return rounding(dinp.host[i]) + 1.2 * sum_error(s_.n) + 1e-5; });
        result_ = bytes_of(dinp);
    }

    void check_backward_weight(bool with_bias, bool accumulate, Stream stream = {}) {
        const size_t count = size_t(s_.n) * s_.k;
        Array<float> dweight("dweight", Role::output, accumulate ? random_values(count, 6) : nans(count));
        Array<float> dbias("dbias", Role::output, accumulate ? random_values(s_.n, 7) : nans(s_.n));
        ops::MatmulBackwardWeight sizes{};
        sizes.rows = s_.rows, sizes.n = s_.n, sizes.k = s_.k;
        auto scratch = scratch_of(ops::matmul_backward_weight_scratch_bytes(sizes));
        auto op = [&]<class Side>(Side side) {
            return ops::MatmulBackwardWeight{.dweight = dweight.on(side),
                                             .dbias = with_bias ? dbias.on(side) : nullptr,
                                             .scratch = scratch.on(OnDevice<T>()),
                                             .dout = at(dout_, side),
                                             .inp = at(inp_, side),
                                             .rows = s_.rows,
                                             .n = s_.n,
                                             .k = s_.k,
                                             .accumulate = accumulate};
        };
        ops::matmul_backward_weight(op(OnDevice<T>()), stream);
        synchronize(stream);
        ref::matmul_backward_weight(op(OnHost()));
        check_close(dweight, [&](size_t i) { return stored_error_fp32(dweight.host[i]) + sum_error(s_.rows); });
        if (with_bias)
            check_close(dbias, [&](size_t i) { return stored_error_fp32(dbias.host[i]) + sum_error(s_.rows); });
        scratch.fetch();
        result_ = bytes_of(dweight) + (with_bias ? bytes_of(dbias) : std::string());
    }

    void check_all(Stream stream = {}) {
        for (bool with_bias : {false, true})
            for (bool second : {false, true}) {
                INFO("bias " << with_bias << ", gelu or += " << second);
                check_forward(with_bias, second, stream);
                check_backward_weight(with_bias, second, stream);
            }
        for (bool with_gelu : {false, true}) {
            INFO("gelu " << with_gelu);
            check_backward_input(with_gelu, stream);
        }
    }

    // The bits that the last check compared.
    const std::string& result() const { return result_; }

private:
    static ActivationFunction activation_if(bool gelu) {
        return gelu ? ActivationFunction::gelu_new : ActivationFunction::none;
    }
    std::vector<double> unwritten(size_t count) const {
        std::vector<double> values(shift_ + count, NAN);
        std::fill_n(values.begin(), shift_, 0.0);  // must not be written
        return values;
    }
    template <class Side> auto* at(Stored<T>& array, Side side) { return array.on(side) + shift_; }
    // Values are in (-1, 1), so the bound is absolute.
    double sum_error(int terms) const { return summation_error(terms + 1) * (terms + 1); }
    template <class Kind> static std::string bytes_of(const Kind& array) {
        const auto values = array.fetch();
        return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0])};
    }

    LayerShape s_;
    size_t shift_;
    Stored<T> inp_, weight_, bias_, dout_, before_;
    std::string result_;
};
