// Properties of the model that must hold bit for bit, and the exactness of the memory plan.
#include <cmath>
#include <map>
#include <set>

#include "model/huggingface.h"
#include "model/inference.h"
#include "model/plan.h"
#include "model/sample.h"
#include "model/tensors.h"
#include "runtime/checkpoint/checkpoint.h"
#include "test/support/allocations.h"
#include "test/support/expect_error.h"
#include "test/support/nano_gpt.h"
#include "test/support/tolerance.h"

namespace {

void require_same(const NanoRun& a, const NanoRun& b) {
    REQUIRE(a.losses == b.losses);
    REQUIRE(a.norms == b.norms);
    REQUIRE(same_bits(a.state, b.state));
}

const Dtype kPrecisions[] = {Dtype::fp32, Dtype::bf16, Dtype::fp16};

GptOptions with_dropout(GptOptions options, double rate = 0.2) {
    options.dropout = rate;
    options.seed = 77;
    return options;
}

// Bitwise properties are tested in every precision without dropout, and in two precisions with it.
std::vector<GptOptions> variants() {
    std::vector<GptOptions> all = {with_dropout(nano_options()), with_dropout(nano_options(Dtype::bf16))};
    for (Dtype precision : kPrecisions) all.push_back(nano_options(precision));
    return all;
}

}  // namespace

TEST_CASE("the table of tensors covers the flat array once", "[model]") {
    const GptShape shape = nano_options().shape;
    const TensorLayout layout = lay_out_tensors(shape);
    std::set<std::string> names;
    size_t end = 0, parameters = 0;
    for (const Tensor& tensor : layout.tensors) {
        REQUIRE(names.insert(tensor.name).second);
        REQUIRE(tensor.begin >= end);
        REQUIRE(tensor.begin < end + kTensorAlignment);
        REQUIRE(tensor.begin % kTensorAlignment == 0);
        end = tensor.begin + tensor.count;
        parameters += tensor.count;
    }
    REQUIRE(layout.elements >= end);
    REQUIRE(layout.parameters == parameters);
    // 4 model tensors, 12 per block.
    REQUIRE(layout.tensors.size() == 4 + 12 * size_t(shape.n_layer));
}

TEST_CASE("GPT-2 has its published sizes", "[model]") {
    // Stored parameters of the 124M model with the vocabulary padded to 50304: llm.c's gpt2_124M.bin.
    REQUIRE(lay_out_tensors({12, 12, 12, 768, 1024, 50257}).parameters == 124475904);
    REQUIRE(lay_out_tensors({48, 25, 25, 1600, 1024, 50257}).parameters == 1557686400);
}

TEST_CASE("chunks cover every element of every tensor once, in order", "[model]") {
    const TensorLayout layout = lay_out_tensors({2, 4, 4, 300, 64, 700});
    const std::vector<ops::Chunk> chunks = chunk_grid(layout);
    size_t next = 0;
    for (size_t i = 0; i < layout.tensors.size(); i++) {
        size_t covered = 0;
        for (; next < chunks.size() && chunks[next].tensor == int(i); next++) {
            REQUIRE(chunks[next].begin == layout.tensors[i].begin + covered);
            REQUIRE(chunks[next].count > 0);
            REQUIRE(chunks[next].count <= ops::kChunkElements);
            covered += size_t(chunks[next].count);
        }
        REQUIRE(covered == layout.tensors[i].count);
    }
    REQUIRE(next == chunks.size());
}

TEST_CASE("the count of chunks matches the chunks, for any number of ranks", "[model]") {
    for (const int ranks : {1, 2, 3, 8})
        for (const size_t bucket_elements : {size_t(1), size_t(100'000), size_t(1) << 24}) {
            const TensorLayout layout = lay_out_tensors({2, 4, 4, 300, 64, 700}, ranks, bucket_elements);
            const std::vector<ops::Chunk> chunks = chunk_grid(layout);
            CHECK(chunk_count(layout) == chunks.size());
            for (int rank = 0; rank < ranks; rank++)
                CHECK(owned_chunk_count(layout, rank) == owned_chunks(layout, chunks, rank, true).size());
        }
}

TEST_CASE("two runs give the same bits", "[model]") {
    for (const GptOptions& options : variants()) require_same(train_nano(options, 5, 2), train_nano(options, 5, 2));
}

TEST_CASE("every recompute level gives the same bits and needs less memory", "[model]") {
    for (GptOptions options : variants()) {
        const NanoRun kept = train_nano(options, 4, 2);
        size_t bytes = planned_bytes(options);
        for (Recompute level : {Recompute::gelu, Recompute::norm, Recompute::block}) {
            options.recompute = level;
            require_same(kept, train_nano(options, 4, 2));
            REQUIRE(planned_bytes(options) < bytes);
            bytes = planned_bytes(options);
        }
    }
}

TEST_CASE("the number of threads does not change a bit", "[model]") {
    const int threads = omp_get_max_threads();
    for (const GptOptions& options : variants()) {
        omp_set_num_threads(1);
        const NanoRun one = train_nano(options, 4, 2);
        for (int n : {2, 3, 8}) {
            omp_set_num_threads(n);
            require_same(one, train_nano(options, 4, 2));
        }
    }
    omp_set_num_threads(threads);
}

// With dropout too: masks depend on the samples, not on how they are distributed.
TEST_CASE("one batch and k micro-steps agree", "[model]") {
    for (GptOptions options : {nano_options(), with_dropout(nano_options())}) {
        options.batch = 6;
        const NanoRun whole = train_nano(options, 3, 1);
        options.batch = 2;
        const NanoRun split = train_nano(options, 3, 3);
        // Sums over 126 positions in another order: 2^-24 times the number of additions, through three steps of AdamW.
        for (size_t step = 0; step < whole.losses.size(); step++)
            REQUIRE(std::abs(whole.losses[step] - split.losses[step]) <= 1e-5 * whole.losses[step]);
        REQUIRE(std::abs(whole.norms[0] - split.norms[0]) <= 126 * 0x1p-24f * whole.norms[0]);
    }
}

TEST_CASE("dropout's masks depend on the seed and the sample's number", "[model]") {
    const std::vector<int> tokens = nano_tokens(43, 131);
    Gpt gpt(with_dropout(nano_options()), comm_single());
    GptOptions other_seed = with_dropout(nano_options());
    other_seed.seed++;
    Gpt other(other_seed, comm_single());
    gpt.initialize(1), other.initialize(1);
    auto loss = [&](Gpt& model, uint64_t first_sample) {
        model.begin_step({.learning_rate = 0, .first_sample = first_sample});
        model.forward(tokens.data());
        model.backward(tokens.data() + 1, 1.0f / 42);
        return model.end_step().loss_sum;
    };
    // A rate of 0.2 changes the loss by a few percent; rounding changes it by less than one part in a million.
    const double first = loss(gpt, 0), next = loss(gpt, 2), far = loss(gpt, uint64_t(1) << 40);
    REQUIRE(loss(gpt, 0) == first);
    for (double different : {next, far, loss(other, 0)}) REQUIRE(std::abs(different - first) > 1e-4 * first);
    REQUIRE(std::abs(far - next) > 1e-4 * first);
}

TEST_CASE("dropout applies to training only, and needs memory only if it is on", "[model]") {
    const std::vector<int> tokens = nano_tokens(43, 131);
    std::vector<float> logits(131), plain_logits(131);
    Gpt gpt(with_dropout(nano_options()), comm_single()), plain(nano_options(), comm_single());
    gpt.initialize(1), plain.initialize(1);
    const double loss = batch_loss(plain, tokens.data(), tokens.data() + 1);
    next_token_logits(plain, tokens.data(), 9, plain_logits.data());
    auto check = [&] {
        REQUIRE(batch_loss(gpt, tokens.data(), tokens.data() + 1) == loss);
        next_token_logits(gpt, tokens.data(), 9, logits.data());
        REQUIRE(same_bits(logits, plain_logits));
    };
    check();
    gpt.begin_step({.learning_rate = 0});
    check();
    gpt.forward(tokens.data());
    gpt.backward(tokens.data() + 1, 1.0f / 42);
    REQUIRE(std::abs(gpt.end_step().loss_sum - loss) > 1e-3 * loss);  // evaluation has not turned it off
    check();
    gpt.forward(tokens.data());  // outside a step
    logits_of_row(gpt, 8, logits.data());
    REQUIRE(same_bits(logits, plain_logits));

    GptOptions options = with_dropout(nano_options());
    REQUIRE(planned_bytes(options) == planned_bytes(nano_options()) + 256);  // a key for each sample
    options.training = false;
    GptOptions forward_only = nano_options();
    forward_only.training = false;
    REQUIRE(planned_bytes(options) == planned_bytes(forward_only));
}

TEST_CASE("computing the head in slices of rows gives the same loss, also with a shorter last slice", "[model]") {
    GptOptions options = nano_options();
    const NanoRun whole = train_nano(options, 3);
    options.head_rows = 16;  // 42 rows: 16, 16, 10
    const NanoRun sliced = train_nano(options, 3);
    // Bit for bit before the first update, but GEMMs of other sizes may have other algorithms on a GPU.
    const double rounding = gpu_name().empty() ? 0 : summation_error(options.shape.n_embd) * whole.losses[0];
    REQUIRE(std::abs(whole.losses[0] - sliced.losses[0]) <= rounding);
    for (size_t step = 0; step < whole.losses.size(); step++)
        REQUIRE(std::abs(whole.losses[step] - sliced.losses[step]) <= 1e-5 * whole.losses[step]);
}

TEST_CASE("a loss scale that is a power of two does not change fp32 results", "[model]") {
    const GptOptions options = nano_options();
    require_same(train_nano(options, 4, 2, 1.0f), train_nano(options, 4, 2, 1024.0f));
}

TEST_CASE("half precisions have fp32's losses within rounding", "[model]") {
    const NanoRun exact = train_nano(nano_options(), 5);
    for (Dtype precision : {Dtype::bf16, Dtype::fp16}) {
        const NanoRun rounded = train_nano(nano_options(precision), 5, 1, precision == Dtype::fp16 ? 1024.0f : 1.0f);
        // Each of the about 6 L + 3 tensors before the logits is rounded once; errors accumulate as a random walk.
        const double unit = precision == Dtype::bf16 ? 0x1p-8 : 0x1p-11;
        const double bound = unit * std::sqrt(6.0 * 3 + 3);
        for (size_t step = 0; step < exact.losses.size(); step++)
            REQUIRE(std::abs(rounded.losses[step] - exact.losses[step]) <= bound * exact.losses[step]);
    }
}

TEST_CASE("training memorizes a batch", "[model]") {
    for (Dtype precision : kPrecisions) {
        const GptOptions options = nano_options(precision);
        Gpt gpt(options, comm_single());
        gpt.initialize(1);
        const std::vector<int> tokens = nano_tokens(43, 131);
        double loss = 0, first = 0;
        for (int step = 1; step <= 150; step++) {
            gpt.begin_step({.loss_scale = 1024, .learning_rate = 3e-3, .update = step});
            gpt.forward(tokens.data());
            gpt.backward(tokens.data() + 1, 1.0f / 42);
            loss = gpt.end_step().loss_sum / 42;
            if (step == 1) first = loss;
        }
        REQUIRE(std::abs(first - std::log(131.0)) < 0.2);  // untrained: a uniform distribution
        REQUIRE(loss < 0.1);
        // batch_loss() matches training: the loss after 150 updates is below the loss before the last one.
        REQUIRE(batch_loss(gpt, tokens.data(), tokens.data() + 1) / 42 < 1.01 * loss);
    }
}

TEST_CASE("a gradient that is not finite is reported and updates nothing", "[model]") {
    for (float poison : {NAN, INFINITY, -INFINITY}) {
        Gpt gpt(nano_options(), comm_single());
        gpt.initialize(1);
        const std::vector<int> tokens = nano_tokens(43, 131);
        const std::vector<float> before = values_of(gpt.state_tensors());
        gpt.begin_step({.learning_rate = 1e-3});
        gpt.forward(tokens.data());
        gpt.backward(tokens.data() + 1, 1.0f / 42);
        const NamedTensor victim = gpt.gradient_tensors()[10];
        copy_to_device(victim.values.from(victim.count - 1).data, &poison, sizeof(poison), Stream{});
        const StepResult result = gpt.end_step();
        REQUIRE("grad." + result.non_finite_tensor == victim.name);
        REQUIRE(same_bits(before, values_of(gpt.state_tensors())));
    }
}

TEST_CASE("a step of split sequences equals a step of a model with that length", "[model]") {
    const std::vector<int> tokens = nano_tokens(43, 131);
    for (const auto& [precision, position] : {std::pair(Dtype::fp32, PositionKind::learned),
                                              {Dtype::fp32, PositionKind::rope},
                                              {Dtype::bf16, PositionKind::learned}}) {
        GptOptions options = nano_options(precision);
        options.shape.position = position;
        options.document_mask = precision == Dtype::fp32;
        options.document_token = tokens[4];
        const NanoRun whole = train_nano(options, 2);
        GptOptions shorter = options;
        shorter.batch *= 3, shorter.seq_len = 7;
        options.max_parts = 3;
        CHECK(same_bits(train_nano(options, 2).state, whole.state));
        auto state_after_step = [&](const GptOptions& o, int seq_len) {
            Gpt gpt(o, comm_single());
            gpt.initialize(42);
            gpt.begin_step({.learning_rate = 1e-3, .seq_len = seq_len});
            gpt.forward(tokens.data());
            gpt.backward(tokens.data() + 1, 1.0f / 42);
            const StepResult result = gpt.end_step();
            std::vector<float> state = values_of(gpt.state_tensors());
            state.insert(state.end(), {float(result.loss_sum), result.grad_norm});
            return state;
        };
        CHECK(same_bits(state_after_step(options, 7), state_after_step(shorter, 0)));
        CHECK_FALSE(same_bits(state_after_step(options, 7), state_after_step(options, 0)));
        auto scratch_bytes = [](const GptOptions& o) {
            const std::vector<MemoryRegion> regions = plan_memory(o);
            return std::ranges::find(regions, "scratch", &MemoryRegion::name)->bytes;
        };
        CHECK(scratch_bytes(options) >= scratch_bytes(shorter));
        for (const int wrong : {3, 4, 42}) CHECK_THROWS_AS(state_after_step(options, wrong), Error);
    }
}

TEST_CASE("the parts of a split sequence have different dropout masks", "[model]") {
    GptOptions options = nano_options();
    options.batch = 1, options.dropout = 0.3;
    std::vector<int> tokens = nano_tokens(8, 131), copies;
    for (int part = 0; part < 3; part++) copies.insert(copies.end(), tokens.begin(), tokens.begin() + 7);
    copies.push_back(tokens[0]);
    tokens[7] = tokens[0];
    auto loss_of = [&](const GptOptions& o, const std::vector<int>& text, int seq_len) {
        Gpt gpt(o, comm_single());
        gpt.initialize(42);
        gpt.begin_step({.seq_len = seq_len, .first_sample = 5});
        gpt.forward(text.data());
        gpt.backward(text.data() + 1, 1.0f);
        return gpt.end_step().loss_sum;
    };
    GptOptions one = options;
    one.seq_len = 7;
    options.max_parts = 3;
    const double whole = loss_of(options, copies, 7), part = loss_of(one, tokens, 0);
    CHECK(std::abs(whole / 3 - part) > 1e-5 * part);
    options.dropout = one.dropout = 0;
    CHECK(std::abs(loss_of(options, copies, 7) / 3 - loss_of(one, tokens, 0)) <= 1e-6 * part);
}

TEST_CASE("a step allocates nothing once each of its ops has run", "[model]") {
    // With several threads, one may run its first part of an op, and allocate its workspace, many steps later.
    const int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    // oneDNN's kernels for matrix instructions (AMX) allocate in every call.
    const bool uses_onednn = device_info().matmul_path.find("oneDNN") != std::string::npos;
    for (GptOptions options : variants()) {
        if (uses_onednn && options.precision != Dtype::fp32) continue;
        options.recompute = Recompute::norm;
        options.micro_steps = 2;
        Gpt gpt(options, comm_single());
        gpt.initialize(1);
        const std::vector<int> tokens = nano_tokens(43, 131);
        auto step = [&](int number) {
            gpt.begin_step({.learning_rate = 1e-3, .update = number});
            for (int micro = 0; micro < 2; micro++) {
                gpt.forward(tokens.data());
                gpt.backward(tokens.data() + 1, 1.0f / 84);
            }
            gpt.end_step();
            batch_loss(gpt, tokens.data(), tokens.data() + 1);
        };
        step(1);
        const long before = allocations();
        for (int number = 2; number <= 5; number++) step(number);
        REQUIRE(allocations() - before == 0);
    }
    omp_set_num_threads(threads);
}

TEST_CASE("targets of -1 are ignored", "[model]") {
    Gpt gpt(nano_options(), comm_single());
    gpt.initialize(1);
    std::vector<int> tokens = nano_tokens(43, 131);
    std::vector<int> targets(tokens.begin() + 1, tokens.end());
    const double whole = batch_loss(gpt, tokens.data(), targets.data());
    double parts = 0;
    for (int half : {0, 1}) {
        std::vector<int> some = targets;
        for (size_t i = 0; i < some.size(); i++)
            if (int(i % 2) == half) some[i] = -1;
        parts += batch_loss(gpt, tokens.data(), some.data());
    }
    REQUIRE(std::abs(whole - parts) <= 1e-6 * whole);
}

TEST_CASE("next_token_logits agrees with the loss", "[model]") {
    Gpt gpt(nano_options(), comm_single());
    gpt.initialize(3);
    const std::vector<int> tokens = nano_tokens(43, 131);
    std::vector<float> logits(131);
    std::vector<int> targets(42, -1);
    for (int count : {1, 2, 13, 21}) {
        next_token_logits(gpt, tokens.data(), count, logits.data());
        double total = 0;
        for (float logit : logits) total += std::exp(double(logit));
        const double expected = std::log(total) - double(logits[size_t(tokens[size_t(count)])]);
        targets.assign(42, -1);
        targets[size_t(count - 1)] = tokens[size_t(count)];
        REQUIRE(std::abs(batch_loss(gpt, tokens.data(), targets.data()) - expected) < 1e-5);
    }
}

TEST_CASE("initialization follows the table", "[model]") {
    const GptOptions options = nano_options();
    Gpt gpt(options, comm_single());
    gpt.initialize(5);
    for (const NamedTensor& tensor : gpt.master_tensors()) {
        const std::vector<float> values = values_of({tensor});
        double sum = 0, squares = 0;
        for (float value : values) sum += value, squares += double(value) * value;
        const double deviation = std::sqrt(squares / double(values.size()));
        INFO(tensor.name);
        if (tensor.shape.size() == 1) {
            const float expected = tensor.name.ends_with("bias") ? 0.0f : 1.0f;
            REQUIRE(values == std::vector<float>(values.size(), expected));
        } else if (tensor.name == "master.wte") {
            for (size_t i = size_t(131) * 48; i < values.size(); i++) REQUIRE(values[i] == 0.0f);
        } else {
            const bool residual = tensor.name.ends_with("proj.weight");
            const double expected = 0.02 / (residual ? std::sqrt(2.0 * options.shape.n_layer) : 1.0);
            REQUIRE(std::abs(deviation / expected - 1) < 4 / std::sqrt(2.0 * double(values.size())));
            REQUIRE(std::abs(sum / double(values.size())) < 4 * expected / std::sqrt(double(values.size())));
        }
    }
}

TEST_CASE("the uniform number determines the sampled token", "[model]") {
    const std::vector<float> logits = {0.0f, std::log(2.0f), std::log(5.0f), -INFINITY};
    auto pick = [&](double temperature, int top_k, float uniform) {
        std::vector<float> copy = logits;
        return pick_token(copy, {.temperature = temperature, .top_k = top_k}, uniform);
    };
    REQUIRE(pick(0, 0, 0.01f) == 2);
    REQUIRE(pick(1, 0, 0.124f) == 0);  // probabilities 1/8, 2/8, 5/8, 0
    REQUIRE(pick(1, 0, 0.126f) == 1);
    REQUIRE(pick(1, 0, 0.374f) == 1);
    REQUIRE(pick(1, 0, 0.376f) == 2);
    REQUIRE(pick(1, 0, 0.9999999f) == 2);
    REQUIRE(pick(1, 2, 0.285f) == 1);  // 2/7, 5/7
    REQUIRE(pick(1, 2, 0.287f) == 2);
    REQUIRE(pick(1, 1, 0.001f) == 2);
}

TEST_CASE("top-p and min-p keep the tokens of their definitions", "[model]") {
    // Probabilities 1/20, 8/20, 4/20, 2/20, 4/20, 1/20, 0.
    std::vector<float> logits;
    for (float weight : {1.0f, 8.0f, 4.0f, 2.0f, 4.0f, 1.0f, 0.0f}) logits.push_back(std::log(weight));
    // The tokens that remain, and their probabilities in 1000ths, from evenly spaced uniform numbers.
    using Shares = std::map<int, int>;
    auto shares = [&](const SampleOptions& options) {
        Shares counts;
        for (int i = 0; i < 1000; i++) {
            std::vector<float> copy = logits;
            counts[pick_token(copy, options, (float(i) + 0.5f) / 1000)]++;
        }
        return counts;
    };
    const Shares all = {{0, 50}, {1, 400}, {2, 200}, {3, 100}, {4, 200}, {5, 50}};
    REQUIRE(shares({}) == all);
    REQUIRE(shares({.top_p = 0.9999}) == all);
    REQUIRE(shares({.top_p = 0}) == Shares{{1, 1000}});  // the most likely token always remains
    REQUIRE(shares({.top_p = 0.39}) == Shares{{1, 1000}});
    REQUIRE(shares({.top_p = 0.41}) == Shares{{1, 667}, {2, 333}});  // the first of equal tokens
    REQUIRE(shares({.top_p = 0.61}) == Shares{{1, 500}, {2, 250}, {4, 250}});
    REQUIRE(shares({.top_p = 0.81}) == Shares{{1, 444}, {2, 223}, {3, 111}, {4, 222}});
    REQUIRE(shares({.top_p = 0.91}) == Shares{{0, 53}, {1, 421}, {2, 210}, {3, 105}, {4, 211}});

    REQUIRE(shares({.min_p = 0.12}) == all);  // 1/8 of the largest probability is 0.125
    REQUIRE(shares({.min_p = 0.13}) == Shares{{1, 444}, {2, 223}, {3, 111}, {4, 222}});
    REQUIRE(shares({.min_p = 0.26}) == Shares{{1, 500}, {2, 250}, {4, 250}});
    REQUIRE(shares({.min_p = 1}) == Shares{{1, 1000}});

    // Order: first the temperature (here weights become their roots), then top-k, then top-p of the remaining tokens.
    REQUIRE(shares({.temperature = 2, .min_p = 0.36}).size() == 4);
    REQUIRE(shares({.temperature = 2, .min_p = 0.35}).size() == 6);
    REQUIRE(shares({.temperature = 2, .top_p = 0.53}).size() == 3);     // (2.83 + 2) / 10.24 is 0.47
    REQUIRE(shares({.top_k = 2, .top_p = 0.66}) == Shares{{1, 1000}});  // 2/3 of the two, 0.4 of all
    REQUIRE(shares({.top_k = 3, .top_p = 0.6, .min_p = 0.6}) == Shares{{1, 1000}});
    REQUIRE(shares({.temperature = 0, .top_p = 0.99}) == Shares{{1, 1000}});
}

TEST_CASE("weights survive a round trip through Hugging Face's layout", "[model]") {
    Gpt gpt(nano_options(), comm_single()), copy(nano_options(), comm_single());
    gpt.initialize(9);
    const std::vector<NamedTensor> from = hf_tensors(gpt), to = hf_tensors(copy);
    for (size_t i = 0; i < from.size(); i++) {
        REQUIRE(from[i].name == to[i].name);
        set_file_values(to[i], file_values(from[i]));
    }
    REQUIRE(same_bits(values_of(gpt.master_tensors()), values_of(copy.master_tensors())));
    REQUIRE(from[0].name == "wte.weight");
    REQUIRE(from[0].shape == std::vector<size_t>{131, 48});
    for (const NamedTensor& tensor : from)
        if (tensor.name == "h.2.attn.c_attn.weight") REQUIRE(tensor.shape == std::vector<size_t>{48, 144});
}
