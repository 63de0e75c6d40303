// 20 steps of each of torch.optim's rules on a GPT-2, a Llama and a Qwen3 (test/recorded/torch/trained.safetensors;
// make_training_reference.py, which made it, describes it).

#include <map>

#include "model/huggingface.h"
#include "test/support/catch.h"
#include "test/support/torch_reference.h"
#include "training/models/hf_config.h"

namespace {

constexpr size_t kStride = 61;  // make_training_reference.py's STRIDE

// Relative. If PyTorch's own runs in FP32 have an error above a third of it, the limit is 3 times that error: Adam
// and RMSprop amplify the error of a gradient near zero, and later steps amplify the weight's error.
constexpr double kTolerance = 1e-6;

// A recorded model and its batches.
struct RecordedModel {
    std::string name, directory;
    Safetensors weights{directory + "/model.safetensors"};
    TorchTensors outputs = load_torch_tensors(directory + "/outputs.safetensors");

    Gpt load(const OptimizerSettings& optimizer) const {
        const std::string path = directory + "/config.json";
        const std::vector<size_t>& shape = outputs.at("tokens").shape;  // ends with batch_size, seq_len
        GptOptions options;
        options.shape = hf_model(read_file(path), path);
        options.batch = int(shape[shape.size() - 2]);
        options.seq_len = int(shape[shape.size() - 1]);
        options.precision = Dtype::fp32;
        options.optimizer = optimizer;
        options.head_rows = 40;  // less than the number of rows, and not a divisor of it
        Gpt gpt(options, comm_single());
        weights.load(tensors(gpt), [](const Safetensors::Entry& entry) { FAIL(entry.name << " is not used"); });
        gpt.masters_changed();
        return gpt;
    }

    std::vector<NamedTensor> tensors(const Gpt& gpt) const {
        return hf_tensors(gpt, [&](const std::string& tensor) { return weights.find(tensor); });
    }

    const int* batch(const char* what, size_t step, size_t size) const {
        const std::vector<int>& ids = outputs.at(what).integers;
        return ids.data() + step % (ids.size() / size) * size;
    }
};

const std::vector<RecordedModel>& models() {
    static const std::vector<RecordedModel> models = {
        {"heads_4x16", "test/recorded/torch/heads_4x16"},
        {"llama_3to1", "test/recorded/torch/families/llama_3to1"},
        {"qwen3_yarn", "test/recorded/torch/families/qwen3_yarn"},
    };
    return models;
}

// The elements of the weights that the file has.
std::vector<float> kept_weights(const RecordedModel& model, const Gpt& gpt) {
    std::map<std::string, std::vector<float>> all;
    for (const NamedTensor& tensor : model.tensors(gpt)) all[tensor.name] = file_values(tensor);
    std::vector<float> kept;
    for (const Safetensors::Entry& entry : model.weights.entries()) {
        const std::vector<float>& values = all.at(entry.name);
        for (size_t i = 0; i < values.size(); i += kStride)
            if (!is_key_bias(entry.name, i, values.size())) kept.push_back(values[i]);
    }
    return kept;
}

double error_in_norm(const std::vector<float>& values, const std::vector<float>& expected) {
    REQUIRE(values.size() == expected.size());
    double difference = 0, size = 0;
    for (size_t i = 0; i < values.size(); i++) {
        difference += std::pow(double(values[i]) - double(expected[i]), 2);
        size += std::pow(double(expected[i]), 2);
    }
    return std::sqrt(difference / size);
}

// The largest relative errors of a training run.
struct Errors {
    double weights, loss = 0, norm = 0;
};

// Trains for the recorded steps, and compares with a group of the file.
Errors errors_of_training(const RecordedModel& model, const OptimizerSettings& settings, double learning_rate,
                          const TorchTensors& trained, const std::string& group) {
    const auto recorded = [&](const char* what) { return trained.at(group + what).values; };
    Gpt gpt = model.load(settings);
    const size_t targets = size_t(gpt.options().batch) * size_t(gpt.options().seq_len);
    Errors errors{};
    for (size_t step = 0; step < recorded("/loss").size(); step++) {
        gpt.begin_step({.learning_rate = learning_rate, .update = int64_t(step) + 1});
        gpt.forward(model.batch("tokens", step, targets));
        gpt.backward(model.batch("targets", step, targets), 1.0f / float(targets));
        const StepResult result = gpt.end_step();
        const double loss = double(recorded("/loss")[step]), norm = double(recorded("/grad_norm")[step]);
        errors.loss = std::max(errors.loss, std::abs(result.loss_sum / double(targets) / loss - 1));
        errors.norm = std::max(errors.norm, std::abs(double(result.grad_norm) / norm - 1));
    }
    errors.weights = error_in_norm(kept_weights(model, gpt), recorded(""));
    return errors;
}

void check_errors(const RecordedModel& model, const OptimizerSettings& settings, double learning_rate,
                  const TorchTensors& trained, const std::string& group) {
    const Errors errors = errors_of_training(model, settings, learning_rate, trained, group);
    INFO(group << ": errors of weights, losses and norms " << errors.weights << ", " << errors.loss << ", "
               << errors.norm);
    const std::vector<float>& fp32_error = trained.at(group + "/fp32_error").values;
    const double all[] = {errors.weights, errors.loss, errors.norm};
    for (size_t i = 0; i < 3; i++) CHECK(all[i] <= std::max(kTolerance, 3 * double(fp32_error[i])));
}

}  // namespace

TEST_CASE("20 steps of each optimizer agree with PyTorch on three models", "[model]") {
    const TorchTensors trained = load_torch_tensors("test/recorded/torch/trained.safetensors");
    for (const RecordedModel& model : models())
        for (const TorchOptimizer& optimizer : kTorchOptimizers) {
            const std::string group = model.name + "/" + optimizer.group;
            check_errors(model, optimizer.settings(), optimizer.learning_rate, trained, group);
        }
}

// Queries, keys, values, gates and ups are separate matrices, as in Hugging Face's models. GPT-2's padded vocabulary is
// longer than the embedding's rows.
TEST_CASE("20 steps of Adafactor agree with PyTorch on three models", "[model]") {
    const TorchTensors trained = load_torch_tensors("test/recorded/torch/trained.safetensors");
    OptimizerSettings settings;
    set_optimizer(settings, OptimizerKind::adafactor);
    for (const RecordedModel& model : models()) check_errors(model, settings, 0.01, trained, model.name + "/adafactor");
}

// The error of PyTorch's iterations in BF16, as torch.optim.Muon makes them, is the limit for ours.
TEST_CASE("20 steps of Muon are closer to exact iterations than PyTorch's", "[model]") {
    const TorchTensors trained = load_torch_tensors("test/recorded/torch/trained.safetensors");
    for (const auto& [rule, scale] :
         {std::pair("muon", MuonScale::shape), std::pair("muon_adamw_rms", MuonScale::adamw_rms)}) {
        OptimizerSettings settings;
        set_optimizer(settings, OptimizerKind::muon);
        settings.muon_scale = scale;
        settings.groups = {{.tensors = "embedding", .lr_scale = 0.1}, {.tensors = "vector", .lr_scale = 0.1}};
        const std::string group = models()[0].name + "/" + rule, exact = group + "_fp64";
        const Errors errors = errors_of_training(models()[0], settings, 0.01, trained, exact);
        const double torch_error = error_in_norm(trained.at(group).values, trained.at(exact).values);
        INFO(group << ": " << errors.weights << ", PyTorch's " << torch_error);
        CHECK(torch_error < 0.1);
        CHECK(errors.weights < torch_error);
    }
}
