// PyTorch's results for three small models: the files in test/recorded/torch, described in
// test/recorded/torch/make_reference.py, which made them. Paths are relative to the repository's root, where the tests
// run.
#pragma once

#include <cmath>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>

#include "model/optimizers.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/io/files.h"
#include "runtime/io/json.h"

// Head sizes 16, 64 and 16, 3 micro-steps in the last model, and no dimension that is a multiple of a tile.
inline const std::vector<std::string> kTorchReferences = {"heads_4x16", "heads_2x64", "micro_steps_3"};

// A group of make_reference.py's OPTIMIZERS.
struct TorchOptimizer {
    std::string group;
    OptimizerKind kind;
    double learning_rate;
    bool nesterov = false;

    OptimizerSettings settings() const {
        OptimizerSettings settings;
        set_optimizer(settings, kind);
        settings.nesterov = nesterov;
        return settings;
    }
};
inline const std::vector<TorchOptimizer> kTorchOptimizers = {
    {"adamw", OptimizerKind::adamw, 1e-3},     {"adam", OptimizerKind::adam, 1e-3},
    {"sgd", OptimizerKind::sgd, 0.05},         {"nesterov", OptimizerKind::sgd, 0.05, true},
    {"rmsprop", OptimizerKind::rmsprop, 1e-3}, {"adagrad", OptimizerKind::adagrad, 1e-2}};

struct TorchTensor {
    std::vector<size_t> shape;
    std::vector<float> values;  // F32
    std::vector<int> integers;  // I32
};
using TorchTensors = std::map<std::string, TorchTensor>;

inline TorchTensors load_torch_tensors(const std::string& path) {
    TorchTensors tensors;
    Safetensors file(path);
    for (const Safetensors::Entry& view : file.entries()) {
        TorchTensor& tensor = tensors[view.name];
        tensor.shape = view.shape;
        require(view.type == "F32" || view.type == "I32", "%s: %s has type %s", path.c_str(), view.name.c_str(),
                view.type.c_str());
        if (view.type == "F32") {
            tensor.values.resize(view.bytes / sizeof(float));
            std::memcpy(tensor.values.data(), view.data, view.bytes);
        } else {
            tensor.integers.resize(view.bytes / sizeof(int));
            std::memcpy(tensor.integers.data(), view.data, view.bytes);
        }
    }
    return tensors;
}

struct TorchReference {
    std::string directory;  // "test/recorded/torch/heads_4x16", in Hugging Face's form: config.json, model.safetensors
    int n_layer, n_head, n_embd, n_positions, vocab_size;
    int steps, micro_steps, batch_size, seq_len;
    TorchTensors weights;  // by Hugging Face's names, linear weights (in, out)
    TorchTensors outputs;  // see make_reference.py

    // (batch_size, seq_len) tokens, or targets, of one micro-step; both counted from 0.
    const int* tokens(int step, int micro_step) const { return batch("tokens", step, micro_step); }
    const int* targets(int step, int micro_step) const { return batch("targets", step, micro_step); }
    bool has(const std::string& group) const { return outputs.count(group + "/stride") > 0; }
    const TorchTensor& output(const std::string& name) const { return outputs.at(name); }

private:
    const int* batch(const char* name, int step, int micro_step) const {
        return outputs.at(name).integers.data() + size_t(step * micro_steps + micro_step) * batch_size * seq_len;
    }
};

inline TorchReference load_torch_reference(const std::string& name) {
    TorchReference reference;
    reference.directory = "test/recorded/torch/" + name;
    std::string config_path = reference.directory + "/config.json";
    nlohmann::ordered_json config = parse_json(read_file(config_path), config_path, Exit::data);
    reference.n_layer = config.at("n_layer"), reference.n_head = config.at("n_head");
    reference.n_embd = config.at("n_embd"), reference.n_positions = config.at("n_positions");
    reference.vocab_size = config.at("vocab_size");
    reference.weights = load_torch_tensors(reference.directory + "/model.safetensors");
    reference.outputs = load_torch_tensors(reference.directory + "/outputs.safetensors");
    const std::vector<size_t>& shape = reference.outputs.at("tokens").shape;
    reference.steps = int(shape.at(0)), reference.micro_steps = int(shape.at(1));
    reference.batch_size = int(shape.at(2)), reference.seq_len = int(shape.at(3));
    return reference;
}

inline bool ends_with(const std::string& name, const std::string& end) {
    return name.size() >= end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0;
}

// Linear weights: (in, out) in Hugging Face's GPT-2, (out, in) in kernels/ops.h.
inline bool is_linear_weight(const std::string& name) {
    return ends_with(name, "c_attn.weight") || ends_with(name, "c_proj.weight") || ends_with(name, "c_fc.weight");
}

// (rows, cols) -> (cols, rows)
inline std::vector<float> transposed(const std::vector<float>& values, size_t rows, size_t cols) {
    require(values.size() == rows * cols, "transposed: %zu values are not %zu x %zu", values.size(), rows, cols);
    std::vector<float> result(values.size());
    for (size_t row = 0; row < rows; row++)
        for (size_t col = 0; col < cols; col++) result[col * rows + row] = values[row * cols + col];
    return result;
}

// Whether an element of a tensor of GPT-2 is a key bias. Softmax ignores terms that all keys share, so the gradient of
// the key bias is 0 apart from rounding noise.
inline bool is_key_bias(const std::string& name, size_t element, size_t count) {
    return ends_with(name, "c_attn.bias") && element / (count / 3) == 1;
}

// An optimizer that divides by the gradient's size moves the key bias by a large part of the learning rate, so it is
// not comparable.
inline bool is_noise(const std::string& group, const std::string& name, size_t element, size_t count) {
    const bool divides = group == "adamw" || group == "adam" || group == "rmsprop" || group == "adagrad";
    return divides && is_key_bias(name, element, count);
}

// The distance of `ours`, in Hugging Face's layout, from PyTorch's tensor GROUP/NAME, relative in norm, over the
// elements that the file contains; plus the error of the whole tensor's norm. NaN if any value is NaN.
inline double torch_error(const TorchReference& reference, const std::string& group, const std::string& name,
                          const std::vector<float>& ours) {
    const std::vector<float>& kept = reference.output(group + "/" + name).values;
    size_t stride = size_t(reference.output(group + "/stride").integers.at(0));
    require(kept.size() == (ours.size() + stride - 1) / stride, "%s/%s: %zu elements of %zu are kept", group.c_str(),
            name.c_str(), kept.size(), ours.size());
    double difference = 0, size = 0, squares = 0;
    bool has_noise = false;
    for (size_t i = 0; i < ours.size(); i++) {
        squares += double(ours[i]) * ours[i];
        bool noise = is_noise(group, name, i, ours.size());
        has_noise = has_noise || noise;
        if (noise || i % stride != 0) continue;
        double expected = kept[i / stride];
        difference += (ours[i] - expected) * (ours[i] - expected);
        size += expected * expected;
    }
    double norm = reference.output("norm/" + group + "/" + name).values.at(0);
    double norm_error = has_noise ? 0 : std::abs(std::sqrt(squares) - norm) / norm;
    return std::sqrt(difference / size) + norm_error;
}
