// The table of optimizers: the state and the settings of each. Memory, the tensors of a checkpoint, and the help of the
// configuration's keys are derived from it.
#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "kernels/base/choices.h"
#include "kernels/numeric.h"

// Settings of some tensors that differ from the others'.
struct TensorGroup {
    std::string tensors;            // the name of a role, or a pattern of names with * and ?: "h.*.fc.weight"
    double lr_scale = 1;            // factor of the learning rate
    double weight_decay = -1;       // negative: OptimizerSettings::weight_decay, and 0 for vectors
    double beta1 = -1, beta2 = -1;  // negative: OptimizerSettings::beta1 and beta2
    // Of the schedule; negative: as for tensors without a group. See learning_rate() in runtime/config/schedule.h.
    double warmup_steps = -1, final_lr_fraction = -1, cooldown_power = -1;
    bool operator==(const TensorGroup&) const = default;
};
using TensorGroups = std::vector<TensorGroup>;

// The optimizer and its settings, constant for a whole run. StepSettings has the values that change between steps.
struct OptimizerSettings {
    OptimizerKind name = OptimizerKind::adamw;
    OptimizerKind scalar_name = OptimizerKind::adamw;  // of the tensors to which `name` does not apply
    double beta1 = 0.9, beta2 = 0.95;
    double eps = 1e-8;
    double momentum = 0.9;
    double alpha = 0.99;
    double trust_coefficient = 0.001;
    double beta2_decay = -0.8, clip_threshold = 1;  // Adafactor's
    bool nesterov = false;
    MuonIteration muon_iteration = MuonIteration::newton_schulz;
    MuonScale muon_scale = MuonScale::adamw_rms;
    double muon_beta2 = 0.95;     // decay rate of second moments in NorMuon and SOAP-Muon
    int soap_interval = 10;       // steps between updates of SOAP's bases
    bool cautious_decay = false;  // optimizers of matrices: decay only weights that the update also moves towards 0
    OptimizerDtype state_dtype = OptimizerDtype::fp32;   // of every StateSlot
    OptimizerDtype master_dtype = OptimizerDtype::fp32;  // of the master weights; bf16 needs GptOptions::precision bf16
    double weight_decay = 0.1;
    double grad_clip = 1.0;    // maximum global gradient norm; 0: no clipping
    TensorGroups groups = {};  // a later group overrides an earlier one

    Dtype state_type() const { return state_dtype == OptimizerDtype::bf16 ? Dtype::bf16 : Dtype::fp32; }
    Dtype master_type() const { return master_dtype == OptimizerDtype::bf16 ? Dtype::bf16 : Dtype::fp32; }
    // Returns the first of the selected optimizers without a StateSlot, which ignores state_dtype; or nullopt.
    std::optional<OptimizerKind> without_slots() const;
};

// An array of state with one element per parameter, 0 at the start.
struct StateSlot {
    std::string name;  // a checkpoint has the tensors NAME.TENSOR, such as "m.wte"
};

// A setting that not every optimizer reads, with its default for one that does.
using SettingMember = std::variant<double OptimizerSettings::*, bool OptimizerSettings::*, int OptimizerSettings::*>;
struct OptimizerSetting {
    SettingMember member;
    double initial;
};

// State of each matrix as a whole, 0 at the start. The matrix's owner keeps it.
struct MatrixSlot {
    std::string name;                                        // a checkpoint has the tensors NAME.MATRIX
    std::vector<size_t> (*shape)(size_t rows, size_t cols);  // of a matrix's state
};

// The update of an element depends on the element, on the norms of its layer, on averages of its layer's rows and
// columns (model/factors.h) and these norms, or on its whole matrix. An optimizer of matrices applies to tensors with
// TensorRole::matrix only.
enum class UpdateScope { element, layer, factors, matrix };

struct OptimizerRow {
    OptimizerKind kind;
    std::vector<StateSlot> slots;
    std::vector<OptimizerSetting> settings;
    UpdateScope scope = UpdateScope::element;
    std::vector<MatrixSlot> matrix_slots = {};
    Dtype exchange = Dtype::bf16;  // type in which the pieces of matrices travel to their owners and back
    int first_update = 1;          // the first one that changes weights; earlier ones only change the state

    bool is_layerwise() const { return scope == UpdateScope::layer || scope == UpdateScope::factors; }
    bool is_of_matrices() const { return scope == UpdateScope::matrix; }
};

const OptimizerRow& optimizer_row(OptimizerKind kind);

// Returns the names of the optimizers that read a setting: "adamw, adam".
std::string users_of(SettingMember setting);

// Selects an optimizer and gives the settings that it reads, and its scalar_name, their defaults.
void set_optimizer(OptimizerSettings& settings, OptimizerKind kind);
