// The fields of "state" in the manifest.
#pragma once

#include <limits>

#include "runtime/checkpoint/manifest.h"
#include "runtime/config/config.h"
#include "runtime/config/divergence.h"
#include "runtime/config/loss_scale.h"
#include "runtime/config/schedule.h"

template <class Fields> void describe(Fields& field, LossScaleState& state) {
    field("scale", state.scale, 1e-30f, kMaxLossScale);
    field("good_steps", state.good_steps, 0, kMaxSteps);
    field("hysteresis_left", state.hysteresis_left);
    field("skipped_in_a_row", state.skipped_in_a_row, 0, kMaxSteps);
    field("total_skipped", state.total_skipped, 0, kMaxSteps);
    field("last_good_step", state.last_good_step, 0, kMaxSteps);
}

template <class Fields> void describe(Fields& field, RunLength& length) {
    field("end_step", length.end_step, 1, kMaxSteps);
    field("cooldown_begin", length.cooldown_begin, 0, length.end_step);
}

template <class Fields> void describe(Fields& field, BestValidation& best) {
    field("loss", best.loss);
    field("step", best.step, 1, kMaxSteps);
    field("worse_since", best.worse_since, 0, kMaxSteps);
}

template <class Fields> void describe(Fields& field, NoiseScale& scale) {
    // Unbiased estimates can be below 0.
    field("noise", scale.noise, std::numeric_limits<double>::lowest());
    field("signal", scale.signal, std::numeric_limits<double>::lowest());
}

template <class Fields> void describe(Fields& field, Rollback& rollback) {
    field("from_step", rollback.from_step, 1, kMaxSteps);
    field("to_step", rollback.to_step, 1, kMaxSteps);
    field("skipped_samples", rollback.skipped_samples);
    field("is_spike", rollback.is_spike);
    field("loss", rollback.loss);
    field("limit", rollback.limit);
}

template <class Fields> void describe(Fields& field, DivergenceState& state) {
    field("last_losses", state.window.losses);
    field.optional("last_trouble", state.last_trouble);
    field.optional("rollbacks", state.rollbacks);
}

template <class Fields> void describe(Fields& field, TrainState::Progress& progress) {
    field("updates", progress.updates, 0, kMaxSteps);
    field("cursor", progress.cursor);
    field("loss_scale", progress.loss_scale);
    field.ignored("device_choices");  // GEMM algorithms, in checkpoints of earlier versions
    field.optional("trained_s", progress.trained_s);
    field.optional("course_by_time", progress.course_by_time);
    field.optional("best_validation", progress.best);
    field.optional("divergence", progress.divergence);
    field.optional("noise_scale", progress.noise);
    field.optional("evaluation_is_due", progress.evaluation_is_due);
    field.ignored("energy");  // written by earlier versions
}
