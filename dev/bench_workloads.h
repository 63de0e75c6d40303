// The models and batches of the benchmarks; the same as in dev/peer_torch.py.
#pragma once

#include <string>
#include <vector>

#include "model/options.h"

struct Workload {
    std::string key;   // on the command line
    std::string name;  // readable, without batch and sequence length
    GptShape shape;
    int batch, seq_len;
    int head_rows = 0;  // as train.head_rows; 0: the trainer's default for the batch
    bool fp8 = false;   // as train.precision "fp8"
    // "optimizer": offload.optimizer and offload.activations, with train.recompute "block"; "all": every key of offload
    std::string offload = {};

    int tokens() const { return batch * seq_len; }
    // Single ops have GPT-2's shapes, with other parts as variants. Other models and FP8 have only the step.
    bool has_op_cases() const { return shape.has_positions() && !fp8; }
    int rows_of_head() const;  // rows of logits at a time, at most tokens()
    std::string title() const;
};

// The workloads that are measured without --workload.
std::vector<Workload> default_workloads(bool on_gpu);

// The workload with this key. Fails with Exit::usage if there is none.
Workload find_workload(const std::string& key, bool on_gpu);

// The options of a training step of the workload, with the trainer's defaults for everything else.
GptOptions options_of(const Workload& work, Dtype precision);
