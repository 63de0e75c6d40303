// 20 steps of each of torch.optim's rules on a GPT-2, a Llama and a Qwen3 (test/recorded/torch/trained.safetensors;
// make_training_reference.py, which made it, describes it).

#include <map>

#include "model/huggingface.h"
#include "test/support/catch.h"
#include "test/support/torch_reference.h"
#include "training/models/hf_config.h"

namespace {

constexpr size_t kStride = 61;  // make_training_reference.py's STRIDE

// Relative. Where the rounding errors of PyTorch's own runs in FP32 grow to more than a third of it, 3 times these
// errors: Adam and RMSprop amplify the error of a gradient near zero, and the following steps that of the weight.
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
        options.shape = hf_model(parse_json(read_file(path), path, Exit::data), path);
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

}  // namespace

TEST_CASE("20 steps of each optimizer agree with PyTorch on three models", "[model]") {
    const TorchTensors trained = load_torch_tensors("test/recorded/torch/trained.safetensors");
    for (const RecordedModel& model : models())
        for (const TorchOptimizer& optimizer : kTorchOptimizers) {
            const std::string group = model.name + "/" + optimizer.group;
            const auto recorded = [&](const char* what) { return trained.at(group + what).values; };
            Gpt gpt = model.load(optimizer.settings());
            const size_t targets = size_t(gpt.options().batch) * size_t(gpt.options().seq_len);
            double loss_error = 0, norm_error = 0;
            for (size_t step = 0; step < recorded("/loss").size(); step++) {
                gpt.begin_step({.learning_rate = optimizer.learning_rate, .update = int64_t(step) + 1});
                gpt.forward(model.batch("tokens", step, targets));
                gpt.backward(model.batch("targets", step, targets), 1.0f / float(targets));
                const StepResult result = gpt.end_step();
                const double loss = double(recorded("/loss")[step]), norm = double(recorded("/grad_norm")[step]);
                loss_error = std::max(loss_error, std::abs(result.loss_sum / double(targets) / loss - 1));
                norm_error = std::max(norm_error, std::abs(double(result.grad_norm) / norm - 1));
            }
            const double errors[] = {error_in_norm(kept_weights(model, gpt), recorded("")), loss_error, norm_error};
            INFO(group << ": errors of weights, losses and norms " << errors[0] << ", " << errors[1] << ", "
                       << errors[2]);
            for (size_t i = 0; i < 3; i++)
                CHECK(errors[i] <= std::max(kTolerance, 3 * double(recorded("/fp32_error")[i])));
        }
}
