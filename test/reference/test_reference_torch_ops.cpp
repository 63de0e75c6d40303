// Ops that GPT-2 does not use, compared with PyTorch: test/recorded/torch/ops.json, made by
// test/recorded/torch/make_ops_reference.py.
//
// Both sides compute in double, so they differ by a few dozen roundings of 2^-53, and by one rounding of 2^-24 where
// ref:: stores float.
#include <nlohmann/json.hpp>

#include "runtime/io/files.h"
#include "runtime/io/json.h"
#include "test/reference/reference.h"
#include "test/support/catch.h"

namespace {

using Json = nlohmann::ordered_json;
using Doubles = std::vector<double>;

const Json& cases_of(const char* op) {
    static const std::string path = "test/recorded/torch/ops.json";
    static const Json all = parse_json(read_file(path), path, Exit::data);
    return all.at(op);
}

// An array of a case; empty if it is null.
Doubles doubles(const Json& one, const char* name) {
    if (one.at(name).is_null()) return {};
    return one.at(name).get<Doubles>();
}

template <class Value> void check_near(const char* name, const std::vector<Value>& values, const Doubles& expected) {
    REQUIRE(values.size() == expected.size());
    const double relative = std::is_same_v<Value, float> ? 0x1p-23 : 0x1p-44;
    for (size_t i = 0; i < values.size(); i++) {
        INFO(name << "[" << i << "] is " << values[i] << ", PyTorch says " << expected[i]);
        CHECK(std::abs(values[i] - expected[i]) <= relative * (1 + std::abs(expected[i])));
    }
}

ActivationFunction activation_of(const Json& one) {
    return choice_named<ActivationFunction>(one.at("activation").get<std::string>()).value();
}

}  // namespace

TEST_CASE("ref::residual_norm_forward and norm_backward equal PyTorch's rms_norm", "[reference]") {
    for (const Json& one : cases_of("rms_norm")) {
        const int rows = one.at("rows"), cols = one.at("cols");
        const Doubles inp = doubles(one, "inp"), weight = doubles(one, "weight"), dout = doubles(one, "dout");
        Doubles out(inp.size()), dinp(inp.size());
        std::vector<float> rstd(static_cast<size_t>(rows)), dweight(weight.size());
        const double* weights = weight.empty() ? nullptr : weight.data();
        ref::residual_norm_forward({.residual = nullptr,
                                    .out = out.data(),
                                    .mean = nullptr,
                                    .rstd = rstd.data(),
                                    .inp = inp.data(),
                                    .branch = nullptr,
                                    .weight = weights,
                                    .bias = nullptr,
                                    .rows = rows,
                                    .cols = cols,
                                    .eps = one.at("eps")});
        check_near("out", out, doubles(one, "out"));
        ref::norm_backward({.dinp = dinp.data(),
                            .dweight = weights ? dweight.data() : nullptr,
                            .dbias = nullptr,
                            .scratch = nullptr,
                            .dout = dout.data(),
                            .inp = inp.data(),
                            .weight = weights,
                            .mean = nullptr,
                            .rstd = rstd.data(),
                            .rows = rows,
                            .cols = cols,
                            .accumulate_dinp = false,
                            .accumulate = false});
        // rstd is stored as float.
        check_near("dinp", std::vector<float>(dinp.begin(), dinp.end()), doubles(one, "dinp"));
        if (weights) check_near("dweight", dweight, doubles(one, "dweight"));
    }
}

TEST_CASE("ref::gated_activation_forward and backward equal PyTorch's", "[reference]") {
    for (const Json& one : cases_of("gated")) {
        const int rows = one.at("rows"), hidden = one.at("hidden");
        const Doubles inp = doubles(one, "inp"), dout = doubles(one, "dout");
        Doubles out(dout.size()), dinp(inp.size());
        ref::gated_activation_forward({out.data(), inp.data(), rows, hidden, activation_of(one)});
        ref::gated_activation_backward({dinp.data(), dout.data(), inp.data(), rows, hidden, activation_of(one)});
        check_near("out", out, doubles(one, "out"));
        check_near("dinp", dinp, doubles(one, "dinp"));
    }
}

TEST_CASE("ref::matmul_* with an activation equal PyTorch's", "[reference]") {
    for (const Json& one : cases_of("product")) {
        const int rows = one.at("rows"), k = one.at("k"), hidden = one.at("hidden"), n = one.at("n");
        const ActivationFunction activation = activation_of(one);
        const Doubles inp = doubles(one, "inp"), first = doubles(one, "first"), second = doubles(one, "second");
        const Doubles dout = doubles(one, "dout");
        Doubles kept(size_t(rows) * hidden), active(kept.size()), out(dout.size());
        const bool keeps_output = activation == ActivationFunction::relu2;
        ref::matmul_forward({.out = active.data(),
                             .pre_activation = keeps_output ? nullptr : kept.data(),
                             .inp = inp.data(),
                             .weight = first.data(),
                             .bias = nullptr,
                             .rows = rows,
                             .n = hidden,
                             .k = k,
                             .activation = activation});
        ref::matmul_forward({.out = out.data(),
                             .pre_activation = nullptr,
                             .inp = active.data(),
                             .weight = second.data(),
                             .bias = nullptr,
                             .rows = rows,
                             .n = n,
                             .k = hidden});
        check_near("out", out, doubles(one, "out"));
        Doubles dbefore(kept.size()), dinp(inp.size());
        std::vector<float> dfirst(first.size()), dsecond(second.size());
        ref::matmul_backward_input({.dinp = dbefore.data(),
                                    .dout = dout.data(),
                                    .weight = second.data(),
                                    .kept = keeps_output ? active.data() : kept.data(),
                                    .rows = rows,
                                    .n = n,
                                    .k = hidden,
                                    .activation = activation});
        ref::matmul_backward_input({.dinp = dinp.data(),
                                    .dout = dbefore.data(),
                                    .weight = first.data(),
                                    .kept = nullptr,
                                    .rows = rows,
                                    .n = hidden,
                                    .k = k});
        check_near("dinp", dinp, doubles(one, "dinp"));
        ref::matmul_backward_weight(
            {dsecond.data(), nullptr, nullptr, dout.data(), active.data(), rows, n, hidden, false});
        ref::matmul_backward_weight(
            {dfirst.data(), nullptr, nullptr, dbefore.data(), inp.data(), rows, hidden, k, false});
        check_near("dsecond", dsecond, doubles(one, "dsecond"));
        check_near("dfirst", dfirst, doubles(one, "dfirst"));
    }
}

TEST_CASE("ref::cross_entropy with a soft cap and z-loss equals PyTorch's", "[reference]") {
    for (const Json& one : cases_of("cross_entropy")) {
        const int rows = one.at("rows"), vocab = one.at("vocab");
        Doubles logits = doubles(one, "logits");
        const std::vector<int> targets = one.at("targets").get<std::vector<int>>();
        std::vector<float> loss(targets.size());
        ref::cross_entropy({.logits = logits.data(),
                            .loss = loss.data(),
                            .targets = targets.data(),
                            .loss_scale = nullptr,
                            .rows = rows,
                            .vocab = vocab,
                            .padded_vocab = vocab,
                            .grad_scale = 1,
                            .write_dlogits = true,
                            .softcap = one.at("softcap"),
                            .z_loss = one.at("z_loss")});
        check_near("loss", loss, doubles(one, "loss"));
        check_near("dlogits", logits, doubles(one, "dlogits"));
    }
}
