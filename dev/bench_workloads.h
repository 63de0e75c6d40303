// The models and batches that the benchmarks measure. dev/peer_torch.py has the same.
#pragma once

#include <string>
#include <vector>

#include "model/options.h"

struct Workload {
    std::string key;   // on the command line
    std::string name;  // for people, without batch and length
    GptShape shape;
    int batch, seq_len;
    int head_rows = 0;  // as train.head_rows; 0: the trainer's default for the batch

    int tokens() const { return batch * seq_len; }
    // The cases of single ops are GPT-2's, with other parts as variants; of another model the step is measured.
    bool has_op_cases() const { return shape.has_positions(); }
    int rows_of_head() const;  // rows of logits at a time, at most tokens()
    std::string title() const;
};

// What is measured where no --workload is given.
std::vector<Workload> default_workloads(bool on_gpu);

// The workload of this key. Fails with Exit::usage where there is none.
Workload find_workload(const std::string& key, bool on_gpu);

// A training step of the workload, everything else at the trainer's defaults.
GptOptions options_of(const Workload& work, Dtype precision);
