// A model small enough to train in milliseconds, with sizes that are not multiples of anything.
#pragma once

#include <omp.h>

#include <cstring>
#include <functional>
#include <random>

#include "model/gpt.h"

inline GptOptions nano_options(Dtype precision = Dtype::fp32) {
    GptOptions options;
    options.shape = {.n_layer = 3, .n_head = 3, .n_embd = 48, .n_positions = 24, .vocab_size = 131};
    options.batch = 2;
    options.seq_len = 21;
    options.precision = precision;
    options.head_rows = 1024;
    return options;
}

// Repeatable token ids: `count` of them in [0, vocab).
inline std::vector<int> nano_tokens(size_t count, int vocab, unsigned seed = 1) {
    std::mt19937 random(seed);
    std::vector<int> tokens(count);
    for (int& token : tokens) token = int(random() % unsigned(vocab));
    return tokens;
}

// The concatenated values of tensors: equal iff every bit is.
inline std::vector<float> values_of(const std::vector<NamedTensor>& tensors) {
    std::vector<float> all;
    for (const NamedTensor& tensor : tensors) {
        std::vector<std::byte> bytes(tensor.count * size_of(tensor.values.dtype));
        copy_to_host(bytes.data(), tensor.values.data, bytes.size(), Stream{});
        synchronize(Stream{});
        for (size_t i = 0; i < tensor.count; i++) all.push_back(float(element({bytes.data(), tensor.values.dtype}, i)));
    }
    return all;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

struct NanoRun {
    std::vector<double> losses;  // per step, averaged over targets
    std::vector<float> norms;
    std::vector<float> state;  // masters and moments at the end
    OffloadTraffic offload;    // of the last step
};

// Trains for `steps` steps of `micros` micro-batches each, always on the same tokens for the same step. `change` gets
// the model before the first one.
inline NanoRun train_nano(GptOptions options, int steps, int micros = 1, float loss_scale = 1.0f,
                          const std::function<void(Gpt&)>& change = nullptr) {
    options.micro_steps = micros;
    Gpt gpt(options, comm_single());
    gpt.initialize(42);
    if (change) change(gpt);
    const size_t BT = size_t(options.batch) * size_t(options.seq_len);
    NanoRun run;
    for (int step = 1; step <= steps; step++) {
        gpt.begin_step({.loss_scale = loss_scale,
                        .learning_rate = 1e-3,
                        .update = step,
                        .first_sample = uint64_t(step - 1) * uint64_t(micros * options.batch)});
        const std::vector<int> tokens = nano_tokens(BT * size_t(micros) + 1, options.shape.vocab_size, unsigned(step));
        for (int micro = 0; micro < micros; micro++) {
            const int* batch = tokens.data() + size_t(micro) * BT;
            gpt.forward(batch);
            gpt.backward(batch + 1, 1.0f / float(BT * size_t(micros)));
        }
        const StepResult result = gpt.end_step();
        run.losses.push_back(result.loss_sum / double(BT * size_t(micros)));
        run.norms.push_back(result.grad_norm);
        run.offload = result.offload;
    }
    run.state = values_of(gpt.state_tensors());
    return run;
}
