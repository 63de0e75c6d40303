// The ops of a training step at the step's shapes, as calls to be timed: with its calls each op is everything that
// model/ launches in a step of one micro-step on one rank.
#pragma once

#include <functional>
#include <memory>

#include "dev/bench_workloads.h"

struct Case {
    std::string name;
    double calls;  // in one step
    std::function<void()> call;
    double flops, bytes;  // of one call; bytes: every operand once
    // Not in a step itself, but an op of it without one of its parts, or as later micro-steps have it: that op's name.
    std::string variant_of = {};
};

// Cases over the same arrays, which live as long as they do.
struct CaseGroup {
    std::vector<Case> cases;
    std::shared_ptr<void> arrays;
};

// Makes a group: one after the other, so that not all arrays of a step have to fit at once.
using MakeGroup = std::function<CaseGroup()>;
template <class T> std::vector<MakeGroup> op_groups(const Workload& work);
