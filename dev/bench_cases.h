// The ops of a training step at the step's shapes, as calls to time: all ops that model/ launches in a step of one
// micro-step on one rank, with their number of calls.
#pragma once

#include <functional>
#include <memory>

#include "dev/bench_workloads.h"

struct Case {
    std::string name;
    double calls;  // per step
    std::function<void()> call;
    double flops, bytes;  // of one call; bytes: every operand once
    // The name of the op that this case is a variant of: without one of its parts, or as in later micro-steps.
    std::string variant_of = {};
};

// Cases that share arrays; the group owns the arrays.
struct CaseGroup {
    std::vector<Case> cases;
    std::shared_ptr<void> arrays;
};

// Makes a group. Groups are made in turn, so that the arrays of a step need not all fit in memory.
using MakeGroup = std::function<CaseGroup()>;
template <class T> std::vector<MakeGroup> op_groups(const Workload& work);
