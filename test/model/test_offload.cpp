// The optimizer's state in host memory: GptOptions::offload_optimizer.
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

GptOptions with_optimizer(OptimizerKind kind) {
    GptOptions options = nano_options(Dtype::bf16);
    options.shape.n_embd = 96, options.shape.vocab_size = 700;
    options.seed = 5;
    set_optimizer(options.optimizer, kind);
    return options;
}

void require_same_run(const GptOptions& options) {
    const NanoRun expected = train_nano(options, 3, 2), found = train_nano(offloaded(options), 3, 2);
    CHECK(found.losses == expected.losses);
    CHECK(found.norms == expected.norms);
    CHECK(same_bits(found.state, expected.state));
    CHECK(found.offload == planned_traffic(offloaded(options)));
    CHECK(expected.offload == OffloadTraffic{});
}

}  // namespace

TEST_CASE("offload: every optimizer trains with the same bits and copies what the plan says", "[model][offload]") {
    for (const OptimizerKind kind :
         {OptimizerKind::adamw, OptimizerKind::sgd, OptimizerKind::lion, OptimizerKind::rmsprop, OptimizerKind::adagrad,
          OptimizerKind::lamb, OptimizerKind::lars, OptimizerKind::adafactor, OptimizerKind::muon,
          OptimizerKind::normuon, OptimizerKind::soap}) {
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
    options.offload_optimizer = true;
    for (const size_t bytes : {size_t(300000), size_t(1000000), size_t(1) << 30}) {
        options.offload_window_bytes = bytes;
        CAPTURE(bytes);
        const NanoRun found = train_nano(options, 2);
        CHECK(same_bits(found.state, expected.state));
        CHECK(found.offload == planned_traffic(options));
    }
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
    CHECK(same_bits(run(offloaded(options)).state, run(options).state));
}

TEST_CASE("offload: averages replace the masters and leave them", "[model][offload]") {
    GptOptions options = offloaded(with_optimizer(OptimizerKind::adamw));
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
        const size_t input = size_t(options.batch) * size_t(options.seq_len) * size_t(options.shape.n_embd) *
                             size_of(options.precision);
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
