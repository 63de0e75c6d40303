// The optimizers' state in bf16.
#include <cmath>

#include "model/gpt.h"
#include "model/plan.h"
#include "model/update.h"
#include "test/support/catch.h"
#include "test/support/nano_gpt.h"

namespace {

GptOptions options_with(OptimizerKind kind, StateDtype dtype, Dtype precision = Dtype::fp32) {
    GptOptions options = nano_options(precision);
    set_optimizer(options.optimizer, kind);
    options.optimizer.state_dtype = dtype;
    options.seed = 5;
    return options;
}

bool has_state_in_bf16(OptimizerKind kind) {
    OptimizerSettings settings;
    set_optimizer(settings, kind);
    return !settings.without_slots();
}

template <class Body> void for_optimizers_with_slots(Body body) {
    for (size_t kind = 0; kind < names_of(OptimizerKind()).size(); kind++)
        if (has_state_in_bf16(OptimizerKind(kind))) {
            INFO(name_of(OptimizerKind(kind)));
            body(OptimizerKind(kind));
        }
}

bool is_of_slot(const NamedTensor& tensor) { return tensor.name.starts_with("m.") || tensor.name.starts_with("v."); }

}  // namespace

TEST_CASE("Adafactor, SOAP and SOAP-Muon have no state for state_dtype", "[model]") {
    constexpr OptimizerKind kWithout[] = {OptimizerKind::adafactor, OptimizerKind::soap, OptimizerKind::soap_muon};
    for (size_t kind = 0; kind < names_of(OptimizerKind()).size(); kind++)
        CHECK(has_state_in_bf16(OptimizerKind(kind)) == (std::ranges::count(kWithout, OptimizerKind(kind)) == 0));
    OptimizerSettings muon{.scalar_name = OptimizerKind::adafactor};
    set_optimizer(muon, OptimizerKind::muon);
    CHECK(muon.without_slots() == OptimizerKind::adafactor);
}

TEST_CASE("state in bf16 has half the memory, in the plan and in checkpoints", "[model]") {
    for_optimizers_with_slots([](OptimizerKind kind) {
        GptOptions options = options_with(kind, StateDtype::bf16), in_fp32 = options_with(kind, StateDtype::fp32);
        options.shape.n_embd = in_fp32.shape.n_embd = 51;  // tensors of odd lengths
        const std::vector<MemoryRegion> regions = plan_memory(options), wide = plan_memory(in_fp32);
        REQUIRE(regions.size() == wide.size());
        const UpdateLayout update = lay_out_update(options, lay_out_tensors(options.shape));
        const auto aligned = [](size_t bytes) { return (bytes + 255) / 256 * 256; };
        size_t halved = 0;
        for (size_t i = 0; i < regions.size(); i++) {
            INFO(regions[i].name);
            CHECK(regions[i].name == wide[i].name);
            size_t saved = 0;
            for (const RuleState& rule : update.rules)
                if (regions[i].name.ends_with(std::string(" of ") + name_of(rule.rule)))
                    saved = aligned(4 * rule.elements) - aligned(2 * rule.elements), halved++;
            CHECK(wide[i].bytes - regions[i].bytes == saved);
        }
        CHECK(halved > 0);

        Gpt gpt(options, comm_single());
        size_t saved = 0, narrow = 0;
        for (const NamedTensor& tensor : gpt.saved_tensors()) {
            INFO(tensor.name);
            const size_t bytes = tensor.count * size_of(tensor.values.dtype);
            CHECK(saved % size_of(tensor.values.dtype) == 0);  // as checkpoints require
            CHECK((tensor.values.dtype == Dtype::bf16) == is_of_slot(tensor));
            saved += bytes, narrow += is_of_slot(tensor) ? bytes : 0;
        }
        CHECK(saved == saved_bytes(options));
        CHECK(saved_bytes(in_fp32) - saved == narrow);
    });
}

TEST_CASE("training with state in bf16 is repeatable and depends on the seed", "[model]") {
    const GptOptions options = options_with(OptimizerKind::adamw, StateDtype::bf16);
    GptOptions other_seed = options;
    other_seed.seed++;
    const NanoRun run = train_nano(options, 3);
    CHECK(same_bits(train_nano(options, 3).state, run.state));
    CHECK(!same_bits(train_nano(other_seed, 3).state, run.state));
    const GptOptions in_fp32 = options_with(OptimizerKind::adamw, StateDtype::fp32);
    GptOptions other_in_fp32 = in_fp32;
    other_in_fp32.seed++;
    CHECK(same_bits(train_nano(other_in_fp32, 3).state, train_nano(in_fp32, 3).state));
}

TEST_CASE("training with state in bf16 stays close to training with state in fp32", "[model]") {
    for_optimizers_with_slots([](OptimizerKind kind) {
        for (const Dtype precision : {Dtype::fp32, Dtype::bf16}) {
            const NanoRun wide = train_nano(options_with(kind, StateDtype::fp32, precision), 60),
                          narrow = train_nano(options_with(kind, StateDtype::bf16, precision), 60);
            double distance = 0;
            for (size_t step = 0; step < wide.losses.size(); step++)
                distance = std::max(distance, std::abs(narrow.losses[step] - wide.losses[step]));
            INFO(name_of(precision) << ": first loss " << wide.losses[0] << ", last " << wide.losses.back()
                                    << ", distance " << distance);
            CHECK(narrow.losses[0] == wide.losses[0]);
            CHECK(distance > 0);
            CHECK(distance < 0.01);
        }
    });
}
