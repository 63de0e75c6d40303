#include "runtime/config/options.h"

#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <type_traits>

#include "runtime/io/io.h"

namespace {

using Json = nlohmann::ordered_json;

constexpr double kMaxInt = std::numeric_limits<int>::max();
constexpr double kAlmost1 = 0.999999;  // well below 1 as a float too: with 1 a moving average never moves

// A NUL would cut the text short wherever the system takes it, as in a path.
bool is_text(const Json& json, bool may_be_empty) {
    if (!json.is_string()) return false;
    const std::string& text = json.get_ref<const std::string&>();
    return text.size() <= kLongestText && text.find('\0') == std::string::npos && (may_be_empty || !text.empty());
}

// A pattern alone, or a list of patterns with their weights.
std::optional<DataParts> data_parts(const Json& json) {
    if (is_text(json, false)) return DataParts{{json.get<std::string>()}};
    if (!json.is_array() || json.empty() || json.size() > kMostDataParts) return std::nullopt;
    DataParts parts;
    for (const Json& part : json) {
        const bool is_part = part.is_object() && part.size() == 2 && part.contains("path") && part.contains("weight") &&
                             is_text(part["path"], false) && part["weight"].is_number();
        if (!is_part || !(part["weight"] > 0) || !(part["weight"] <= kLargestWeight)) return std::nullopt;
        parts.push_back({part["path"], part["weight"]});
    }
    return parts;
}

// The value of type T that `json` stands for, if it is of that type and allowed.
template <class T> std::optional<T> allowed_value(const Json& json, const Allowed& allowed) {
    bool is_allowed = false;
    if constexpr (std::is_enum_v<T>) {
        if constexpr (std::is_same_v<T, AttentionBias>)  // Hugging Face's attention_bias is true or false
            if (json.is_boolean()) return json.get<bool>() ? AttentionBias::all : AttentionBias::none;
        return json.is_string() ? choice_named<T>(json.get<std::string>()) : std::nullopt;
    } else if constexpr (std::is_same_v<T, DataParts>) {
        return data_parts(json);
    } else if constexpr (std::is_same_v<T, std::string>) {
        is_allowed = is_text(json, allowed.may_be_empty);
    } else if constexpr (std::is_same_v<T, bool>) {
        is_allowed = json.is_boolean();
    } else {
        const bool is_of_type = std::is_same_v<T, double>     ? json.is_number()
                                : std::is_same_v<T, uint64_t> ? json.is_number_unsigned()
                                                              : json.is_number_integer();
        is_allowed = is_of_type && json.get<double>() >= allowed.low && json.get<double>() <= allowed.high;
    }
    if constexpr (!std::is_same_v<T, DataParts>) return is_allowed ? std::optional<T>(json.get<T>()) : std::nullopt;
}

constexpr Allowed kSteps = between(1, kMostSteps), kStepsOr0 = between(0, kMostSteps);
constexpr Effect kNone = Effect::none;

std::vector<Option> run_options(Config& c) {
    return {
        {"run.dir", &c.run.dir, kSomeText, "directory of everything that the run writes", kNone},
        {"run.seed", &c.run.seed, kAnything, "seed of the initial weights and the order of the training data"},
    };
}

// On what is trained, and how.
std::vector<Option> training_options(Config& c) {
    return {
        {"data.train", &c.data.train, kSomeText,
         "pattern of the training shards' paths; or a list of patterns, from which samples are drawn by weight", kNone},
        {"data.val", &c.data.val, kAnything, "pattern of the validation shards' paths; empty: no validation", kNone},
        {"data.tokenizer", &c.data.tokenizer, kAnything, "tokenizer.json of the shards; empty: no samples as text",
         kNone},
        {"data.document_mask", &c.data.document_mask, kAnything,
         "tokens do not attend to those of earlier documents in the same sequence"},
        {"data.document_token", &c.data.document_token, between(-1, 1 << 24),
         "document_mask: the token that begins each document; -1: data.tokenizer's <|endoftext|>"},

        {"train.max_steps", &c.train.max_steps, kStepsOr0, "optimizer steps of the whole run; 0: no limit"},
        {"train.max_epochs", &c.train.max_epochs, between(0, 1e6),
         "passes over the training data; 0: no limit. Whichever of steps, epochs and minutes is reached first ends the "
         "run"},
        {"train.max_minutes", &c.train.max_minutes, between(0, 1e6),
         "minutes of training, all resumed parts together; 0: no limit. wsd's cooldown begins in time for it"},
        {"train.batch_size", &c.train.batch_size, between(1, 1 << 20), "sequences per rank and micro-step"},
        {"train.seq_len", &c.train.seq_len, between(1, 1 << 24), "tokens per sequence, at most n_positions"},
        {"train.total_batch_tokens", &c.train.total_batch_tokens, between(1, kMaxInt),
         "tokens per optimizer step over all ranks; gradients accumulate over as many micro-steps as that takes"},
        {"train.precision", &c.train.precision, kAnything, "storage of activations and compute weights"},
        {"train.recompute", &c.train.recompute, kAnything,
         "what the backward pass computes again to save memory; each level includes the ones before", kNone},
        {"train.head_rows", &c.train.head_rows, between(0, kMaxInt),
         "tokens whose logits are held in memory at a time; 0: a micro-step's, at most 8192"},
        {"train.on_spike", &c.train.on_spike, kAnything,
         "after a step whose loss is a spike. rollback: go back to the last healthy checkpoint and skip the data up to "
         "the spike, at most 3 times in 1000 steps"},
        {"train.spike_deviations", &c.train.spike_deviations, between(1, 1e6),
         "a spike is a loss so many median absolute deviations above the median of the last 200 steps"},
        {"train.on_nonfinite", &c.train.on_nonfinite, kAnything,
         "after loss_scale.max_skipped_steps; rollback: as for a spike"},
        {"train.check_replicas_every", &c.train.check_replicas_every, kStepsOr0,
         "steps between comparisons of what several ranks hold alike, which find a rank that computes wrongly; 0: none",
         kNone},

        {"optim.name", &c.optim.name, kAnything, "the optimizer"},
        {"optim.learning_rate", &c.optim.learning_rate, between(0, 1000), "the highest of the schedule"},
        {"optim.beta1", &c.optim.beta1, between(0, kAlmost1), "adamw: decay of the first moment"},
        {"optim.beta2", &c.optim.beta2, between(0, kAlmost1), "adamw: decay of the second moment"},
        {"optim.eps", &c.optim.eps, between(1e-30, 1), "adamw: added to the root of the second moment"},
        {"optim.weight_decay", &c.optim.weight_decay, between(0, 1000), "decoupled decay of matrices"},
        {"optim.grad_clip", &c.optim.grad_clip, between(0, 1e30), "largest norm of the gradient; 0: no clipping"},
        {"optim.momentum", &c.optim.momentum, between(0, kAlmost1), "sgd: momentum"},

        {"schedule.name", &c.schedule.name, kAnything, "course of the learning rate after the warm-up"},
        {"schedule.warmup_steps", &c.schedule.warmup_steps, kStepsOr0, "steps of linear growth at the beginning"},
        {"schedule.final_lr_fraction", &c.schedule.final_lr_fraction, between(0, 1),
         "learning rate of the last step, as a part of optim.learning_rate; cyclic: the lowest"},
        {"schedule.cooldown_fraction", &c.schedule.cooldown_fraction, between(0, 1),
         "wsd: part of all steps, at least one step, over which the learning rate falls"},
        {"schedule.cycle_steps", &c.schedule.cycle_steps, between(2, kMostSteps), "cyclic: steps from peak to peak"},

        {"loss_scale.dynamic", &c.loss_scale.dynamic, kAnything, "adapt the loss scale, as fp16 needs it"},
        {"loss_scale.fixed", &c.loss_scale.fixed, between(1e-9, 1e18), "the loss scale if not dynamic"},
        {"loss_scale.initial", &c.loss_scale.initial, between(1e-9, 1e18), "dynamic: the first scale"},
        {"loss_scale.growth_interval", &c.loss_scale.growth_interval, kSteps,
         "dynamic: finite steps in a row after which the scale grows"},
        {"loss_scale.growth_factor", &c.loss_scale.growth_factor, between(1.001, 65536),
         "dynamic: by how much it grows"},
        {"loss_scale.backoff_factor", &c.loss_scale.backoff_factor, between(0.001, 0.999),
         "dynamic: by how much it shrinks"},
        {"loss_scale.hysteresis", &c.loss_scale.hysteresis, between(1, 1000000),
         "dynamic: non-finite steps since the last growth from which on it shrinks"},
        {"loss_scale.minimum", &c.loss_scale.minimum, between(1e-9, 1e18), "dynamic: the smallest scale"},
        {"loss_scale.max_skipped_steps", &c.loss_scale.max_skipped_steps, kStepsOr0,
         "non-finite steps in a row that are skipped; one more is a case for train.on_nonfinite, in every precision"},
    };
}

// Ranks, files, what is shown, and the device.
std::vector<Option> surrounding_options(Config& c) {
    return {
        {"parallel.zero_stage", &c.parallel.zero_stage, between(0, 3),
         "what each rank keeps its share of only. 0: nothing; 1: masters and optimizer state; 2: gradients too; 3: "
         "parameters too",
         kNone},
        {"parallel.deterministic_reduce", &c.parallel.deterministic_reduce, kAnything,
         "gradients add up in the same order for any number of ranks and micro-steps that are powers of 2"},
        {"parallel.bucket_mb", &c.parallel.bucket_mb, between(0, 1 << 20),
         "MiB of gradients that travel between ranks together; 0: each block's alone"},
        {"parallel.start_timeout_s", &c.parallel.start_timeout_s, between(0.1, 1e6),
         "seconds that ranks may take to start and to meet, and without progress before the second step", kNone},
        {"parallel.silence_s", &c.parallel.silence_s, between(0.1, 1e6),
         "seconds without any sign of a rank after which the others end", kNone},
        {"parallel.step_timeout_s", &c.parallel.step_timeout_s, between(0.1, 1e6),
         "seconds without progress of a rank within a step after which all end", kNone},

        {"checkpoint.every_steps", &c.checkpoint.every_steps, kStepsOr0,
         "steps between checkpoints, one more at the end; 0: only that"},
        {"checkpoint.keep", &c.checkpoint.keep, between(1, 1000000), "newest checkpoints that are kept", kNone},
        {"checkpoint.keep_best", &c.checkpoint.keep_best, kAnything,
         "save where the validation loss is the lowest so far, and keep that checkpoint too", kNone},
        {"checkpoint.asynchronous", &c.checkpoint.asynchronous, kAnything,
         "write checkpoints while training goes on, from a copy in host memory", kNone},

        {"eval.every_steps", &c.eval.every_steps, kStepsOr0, "steps between validations, one more at the end; 0: none",
         kNone},
        {"eval.batches", &c.eval.batches, between(0, kMostSteps),
         "micro-batches per validation, all ranks together; 0: the whole split", kNone},
        {"eval.stride", &c.eval.stride, between(0, kMaxInt),
         "tokens that a validation window adds to the one before; the rest of it is context. 0: train.seq_len, no "
         "overlap",
         kNone},
        {"eval.patience", &c.eval.patience, kStepsOr0,
         "validations in a row without a new lowest loss after which training ends; 0: it does not end early"},
        {"eval.questions", &c.eval.questions, kAnything,
         "pattern of files of multiple-choice questions (JSON Lines or llm.c's .bin) that are asked with each "
         "validation; empty: none",
         kNone},
        {"eval.max_questions", &c.eval.max_questions, between(0, kMostSteps),
         "the first so many questions of each file; 0: all", kNone},

        {"sample.every_steps", &c.sample.every_steps, kStepsOr0, "steps between samples of text; 0: none", kNone},
        {"sample.tokens", &c.sample.tokens, between(1, 1 << 24), "tokens per sample", kNone},
        {"sample.prompt", &c.sample.prompt, kAnything, "text that samples continue", kNone},
        {"sample.temperature", &c.sample.temperature, between(0, 1000), "0: always the likeliest token", kNone},
        {"sample.top_k", &c.sample.top_k, between(0, 1 << 24), "sample among the likeliest tokens only; 0: among all",
         kNone},
        {"sample.top_p", &c.sample.top_p, between(0, 1),
         "among the fewest likeliest tokens whose probabilities sum to this; 1: among all", kNone},
        {"sample.min_p", &c.sample.min_p, between(0, 1),
         "among tokens that are at least this times as likely as the likeliest; 0: among all", kNone},

        {"log.every_steps", &c.log.every_steps, kSteps, "steps between progress lines where there is no terminal",
         kNone},
        {"log.terminal", &c.log.terminal, kAnything,
         "progress on stdout. view: a block with a loss curve; line: one line that is rewritten; plain: lines; auto: "
         "what the terminal allows",
         kNone},
        {"log.tensorboard", &c.log.tensorboard, kAnything, "write event files for TensorBoard in run.dir/tensorboard",
         kNone},
        {"log.norms_every_steps", &c.log.norms_every_steps, kStepsOr0,
         "steps between records of each tensor's gradient norm and each layer's activations; 0: none", kNone},

        {"cost.price_per_hour", &c.cost.price_per_hour, between(0, 1e9),
         "price of an hour of all machines of the run, in any currency; 0: no estimate", kNone},
        {"cost.co2_g_per_kwh", &c.cost.co2_g_per_kwh, between(0, 1e6),
         "grams of CO2 per kWh of electricity; 0: no estimate", kNone},

        {"device.tf32", &c.device.tf32, kAnything,
         "GPU: fp32 products round their operands to TF32, faster and with 10 bits instead of 23"},
        {"device.debug_sync", &c.device.debug_sync, kAnything,
         "GPU: wait after each kernel, so that an error names the kernel that made it; also --debug-sync", kNone},
    };
}

}  // namespace

std::vector<Option> option_table(Config& config) {
    std::vector<Option> table = run_options(config);
    for (auto options : {model_options, training_options, surrounding_options})
        std::ranges::move(options(config), std::back_inserter(table));
    return table;
}

void assign_option(const Option& option, const Json& json, const std::string& origin) {
    auto assign = [&]<class T>(T* value) {
        const std::optional<T> given = allowed_value<T>(json, option.allowed);
        if (!given)
            fail(Exit::config, "%s: %s must be %s, is %s", origin, option.key, allowed_values(option), printed(json));
        *value = *given;
    };
    std::visit(assign, option.value);
}

Json option_value(const Option& option) {
    auto read = []<class T>(const T* value) -> Json {
        if constexpr (std::is_enum_v<T>) {
            return name_of(*value);
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

std::string allowed_values(const Option& option) {
    auto describe = [&]<class T>(const T*) -> std::string {
        const Allowed& allowed = option.allowed;
        if constexpr (std::is_same_v<T, bool>)
            return "true or false";
        else if constexpr (std::is_same_v<T, uint64_t>)
            return "an integer from 0 to 18446744073709551615";
        else if constexpr (std::is_same_v<T, DataParts>)
            return format(
                "text without NUL, 1 to %zu bytes, or a list of 1 to %zu {\"path\": such a text, "
                "\"weight\": a number in (0, %.10g]}",
                kLongestText, kMostDataParts, kLargestWeight);
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
