// Arrays in host memory: GptOptions::offload_optimizer, offload_weights, offload_gradients and offload_activations.
#include <cmath>

#include "model/offload.h"
#include "model/plan.h"
#include "model/state.h"
#include "test/support/catch.h"
#include "test/support/nano_gpt.h"

namespace {

// Windows of the least size, so that an update has several pieces.
GptOptions offloaded(GptOptions options) {
    options.offload_optimizer = true;
    options.offload_window_bytes = 0;
    return options;
}

// And weights and gradients.
GptOptions all_offloaded(GptOptions options) {
    options = offloaded(options);
    options.offload_weights = options.offload_gradients = true;
    return options;
}

GptOptions with_optimizer(OptimizerKind kind) {
    GptOptions options = nano_options(Dtype::bf16);
    options.shape.n_embd = 96, options.shape.vocab_size = 700;
    options.seed = 5;
    set_optimizer(options.optimizer, kind);
    return options;
}

void require_same_run(const NanoRun& found, const NanoRun& expected) {
    CHECK(found.losses == expected.losses);
    CHECK(found.norms == expected.norms);
    CHECK(same_bits(found.state, expected.state));
}

void require_same_run(const GptOptions& options) {
    const NanoRun expected = train_nano(options, 3, 2);
    CHECK(expected.offload == OffloadTraffic{});
    for (GptOptions with : {offloaded(options), all_offloaded(options)}) {
        CAPTURE(with.offload_weights);
        const NanoRun found = train_nano(with, 3, 2);
        require_same_run(found, expected);
        with.micro_steps = 2;
        CHECK(found.offload == planned_traffic(with));
    }
}

}  // namespace

TEST_CASE("offload: every optimizer trains with the same bits and copies what the plan says", "[model][offload]") {
    for (const OptimizerKind kind :
         {OptimizerKind::adamw, OptimizerKind::sgd, OptimizerKind::lion, OptimizerKind::rmsprop, OptimizerKind::adagrad,
          OptimizerKind::lamb, OptimizerKind::lars, OptimizerKind::adafactor, OptimizerKind::muon,
          OptimizerKind::normuon, OptimizerKind::soap, OptimizerKind::soap_muon}) {
        INFO(name_of(kind));
        require_same_run(with_optimizer(kind));
    }
}

TEST_CASE("offload: types of state, averages and groups", "[model][offload]") {
    for (const OptimizerKind kind : {OptimizerKind::adamw, OptimizerKind::lamb, OptimizerKind::muon}) {
        INFO(name_of(kind));
        GptOptions options = with_optimizer(kind);
        options.averages = true;
        options.optimizer.groups = {{.tensors = "h.1.*", .lr_scale = 0.5}, {.tensors = "wte", .weight_decay = 0}};
        require_same_run(options);
        options.optimizer.state_dtype = OptimizerDtype::bf16;
        require_same_run(options);
        options.optimizer.master_dtype = OptimizerDtype::bf16;  // masters are the compute weights
        require_same_run(options);
        options = with_optimizer(kind);
        options.precision = Dtype::fp32;
        require_same_run(options);
    }
}

// With Muon a large window has chunks of two optimizers.
TEST_CASE("offload: windows of any size", "[model][offload]") {
    GptOptions options = with_optimizer(OptimizerKind::muon);
    options.averages = true;
    const NanoRun expected = train_nano(options, 2);
    for (GptOptions with : {offloaded(options), all_offloaded(options)})
        for (const size_t bytes : {size_t(300000), size_t(1000000), size_t(1) << 30}) {
            with.offload_window_bytes = bytes;
            CAPTURE(bytes, with.offload_weights);
            const NanoRun found = train_nano(with, 2);
            CHECK(same_bits(found.state, expected.state));
            CHECK(found.offload == planned_traffic(with));
        }
}

// Five blocks pass through two slots, so that each kind of array leaves its slot and returns.
TEST_CASE("offload: weights and gradients in slots", "[model][offload]") {
    GptOptions deep = with_optimizer(OptimizerKind::adamw);
    deep.shape.n_layer = 5, deep.shape.n_embd = 48;
    std::vector<GptOptions> all(6, deep);
    all[1].shape.tie_embeddings = false, all[1].shape.embedding_norm = true, all[1].averages = true;
    all[2].bucket_bytes = 240000;  // of two blocks
    all[3].recompute = Recompute::block, all[3].dropout = 0.2, all[3].offload_activations = true;
    all[4].precision = Dtype::fp32;
    all[5].fp8 = true, all[5].batch = 4, all[5].seq_len = 20;
    for (const GptOptions& options : all) {
        CAPTURE(options.shape.tie_embeddings, options.bucket_bytes, options.dropout, options.fp8);
        GptOptions without = options;
        without.offload_activations = false;
        const NanoRun expected = train_nano(without, 3, 3);
        for (const auto& [weights, gradients] : {std::pair(true, false), {false, true}, {true, true}}) {
            GptOptions with = offloaded(options);
            with.offload_weights = weights, with.offload_gradients = gradients;
            CAPTURE(weights, gradients);
            const NanoRun found = train_nano(with, 3, 3);
            require_same_run(found, expected);
            with.micro_steps = 3;
            CHECK(found.offload == planned_traffic(with));
        }
    }
}

TEST_CASE("offload: weights with the deterministic sum", "[model][offload]") {
    GptOptions options = with_optimizer(OptimizerKind::adamw);
    options.deterministic_reduce = true, options.shape.n_layer = 4;
    const NanoRun expected = train_nano(options, 2, 3);
    options = offloaded(options), options.offload_weights = true;
    require_same_run(train_nano(options, 2, 3), expected);
}

TEST_CASE("offload: the traffic of slots", "[model][offload]") {
    GptOptions options = all_offloaded(with_optimizer(OptimizerKind::adamw));
    options.shape.n_layer = 5, options.micro_steps = 3;
    const TensorLayout layout = lay_out_rank(options);
    const size_t block = layout.bucket_elements(layout.bucket_of_layer(0)), outer = layout.bucket_elements(0);
    const OffloadTraffic passes = planned_traffic_of_passes(options);
    // The first forward pass fetches all weights. Every other pass fetches the weights of three blocks: the pass before
    // left the other two in the slots. The second and the third backward pass fetch the sums of all blocks: they begin
    // with the last block, and the pass before ended with the first.
    CHECK(passes.to_device == 2 * (outer + (5 + 3 + 4 * 3) * block) + 4 * 2 * 5 * block);
    CHECK(passes.to_host == 3 * 4 * (outer + 5 * block));
}

TEST_CASE("offload: the gradient of the first micro-step is measured", "[model][offload]") {
    const auto norm = [](GptOptions options) {
        options.micro_steps = 2;
        Gpt gpt(options, comm_single());
        gpt.initialize(42);
        gpt.begin_step({.measure_first = true, .update = 1});
        const std::vector<int> tokens = nano_tokens(43, options.shape.vocab_size);
        for (int micro = 0; micro < 2; micro++) {
            gpt.forward(tokens.data());
            gpt.backward(tokens.data() + 1 - micro, 1);
        }
        gpt.end_step();
        return gpt.first_norm_squared();
    };
    const GptOptions options = with_optimizer(OptimizerKind::adamw);
    CHECK(norm(options) > 0);
    CHECK(norm(all_offloaded(options)) == norm(options));
}

TEST_CASE("offload: the device keeps two windows instead of the state", "[model][offload]") {
    GptOptions options = with_optimizer(OptimizerKind::adamw);
    options.averages = true;
    options.shape.n_embd = 192;
    const GptOptions with = offloaded(options);
    const size_t parameters = lay_out_rank(options).elements, state = 16 * parameters;  // master, m, v, average
    CHECK(planned_host_bytes(options) == 0);
    CHECK(planned_host_bytes(with) >= state);
    CHECK(planned_host_bytes(with) < state + 4096);
    const size_t windows = planned_bytes(with) + planned_host_bytes(with) - planned_bytes(options);
    CHECK(windows == 2 * 12 * (size_t(ops::kChunkElements) + kTensorAlignment));
    CHECK(windows < state / 10);
}

// Factors of Adafactor are small and stay.
TEST_CASE("offload: no optimizer keeps state on the device", "[model][offload]") {
    for (const OptimizerKind kind :
         {OptimizerKind::adamw, OptimizerKind::normuon, OptimizerKind::soap, OptimizerKind::soap_muon}) {
        INFO(name_of(kind));
        size_t state = 0;
        for (const MemoryRegion& region : plan_memory(offloaded(with_optimizer(kind))))
            if (!region.is_on_host && std::string(region.category) == "optimizer state") state += region.bytes;
        CHECK(state == 0);
    }
}

TEST_CASE("offload: the device needs less than a tenth of the state of a deep model", "[model][offload]") {
    const auto kept = [](int layers) {
        GptOptions options = all_offloaded(with_optimizer(OptimizerKind::adamw));
        options.shape.n_layer = layers, options.shape.n_embd = 192;
        options.recompute = Recompute::block, options.offload_activations = true;
        size_t control = 0;  // chunks
        for (const MemoryRegion& region : plan_memory(options))
            if (!region.is_on_host && std::string(region.category) == "control") control += region.bytes;
        return std::pair(planned_bytes(options) - control, 18 * lay_out_rank(options).elements);
    };
    const auto [with_24, state_of_24] = kept(24);
    CHECK(kept(36).first == with_24);
    CHECK(with_24 < state_of_24 / 10);
}

// The update copies arrays while the passes run, so a change between steps must come first.
TEST_CASE("offload: changes of masters between steps take effect", "[model][offload]") {
    const auto run = [](const GptOptions& options) {
        return train_nano(options, 2, 1, 1, [](Gpt& gpt) {
            for (const NamedTensor& tensor : gpt.state_tensors()) {
                std::vector<float> values(tensor.count, 0.01f);
                copy_to_device(tensor.values.data, values.data(), values.size() * sizeof(float), Stream{});
            }
            gpt.masters_changed();
        });
    };
    GptOptions options = with_optimizer(OptimizerKind::adamw);
    options.averages = true;
    CHECK(same_bits(run(all_offloaded(options)).state, run(options).state));
}

TEST_CASE("offload: a skipped update changes nothing", "[model][offload]") {
    GptOptions options = with_optimizer(OptimizerKind::adamw);
    options.shape.n_layer = 4;
    const auto run = [&](const GptOptions& of) {
        Gpt gpt(of, comm_single());
        gpt.initialize(42);
        const std::vector<int> tokens = nano_tokens(43, of.shape.vocab_size);
        std::vector<double> losses;
        for (const float grad_scale : {1.0f, INFINITY, 1.0f}) {
            gpt.begin_step({.update = 1});
            gpt.forward(tokens.data());
            gpt.backward(tokens.data() + 1, grad_scale);
            const StepResult result = gpt.end_step();
            CHECK(result.non_finite_tensor.empty() == std::isfinite(grad_scale));
            losses.push_back(result.loss_sum);
        }
        CHECK(losses[1] == losses[2]);
        return std::pair(losses, values_of(gpt.state_tensors()));
    };
    const auto expected = run(options), found = run(all_offloaded(options));
    CHECK(found.first == expected.first);
    CHECK(same_bits(found.second, expected.second));
}

TEST_CASE("offload: averages replace the masters and leave them", "[model][offload]") {
    GptOptions options = all_offloaded(with_optimizer(OptimizerKind::adamw));
    options.averages = true;
    Gpt gpt(options, comm_single());
    gpt.initialize(3);
    const std::vector<float> masters = values_of(gpt.master_tensors());
    gpt.use_average();
    CHECK(values_of(gpt.master_tensors()) == std::vector<float>(masters.size(), 0.0f));
    gpt.restore_masters();
    CHECK(same_bits(values_of(gpt.master_tensors()), masters));
}

TEST_CASE("offload: activations give the same bits and copy what the plan says", "[model][offload]") {
    std::vector<GptOptions> all(4, with_optimizer(OptimizerKind::adamw));
    all[1].dropout = 0.2, all[1].shape.embedding_norm = true;
    all[2].precision = Dtype::fp32, all[2].shape.n_layer = 1;
    all[3].offload_optimizer = true, all[3].shape.n_layer = 4, all[3].document_mask = true, all[3].document_token = 5;
    for (GptOptions options : all) {
        options.recompute = Recompute::block;
        CAPTURE(options.dropout, options.shape.n_layer, options.offload_optimizer);
        const NanoRun expected = train_nano(options, 3, 2);
        GptOptions with = options;
        with.offload_activations = true;
        const NanoRun found = train_nano(with, 3, 2);
        CHECK(found.losses == expected.losses);
        CHECK(same_bits(found.state, expected.state));
        with.micro_steps = options.micro_steps = 2;
        const OffloadTraffic planned = planned_traffic(with), before = planned_traffic(options);
        CHECK(found.offload == planned);
        const size_t input =
            size_t(options.batch) * size_t(options.seq_len) * size_t(options.shape.n_embd) * size_of(options.precision);
        CHECK(planned.to_host - before.to_host == 2 * size_t(options.shape.n_layer) * input);
    }
}

TEST_CASE("offload: the memory of activations does not depend on the number of layers", "[model][offload]") {
    const auto bytes = [](int layers, bool offloads) {
        GptOptions options = with_optimizer(OptimizerKind::adamw);
        options.recompute = Recompute::block, options.offload_activations = offloads;
        options.shape.n_layer = layers;
        size_t sum = 0;
        for (const MemoryRegion& region : plan_memory(options))
            if (!region.is_on_host && std::string(region.category) == "activations") sum += region.bytes;
        return sum;
    };
    CHECK(bytes(3, true) == bytes(9, true));
    CHECK(bytes(2, true) == bytes(2, false));
    CHECK(bytes(9, false) - bytes(3, false) == 6 * (bytes(3, false) - bytes(2, false)));
}
