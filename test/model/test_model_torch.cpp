// The trainer's model against PyTorch's outputs (test/recorded/torch, made by make_reference.py): logits, losses, every
// gradient, and the parameters after steps of AdamW and SGD. The weights are read by the functions of the Hugging Face
// importer.

#include "model/huggingface.h"
#include "model/inference.h"
#include "runtime/config/schedule.h"
#include "test/support/catch.h"
#include "test/support/tolerance.h"
#include "test/support/torch_reference.h"

namespace {

constexpr double kTolerance = 1e-5;  // relative in norm, per tensor, in fp32

GptOptions options_of(const TorchReference& torch, Dtype precision, const OptimizerSettings& optimizer = {}) {
    GptOptions options;
    options.shape = {torch.n_layer, torch.n_head, torch.n_head, torch.n_embd, torch.n_positions, torch.vocab_size};
    options.batch = torch.batch_size;
    options.micro_steps = torch.micro_steps;
    options.seq_len = torch.seq_len;
    options.precision = precision;
    options.optimizer = optimizer;
    options.head_rows = 40;  // less than the number of rows, and not a divisor of it
    return options;
}

Gpt load(const TorchReference& torch, const GptOptions& options) {
    Gpt gpt(options, comm_single());
    for (const NamedTensor& tensor : hf_tensors(gpt)) set_file_values(tensor, torch.weights.at(tensor.name).values);
    gpt.masters_changed();
    return gpt;
}

Gpt load(const TorchReference& torch, Dtype precision = Dtype::fp32, const OptimizerSettings& optimizer = {}) {
    return load(torch, options_of(torch, precision, optimizer));
}

// Forward and backward passes of one step's micro-batches; end_step() returns the step's mean loss.
void accumulate_gradients(Gpt& gpt, const TorchReference& torch, int step, const StepSettings& settings) {
    const float targets = float(torch.batch_size * torch.seq_len * torch.micro_steps);
    gpt.begin_step(settings);
    for (int micro = 0; micro < torch.micro_steps; micro++) {
        gpt.forward(torch.tokens(step, micro));
        gpt.backward(torch.targets(step, micro), 1.0f / targets);
    }
}

// The largest error of any tensor of the group, after dividing gradients by the loss scale.
double worst_error(const Gpt& gpt, const TorchReference& torch, const std::string& group, float scale = 1.0f) {
    double worst = 0;
    const bool is_gradient = group == "gradient" || group == "dropout";
    for (const NamedTensor& tensor :
         hf_tensors(gpt.layout(), is_gradient ? gpt.gradient_tensors() : gpt.master_tensors())) {
        std::vector<float> values = file_values(tensor);
        for (float& value : values) value /= scale;
        const double error = torch_error(torch, group, tensor.name, values);
        UNSCOPED_INFO(group << " " << tensor.name << " " << error);
        if (!(error <= worst)) worst = error;  // keeps a NaN
    }
    return worst;
}

void check_training(const TorchOptimizer& optimizer) {
    const std::string& group = optimizer.group;
    for (const std::string& name : kTorchReferences) {
        const TorchReference torch = load_torch_reference(name);
        if (!torch.has(group)) continue;
        INFO(name << " " << group);
        Gpt gpt = load(torch, Dtype::fp32, optimizer.settings());
        const double targets = double(torch.batch_size) * torch.seq_len * torch.micro_steps;
        for (int step = 0; step < torch.steps; step++) {
            accumulate_gradients(gpt, torch, step, {.learning_rate = optimizer.learning_rate, .update = step + 1});
            const StepResult result = gpt.end_step();
            const double loss = torch.output(group + "/loss").values[size_t(step)];
            const double norm = torch.output(group + "/grad_norm").values[size_t(step)];
            REQUIRE(std::abs(result.loss_sum / targets - loss) <= kTolerance * loss);
            REQUIRE(std::abs(result.grad_norm - norm) <= kTolerance * norm);
        }
        REQUIRE(worst_error(gpt, torch, group) <= kTolerance);
    }
}

}  // namespace

TEST_CASE("the model agrees with PyTorch: logits, loss and every gradient", "[model]") {
    for (const std::string& name : kTorchReferences) {
        INFO(name);
        const TorchReference torch = load_torch_reference(name);
        Gpt gpt = load(torch);
        std::vector<float> logits, row(size_t(torch.vocab_size));
        for (int b = 0; b < torch.batch_size; b++)
            for (int t = 0; t < torch.seq_len; t++) {
                next_token_logits(gpt, torch.tokens(0, 0) + b * torch.seq_len, t + 1, row.data());
                logits.insert(logits.end(), row.begin(), row.end());
            }
        REQUIRE(torch_error(torch, "first", "logits", logits) <= kTolerance);
        accumulate_gradients(gpt, torch, 0, {});
        REQUIRE(worst_error(gpt, torch, "gradient") <= kTolerance);
    }
}

// PyTorch used masks from make_reference.py's own Philox: all four sites, the samples of all micro-steps, and the
// scaling must match. The step is not the run's first one.
TEST_CASE("the model agrees with PyTorch: dropout", "[model]") {
    const TorchReference torch = load_torch_reference("micro_steps_3");
    const int step = 1;
    for (Recompute level : {Recompute::none, Recompute::block}) {
        GptOptions options = options_of(torch, Dtype::fp32);
        options.dropout = 0.2;
        options.seed = 5;
        options.recompute = level;
        Gpt gpt = load(torch, options);
        const uint64_t samples = uint64_t(torch.batch_size * torch.micro_steps);
        accumulate_gradients(gpt, torch, step, {.first_sample = step * samples});
        REQUIRE(worst_error(gpt, torch, "dropout") <= kTolerance);
        const double loss = torch.output("dropout/loss").values[0];
        REQUIRE(std::abs(gpt.end_step().loss_sum / double(samples * uint64_t(torch.seq_len)) - loss) <=
                kTolerance * loss);
    }
}

TEST_CASE("the model agrees with PyTorch: five steps of each optimizer", "[model]") {
    for (const TorchOptimizer& optimizer : kTorchOptimizers) check_training(optimizer);
}

TEST_CASE("gradients in half precisions stay near PyTorch's", "[model]") {
    for (Dtype precision : {Dtype::bf16, Dtype::fp16}) {
        for (const std::string& name : kTorchReferences) {
            INFO(name << " " << name_of(precision));
            const TorchReference torch = load_torch_reference(name);
            Gpt gpt = load(torch, precision);
            const float loss_scale = 256;
            accumulate_gradients(gpt, torch, 0, {.loss_scale = loss_scale});
            // On the longest path a value is rounded about 8 times in each block, forward and again backward, and a few
            // times at the ends. Roundings are independent, so they accumulate as a random walk: 4 standard deviations,
            // each rounding at most a unit round-off (weights are rounded too, which doubles the variance).
            const double roundings = 2 * (8.0 * torch.n_layer + 6);
            const double unit = precision == Dtype::bf16 ? unit_roundoff<bf16> : unit_roundoff<fp16>;
            REQUIRE(worst_error(gpt, torch, "gradient", loss_scale) <= 4 * unit * std::sqrt(2 * roundings));
        }
    }
}
