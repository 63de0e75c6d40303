// The configuration of a run: every option and its default. It is read from one JSON file and from --set on the command
// line. Also the parts of a run that depend only on it: learning rate schedule, loss scale and divergence checks.
//
// Keys are "section.name". The table in runtime/config/options.cpp gives each key a range and a line of help; parsing,
// checks, help, printing and the digest are derived from that table. Paths are relative to the current directory.
//
// Fails with Exit::config, naming the file, the key and the values; with Exit::no_input if the file is missing, with
// Exit::data if it is too large, and with Exit::usage if an argument of --set is not of the form key=value.
#pragma once

#include <vector>

#include "kernels/base/choices.h"
#include "model/shape.h"

inline constexpr int kMostSteps = 1'000'000'000;  // of a run

// The learning rate schedule after the warm-up.
enum class LrSchedule : int { cosine, linear, wsd, constant, cyclic };
inline constexpr const char* name_of(LrSchedule schedule) {
    switch (schedule) {
        case LrSchedule::cosine: return "cosine";
        case LrSchedule::linear: return "linear";
        case LrSchedule::wsd: return "wsd";
        case LrSchedule::constant: return "constant";
        case LrSchedule::cyclic: return "cyclic";
    }
    return nullptr;
}

// The actions after a loss spike and after too many non-finite gradients: see DivergenceState.
enum class OnSpike : int { warn, rollback, stop };
inline constexpr const char* name_of(OnSpike action) {
    switch (action) {
        case OnSpike::warn: return "warn";
        case OnSpike::rollback: return "rollback";
        case OnSpike::stop: return "stop";
    }
    return nullptr;
}
enum class OnNonFinite : int { stop, rollback };
inline constexpr const char* name_of(OnNonFinite action) {
    switch (action) {
        case OnNonFinite::stop: return "stop";
        case OnNonFinite::rollback: return "rollback";
    }
    return nullptr;
}

// The progress display on stdout: see TrainingProgress.
enum class TerminalMode : int { automatic, plain, line, view };
inline constexpr const char* name_of(TerminalMode mode) {
    switch (mode) {
        case TerminalMode::automatic: return "auto";
        case TerminalMode::plain: return "plain";
        case TerminalMode::line: return "line";
        case TerminalMode::view: return "view";
    }
    return nullptr;
}

// Sets the defaults of the architecture options.
enum class ModelFamily : int { gpt2, gpt3, llama, qwen2, qwen3, custom };
inline constexpr const char* name_of(ModelFamily family) {
    switch (family) {
        case ModelFamily::gpt2: return "gpt2";
        case ModelFamily::gpt3: return "gpt3";
        case ModelFamily::llama: return "llama";
        case ModelFamily::qwen2: return "qwen2";
        case ModelFamily::qwen3: return "qwen3";
        case ModelFamily::custom: return "custom";
    }
    return nullptr;
}

// One part of the training data: a glob pattern of shards, and its weight in the mixture.
struct DataPart {
    std::string path;
    double weight = 1;
};
using DataParts = std::vector<DataPart>;

// The defaults are GPT-2 124M on 10 billion tokens.
struct Config {
    struct Run {
        std::string dir = "runs/gpt2_124M";
        uint64_t seed = 1337;
    } run;

    struct Model : GptShape {
        ModelFamily family = ModelFamily::gpt2;
        double z_loss = 0;
        std::string init_from;  // empty: random, as in GPT-2
        double dropout = 0;
    } model;

    struct Data {
        DataParts train = {{"datasets/fineweb10B/fineweb_train_*.bin"}};
        std::string val = "datasets/fineweb10B/fineweb_val_*.bin";
        std::string tokenizer;  // empty: none
        bool document_mask = false;
        int document_token = -1;  // -1: the tokenizer's <|endoftext|>
    } data;

    struct Train {
        int max_steps = 19073;   // 0: no limit
        double max_epochs = 0;   // 0: no limit
        double max_minutes = 0;  // 0: no limit
        int batch_size = 16;     // sequences per rank and micro-step; 0: largest_batch_size(), at most kMaxDefaultBatch
        int seq_len = 1024;
        int64_t total_batch_tokens = 524288;  // per optimizer step, over all ranks
        Dtype precision = Dtype::bf16;
        Recompute recompute = Recompute::none;
        int head_rows = 0;  // 0: default_head_rows(), filled in by load_config()
        OnSpike on_spike = OnSpike::warn;
        double spike_deviations = 8;
        OnNonFinite on_nonfinite = OnNonFinite::stop;
        int check_replicas_every = 0;  // 0: never
        bool may_roll_back() const { return on_spike == OnSpike::rollback || on_nonfinite == OnNonFinite::rollback; }
    } train;

    struct Optim {
        OptimizerKind name = OptimizerKind::adamw;
        double learning_rate = 6e-4;
        double beta1 = 0.9;
        double beta2 = 0.95;
        double eps = 1e-8;
        double weight_decay = 0.1;
        double grad_clip = 1.0;  // 0: no clipping
        double momentum = 0.9;   // sgd only
    } optim;

    struct Schedule {
        LrSchedule name = LrSchedule::cosine;
        int warmup_steps = 700;
        double final_lr_fraction = 0.1;
        double cooldown_fraction = 0.2;  // wsd only: fraction of all steps
        int cycle_steps = 1000;          // cyclic only
    } schedule;

    struct LossScale {
        bool dynamic = false;
        double fixed = 1.0;        // the scale if dynamic is false
        double initial = 65536.0;  // this and the following options but the last: if dynamic is true
        int growth_interval = 1000;
        double growth_factor = 2.0;
        double backoff_factor = 0.5;
        int hysteresis = 2;
        double minimum = 1.0;
        int max_skipped_steps = 20;  // consecutive, in any precision
    } loss_scale;

    struct Parallel {
        int zero_stage = 0;
        bool deterministic_reduce = false;
        int bucket_mb = 32;
        double start_timeout_s = 300;
        double silence_s = 60;
        double step_timeout_s = 120;
    } parallel;

    struct Checkpoint {
        int every_steps = 1000;  // 0: only at the end
        int keep = 2;
        bool keep_best = false;
        bool asynchronous = true;
    } checkpoint;

    struct Eval {
        int every_steps = 250;  // 0: never
        int batches = 20;       // 0: the whole split
        int stride = 0;         // 0: seq_len
        int patience = 0;       // 0: no early stopping
        std::string questions;  // empty: none
        int max_questions = 0;  // of each file; 0: all
    } eval;

    struct Sample {
        int every_steps = 0;  // 0: never
        int tokens = 128;
        std::string prompt;
        double temperature = 1.0;  // 0: greedy
        int top_k = 0;             // 0: all tokens
        double top_p = 1.0;        // 1: all tokens
        double min_p = 0.0;        // 0: all tokens
    } sample;

    struct Log {
        int every_steps = 10;
        TerminalMode terminal = TerminalMode::automatic;
        bool tensorboard = true;
        int norms_every_steps = 100;  // 0: never
    } log;

    struct Cost {
        double price_per_hour = 0, co2_g_per_kwh = 0;
    } cost;

    struct Device {
        bool tf32 = false;
        bool debug_sync = false;
    } device;
};

// Reads the configuration file, applies `overrides` ("section.key=value") in order, fills in the defaults that depend
// on other keys (train.batch_size, train.head_rows, too long a warm-up), and calls check_config() for `world` ranks.
Config load_config(const std::string& path, const std::vector<std::string>& overrides, int world);

// Parses a configuration in JSON. Absent keys get their defaults, which depend on model.family. A key and its aliases
// must not appear together. `family`, if given, overrides model.family. Error messages name `origin` as the source.
// Checks the range of each value, but not the values against each other: see check_config().
Config parse_config(std::string_view json_text, const std::string& origin, std::optional<ModelFamily> family = {});

// Sets every architecture option to the family's default and keeps the sizes.
void set_family(Config::Model& model, ModelFamily family);

// Returns one text like `model.norm: "layernorm" -> "rmsnorm"` for each setting in which the models differ. Ignores
// settings that do not change what the weights compute: init_from, dropout, z_loss, family and those without effect.
std::vector<std::string> model_differences(const Config::Model& from, const Config::Model& to);
// Joins them with semicolons.
std::string joined(const std::vector<std::string>& differences);

// Applies one "section.key=value". The value is JSON or a bare string, as in train.precision=fp32. model.family=NAME
// calls set_family().
void override_config(Config& config, const std::string& assignment);

// The largest number of sequences per micro-batch, at most `most`, with which train.total_batch_tokens is a multiple of
// the tokens of `world` ranks' micro-batches; 0 if there is none.
int largest_batch_size(const Config& config, int world, int most);
// The limit if train.batch_size is 0.
inline constexpr int kMaxDefaultBatch = 8;

// Checks the keys against each other, for `world` ranks: head sizes, lengths, gradient accumulation, schedules. Fails
// with Exit::config and all problems.
void check_config(const Config& config, const std::string& origin, int world);

// The rows of logits in memory at a time if train.head_rows is 0: one micro-batch, at most 8192. More rows make the
// head's GEMMs larger and sum its weight gradient in fewer parts; 8192 rows of GPT-2's vocabulary are 0.8 GB in bf16.
// The value affects the summation order and thus the bits of the result, so it depends on the configuration alone.
int default_head_rows(int batch_size, int seq_len);

// Micro-steps per optimizer step on each of `world` ranks. The division is exact after check_config().
int micro_steps(const Config& config, int world);

// The configuration as JSON with every option. It is a valid configuration file; parsing it gives exactly equal values.
std::string config_json(const Config& config);

// The options that differ from their defaults as JSON: a short, equivalent configuration file.
std::string changed_config_json(const Config& config);

// 16 hexadecimal digits. Barring hash collisions, equal for two configurations iff config_differences() is empty.
std::string config_digest(const Config& config);

// Returns one text like "optim.learning_rate: 0.0006 -> 0.0003" per option that differs and affects the run's result.
// Ignores options with Effect::none: paths, output intervals, memory savings.
std::vector<std::string> config_differences(const Config& from, const Config& to);

// "section.key=value", as --set takes it, for every option that differs from its default.
std::vector<std::string> changed_settings(const Config& config);

// Key, default, range and meaning of every option: for the terminal, and as the table of docs/configuration.md.
std::string config_help();
std::string config_markdown();

// A JSON schema (draft 2020-12) of the configuration: allowed values, default and help of every key.
std::string config_schema();

// Returns the known name with the smallest Levenshtein distance to `name` (the first of several), or an empty string if
// none is within half of the name's length. For "did you mean ...?".
std::string nearest_name(const std::string& name, const std::vector<std::string>& known);

// ---- run length and learning rate -----------------------------------------------------------------------------------

// The length of a run. train.max_steps and train.max_epochs determine it before the first step. train.max_minutes
// determines it when the cooldown must start, from the measured step time.
struct Course {
    int end_step = 0;        // the last step; 0: not known yet, train.max_minutes will determine it
    int cooldown_begin = 0;  // wsd: the last step before the cooldown; 0 as long as end_step is 0
    bool operator==(const Course&) const = default;
};

// Returns the course for the smaller of train.max_steps and train.max_epochs, with `epoch_samples` sequences per epoch;
// the last step completes the last epoch. Fails with Exit::config if the epochs have too few steps for the warm-up and
// the cooldown.
Course planned_course(const Config& config, uint64_t epoch_samples);

// Returns the course that train.max_minutes imposes after `step` (>= 1) steps that took `elapsed_s` seconds; nothing if
// `planned` ends earlier or nothing must change yet. wsd: the cooldown starts after this step and fills the remaining
// time at the mean step time so far, with at least one step. constant, cyclic: this step is the last.
std::optional<Course> course_by_time(const Config& config, const Course& planned, int step, double elapsed_s);

// An estimate, for display, of the last step at the mean step time of the first `step` steps. 0 if not known yet.
int expected_end(const Config& config, const Course& course, int step, double elapsed_s);

// The learning rate of a step in 1 .. course.end_step. With lr = optim.learning_rate and final = lr *
// schedule.final_lr_fraction: in the warm-up (step <= warmup_steps) lr step / warmup_steps; afterwards, with p = (step
// - warmup) / (end_step - warmup),
//   cosine    final + (lr - final) (1 + cos(pi p)) / 2             (Loshchilov, Hutter, arXiv 1608.03983, eq. 5)
//   linear    final + (lr - final) (1 - p)
//   wsd       lr until cooldown_begin, then, with q rising from 0 to 1 at end_step,
//             final + (lr - final) (1 - sqrt(q))                   (Haegele et al., arXiv 2405.18392, section 3);
//             if train.max_minutes ends the warm-up early, the rate reached by then replaces lr
//   constant  lr
//   cyclic    a triangle: from lr to final and back to lr every cycle_steps (Smith, arXiv 1506.01186, section 3)
// With cosine, linear and wsd the last step has exactly the rate `final`, if any step follows the warm-up.
double learning_rate(const Config& config, const Course& course, int step);

// The steps of wsd's cooldown in a run of `steps` steps: cooldown_fraction of them, rounded, at least 1.
int cooldown_steps(const Config& config, int steps);

// ---- the loss scale -------------------------------------------------------------------------------------------------

// Above this, the reciprocal and the scaled gradients leave the range of float.
inline constexpr float kLargestLossScale = 0x1p100f;

// The loss scale, which keeps small FP16 gradients from vanishing, and the counts of skipped steps. Part of the
// checkpoint.
//
// Dynamic scaling follows Megatron-LM's DynamicGradScaler. `growth_interval` consecutive finite steps multiply the
// scale by `growth_factor` and restore the hysteresis. Each non-finite step decrements the hysteresis; once it is 0,
// each one multiplies the scale by `backoff_factor`, down to `minimum` (Micikevicius et al., "Mixed precision
// training", arXiv 1710.03740, section 3.2). Without dynamic scaling the scale is `fixed`. In both cases the number of
// consecutive non-finite steps is limited.
struct LossScaleState {
    float scale = 1;
    int good_steps = 0;       // consecutive finite steps since the scale last changed or a step was skipped
    int hysteresis_left = 0;  // non-finite steps until the scale shrinks; 0 and 1: at the next one
    int skipped_in_a_row = 0;
    int64_t total_skipped = 0;
    int last_good_step = 0;  // 0: none yet

    // Records that the update of `step` was applied.
    void step_applied(const Config::LossScale& options, int step);

    // Records that `step` was skipped; `tensor` is the first whose gradient is not finite. Returns a diagnosis if the
    // run cannot continue: the scale is already at its minimum, or more than max_skipped_steps consecutive steps were
    // skipped. Otherwise returns an empty string.
    std::string step_skipped(const Config::LossScale& options, int step, const std::string& tensor);
};

// The state before a run's first step.
LossScaleState first_loss_scale(const Config::LossScale& options);

// ---- divergence detection -------------------------------------------------------------------------------------------

// The losses of the last applied steps, to which the next loss is compared. All of them are finite.
struct LossWindow {
    static constexpr size_t kMost = 200;
    static constexpr size_t kFewest = 50;  // with fewer, no loss is a spike: the loss still falls fast at the start

    std::vector<double> losses;  // the oldest first
    bool operator==(const LossWindow&) const = default;

    void add(double loss);  // drops the oldest loss of a full window; ignores a non-finite loss

    // A loss above this limit is a spike: the median plus `deviations` times the median absolute deviation (MAD).
    // Infinite with too few losses. The MAD of a normal distribution is 0.6745 sigma, so 8 of them are 5.4 sigma. It is
    // taken as at least 2^-20 of the median, so that rounding of equal losses is not a spike.
    double limit(double deviations) const;
};

// A return to an earlier checkpoint.
struct Rollback {
    int from_step = 0, to_step = 0;  // from the state after one step to the state after another
    uint64_t skipped_samples = 0;    // the samples of those steps, which the run does not see again
    bool is_spike = true;            // false: non-finite gradients
    double loss = 0, limit = 0;      // the loss of the spike, and the limit that it exceeded
    bool operator==(const Rollback&) const = default;
};

struct DivergenceState {
    static constexpr size_t kMostRollbacks = 3;  // within kRollbackSteps
    static constexpr int kRollbackSteps = 1000;

    LossWindow window = {};
    int last_trouble = 0;                  // the last step with a spike or a skipped update; 0: none
    std::vector<Rollback> rollbacks = {};  // in the last kRollbackSteps, the oldest first
    bool operator==(const DivergenceState&) const = default;

    // Decides whether the step's loss is a spike, and adds the loss to the window if the step was applied. A skipped
    // step with `is_routine` (see is_routine_skip()) does not count as trouble.
    struct Judgement {
        bool is_spike = false;
        double limit = 0;  // a loss above it is a spike
    };
    Judgement judge(int step, double loss, bool is_applied, bool is_routine, double deviations);

    // Whether the limit of rollbacks permits another one from this step.
    bool may_roll_back(int step) const;
    void note(const Rollback& rollback);
};

// Whether a checkpoint after `step` is healthy: no trouble since the last multiple of `every_steps` before it, or, if
// `every_steps` is 0, since the start of the run. Does not depend on when the run was stopped and resumed.
bool is_healthy_after(const DivergenceState& state, int step, int every_steps);

// Whether a skipped step is part of normal dynamic loss scaling, which finds the largest scale by trial: at most
// loss_scale.hysteresis consecutive steps.
bool is_routine_skip(const LossScaleState& state, const Config::LossScale& options);
