// Optional measurements of a step: gradient norms by tensor, and the residual stream.
#include <cmath>

#include "kernels/base/check.h"
#include "test/support/catch.h"
#include "test/support/nano_gpt.h"

namespace {

// A step of two micro-steps.
StepResult measured_step(Gpt& gpt, bool measure, int update = 1, float loss_scale = 1) {
    const size_t BT = size_t(gpt.options().batch) * size_t(gpt.options().seq_len);
    gpt.begin_step({.loss_scale = loss_scale,
                    .learning_rate = 1e-3,
                    .measure = measure,
                    .measure_first = measure,
                    .update = update});
    for (unsigned micro = 1; micro <= 2; micro++) {
        const std::vector<int> tokens = nano_tokens(BT + 1, gpt.options().shape.vocab_size, micro);
        gpt.forward(tokens.data());
        gpt.backward(tokens.data() + 1, 0.5f / float(BT));
    }
    return gpt.end_step();
}

GptOptions two_micro_steps(Dtype precision) {
    GptOptions options = nano_options(precision);
    options.micro_steps = 2;
    return options;
}

std::vector<float> named_values(const std::vector<NamedTensor>& tensors, const std::string& name) {
    for (const NamedTensor& tensor : tensors)
        if (tensor.name == name) return values_of({tensor});
    FAIL("no tensor " << name);
    return {};
}

void set_values(const Gpt& gpt, const std::string& name, float value) {
    for (const NamedTensor& tensor : gpt.master_tensors()) {
        if (tensor.name != "master." + name) continue;
        const std::vector<float> values(tensor.count, value);
        copy_to_device(tensor.values.data, values.data(), values.size() * sizeof(float), Stream{});
    }
}

}  // namespace

TEST_CASE("a measured step returns the norm of each tensor's gradient", "[model]") {
    for (Dtype precision : {Dtype::fp32, Dtype::bf16})
        for (float loss_scale : {1.0f, 1024.0f}) {
            Gpt gpt(two_micro_steps(precision), comm_single());
            gpt.initialize(42);
            const StepResult result = measured_step(gpt, true, 1, loss_scale);
            const std::vector<NamedTensor> gradients = gpt.gradient_tensors();
            REQUIRE(result.tensor_norms.size() == gradients.size());
            double all = 0;
            for (size_t i = 0; i < gradients.size(); i++) {
                double sum = 0;
                for (const float value : values_of({gradients[i]})) sum += double(value) * double(value);
                INFO(gradients[i].name);
                CHECK(std::abs(result.tensor_norms[i] - std::sqrt(sum) / double(loss_scale)) <= 1e-12);
                CHECK(result.tensor_norms[i] > 0);
                all += result.tensor_norms[i] * result.tensor_norms[i];
            }
            CHECK(std::abs(std::sqrt(all) / double(result.grad_norm) - 1) < 1e-6);
        }
}

// With other buckets, chunks end at other elements.
TEST_CASE("a measured step's norms have the same bits for any grid of chunks", "[model]") {
    std::vector<double> norms[2];
    std::vector<int> counts[2];
    for (const int shares : {0, 1}) {
        GptOptions options = two_micro_steps(Dtype::fp32);
        options.shape.n_embd = 96, options.bucket_bytes = shares ? 1 << 30 : 0;
        Gpt gpt(options, comm_single());
        gpt.initialize(42);
        norms[shares] = measured_step(gpt, true).tensor_norms;
        for (const ops::Chunk& chunk : chunk_grid(gpt.layout())) counts[shares].push_back(chunk.count);
    }
    CHECK(counts[0] != counts[1]);
    CHECK(norms[0] == norms[1]);
}

// With projections of zero, only embeddings and biases contribute to the residual stream; they differ between places.
TEST_CASE("a measured step returns the residual stream of its last micro-step", "[model]") {
    for (Recompute recompute : {Recompute::none, Recompute::block}) {
        GptOptions options = two_micro_steps(Dtype::fp32);
        options.recompute = recompute;
        Gpt gpt(options, comm_single());
        gpt.initialize(42);
        std::vector<float> offset(1);  // of the stream from the embedding, by place
        for (int layer = 0; layer < options.shape.n_layer; layer++)
            for (const char* projection : {"attn_proj", "fc_proj"}) {
                const std::string name = format("h.%d.%s", layer, projection);
                const float bias = 0.125f * float(offset.size());
                set_values(gpt, name + ".weight", 0);
                set_values(gpt, name + ".bias", bias);
                offset.push_back(offset.back() + bias);
            }
        gpt.masters_changed();
        const std::vector<NamedTensor> masters = gpt.master_tensors();
        const std::vector<float> wte = named_values(masters, "master.wte"), wpe = named_values(masters, "master.wpe");
        const size_t C = size_t(options.shape.n_embd), T = size_t(options.seq_len), BT = size_t(options.batch) * T;
        const std::vector<int> tokens = nano_tokens(BT + 1, options.shape.vocab_size, 2);
        const StepResult result = measured_step(gpt, true);
        REQUIRE(result.residual_rms.size() == offset.size());
        for (size_t place = 0; place < offset.size(); place++) {
            double sum = 0;
            for (size_t row = 0; row < BT; row++)
                for (size_t i = 0; i < C; i++) {
                    const float embedding = wte[size_t(tokens[row]) * C + i] + wpe[row % T * C + i];
                    sum += std::pow(double(embedding) + double(offset[place]), 2);
                }
            INFO("place " << place);
            CHECK(std::abs(result.residual_rms[place] / std::sqrt(sum / double(BT * C)) - 1) < 1e-5);
        }
    }
}

// The gradients of single sequences, added in double precision, give the norms of a micro-step and of the step.
TEST_CASE("a measured step returns the norm of its first micro-step's gradient", "[model]") {
    for (const bool deterministic : {false, true})
        for (float loss_scale : {1.0f, 1024.0f}) {
            GptOptions options = two_micro_steps(Dtype::fp32), single = nano_options(Dtype::fp32);
            options.deterministic_reduce = deterministic;
            single.batch = 1;
            const size_t T = size_t(options.seq_len), BT = size_t(options.batch) * T;
            const float scale = 0.5f / float(BT);
            std::vector<double> first, all;  // sums of the sequences' gradients
            for (unsigned micro = 1; micro <= 2; micro++) {
                const std::vector<int> tokens = nano_tokens(BT + 1, options.shape.vocab_size, micro);
                for (size_t row = 0; row < size_t(options.batch); row++) {
                    Gpt gpt(single, comm_single());
                    gpt.initialize(42);
                    gpt.begin_step({});
                    gpt.forward(&tokens[row * T]);
                    gpt.backward(&tokens[row * T + 1], scale);
                    gpt.end_step();
                    const std::vector<float> gradient = values_of(gpt.gradient_tensors());
                    all.resize(gradient.size());
                    for (size_t i = 0; i < gradient.size(); i++) all[i] += double(gradient[i]);
                }
                if (micro == 1) first = all;
            }
            auto squared = [](const std::vector<double>& values) {
                double sum = 0;
                for (const double value : values) sum += value * value;
                return sum;
            };
            Gpt gpt(options, comm_single());
            gpt.initialize(42);
            const StepResult result = measured_step(gpt, true, 1, loss_scale);
            // FP32 sums of at most BT terms: relative errors of 2^-24 each.
            CHECK(std::abs(gpt.first_norm_squared() / squared(first) - 1) < 1e-5);
            CHECK(std::abs(double(result.grad_norm) / std::sqrt(squared(all)) - 1) < 1e-5);
            measured_step(gpt, false, 2);
            CHECK(gpt.first_norm_squared() == 0);
        }
}

TEST_CASE("measuring does not change a bit, and other steps measure nothing", "[model]") {
    std::vector<float> states[2];
    for (const bool measure : {false, true}) {
        Gpt gpt(two_micro_steps(Dtype::bf16), comm_single());
        gpt.initialize(42);
        for (int step = 1; step <= 3; step++) {
            const StepResult result = measured_step(gpt, measure && step == 2, step);
            CHECK(result.tensor_norms.empty() == !(measure && step == 2));
            CHECK(result.residual_rms.empty() == !(measure && step == 2));
        }
        states[measure] = values_of(gpt.state_tensors());
    }
    CHECK(same_bits(states[0], states[1]));
}
