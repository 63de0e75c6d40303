#include "runtime/config/options.h"

#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <type_traits>

#include "runtime/io/json.h"

namespace {

using Json = nlohmann::ordered_json;

constexpr double kMaxInt = std::numeric_limits<int>::max();
constexpr size_t kLongestText = 4096;  // bytes of a text
constexpr size_t kMaxListed = 256;     // items of a list
constexpr double kMaxWeight = 1e6, kMaxRate = 1000, kMinPower = 0.01, kMaxPower = 100;
constexpr double kAlmost1 = 0.999999;  // also below 1 as a float: at 1 a moving average would never change

// System calls end a path at the first NUL.
bool is_text(const Json& json, bool may_be_empty) {
    if (!json.is_string()) return false;
    const std::string& text = json.get_ref<const std::string&>();
    return text.size() <= kLongestText && text.find('\0') == std::string::npos && (may_be_empty || !text.empty());
}

// allowed_value(json, allowed, target) returns `json` as a value of the target's type, or nothing if it has another
// type or is not allowed.

// Accepts one pattern or a list of patterns with weights.
std::optional<DataParts> allowed_value(const Json& json, const Allowed&, const DataParts*) {
    if (is_text(json, false)) return DataParts{{json.get<std::string>()}};
    if (!json.is_array() || json.empty() || json.size() > kMaxListed) return std::nullopt;
    DataParts parts;
    for (const Json& part : json) {
        const bool is_part = part.is_object() && part.size() == 2 && part.contains("path") && part.contains("weight") &&
                             is_text(part["path"], false) && part["weight"].is_number();
        if (!is_part || !(part["weight"] > 0) || !(part["weight"] <= kMaxWeight)) return std::nullopt;
        parts.push_back({part["path"], part["weight"]});
    }
    return parts;
}

// A number of a group. A group without the key has its default or, if that is negative, the setting of other tensors.
struct GroupKey {
    const char* name;
    double TensorGroup::*member;
    double least, most;
    bool is_integer() const { return most == kMaxSteps; }
};
constexpr GroupKey kGroupKeys[] = {
    {"lr_scale", &TensorGroup::lr_scale, 0, kMaxRate},
    {"weight_decay", &TensorGroup::weight_decay, 0, kMaxRate},
    {"beta1", &TensorGroup::beta1, 0, kAlmost1},
    {"beta2", &TensorGroup::beta2, 0, kAlmost1},
    {"warmup_steps", &TensorGroup::warmup_steps, 0, kMaxSteps},
    {"final_lr_fraction", &TensorGroup::final_lr_fraction, 0, 1},
    {"cooldown_power", &TensorGroup::cooldown_power, kMinPower, kMaxPower},
};

// Accepts a list of objects with the key "tensors" and others of kGroupKeys.
std::optional<TensorGroups> allowed_value(const Json& json, const Allowed&, const TensorGroups*) {
    if (!json.is_array() || json.size() > kMaxListed) return std::nullopt;
    TensorGroups groups;
    for (const Json& item : json) {
        if (!item.is_object() || !item.contains("tensors") || !is_text(item["tensors"], false)) return std::nullopt;
        TensorGroup& group = groups.emplace_back(TensorGroup{.tensors = item["tensors"]});
        for (const auto& [name, value] : item.items()) {
            if (name == "tensors") continue;
            const auto key = std::ranges::find(kGroupKeys, name, &GroupKey::name);
            if (key == std::end(kGroupKeys) || !value.is_number()) return std::nullopt;
            if (!(value >= key->least) || !(value <= key->most)) return std::nullopt;
            if (key->is_integer() && !value.is_number_integer()) return std::nullopt;
            group.*(key->member) = value;
        }
    }
    return groups;
}

bool is_integer_in(const Json& json, double low, double high) {
    return json.is_number_integer() && json >= low && json <= high;
}

// Accepts a list of objects with the keys "until_step" and allowed.ramped.
std::optional<Ramp> allowed_value(const Json& json, const Allowed& allowed, const Ramp*) {
    if (!json.is_array() || json.size() > kMaxListed) return std::nullopt;
    Ramp parts;
    for (const Json& part : json) {
        const bool is_part = part.is_object() && part.size() == 2 &&
                             is_integer_in(part.value("until_step", Json()), 1, kMaxSteps) &&
                             is_integer_in(part.value(allowed.ramped, Json()), allowed.low, allowed.high);
        if (!is_part) return std::nullopt;
        parts.push_back({part["until_step"], part[allowed.ramped]});
    }
    return parts;
}

std::optional<std::vector<int>> allowed_value(const Json& json, const Allowed& allowed, const std::vector<int>*) {
    const auto is_allowed = [&](const Json& item) { return is_integer_in(item, allowed.low, allowed.high); };
    if (!json.is_array() || json.size() > kMaxListed || !std::ranges::all_of(json, is_allowed)) return std::nullopt;
    return json.get<std::vector<int>>();
}

Json json_of(const TensorGroups& groups) {
    Json list = Json::array();
    for (const TensorGroup& group : groups) {
        Json item = {{"tensors", group.tensors}};
        for (const GroupKey& key : kGroupKeys) {
            const double value = group.*key.member;
            if (value >= 0) item[key.name] = key.is_integer() ? Json(int64_t(value)) : Json(value);
        }
        list.push_back(item);
    }
    return list;
}

template <class T> std::optional<T> allowed_value(const Json& json, const Allowed& allowed, const T*) {
    if constexpr (std::is_enum_v<T>) {
        if constexpr (std::is_same_v<T, AttentionBias>)  // Hugging Face's attention_bias is true or false
            if (json.is_boolean()) return json.get<bool>() ? AttentionBias::all : AttentionBias::none;
        return json.is_string() ? choice_named<T>(json.get<std::string>()) : std::nullopt;
    } else if constexpr (std::is_same_v<T, std::string>) {
        if (is_text(json, allowed.may_be_empty)) return json.get<T>();
    } else if constexpr (std::is_same_v<T, bool>) {
        if (json.is_boolean()) return json.get<T>();
    } else {
        const bool is_of_type = std::is_same_v<T, double>     ? json.is_number()
                                : std::is_same_v<T, uint64_t> ? json.is_number_unsigned()
                                                              : json.is_number_integer();
        if (is_of_type && json.get<double>() >= allowed.low && json.get<double>() <= allowed.high) return json.get<T>();
    }
    return std::nullopt;
}

constexpr Allowed kSteps = between(1, kMaxSteps), kStepsOr0 = between(0, kMaxSteps);
constexpr Effect kNone = Effect::none;

std::vector<Option> run_options(Config& c) {
    return {
        {"run.dir", &c.run.dir, kSomeText, "output directory of the run", kNone},
        {"run.seed", &c.run.seed, kAnything,
         "random seed of weights, data order, dropout, samples and stochastic rounding"},
    };
}

// The help of a setting of some optimizers: "adamw: decay rate of the first moment".
std::string used_by(SettingMember setting, const char* help) { return users_of(setting) + ": " + help; }

std::vector<Option> training_options(Config& c) {
    return {
        {"data.train", &c.data.train, kSomeText,
         "glob pattern of the training shards, or a list of patterns with weights (a mixture)", kNone},
        {"data.val", &c.data.val, kAnything, "glob pattern of the validation shards; empty: no validation", kNone},
        {"data.tokenizer", &c.data.tokenizer, kAnything, "tokenizer.json of the shards; empty: no text samples", kNone},
        {"data.document_mask", &c.data.document_mask, kAnything,
         "mask attention across document boundaries within a sequence"},
        {"data.document_token", &c.data.document_token, between(-1, 1 << 24),
         "document_mask: token that starts each document; -1: data.tokenizer's <|endoftext|>"},

        {"train.max_steps", &c.train.max_steps, kStepsOr0, "optimizer steps of the whole run; 0: no limit"},
        {"train.max_epochs", &c.train.max_epochs, between(0, 1e6),
         "passes over the training data; 0: no limit. The run ends at the first limit of steps, epochs and minutes"},
        {"train.max_minutes", &c.train.max_minutes, between(0, 1e6),
         "training time in minutes, summed over all resumes; 0: no limit. wsd: the cooldown starts early enough to "
         "finish in time"},
        {"train.batch_size", &c.train.batch_size, between(0, 1 << 20),
         "sequences per micro-batch and rank; 0: on a known GPU the fastest number that fits, else the largest up to "
         "8; both divide total_batch_tokens"},
        {"train.seq_len", &c.train.seq_len, between(1, 1 << 24), "tokens per sequence; at most model.n_positions"},
        {"train.total_batch_tokens", &c.train.total_batch_tokens, between(1, kMaxInt),
         "tokens per optimizer step over all ranks; determines the number of gradient accumulation steps"},
        {"train.batch_ramp", &c.train.batch_ramp, ramp_of("total_batch_tokens", kMaxInt),
         "total_batch_tokens of the first steps: of each part up to its until_step, which is included"},
        {"train.seq_ramp", &c.train.seq_ramp, ramp_of("seq_len", 1 << 24),
         "seq_len of the first steps, as in batch_ramp; must divide train.seq_len, whose sequences are split"},
        {"train.precision", &c.train.precision, kAnything,
         "data type of activations and compute weights. fp8: bf16, but the operands of the blocks' GEMMs have 8 bits"},
        {"train.fp8_gradients", &c.train.fp8_gradients, kAnything,
         "with train.precision fp8: the type of the gradients among these operands"},
        {"train.recompute", &c.train.recompute, kAnything,
         "activations that the backward pass recomputes to save memory; each level includes the previous ones. auto: "
         "the fastest that fits, none on a CPU",
         kNone},
        {"train.head_rows", &c.train.head_rows, between(0, kMaxInt),
         "tokens whose logits are in memory at the same time; 0: one micro-batch, at most 8192"},
        {"train.on_spike", &c.train.on_spike, kAnything,
         "action after a loss spike. rollback: return to the last healthy checkpoint and skip the data up to the "
         "spike, at most 3 times in 1000 steps"},
        {"train.spike_deviations", &c.train.spike_deviations, between(1, 1e6),
         "a loss this many median absolute deviations above the median of the last 200 steps counts as a spike"},
        {"train.on_nonfinite", &c.train.on_nonfinite, kAnything,
         "action when non-finite steps exceed loss_scale.max_skipped_steps or persist at loss_scale.minimum. rollback: "
         "as for on_spike"},
        {"train.check_replicas_every", &c.train.check_replicas_every, kStepsOr0,
         "steps between comparisons of replicas, which detect silent data corruption; 0: never", kNone},

        {"offload.optimizer", &c.offload.optimizer, kAnything,
         "keep the optimizer's state in host memory: masters, unless they are the compute weights, state of each "
         "parameter, and averages",
         kNone},
        {"offload.weights", &c.offload.weights, kAnything,
         "keep the compute weights in host memory; each block's are copied to the device ahead of its passes; needs "
         "offload.optimizer and one rank",
         kNone},
        {"offload.gradients", &c.offload.gradients, kAnything,
         "keep the FP32 gradients in host memory; each block's are on the device during its backward pass; needs "
         "offload.optimizer and one rank",
         kNone},
        {"offload.activations", &c.offload.activations, kAnything,
         "keep the inputs of the blocks in host memory between the forward and the backward pass; needs "
         "train.recompute block",
         kNone},
        {"offload.window_mb", &c.offload.window_mb, between(0, 1 << 20),
         "MiB of device memory for each of the two windows through which the arrays of an update pass; 0: the least",
         kNone},
    };
}

// Optimizer, schedule and loss scale.
std::vector<Option> optimizer_options(Config& c) {
    using S = OptimizerSettings;
    return {
        {"optim.name", &c.optim.name, kAnything,
         "optimizer; sets the defaults of the keys that only some optimizers read"},
        {"optim.learning_rate", &c.optim.learning_rate, between(0, kMaxRate), "peak learning rate"},
        {"optim.beta1", &c.optim.beta1, between(0, kAlmost1),
         used_by(&S::beta1, "decay rate of the first moment; lion: of the update")},
        {"optim.beta2", &c.optim.beta2, between(0, kAlmost1),
         used_by(&S::beta2, "decay rate of the second moment; lion: of the momentum")},
        {"optim.eps", &c.optim.eps, between(1e-30, 1),
         used_by(&S::eps,
                 "added to the square root of the averaged or summed squared gradients; adafactor: minimum of "
                 "that root and of a matrix's mean squared gradient")},
        {"optim.weight_decay", &c.optim.weight_decay, between(0, 1000),
         "weight decay of matrices, embeddings and the head; decoupled in adamw, lion, lamb, adafactor, muon, normuon, "
         "soap and soap_muon, else added to the gradient"},
        {"optim.grad_clip", &c.optim.grad_clip, between(0, 1e30), "maximum gradient norm; 0: no clipping"},
        {"optim.momentum", &c.optim.momentum, between(0, kAlmost1), used_by(&S::momentum, "momentum")},
        {"optim.nesterov", &c.optim.nesterov, kAnything,
         used_by(&S::nesterov, "Nesterov's momentum; default true in muon, normuon and soap_muon")},
        {"optim.alpha", &c.optim.alpha, between(0, kAlmost1),
         used_by(&S::alpha, "decay rate of the average of squared gradients")},
        {"optim.trust_coefficient", &c.optim.trust_coefficient, between(0, kMaxRate),
         used_by(&S::trust_coefficient, "the rate of a layer, in proportion to its weights' norm / its gradient's")},
        {"optim.beta2_decay", &c.optim.beta2_decay, between(-10, 0),
         used_by(&S::beta2_decay, "the decay rate of update t is 1 - t^beta2_decay")},
        {"optim.clip_threshold", &c.optim.clip_threshold, between(1e-6, kMaxRate),
         used_by(&S::clip_threshold, "maximum of the root mean square of a layer's direction")},
        {"optim.scalar_name", &c.optim.scalar_name, kAnything,
         "muon, normuon, soap, soap_muon: optimizer of embeddings, head and vectors; not an optimizer of matrices"},
        {"optim.muon_iteration", &c.optim.muon_iteration, kAnything,
         "muon, normuon, soap_muon: polynomials that orthogonalize a matrix"},
        {"optim.muon_scale", &c.optim.muon_scale, kAnything,
         "muon, normuon, soap_muon: scale of the update. adamw_rms: the size of AdamW's, so that the same learning "
         "rate fits; shape: the square root of rows / columns, at least 1"},
        {"optim.muon_beta2", &c.optim.muon_beta2, between(0, kAlmost1),
         used_by(&S::muon_beta2, "decay rate of the second moment; normuon: of rows; default 0.9 in soap_muon")},
        {"optim.soap_interval", &c.optim.soap_interval, between(1, 1000000),
         used_by(&S::soap_interval, "steps between updates of the bases; default 1 in soap_muon")},
        {"optim.cautious_decay", &c.optim.cautious_decay, kAnything,
         "muon, normuon, soap, soap_muon: weight decay only of weights that the update also moves towards 0"},
        {"optim.state_dtype", &c.optim.state_dtype, kAnything,
         "storage type of the optimizer's state, not of adafactor, soap and soap_muon. bf16: half the memory, rounded "
         "stochastically"},
        {"optim.master_dtype", &c.optim.master_dtype, kAnything,
         "storage type of the master weights. bf16: they are the compute weights, rounded stochastically; needs "
         "train.precision bf16"},
        {"optim.groups", &c.optim.groups, kAnything,
         "tensors with another learning rate (times lr_scale), schedule, weight decay or decay rates of moments; a "
         "later group overrides an earlier one"},

        {"schedule.name", &c.schedule.name, kAnything, "learning rate schedule after the warm-up"},
        {"schedule.warmup_steps", &c.schedule.warmup_steps, kStepsOr0, "steps of linear warm-up"},
        {"schedule.final_lr_fraction", &c.schedule.final_lr_fraction, between(0, 1),
         "learning rate of the last step as a fraction of optim.learning_rate; cyclic: the minimum"},
        {"schedule.cooldown_fraction", &c.schedule.cooldown_fraction, between(0, 1),
         "wsd: length of the cooldown as a fraction of all steps, at least one step"},
        {"schedule.cooldown_power", &c.schedule.cooldown_power, between(kMinPower, kMaxPower),
         "wsd: the cooldown's rate falls with this power of its progress; 1: linearly"},
        {"schedule.cycle_steps", &c.schedule.cycle_steps, between(2, kMaxSteps), "cyclic: steps from peak to peak"},

        {"average.kind", &c.average.kind, kAnything,
         "average of the weights, which evaluations, samples and exports use. exponential: of all steps, with decay; "
         "tail: the mean of the last steps"},
        {"average.decay", &c.average.decay, between(0, kAlmost1), "exponential: weight of the previous average"},
        {"average.tail_fraction", &c.average.tail_fraction, between(0, 1),
         "tail: length as a fraction of all steps, at least one step"},

        {"loss_scale.dynamic", &c.loss_scale.dynamic, kAnything, "use dynamic loss scaling, for fp16"},
        {"loss_scale.fixed", &c.loss_scale.fixed, between(1e-9, 1e18), "loss scale if not dynamic"},
        {"loss_scale.initial", &c.loss_scale.initial, between(1e-9, 1e18), "dynamic: initial scale"},
        {"loss_scale.growth_interval", &c.loss_scale.growth_interval, kSteps,
         "dynamic: consecutive finite steps before the scale grows"},
        {"loss_scale.growth_factor", &c.loss_scale.growth_factor, between(1.001, 65536),
         "dynamic: factor applied when the scale grows"},
        {"loss_scale.backoff_factor", &c.loss_scale.backoff_factor, between(0.001, 0.999),
         "dynamic: factor applied when the scale shrinks"},
        {"loss_scale.hysteresis", &c.loss_scale.hysteresis, between(1, 1000000),
         "dynamic: number of non-finite steps since the last growth at which the scale starts to shrink"},
        {"loss_scale.minimum", &c.loss_scale.minimum, between(1e-9, 1e18), "dynamic: smallest scale"},
        {"loss_scale.max_skipped_steps", &c.loss_scale.max_skipped_steps, kStepsOr0,
         "consecutive non-finite steps to skip, in any precision; one more triggers train.on_nonfinite"},
    };
}

// Ranks, checkpoints, validation, samples, logs and the device.
std::vector<Option> surrounding_options(Config& c) {
    return {
        {"parallel.auto", &c.parallel.automatic, kAnything,
         "choose zero_stage, tensor, context and pipeline: the first layout that `plan --gpus` lists", kNone},
        {"parallel.zero_stage", &c.parallel.zero_stage, between(0, 3),
         "ZeRO: sharded state. 0: none; 1: masters and optimizer state; 2: also gradients; 3: also parameters", kNone},
        {"parallel.deterministic_reduce", &c.parallel.deterministic_reduce, kAnything,
         "sum in a fixed order: the same bits for any power-of-two number of ranks and micro-steps, any number of "
         "pipeline stages and, up to terms, any parallel.tensor and parallel.context"},
        {"parallel.tensor", &c.parallel.tensor, between(1, 1 << 10),
         "tensor and sequence parallelism: ranks that divide each layer, a power of two that divides the heads", kNone},
        {"parallel.terms", &c.parallel.terms, between(0, 16),
         "with deterministic_reduce: the most terms of a sum that parallel.tensor or parallel.context divides, the "
         "same on one rank; 1 costs nothing, but the bits depend on these keys. 0: 8 on CPUs, 1 on GPUs"},
        {"parallel.context", &c.parallel.context, between(1, 1 << 10),
         "context parallelism: ranks that divide each sequence. train.seq_len: a multiple of 32 times this", kNone},
        {"parallel.pipeline", &c.parallel.pipeline, between(1, 1 << 10),
         "pipeline parallelism: ranks that have different layers", kNone},
        {"parallel.pipeline_schedule", &c.parallel.pipeline_schedule, kAnything,
         "pipeline above 1: order of the passes of a step. gpipe: all forward passes first; 1f1b: forward and backward "
         "alternate; interleaved: 1f1b with several parts of the layers on each rank; zero_bubble: 1f1b with separate "
         "passes for the gradients of weights",
         kNone},
        {"parallel.pipeline_chunks", &c.parallel.pipeline_chunks, between(0, 1 << 10),
         "interleaved: parts of the layers on each rank; 0: 2, or 1 with another schedule", kNone},
        {"parallel.pipeline_layers", &c.parallel.pipeline_layers, between(1, 10000),
         "pipeline above 1: layers of each of the pipeline times pipeline_chunks parts; empty: balanced", kNone},
        {"parallel.bucket_mb", &c.parallel.bucket_mb, between(0, 1 << 20),
         "size of a gradient bucket in MiB, reduced in one collective; 0: one bucket per block"},
        {"parallel.start_timeout_s", &c.parallel.start_timeout_s, between(0.1, 1e6),
         "seconds allowed for ranks to start and rendezvous, and without progress before the second step", kNone},
        {"parallel.silence_s", &c.parallel.silence_s, between(0.1, 1e6),
         "seconds without a heartbeat from a rank before the other ranks exit", kNone},
        {"parallel.step_timeout_s", &c.parallel.step_timeout_s, between(0.1, 1e6),
         "seconds without progress of a rank within a step before all ranks exit", kNone},

        {"checkpoint.every_steps", &c.checkpoint.every_steps, kStepsOr0,
         "steps between checkpoints; the last step is always saved. 0: only the last step"},
        {"checkpoint.keep", &c.checkpoint.keep, between(1, 1000000), "number of newest checkpoints to keep", kNone},
        {"checkpoint.keep_best", &c.checkpoint.keep_best, kAnything,
         "save at each new lowest validation loss, and keep the best checkpoint", kNone},
        {"checkpoint.asynchronous", &c.checkpoint.asynchronous, kAnything,
         "write checkpoints in the background, from a copy in host memory", kNone},

        {"eval.every_steps", &c.eval.every_steps, kStepsOr0,
         "steps between validations; the last step is always validated. 0: no validation", kNone},
        {"eval.batches", &c.eval.batches, between(0, kMaxSteps),
         "micro-batches per validation, over all ranks; 0: the whole split", kNone},
        {"eval.stride", &c.eval.stride, between(0, kMaxInt),
         "tokens from one validation window to the next; their overlap is context only. 0: train.seq_len", kNone},
        {"eval.patience", &c.eval.patience, kStepsOr0,
         "stop after this many consecutive validations without a new lowest loss; 0: no early stopping"},
        {"eval.questions", &c.eval.questions, kAnything,
         "glob pattern of multiple-choice question files (JSON Lines) for each validation; empty: none", kNone},
        {"eval.max_questions", &c.eval.max_questions, between(0, kMaxSteps),
         "questions per file, taken from its start; 0: all", kNone},

        {"sample.every_steps", &c.sample.every_steps, kStepsOr0, "steps between text samples; 0: none", kNone},
        {"sample.tokens", &c.sample.tokens, between(1, 1 << 24), "tokens per sample", kNone},
        {"sample.prompt", &c.sample.prompt, kAnything, "prompt that samples continue", kNone},
        {"sample.temperature", &c.sample.temperature, between(0, 1000),
         "sampling temperature; 0: greedy, always the most likely token", kNone},
        {"sample.top_k", &c.sample.top_k, between(0, 1 << 24), "sample from the k most likely tokens; 0: all", kNone},
        {"sample.top_p", &c.sample.top_p, between(0, 1),
         "nucleus sampling: smallest set of tokens with total probability top_p; 1: all", kNone},
        {"sample.min_p", &c.sample.min_p, between(0, 1),
         "sample from tokens at least min_p times as likely as the top one; 0: all", kNone},

        {"log.every_steps", &c.log.every_steps, kSteps, "steps between progress lines on stdout", kNone},
        {"log.tensorboard", &c.log.tensorboard, kAnything, "write event files to run.dir/tensorboard", kNone},
        {"log.norms_every_steps", &c.log.norms_every_steps, kStepsOr0,
         "steps between records of each tensor's gradient norm and each layer's activation RMS; 0: none", kNone},
        {"log.noise_scale_every_steps", &c.log.noise_scale_every_steps, kStepsOr0,
         "steps between measurements of the gradient noise scale, which need 2 micro-steps per step; 0: none", kNone},

        {"device.tf32", &c.device.tf32, kAnything,
         "GPU: round the operands of fp32 GEMMs to TF32: faster, 10 instead of 23 mantissa bits"},
        {"device.gelu_epilogue", &c.device.gelu_epilogue, kAnything,
         "GPU: let 16-bit GEMMs apply gelu_new before they round; then the recompute levels differ in bits"},
        {"device.gemm_choices", &c.device.gemm_choices, kAnything,
         "GPU: file of train_gpt tune with an algorithm for each GEMM; empty: the library's first proposals"},
        {"device.arch_kernels", &c.device.arch_kernels, kAnything,
         "GPU: use kernels for its compute capability if they pass a check against the portable ones"},
        {"device.kernel_check_s", &c.device.kernel_check_s, between(0.1, 3600),
         "GPU: time limit of that check, in seconds", kNone},
        {"device.graphs", &c.device.graphs, kAnything,
         "GPU: record the passes of a micro-step as CUDA graphs and replay them", kNone},
        {"device.debug_sync", &c.device.debug_sync, kAnything,
         "GPU: synchronize after each kernel, so that an error names the failing kernel; also --debug-sync", kNone},
    };
}

}  // namespace

std::vector<Option> option_table(Config& config) {
    std::vector<Option> table = run_options(config);
    for (auto options : {model_options, training_options, optimizer_options, surrounding_options})
        std::ranges::move(options(config), std::back_inserter(table));
    return table;
}

void assign_option(const Option& option, const Json& json, const std::string& origin) {
    auto assign = [&]<class T>(T* value) {
        const std::optional<T> given = allowed_value(json, option.allowed, value);
        if (!given)
            fail(Exit::config, "%s: %s must be %s, is %s", origin, option.key, allowed_values(option), printed(json));
        *value = *given;
    };
    std::visit(assign, option.value);
}

Json option_value(const Option& option) {
    auto read = [&]<class T>(const T* value) -> Json {
        if constexpr (std::is_enum_v<T>) {
            return name_of(*value);
        } else if constexpr (std::is_same_v<T, TensorGroups>) {
            return json_of(*value);
        } else if constexpr (std::is_same_v<T, Ramp>) {
            Json list = Json::array();
            for (const auto& [step, number] : *value)
                list.push_back({{"until_step", step}, {option.allowed.ramped, number}});
            return list;
        } else if constexpr (std::is_same_v<T, DataParts>) {
            if (value->size() == 1) return value->front().path;
            Json list = Json::array();
            for (const DataPart& part : *value) list.push_back({{"path", part.path}, {"weight", part.weight}});
            return list;
        } else {
            return *value;
        }
    };
    return std::visit(read, option.value);
}

std::string group_keys_text() {
    std::string text;
    for (const GroupKey& key : kGroupKeys)
        text += format(", \"%s\": %s in [%g, %.10g]", key.name, key.is_integer() ? "an integer" : "a number", key.least,
                       key.most);
    return text;
}

std::string allowed_values(const Option& option) {
    auto describe = [&]<class T>(const T*) -> std::string {
        const Allowed& allowed = option.allowed;
        if constexpr (std::is_same_v<T, bool>)
            return "true or false";
        else if constexpr (std::is_same_v<T, uint64_t>)
            return "an integer from 0 to 18446744073709551615";
        else if constexpr (std::is_same_v<T, TensorGroups>)
            return format("a list of up to %zu {\"tensors\": a role (%s) or a pattern of tensor names%s}", kMaxListed,
                          choice_names<TensorRole>().c_str(), group_keys_text().c_str());
        else if constexpr (std::is_same_v<T, Ramp>)
            return format(
                "a list of up to %zu {\"until_step\": an integer in [1, %d], \"%s\": an integer in [%.10g, %.10g]}",
                kMaxListed, kMaxSteps, allowed.ramped, allowed.low, allowed.high);
        else if constexpr (std::is_same_v<T, std::vector<int>>)
            return format("a list of up to %zu integers in [%.10g, %.10g]", kMaxListed, allowed.low, allowed.high);
        else if constexpr (std::is_same_v<T, DataParts>)
            return format(
                "text without NUL, 1 to %zu bytes, or a list of 1 to %zu {\"path\": such a text, "
                "\"weight\": a number in (0, %.10g]}",
                kLongestText, kMaxListed, kMaxWeight);
        else if constexpr (std::is_same_v<T, std::string>)
            return format("text without NUL, %d to %zu bytes", allowed.may_be_empty ? 0 : 1, kLongestText);
        else if constexpr (std::is_enum_v<T>)
            return choice_names<T>();
        else
            return format("%s in [%.10g, %.10g]", std::is_same_v<T, double> ? "a number" : "an integer", allowed.low,
                          allowed.high);
    };
    return std::visit(describe, option.value);
}
