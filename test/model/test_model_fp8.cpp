// Training with operands of 8 bits: see model/fp8.h.
#include <algorithm>
#include <cmath>

#include "kernels/trace.h"
#include "model/fp8.h"
#include "model/plan.h"
#include "model/state.h"
#include "test/support/catch.h"
#include "test/support/nano_gpt.h"

namespace {

// Sizes that are multiples of 16, as GEMMs of 8 bits require.
GptOptions fp8_options() {
    GptOptions options = nano_options(Dtype::bf16);
    options.fp8 = true;
    options.batch = 4, options.seq_len = 20;
    return options;
}

std::vector<GptOptions> fp8_variants() {
    std::vector<GptOptions> all(6, fp8_options());
    all[1].dropout = 0.2, all[1].seed = 77;
    all[2].shape.gated_mlp = true, all[2].shape.activation = ActivationFunction::silu;
    all[2].shape.norm = NormKind::rmsnorm, all[2].shape.given_kv_heads = 1;
    all[3].shape.activation = ActivationFunction::relu2;
    all[4].fp8_gradients = Dtype::e4m3;
    all[5].shape.position = PositionKind::rope, all[5].shape.qk_norm = QkNorm::weight;
    return all;
}

// The result of a step whose conversions use the magnitudes that `change` leaves in the model.
StepResult one_step(const std::function<void(Gpt&)>& change) {
    const GptOptions options = fp8_options();
    Gpt gpt(options, comm_single());
    gpt.initialize(42);
    gpt.begin_step({});
    const std::vector<int> tokens =
        nano_tokens(size_t(options.batch) * size_t(options.seq_len) + 1, options.shape.vocab_size);
    gpt.forward(tokens.data());
    change(gpt);
    gpt.backward(tokens.data() + 1, 1);
    return gpt.end_step();
}

// The arrays that keeps_amax() gives an amax.
std::vector<View*> operands_of(GptState& s) {
    std::vector<View*> all;
    for (GptActivations& acts : s.acts) {
        for (Activation* a : {&acts.dresidual, &acts.dbranch, &acts.dwide}) all.push_back(&a->view);
        for (BlockActivations& b : acts.block)
            for (Activation* a : {&b.norm1.out, &b.attn.out, &b.norm2.out, &b.mlp.act}) all.push_back(&a->view);
    }
    return all;
}

// Trains, with the magnitudes that ops give or with ones that every conversion looks for.
NanoRun train_fp8(const GptOptions& options, bool looks) {
    return train_nano(options, 3, 2, 1, [&](Gpt& gpt) {
        for (View* operand : operands_of(gpt.state())) {
            REQUIRE(operand->amax);
            if (looks) operand->amax = nullptr;
        }
    });
}

void require_same(const NanoRun& a, const NanoRun& b) {
    CHECK(a.losses == b.losses);
    CHECK(a.norms == b.norms);
    CHECK(same_bits(a.state, b.state));
}

}  // namespace

// A magnitude of another array, or of an earlier step, would change the scale.
TEST_CASE("fp8: ops give the magnitudes of the operands", "[model][fp8]") {
    for (GptOptions options : fp8_variants())
        for (const Recompute level : {Recompute::none, Recompute::gelu, Recompute::block}) {
            options.recompute = level;
            CAPTURE(int(options.shape.activation), options.dropout, int(level));
            require_same(train_fp8(options, false), train_fp8(options, true));
        }
}

// Of the gradients, only the one before an activation comes from an op without magnitude: a GEMM of cuBLASLt.
TEST_CASE("fp8: conversions look only for the magnitudes of weights and of gradients before activations",
          "[model][fp8]") {
    for (const GptOptions& options : fp8_variants()) {
        CAPTURE(options.shape.gated_mlp, options.shape.changes_heads());
        Trace trace;
        train_nano(options, 1, 1, 1, [&](Gpt& gpt) { gpt.trace(&trace, 1); });
        const std::vector<Span> spans = trace.take();
        const auto searches = std::ranges::count_if(spans, [](const Span& s) { return s.name == "abs_max"; });
        CHECK(searches == options.shape.n_layer * (2 * 4 + !options.shape.gated_mlp));
    }
}

TEST_CASE("fp8: the bits do not depend on the recompute level", "[model][fp8]") {
    for (GptOptions options : fp8_variants()) {
        const NanoRun expected = train_fp8(options, false);
        for (const Recompute level : {Recompute::gelu, Recompute::norm, Recompute::block}) {
            options.recompute = level;
            CAPTURE(int(options.shape.activation), options.dropout, int(level));
            require_same(train_fp8(options, false), expected);
        }
    }
}

TEST_CASE("fp8: losses and gradients are near the ones of bf16, and the types of gradients differ", "[model][fp8]") {
    for (GptOptions options : fp8_variants()) {
        const NanoRun fp8 = train_nano(options, 6);
        options.fp8 = false;
        const NanoRun bf16 = train_nano(options, 6);
        CHECK(fp8.losses != bf16.losses);
        for (size_t i = 0; i < fp8.losses.size(); i++) {
            CHECK(std::abs(fp8.losses[i] / bf16.losses[i] - 1) < 0.01);
            CHECK(std::abs(fp8.norms[i] / bf16.norms[i] - 1) < 0.02);
        }
    }
    GptOptions e4m3 = fp8_options();
    e4m3.fp8_gradients = Dtype::e4m3;
    CHECK(train_nano(e4m3, 2).state != train_nano(fp8_options(), 2).state);
}

// Without the outputs of the blocks, only the embedding, the last norm and the head compute the loss.
TEST_CASE("fp8: embedding and head compute with 16 bits", "[model][fp8]") {
    const auto first_loss = [](const GptOptions& options) {
        const NanoRun run = train_nano(options, 1, 1, 1, [](Gpt& gpt) {
            for (const NamedTensor& tensor : gpt.state_tensors()) {
                if (tensor.name.find("_proj.weight") == std::string::npos) continue;
                const std::vector<std::byte> zeros(tensor.count * size_of(tensor.values.dtype));
                copy_to_device(tensor.values.data, zeros.data(), zeros.size(), Stream{});
            }
            gpt.masters_changed();
        });
        return run.losses[0];
    };
    GptOptions bf16 = fp8_options();
    bf16.fp8 = false;
    CHECK(first_loss(fp8_options()) == first_loss(bf16));
}

// Then an operand has parts that several ops or ranks compute.
TEST_CASE("fp8: a step counts numbers that saturate", "[model][fp8]") {
    CHECK(one_step([](Gpt&) {}).fp8_saturated == 0);
    // The backward pass converts this input of a layer with a magnitude that is too small.
    const StepResult wrong = one_step([](Gpt& gpt) {
        const View& input = gpt.state().acts[0].block[1].norm2.out.view;
        const float amax = 1e-3f;
        copy_to_device(input.amax, &amax, sizeof(amax), Stream{});
    });
    CHECK(wrong.fp8_saturated > 80 * 48 / 2);
    CHECK(wrong.fp8_saturated <= 80 * 48);
}

TEST_CASE("fp8: no magnitudes are kept for operands in parts", "[model][fp8]") {
    CHECK(keeps_amax(fp8_options()));
    GptOptions options[5];
    for (GptOptions& o : options) o = fp8_options(), o.shape.n_head = 4, o.shape.n_embd = 64;
    options[0].fp8 = false;
    options[1].pipeline.size = 2, options[1].shape.n_layer = 2;
    options[2].tensor_parallel.size = 2;
    options[3].context.size = 2;
    options[4].max_terms = 2;
    for (const GptOptions& o : options) CHECK_FALSE(keeps_amax(o));
}

TEST_CASE("fp8: sizes that GEMMs of 8 bits do not have", "[model][fp8]") {
    CHECK(fp8_problem(fp8_options()).empty());
    GptOptions tokens = fp8_options(), channels = fp8_options();
    tokens.batch = 3;
    CHECK(fp8_problem(tokens).find("60 tokens at a time, which must be a multiple of 16") != std::string::npos);
    channels.shape.n_embd = 24;
    CHECK(fp8_problem(channels).find("multiples of 16 channels, but a linear layer has 72") != std::string::npos);
    tokens.fp8 = channels.fp8 = false;
    CHECK(fp8_problem(tokens).empty());
    CHECK(fp8_problem(channels).empty());
}
