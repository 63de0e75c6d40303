// What a run carries from one step to the next besides its tensors, and how it goes through a checkpoint.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/run_directory.h"
#include "runtime/config/config.h"
#include "runtime/config/loss_scaler.h"

struct TrainState {
    int step = 0;             // steps done
    int64_t updates = 0;      // steps whose update was applied: AdamW's t
    uint64_t cursor = 0;      // the next sample, counted over all ranks and epochs
    int64_t saved_step = -1;  // of the newest checkpoint, the next one's parent; -1 for none
    std::string run_id;
    LossScaleState loss_scale;
    std::string device_choices;  // the function's answer in the process that saved the run; empty for a new one
};

// Before the first step of a new run.
TrainState new_state(const Config& config);

// The checkpoint record of this moment; `dataset_digest` says what data.train holds.
CheckpointInfo checkpoint_info(const TrainState& state, const Config& config, const std::string& dataset_digest);

// The checkpoint that a run with this start action continues, if any; what was found damaged on the way is told on
// stderr. Exit::no_input if it must continue and there is none, or if all there were have been set aside: whoever asked
// to continue if possible does not want to lose them by starting anew.
std::optional<Checkpoint> checkpoint_to_resume(const std::string& run_dir, StartAction action);

// Where the checkpoint left off. Exit::config, listing what differs, if configuration or data have changed in a way
// that changes the run and `accept_changes` is false. Exit::data if the record is not one of ours.
TrainState resumed_state(const Checkpoint& checkpoint, const Config& config, const std::string& dataset_digest,
                         bool accept_changes);
