// The ops of a training step at the step's shapes, as calls to be timed. Their arrays hold random numbers, as training
// does: zeros are multiplied faster.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "model/shape.h"

struct Workload {
    std::string key;   // on the command line
    std::string name;  // for people, without batch and length
    GptShape shape;
    int batch, seq_len;
    int head_rows;  // rows of logits at a time

    std::string title() const;
};

struct Case {
    std::string name;
    double calls;  // in one step
    std::function<void()> call;
    double flops, bytes;  // of one call; bytes: every operand once
};

// Cases over the same arrays, which live as long as they do.
struct CaseGroup {
    std::vector<Case> cases;
    std::shared_ptr<void> arrays;
};

// Makes a group: one after the other, so that not all arrays of a step have to fit at once.
using MakeGroup = std::function<CaseGroup()>;
template <class T> std::vector<MakeGroup> op_groups(const Workload& work);

// What the device's speed of light is measured by: a square product of `size`, and a cast that streams.
template <class T> MakeGroup product_roof(int size);
MakeGroup stream_roof(size_t elements);
