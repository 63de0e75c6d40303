// The table of optimizers: the state and the settings of each. Memory, the tensors of a checkpoint, and the help of the
// configuration's keys are derived from it.
#pragma once

#include <string>
#include <vector>

#include "kernels/base/choices.h"

// The optimizer and its settings, constant for a whole run. StepSettings has the values that change between steps.
struct OptimizerSettings {
    OptimizerKind name = OptimizerKind::adamw;
    double beta1 = 0.9, beta2 = 0.95;
    double eps = 1e-8;
    double momentum = 0.9;
    double weight_decay = 0.1;
    double grad_clip = 1.0;  // maximum global gradient norm; 0: no clipping
};

// An array of state with one element per parameter, 0 at the start.
struct StateSlot {
    std::string name;  // a checkpoint has the tensors NAME.TENSOR, such as "m.wte"
};

struct OptimizerRow {
    OptimizerKind kind;
    std::vector<StateSlot> slots;
    std::vector<double OptimizerSettings::*> settings;  // that its formula reads, and not every optimizer's
};

const OptimizerRow& optimizer_row(OptimizerKind kind);

// Returns the names of the optimizers that read a setting: "adamw".
std::string users_of(double OptimizerSettings::*setting);
