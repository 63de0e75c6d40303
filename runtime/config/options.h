// The table of options: key, pointer to the value, allowed values, one line of help. Defaults are in Config.
#pragma once

#include <limits>
#include <nlohmann/json_fwd.hpp>
#include <variant>

#include "runtime/config/config.h"

// The allowed values of an option: numbers in [low, high], also as the values of a ramp or the items of a list; any
// text that can be a path; every choice of an enum.
struct Allowed {
    double low = -std::numeric_limits<double>::infinity();
    double high = std::numeric_limits<double>::infinity();
    bool may_be_empty = true;
    const char* ramped = "";  // the name of a ramp's values
};

constexpr Allowed between(double low, double high) { return {.low = low, .high = high}; }
constexpr Allowed ramp_of(const char* name, double high) { return {.low = 1, .high = high, .ramped = name}; }
inline constexpr Allowed kAnything, kSomeText{.may_be_empty = false};

// Whether the option affects the trained weights. Options for paths, output intervals and memory savings do not; they
// may change when a run resumes. (A checkpoint records the content of the data files, so their names do not matter.)
enum class Effect { result, none };

struct Option {
    const char* key;  // "section.name"
    std::variant<bool*, int*, int64_t*, uint64_t*, double*, std::string*, DataParts*, TensorGroups*, Ramp*,
                 std::vector<int>*, Precision*, Fp8Gradients*, Recompute*, OptimizerKind*, OptimizerDtype*,
                 PipelineSchedule*, MuonIteration*, MuonScale*, LrSchedule*, AverageKind*, OnSpike*, OnNonFinite*,
                 ModelFamily*, ActivationFunction*, NormKind*, PositionKind*, RopeScaling*, AttentionBias*, QkNorm*>
        value;
    Allowed allowed;
    std::string help;
    Effect effect = Effect::result;
};

// One row per option, grouped by section, with pointers into `config`.
std::vector<Option> option_table(Config& config);

// The options of section "model".
std::vector<Option> model_options(Config& config);

// An alias of an option of section "model": its name in Hugging Face's config.json.
struct Alias {
    const char* name;
    const char* key;  // without the section
};
const std::vector<Alias>& model_aliases();

// Sets the option, or fails with Exit::config: "ORIGIN: KEY must be ..., is VALUE".
void assign_option(const Option& option, const nlohmann::ordered_json& value, const std::string& origin);

nlohmann::ordered_json option_value(const Option& option);

// "a number in [0, 1]", "fp32|bf16|fp16", "true or false".
std::string allowed_values(const Option& option);
