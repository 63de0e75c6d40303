// The configuration of a run, every option with its default, read from one JSON file and from --set on the command
// line; and what is computed from it alone: the learning rate of each step and the loss scale.
//
// Keys are "section.name"; the table in runtime/config/options.cpp gives each a range and a line of help, and
// everything else (parsing, checks, help, printing, digest) is derived from it. Paths are relative to the current
// directory.
//
// Errors exit with Exit::config and name the file, the key and the values; Exit::no_input where the file is missing,
// Exit::data where it is larger than a configuration can be, Exit::usage where --set is not of the form key=value.
#pragma once

#include <vector>

#include "kernels/base/choices.h"

inline constexpr int kMostSteps = 1'000'000'000;  // of a run

// The course of the learning rate after the warm-up.
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

// What a run does after a step whose loss is a spike, and where gradients stay non-finite: see DivergenceState.
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

// How a run shows its progress on stdout: see TrainingProgress.
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

// What the parts of the model are by default; each part has a key of its own.
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

// One part of the training data: a pattern of shards' paths, and its weight among the parts.
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

    struct Model {
        ModelFamily family = ModelFamily::gpt2;
        int n_layer = 12;
        int n_head = 12;
        int n_kv_head = 0;  // 0: n_head
        int n_embd = 768;
        int head_size = 0;        // 0: n_embd / n_head
        int hidden_size_mlp = 0;  // 0: 4 n_embd, or with a gate 8/3 n_embd, rounded up to a multiple of 256
        int n_positions = 1024;
        int vocab_size = 50257;
        ActivationFunction activation = ActivationFunction::gelu_new;
        bool gated_mlp = false;
        NormKind norm = NormKind::layernorm;
        double norm_eps = 1e-5;
        bool norm_weight = true;
        bool norm_bias = true;
        PositionKind position = PositionKind::learned;
        double rope_theta = 10000;
        double rope_fraction = 1;
        RopeScaling rope_scaling = RopeScaling::none;
        double rope_factor = 1;
        int rope_original_positions = 0;                             // 0: n_positions
        double rope_low_freq_factor = 1, rope_high_freq_factor = 4;  // llama3 only
        double rope_beta_fast = 32, rope_beta_slow = 1;              // yarn only
        double rope_attention_factor = 0;                            // yarn only; 0: 0.1 ln(rope_factor) + 1
        AttentionBias attention_bias = AttentionBias::all;
        bool mlp_bias = true;
        QkNorm qk_norm = QkNorm::none;
        double attention_scale = 0;  // 0: 1 / sqrt(head_size)
        int sliding_window = 0;      // 0: none
        std::string window_pattern = "S";
        double attention_softcap = 0;  // 0: none
        double final_softcap = 0;      // 0: none
        bool tie_embeddings = true;
        bool embedding_norm = false;
        double z_loss = 0;
        std::string init_from;  // empty: random, as GPT-2's
        double dropout = 0;
    } model;

    struct Data {
        DataParts train = {{"datasets/fineweb10B/fineweb_train_*.bin"}};
        std::string val = "datasets/fineweb10B/fineweb_val_*.bin";
        std::string tokenizer;  // empty: none
        bool document_mask = false;
        int document_token = -1;  // -1: the tokenizer's
    } data;

    struct Train {
        int max_steps = 19073;   // 0: no limit
        double max_epochs = 0;   // 0: no limit
        double max_minutes = 0;  // 0: no limit
        int batch_size = 16;     // sequences per rank and micro-step
        int seq_len = 1024;
        int64_t total_batch_tokens = 524288;  // per optimizer step, all ranks
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
        double cooldown_fraction = 0.2;  // wsd only, of all steps
        int cycle_steps = 1000;          // cyclic only
    } schedule;

    struct LossScale {
        bool dynamic = false;
        double fixed = 1.0;        // the scale where dynamic is false
        double initial = 65536.0;  // the first scale where dynamic is true, like all that follow but the last
        int growth_interval = 1000;
        double growth_factor = 2.0;
        double backoff_factor = 0.5;
        int hysteresis = 2;
        double minimum = 1.0;
        int max_skipped_steps = 20;  // in a row, in every precision
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
        double temperature = 1.0;  // 0: always the likeliest token
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

// The configuration that the file describes, with `overrides` ("section.key=value") applied in order, defaults that
// depend on other keys filled in (train.head_rows) and check_config() passed for `world` ranks.
Config load_config(const std::string& path, const std::vector<std::string>& overrides, int world);

// The configuration in a JSON text; keys that are absent keep their defaults, which depend on model.family, and of the
// names of a key one may be given. `family`, if there is one, replaces the text's. `origin` is what errors call the
// text. Every value is inside its own range, but the values have not been compared with each other: see check_config().
Config parse_config(std::string_view json_text, const std::string& origin, std::optional<ModelFamily> family = {});

// The model with the sizes that are 0 for "derived" filled in.
Config::Model with_sizes(Config::Model model);

// Whether a layer's attention has the window.
bool has_window(const Config::Model& model, int layer);

// Gives every part of the model the family's default; sizes stay.
void set_family(Config::Model& model, ModelFamily family);

// "model.norm: "layernorm" -> "rmsnorm"" for each size or part that two models for the same weights would not have in
// common: init_from, dropout, z_loss and the family's name do not count, nor do settings without effect.
std::vector<std::string> model_differences(const Config::Model& from, const Config::Model& to);
// For a sentence: separated by semicolons.
std::string joined(const std::vector<std::string>& differences);

// Applies one "section.key=value". The value is JSON, or else a bare word taken as a string: precision=fp32 is fine.
// model.family=NAME is set_family().
void override_config(Config& config, const std::string& assignment);

// The checks that need more than one key, for `world` ranks: head sizes, lengths, gradient accumulation, schedules.
void check_config(const Config& config, const std::string& origin, int world);

// Rows of logits held at a time where train.head_rows is 0: those of a micro-step, at most 8192. More rows make the
// products of the head larger and its weight gradient's additions fewer; 8192 rows of GPT-2's vocabulary are 0.8 GB in
// bf16. The order of those additions, and so the bits of a result, depend on it: it looks at the configuration alone.
int default_head_rows(int batch_size, int seq_len);

// Micro-steps per optimizer step on each of `world` ranks; exact for a checked configuration.
int micro_steps(const Config& config, int world);

// The configuration as JSON, every option included: itself a configuration file, and parsing it gives the same bits.
std::string config_json(const Config& config);

// Only the options that do not have their defaults, as JSON: a short configuration file that means the same.
std::string changed_config_json(const Config& config);

// 16 hexadecimal digits, equal for two configurations iff config_differences() of them is empty (hash collisions
// apart).
std::string config_digest(const Config& config);

// One sentence part per option that changes a run's result and differs: "optim.learning_rate: 0.0006 -> 0.0003".
// Options that only say where to read and write, how often to look, or how to save memory do not count.
std::vector<std::string> config_differences(const Config& from, const Config& to);

// "section.key=value" for every option that does not have its default, as --set takes it.
std::vector<std::string> changed_settings(const Config& config);

// Every option as "key  default  range  meaning" for the terminal, and as the table of docs/configuration.md.
std::string config_help();
std::string config_markdown();

// The same as a JSON schema (draft 2020-12): what every key may be, its default and its help.
std::string config_schema();

// The known name with the fewest inserted, deleted or changed characters (Levenshtein's distance; the first of equals),
// or an empty string where none is within half of the name's length: for "did you mean ...?".
std::string nearest_name(const std::string& name, const std::vector<std::string>& known);

// ---- the end of a run and the learning rate -------------------------------------------------------------------------

// Which step is a run's last. Steps and epochs say it before the first step; train.max_minutes says it when the
// cooldown has to begin, from the measured pace.
struct Course {
    int end_step = 0;        // 0: not known yet, the minutes will decide
    int cooldown_begin = 0;  // wsd: the last step before the cooldown; unknown like end_step
    bool operator==(const Course&) const = default;
};

// The course that train.max_steps and train.max_epochs give, whichever ends first, for epochs of `epoch_samples`
// sequences: the last step completes the last epoch. Fails with Exit::config, with the numbers, if the steps of the
// epochs are too few for the warm-up and the cooldown.
Course planned_course(const Config& config, uint64_t epoch_samples);

// Whether train.max_minutes ends the run before `planned` does, and must decide after `step` (>= 1) steps that took
// `elapsed_s` seconds: the cooldown begins after this step and lasts as many steps as the rest of the time has at the
// mean pace so far, at least one; without a cooldown (constant, cyclic) the run ends with this step or goes on.
std::optional<Course> course_by_time(const Config& config, const Course& planned, int step, double elapsed_s);

// The last step if the pace stays as it was in the first `step` steps: for showing. 0 if there is no pace yet.
int expected_end(const Config& config, const Course& course, int step, double elapsed_s);

// The learning rate of step 1 .. course.end_step. With lr = optim.learning_rate, final = lr *
// schedule.final_lr_fraction: warm-up (step <= warmup_steps): lr step / warmup_steps; afterwards, with p = (step -
// warmup) / (end_step - warmup),
//   cosine    final + (lr - final) (1 + cos(pi p)) / 2             (Loshchilov, Hutter, arXiv 1608.03983, eq. 5)
//   linear    final + (lr - final) (1 - p)
//   wsd       lr until cooldown_begin, then with q = 0 .. 1 from there to end_step
//             final + (lr - final) (1 - sqrt(q))                   (Haegele et al., arXiv 2405.18392, section 3);
//             from the warm-up's rate instead of lr where the minutes end during the warm-up
//   constant  lr
//   cyclic    a triangle: from lr to final and back to lr every cycle_steps (Smith, arXiv 1506.01186, section 3)
// cosine, linear and wsd have the rate `final` exactly at the last step, if any step follows the warm-up.
double learning_rate(const Config& config, const Course& course, int step);

// Steps of wsd's cooldown in a run of `steps`: cooldown_fraction of them, rounded, at least 1.
int cooldown_steps(const Config& config, int steps);

// ---- the loss scale -------------------------------------------------------------------------------------------------

// Above this its reciprocal and the scaled gradients would leave float's range for good.
inline constexpr float kLargestLossScale = 0x1p100f;

// A factor on the loss that keeps small FP16 gradients from vanishing, and the count of skipped steps; part of the
// checkpoint.
//
// Dynamic scaling follows Megatron-LM's DynamicGradScaler: `growth_interval` finite steps in a row multiply the scale
// by `growth_factor` and restore the hysteresis; a non-finite step uses up one of `hysteresis`, and from the last one
// on each multiplies the scale by `backoff_factor`, never below `minimum` (Micikevicius et al., "Mixed precision
// training", arXiv 1710.03740, section 3.2). Without it the scale is `fixed`. In both cases non-finite steps are
// counted and limited.
struct LossScaleState {
    float scale = 1;
    int good_steps = 0;       // finite in a row since the scale last changed or a step was skipped
    int hysteresis_left = 0;  // non-finite steps until the scale backs off; 0 and 1: the next one does
    int skipped_in_a_row = 0;
    int64_t total_skipped = 0;
    int last_good_step = 0;  // 0: none yet

    // The update of `step` was applied.
    void step_applied(const Config::LossScale& options, int step);

    // Step `step` was skipped since `tensor` is the first whose gradient is not finite. Returns a diagnosis where the
    // run cannot go on like this: the scale is at its minimum already, or more than max_skipped_steps were skipped in a
    // row. Else returns an empty text.
    std::string step_skipped(const Config::LossScale& options, int step, const std::string& tensor);
};

// The state before a run's first step.
LossScaleState first_loss_scale(const Config::LossScale& options);

// ---- signs of divergence --------------------------------------------------------------------------------------------

// The losses of the last applied steps, against which the next one is judged. They are all finite: NaN cannot enter.
struct LossWindow {
    static constexpr size_t kMost = 200;
    static constexpr size_t kFewest = 50;  // with fewer no loss is a spike: at the beginning of a run it still falls

    std::vector<double> losses;  // the oldest first
    bool operator==(const LossWindow&) const = default;

    void add(double loss);  // drops the oldest if there are too many; ignores what is not finite

    // Above this a loss is a spike: the median plus `deviations` times the median absolute deviation from it. Infinite
    // with too few losses. Of a normal distribution the deviation is 0.6745 sigma, so that 8 of them are 5.4 sigma. It
    // counts as at least 2^-20 of the median, so that the rounding of equal losses is no spike.
    double limit(double deviations) const;
};

// A return to an earlier checkpoint.
struct Rollback {
    int from_step = 0, to_step = 0;  // from after one step to after another
    uint64_t skipped_samples = 0;    // of those steps, which are not seen again
    bool is_spike = true;            // else gradients stayed non-finite
    double loss = 0, limit = 0;      // of the spike; above which it is one
    bool operator==(const Rollback&) const = default;
};

struct DivergenceState {
    static constexpr size_t kMostRollbacks = 3;  // within
    static constexpr int kRollbackSteps = 1000;

    LossWindow window = {};
    int last_trouble = 0;                  // the last step that was skipped or whose loss was a spike; 0: none
    std::vector<Rollback> rollbacks = {};  // of the last kRollbackSteps, the oldest first
    bool operator==(const DivergenceState&) const = default;

    // Whether the step's loss is a spike; what is not applied enters no window. `is_routine`: the loss scaler skips
    // such steps in its normal work, so they are no trouble.
    struct Judgement {
        bool is_spike = false;
        double limit = 0;  // above which it is one
    };
    Judgement judge(int step, double loss, bool is_applied, bool is_routine, double deviations);

    // Whether the run may go back from this step once more.
    bool may_roll_back(int step) const;
    void note(const Rollback& rollback);
};

// Whether a checkpoint after `step` is healthy: no trouble since the last step before it that is a multiple of
// `every_steps`, or with 0 since the run began. A function of the course of the run alone, not of when it was stopped.
bool is_healthy_after(const DivergenceState& state, int step, int every_steps);

// Whether a skipped step is in the normal work of the loss scaler, which finds the largest scale by trying: with
// dynamic scaling, not more than loss_scale.hysteresis in a row.
bool is_routine_skip(const LossScaleState& state, const Config::LossScale& options);
