// The configuration of a run: every option and its default. It is read from one JSON file and from --set on the command
// line.
//
// Keys are "section.name". The table in runtime/config/options.cpp gives each key a range and a line of help; parsing,
// checks, help, printing and the digest are derived from that table. Paths are relative to the current directory.
//
// Fails with Exit::config, naming the file, the key and the values; with Exit::no_input if the file is missing, with
// Exit::data if it is too large, and with Exit::usage if an argument of --set is not of the form key=value.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/base/choices.h"  // IWYU pragma: export
#include "kernels/base/grid.h"     // IWYU pragma: export
#include "kernels/numeric.h"
#include "model/optimizers.h"  // IWYU pragma: export
#include "model/shape.h"       // IWYU pragma: export

inline constexpr int kMaxSteps = 1'000'000'000;  // of a run

// The learning rate schedule after the warm-up.
enum class LrSchedule : int { cosine, linear, wsd, constant, cyclic };
constexpr auto names_of(LrSchedule) { return std::array{"cosine", "linear", "wsd", "constant", "cyclic"}; }

// The average of the weights that evaluations, samples and exports use in place of the last weights.
enum class AverageKind : int { none, exponential, tail };
constexpr auto names_of(AverageKind) { return std::array{"none", "exponential", "tail"}; }

// The actions after a loss spike and after too many non-finite gradients: see DivergenceState.
enum class OnSpike : int { warn, rollback, stop };
constexpr auto names_of(OnSpike) { return std::array{"warn", "rollback", "stop"}; }
enum class OnNonFinite : int { stop, rollback };
constexpr auto names_of(OnNonFinite) { return std::array{"stop", "rollback"}; }

// Sets the defaults of the architecture options.
enum class ModelFamily : int { gpt2, gpt3, llama, qwen2, qwen3, custom };
constexpr auto names_of(ModelFamily) { return std::array{"gpt2", "gpt3", "llama", "qwen2", "qwen3", "custom"}; }

// One part of the training data: a glob pattern of shards, and its weight in the mixture.
struct DataPart {
    std::string path;
    double weight = 1;
};
using DataParts = std::vector<DataPart>;

// A setting that changes during a run. A part has the value of the steps after the previous part, up to until_step,
// which is included.
struct RampPart {
    int until_step;
    int64_t value;
    bool operator==(const RampPart&) const = default;
};
using Ramp = std::vector<RampPart>;

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
        int batch_size = 16;     // sequences per rank and micro-step; 0: see `open`
        int seq_len = 1024;
        int64_t total_batch_tokens = 524288;  // per optimizer step, over all ranks
        Ramp batch_ramp;                      // total_batch_tokens of earlier steps: see batch_tokens()
        Ramp seq_ramp;                        // seq_len of earlier steps: see sequence_length()
        Precision precision = Precision::bf16;
        Fp8Gradients fp8_gradients = Fp8Gradients::e5m2;
        Recompute recompute = Recompute::none;
        int head_rows = 0;  // 0: default_head_rows(), filled in by load_config()
        OnSpike on_spike = OnSpike::warn;
        double spike_deviations = 8;
        OnNonFinite on_nonfinite = OnNonFinite::stop;
        int check_replicas_every = 0;  // 0: never
        bool may_roll_back() const { return on_spike == OnSpike::rollback || on_nonfinite == OnNonFinite::rollback; }
    } train;

    struct Optim : OptimizerSettings {
        double learning_rate = 6e-4;
    } optim;

    struct Offload {
        bool optimizer = false, weights = false, gradients = false, activations = false;
        bool is_on() const { return optimizer || activations; }  // the others need `optimizer`
        int window_mb = 192;  // of each window
    } offload;

    struct Schedule {
        LrSchedule name = LrSchedule::cosine;
        int warmup_steps = 700;
        double final_lr_fraction = 0.1;
        double cooldown_fraction = 0.2;  // wsd only: fraction of all steps
        double cooldown_power = 0.5;     // wsd only
        int cycle_steps = 1000;          // cyclic only
    } schedule;

    struct Average {
        AverageKind kind = AverageKind::none;
        double decay = 0.999;        // exponential only: per step
        double tail_fraction = 0.1;  // tail only: fraction of all steps
    } average;

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
        bool automatic = false;  // plan_layouts() chooses zero_stage, tensor, context and pipeline
        int zero_stage = 0;
        bool deterministic_reduce = false;
        int bucket_mb = 32;
        int tensor = 1;
        int terms = 0;  // 0: see terms_of() in training/models/model_io.cpp
        int context = 1;
        int pipeline = 1;
        PipelineSchedule pipeline_schedule = PipelineSchedule::one_f_one_b;  // this and the following: pipeline > 1
        int pipeline_chunks = 0;                                             // 0: see chunks()
        std::vector<int> pipeline_layers;                                    // empty: balanced
        double start_timeout_s = 300;
        double silence_s = 60;
        double step_timeout_s = 120;
        // Parts of the layers on each rank: pipeline_chunks or its default.
        int chunks() const {
            if (pipeline_chunks > 0) return pipeline_chunks;
            return pipeline_schedule == PipelineSchedule::interleaved ? 2 : 1;
        }
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
        bool tensorboard = true;
        int norms_every_steps = 100;      // 0: never
        int noise_scale_every_steps = 0;  // 0: never
    } log;

    struct Device {
        bool tf32 = false;
        bool gelu_epilogue = false;
        std::string gemm_choices;
        bool arch_kernels = true;
        double kernel_check_s = 60;
        bool graphs = true;
        bool debug_sync = false;
    } device;

    // Keys that were 0. load_config() sets batch_size to largest_batch_size(), at most kMaxDefaultBatch, and head_rows
    // to default_head_rows(); a program that knows its GPU may choose other values.
    struct Open {
        bool batch_size = false, head_rows = false;
    } open;
    bool leaves_choices() const { return open.batch_size || train.recompute == Recompute::automatic; }
};

// Reads the configuration file, applies `overrides` ("section.key=value") in order, fills in the defaults that depend
// on other keys (train.batch_size, train.head_rows, too long a warm-up), and calls check_config() for `world` ranks; 0:
// for as many as its smallest grid has.
Config load_config(const std::string& path, const std::vector<std::string>& overrides, int world);

// Parses a configuration in JSON. Absent keys get their defaults, which depend on model.family and optim.name. A key
// and its aliases must not appear together. `overrides` ("section.key=value") take precedence over the JSON. Error
// messages name `origin` as the source. Ignores section "cost" and key "log.terminal" of earlier versions. Checks the
// range of each value, but not the values against each other: see check_config().
Config parse_config(std::string_view json_text, const std::string& origin,
                    const std::vector<std::string>& overrides = {});

// Sets every architecture option to the family's default and keeps the sizes.
void set_family(Config::Model& model, ModelFamily family);

// Returns one text like `model.norm: "layernorm" -> "rmsnorm"` for each setting in which the models differ. Ignores
// settings that do not change what the weights compute: init_from, dropout, z_loss, family and those without effect.
std::vector<std::string> model_differences(const Config::Model& from, const Config::Model& to);

// Fails with Exit::usage unless the text is a "section.key=value".
void check_assignment(const std::string& assignment);
// Applies one "section.key=value". The value is JSON or a bare string, as in train.precision=fp32. model.family=NAME
// calls set_family(), optim.name=NAME set_optimizer().
void override_config(Config& config, const std::string& assignment);

// The largest number of sequences per micro-batch, at most `most`, with which the tokens of every step are a multiple
// of the tokens of `world` ranks' micro-batches; 0 if there is none.
int largest_batch_size(const Config& config, int world, int most);
// The limit if train.batch_size is 0.
inline constexpr int kMaxDefaultBatch = 8;

// Checks the keys against each other, for `world` ranks: head sizes, lengths, gradient accumulation, schedules. Fails
// with Exit::config and all problems. With parallel.auto, what depends on the grid is checked when it is chosen.
void check_config(const Config& config, const std::string& origin, int world);

// The rows of logits in memory at a time if train.head_rows is 0: one micro-batch, at most 8192. More rows make the
// head's GEMMs larger and sum its weight gradient in fewer parts; 8192 rows of GPT-2's vocabulary are 0.8 GB in bf16.
// The value affects the summation order and thus the bits of the result, so it depends on the configuration alone.
int default_head_rows(int batch_size, int seq_len);

// Tokens of a step over all ranks, and per sequence.
int64_t batch_tokens(const Config& config, int step);
int sequence_length(const Config& config, int step);
// Tokens of the steps 1 to `steps`.
int64_t tokens_of_steps(const Config& config, int steps);
// Tokens per step, as text: "524288", or with a ramp "65536 to 524288".
std::string batch_text(const Config& config);

// The grid of `world` ranks, and at least of one rank with each part of the model. The division is exact after
// check_config().
Grid grid_of(const Config& config, int world);

// Micro-steps of a step (from 1) on each of `world` ranks that divide the batch: Grid::data. The division is exact
// after check_config().
int micro_steps(const Config& config, int world, int step);
// The most micro-steps of any step.
int max_micro_steps(const Config& config, int world);

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

// Returns the keys with the name of `key` in any section: "train.max_steps" for "max_steps" or "run.max_steps".
std::vector<std::string> keys_with_name(const std::string& key);

// Returns the known name with the smallest Levenshtein distance to `name` (the first of several), or an empty string if
// none is within half of the name's length. For "did you mean ...?".
std::string nearest_name(const std::string& name, const std::vector<std::string>& known);
