// ref::'s GEMMs and activations checked by mathematics.
#include "test/support/finite_differences.h"

namespace {

constexpr ActivationFunction kActivations[] = {ActivationFunction::none, ActivationFunction::gelu_new,
                                               ActivationFunction::silu, ActivationFunction::relu2};

}  // namespace

// The backward ops take the gradient of the GEMM's output. With an activation, the next GEMM's dinp includes the
// activation's derivative, so the test differentiates the chain activation -> GEMM as in the model.
TEST_CASE("ref::matmul_backward_* are the derivatives of ref::matmul_forward", "[reference]") {
    for (int rows : {1, 4})
        for (ActivationFunction activation : kActivations)
            for (bool accumulate : {false, true}) {
                const int n = 3, k = 5;
                INFO("rows " << rows << ", activation " << int(activation));
                const bool is_activated = activation != ActivationFunction::none;
                std::vector<double> pre = random_values(rows * k, 1, 3), weight = random_values(n * k, 2);
                std::vector<double> bias = random_values(n, 3), inp(pre.size());
                std::vector<double> out(rows * n), dout = random_values(out.size(), 4);
                Objective objective = [&] {
                    inp = pre;
                    if (is_activated) ref::activation_forward({inp.data(), pre.data(), inp.size(), activation});
                    ref::matmul_forward(ops::MatmulForward{.out = out.data(),
                                                           .pre_activation = nullptr,
                                                           .inp = inp.data(),
                                                           .weight = weight.data(),
                                                           .bias = bias.data(),
                                                           .rows = rows,
                                                           .n = n,
                                                           .k = k});
                    return sum_of_products(out, dout);
                };
                objective();
                std::vector<double> dinp(pre.size(), NAN);
                std::vector<double> weight_before = random_values(weight.size(), 5), bias_before = random_values(n, 6);
                auto dweight = held_before<float>(weight_before, accumulate);
                auto dbias = held_before<float>(bias_before, accumulate);
                const auto& kept = activation == ActivationFunction::relu2 ? inp : pre;
                ref::matmul_backward_input(ops::MatmulBackwardInput{.dinp = dinp.data(),
                                                                    .dout = dout.data(),
                                                                    .weight = weight.data(),
                                                                    .kept = is_activated ? kept.data() : nullptr,
                                                                    .rows = rows,
                                                                    .n = n,
                                                                    .k = k,
                                                                    .activation = activation});
                ref::matmul_backward_weight(ops::MatmulBackwardWeight{.dweight = dweight.data(),
                                                                      .dbias = dbias.data(),
                                                                      .scratch = nullptr,
                                                                      .dout = dout.data(),
                                                                      .inp = inp.data(),
                                                                      .rows = rows,
                                                                      .n = n,
                                                                      .k = k,
                                                                      .accumulate = accumulate});
                check_gradient("dinp", pre, dinp, {}, objective);
                check_gradient("dweight", weight, dweight, if_added(weight_before, accumulate), objective);
                check_gradient("dbias", bias, dbias, if_added(bias_before, accumulate), objective);
            }
}

TEST_CASE("ref::matmul_forward with an activation is ref::activation_forward of the product", "[reference]") {
    const int rows = 3, n = 4, k = 5;
    for (ActivationFunction activation :
         {ActivationFunction::gelu_new, ActivationFunction::silu, ActivationFunction::relu2}) {
        INFO(name_of(activation));
        std::vector<double> inp = random_values(rows * k, 1, 2), weight = random_values(n * k, 2),
                            bias = random_values(n, 3);
        std::vector<double> product(rows * n), pre_activation(rows * n), out(rows * n), activated(rows * n);
        ops::MatmulForward op{.out = product.data(),
                              .pre_activation = nullptr,
                              .inp = inp.data(),
                              .weight = weight.data(),
                              .bias = bias.data(),
                              .rows = rows,
                              .n = n,
                              .k = k};
        ref::matmul_forward(op);
        op.out = out.data(), op.activation = activation;
        if (activation != ActivationFunction::relu2) op.pre_activation = pre_activation.data();
        ref::matmul_forward(op);
        ref::activation_forward({activated.data(), product.data(), product.size(), activation});
        if (op.pre_activation) CHECK(pre_activation == product);
        CHECK(out == activated);
    }
}

TEST_CASE("ref::gated_activation_backward is the derivative of ref::gated_activation_forward", "[reference]") {
    const int rows = 3, hidden = 5;
    for (ActivationFunction activation :
         {ActivationFunction::gelu_new, ActivationFunction::silu, ActivationFunction::relu2}) {
        INFO(name_of(activation));
        std::vector<double> inp = random_values(rows * 2 * hidden, 1, 3), out(rows * hidden);
        std::vector<double> dout = random_values(out.size(), 2), dinp(inp.size(), NAN);
        Objective objective = [&] {
            ref::gated_activation_forward({out.data(), inp.data(), rows, hidden, activation});
            return sum_of_products(out, dout);
        };
        ref::gated_activation_backward({dinp.data(), dout.data(), inp.data(), rows, hidden, activation});
        check_gradient("dinp", inp, dinp, {}, objective);
    }
}

// The definitions by hand: silu(2) = 2 / (1 + e^-2), and the gate is the first half of a row.
TEST_CASE("ref::gated_activation_forward: the gate comes first", "[reference]") {
    std::vector<double> inp = {2, 3, /**/ -1, 5}, out(2);
    ref::gated_activation_forward({out.data(), inp.data(), 2, 1, ActivationFunction::silu});
    CHECK(std::abs(out[0] - 3 * 2 / (1 + std::exp(-2.0))) < 1e-14);
    CHECK(std::abs(out[1] - 5 * -1 / (1 + std::exp(1.0))) < 1e-14);
    ref::gated_activation_forward({out.data(), inp.data(), 2, 1, ActivationFunction::relu2});
    CHECK(out == std::vector<double>{12, 0});
}
