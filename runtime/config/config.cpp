
#include <xxhash.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>

#include "runtime/config/options.h"
#include "runtime/io/io.h"

namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kLargestFile = 1 << 20;
constexpr size_t kDeepest = 8;
constexpr std::string_view kFamilyKey = "model.family";

std::string section_of(const std::string& key) { return key.substr(0, key.find('.')); }

// "max_steps" of "train.max_steps"; the whole key if it has no dot.
std::string name_in_section(const std::string& key) { return key.substr(key.find('.') + 1); }  // npos + 1 is 0

// The keys that the user may have meant by `key`: those with the same name in any section, else the nearest ones.
std::vector<std::string> meant_keys(const std::vector<Option>& table, const std::string& key) {
    auto named = [&](const std::string& name) {
        std::vector<std::string> keys;
        for (const Option& option : table)
            if (name_in_section(option.key) == name) keys.push_back(option.key);
        return keys;
    };
    if (const auto same = named(name_in_section(key)); !same.empty()) return same;
    std::vector<std::string> known;
    for (const Option& option : table) known.push_back(option.key);
    if (key.find('.') == std::string::npos)
        for (const Option& option : table) {
            known.push_back(section_of(option.key));
            known.push_back(name_in_section(option.key));
        }
    const std::string nearest = nearest_name(key, known);
    if (nearest.empty()) return {};
    const bool is_section = std::ranges::count(table, nearest, [](const Option& o) { return section_of(o.key); }) > 0;
    const bool is_name = !is_section && nearest.find('.') == std::string::npos;
    return is_name ? named(nearest) : std::vector{nearest};
}

// `value`: the value of `key` if it is at the top level of a file, where only sections are allowed; else null.
[[noreturn]] void fail_unknown(const std::vector<Option>& table, const std::string& key, const std::string& origin,
                               const Json* value = nullptr) {
    const std::vector<std::string> keys = meant_keys(table, key);
    std::string remedy = keys.empty() ? "--help-config lists all keys" : "did you mean ";
    for (size_t i = 0; i < keys.size(); i++)
        remedy += (i == 0 ? "" : i + 1 < keys.size() ? ", " : " or ") + ("\"" + keys[i] + "\"");
    if (!keys.empty()) remedy += "?";
    if (value && keys.size() == 1 && keys[0].find('.') != std::string::npos) {
        const Json nested = {{section_of(keys[0]), {{name_in_section(keys[0]), *value}}}};
        if (keys[0] == key) remedy = "in a file, keys are nested in sections:";
        remedy += (keys[0] == key ? " " : " In a file, write ") + printed(nested);
    }
    fail(Exit::config, "%s: unknown key %s; %s", origin, printed(key), remedy);
}

// Resolves an alias to its key; returns any other `key` unchanged.
std::string canonical(const std::string& key) {
    if (section_of(key) == "model")
        for (const Alias& alias : model_aliases())
            if (name_in_section(key) == alias.name) return std::string("model.") + alias.key;
    return key;
}

const Option& option_named(const std::vector<Option>& table, const std::string& key, const std::string& origin) {
    const auto found = std::ranges::find(table, canonical(key), &Option::key);
    if (found == table.end()) fail_unknown(table, key, origin);
    return *found;
}

// Parses a value from the command line: JSON, or a bare string, whose UTF-8 the JSON parser has not checked.
Json typed_value(const std::string& text, const Option& option) {
    const Json json = parse_json_or_null(text);
    const bool takes_text =
        option_value(option).is_string() || std::holds_alternative<DataParts*>(option.value);  // both: one pattern
    if (json.is_string() || json.is_array() || !(json.is_null() || takes_text)) return json;
    try {
        (void)Json(text).dump();
    } catch (const Json::exception&) {
        fail(Exit::config, "--set: %s must be valid UTF-8, is %s", option.key, printed(text));
    }
    return text;
}

// The options that affect a run's result, as "key: value" in the order of the table.
std::vector<std::string> result_lines(const Config& config) {
    Config copy = config;
    std::vector<std::string> lines;
    for (const Option& option : option_table(copy))
        if (option.effect == Effect::result)
            lines.push_back(std::string(option.key) + ": " + option_value(option).dump());
    return lines;
}

// Fills in derived values and resets options that have no effect in this configuration.
Config with_derived(Config config) {
    config.model.fill_in_sizes();
    if (config.train.on_spike == OnSpike::warn) config.train.spike_deviations = Config().train.spike_deviations;
    if (!config.train.may_roll_back()) config.checkpoint.every_steps = Config().checkpoint.every_steps;
    return config;
}

Json nested(const std::vector<Option>& options) {
    Json json = Json::object();
    for (const Option& option : options) {
        const std::string section = section_of(option.key);
        // Not json[section][...]: the library aborts if memory runs out while it converts null to an object.
        Json& members = json.emplace(section, Json::object()).first.value();
        members[option.key + section.size() + 1] = option_value(option);
    }
    return json;
}

// The options that differ from their defaults, which depend on the model's family.
std::vector<Option> changed_options(Config& config) {
    Config defaults;
    set_family(defaults.model, config.model.family);
    const std::vector<Option> table = option_table(defaults);
    std::vector<Option> changed = option_table(config);
    std::erase_if(changed, [&](const Option& option) {
        const bool is_family = option.key == kFamilyKey && config.model.family != Config().model.family;
        return !is_family && option_value(option) == option_value(option_named(table, option.key, ""));
    });
    return changed;
}

// Checks that some limit ends the run, and that the schedule and the validations are compatible with it.
void check_end(const Config& c, const std::string& origin) {
    if (c.train.max_steps == 0 && c.train.max_epochs == 0 && c.train.max_minutes == 0)
        fail(Exit::config,
             "%s: train.max_steps, train.max_epochs and train.max_minutes are all 0; set at least one to end the run",
             origin);
    const LrSchedule schedule = c.schedule.name;
    if (c.train.max_minutes > 0 && (schedule == LrSchedule::cosine || schedule == LrSchedule::linear))
        fail(Exit::config,
             "%s: train.max_minutes (%g) needs schedule.name \"wsd\", \"constant\" or \"cyclic\", is \"%s\", which "
             "depends on the number of steps from the start",
             origin, c.train.max_minutes, name_of(schedule));
    auto needs_validation = [&](bool is_set, const char* key) {
        if (is_set && (c.data.val.empty() || c.eval.every_steps == 0))
            fail(Exit::config, "%s: %s needs validations: data.val and eval.every_steps must be set", origin, key);
    };
    needs_validation(c.eval.patience > 0, "eval.patience");
    needs_validation(c.checkpoint.keep_best, "checkpoint.keep_best");
    if (!c.eval.questions.empty() && c.eval.every_steps == 0)
        fail(Exit::config, "%s: eval.questions needs eval.every_steps, which is 0", origin);
}

}  // namespace

Config load_config(const std::string& path, const std::vector<std::string>& overrides, int world) {
    // Apply the family first, wherever it is in the overrides, because it only sets defaults.
    Config families;
    std::vector<std::string> others;
    for (const std::string& assignment : overrides)
        if (canonical(assignment.substr(0, assignment.find('='))) == kFamilyKey)
            override_config(families, assignment);
        else
            others.push_back(assignment);
    const bool is_given = others.size() < overrides.size();
    Config config = parse_config(read_file(path, kLargestFile), path,
                                 is_given ? std::make_optional(families.model.family) : std::nullopt);
    for (const std::string& assignment : others) override_config(config, assignment);
    if (config.train.head_rows == 0)
        config.train.head_rows = default_head_rows(config.train.batch_size, config.train.seq_len);
    check_config(config, path, world);
    return config;
}

namespace {

// Assigns the members of a section. Fails if a key is given under more than one of its names.
void assign_members(const std::vector<Option>& table, const std::string& section, const Json& members,
                    const std::string& origin) {
    std::map<std::string, std::string> names;  // by canonical key
    for (const auto& [name, value] : members.items()) {
        const std::string key = section + "." + name;
        const Option& option = option_named(table, key, origin);
        const auto [before, is_new] = names.emplace(option.key, key);
        if (!is_new)
            fail(Exit::config, "%s: %s and %s are names of the same key; use only one", origin, before->second, key);
        assign_option(option, value, origin);
    }
}

// The value of model.family or its alias in a file; null if it is absent.
const Json* family_in(const Json& json) {
    const auto section = json.find("model");
    if (section == json.end() || !section->is_object()) return nullptr;
    for (const auto& [name, value] : section->items())
        if (canonical("model." + name) == kFamilyKey) return &value;
    return nullptr;
}

}  // namespace

Config parse_config(std::string_view json_text, const std::string& origin, std::optional<ModelFamily> family) {
    const Json json = parse_json(json_text, origin, Exit::config, {.max_depth = kDeepest});
    if (!json.is_object()) fail(Exit::config, "%s must be an object of sections, is %s", origin, printed(json));
    Config config;
    const std::vector<Option> table = option_table(config);
    if (const Json* given = family_in(json))
        assign_option(option_named(table, std::string(kFamilyKey), origin), *given, origin);
    set_family(config.model, family.value_or(config.model.family));
    for (const auto& [section, members] : json.items()) {
        if (section == "$schema" && members.is_string()) continue;  // for editors
        const auto known =
            std::ranges::find(table, section, [](const Option& option) { return section_of(option.key); });
        if (known == table.end()) fail_unknown(table, section, origin, &members);
        if (!members.is_object())
            fail(Exit::config, "%s: %s must be an object of keys, is %s", origin, section, printed(members));
        assign_members(table, section, members, origin);
    }
    config.model.family = family.value_or(config.model.family);
    return config;
}

void override_config(Config& config, const std::string& assignment) {
    const size_t equals = assignment.find('=');
    if (equals == std::string::npos) fail(Exit::usage, "--set takes section.key=value, is %s", printed(assignment));
    const std::vector<Option> table = option_table(config);
    const Option& option = option_named(table, assignment.substr(0, equals), "--set");
    assign_option(option, typed_value(assignment.substr(equals + 1), option), "--set");
    if (option.key == kFamilyKey) set_family(config.model, config.model.family);
}

void check_config(const Config& c, const std::string& origin, int world) {
    check_model(c.model, origin);
    if (c.data.document_mask && c.data.document_token < 0 && c.data.tokenizer.empty())
        fail(Exit::config,
             "%s: data.document_mask needs data.tokenizer or data.document_token, the token that starts a document",
             origin);
    if (c.data.document_token >= c.model.vocab_size)
        fail(Exit::config, "%s: data.document_token (%d) must be below model.vocab_size (%d)", origin,
             c.data.document_token, c.model.vocab_size);

    if (c.train.may_roll_back() && c.checkpoint.every_steps == 0)
        fail(Exit::config, "%s: train.on_spike or train.on_nonfinite is \"rollback\", but checkpoint.every_steps is 0",
             origin);

    struct AtMost {
        const char* key;
        int value;
        const char* limit_key;
        int limit;
    };
    for (const AtMost& pair : {AtMost{"train.seq_len", c.train.seq_len, "model.n_positions", c.model.n_positions},
                               AtMost{"eval.stride", c.eval.stride, "train.seq_len", c.train.seq_len},
                               AtMost{"sample.top_k", c.sample.top_k, "model.vocab_size", c.model.vocab_size},
                               AtMost{"schedule.warmup_steps", c.schedule.warmup_steps, "train.max_steps",
                                      c.train.max_steps > 0 ? c.train.max_steps : kMostSteps}})
        if (pair.value > pair.limit)
            fail(Exit::config, "%s: %s (%d) must not be larger than %s (%d)", origin, pair.key, pair.value,
                 pair.limit_key, pair.limit);

    // The ranges keep the product far below 2^63. A divisor of the total, an int, is an int as well.
    const int64_t tokens = int64_t(c.train.batch_size) * c.train.seq_len * world, total = c.train.total_batch_tokens;
    const int64_t below = total / tokens * tokens;
    if (below != total)
        fail(Exit::config,
             "%s: train.total_batch_tokens (%ld) must be a multiple of train.batch_size (%d) times train.seq_len (%d) "
             "times the number of ranks (%d), i.e. of %ld; the nearest valid %s%ld",
             origin, total, c.train.batch_size, c.train.seq_len, world, tokens,
             below ? format("values are %ld and ", below) : "value is ", below + tokens);

    check_end(c, origin);
    const int warmup = c.schedule.warmup_steps, steps = c.train.max_steps;
    if (c.schedule.name == LrSchedule::wsd && steps > 0 && warmup + cooldown_steps(c, steps) > steps)
        fail(Exit::config,
             "%s: schedule.warmup_steps (%d) plus the cooldown (schedule.cooldown_fraction %g of train.max_steps, %d "
             "steps) must not exceed train.max_steps (%d)",
             origin, warmup, c.schedule.cooldown_fraction, cooldown_steps(c, steps), steps);

    if (c.train.precision == Dtype::fp16 && !c.loss_scale.dynamic && c.loss_scale.fixed <= 1)
        fail(Exit::config,
             "%s: train.precision \"fp16\" needs loss_scale.dynamic true or loss_scale.fixed above 1 (is %g): without "
             "a loss scale, small gradients vanish in fp16",
             origin, c.loss_scale.fixed);
    if (c.loss_scale.dynamic && c.loss_scale.minimum > c.loss_scale.initial)
        fail(Exit::config, "%s: loss_scale.minimum (%g) must not be larger than loss_scale.initial (%g)", origin,
             c.loss_scale.minimum, c.loss_scale.initial);
}

int default_head_rows(int batch_size, int seq_len) {
    constexpr int64_t kMostRows = 8192;
    return int(std::min(int64_t(batch_size) * seq_len, kMostRows));
}

int micro_steps(const Config& config, int world) {
    return int(config.train.total_batch_tokens / (int64_t(config.train.batch_size) * config.train.seq_len * world));
}

std::string config_json(const Config& config) {
    Config copy = config;
    return nested(option_table(copy)).dump(4) + "\n";
}

std::string changed_config_json(const Config& config) {
    Config copy = config;
    return nested(changed_options(copy)).dump(2) + "\n";
}

std::string config_digest(const Config& config) {
    std::string text;
    for (const std::string& line : result_lines(with_derived(config))) text += line + "\n";
    return format("%016llx", (unsigned long long)XXH3_64bits(text.data(), text.size()));
}

std::vector<std::string> config_differences(const Config& from, const Config& to) {
    std::vector<std::string> differences;
    const std::vector<std::string> before = result_lines(with_derived(from)), after = result_lines(with_derived(to));
    if (before == after) return differences;
    const std::vector<std::string> given_before = result_lines(from), given_after = result_lines(to);
    for (size_t i = 0; i < before.size(); i++)  // skips values derived from another option that is listed itself
        if (before[i] != after[i] && given_before[i] != given_after[i])
            differences.push_back(before[i] + " -> " + after[i].substr(after[i].find(": ") + 2));
    return differences;
}

std::vector<std::string> changed_settings(const Config& config) {
    Config copy = config;
    std::vector<std::string> settings;
    for (const Option& option : changed_options(copy))
        settings.push_back(std::string(option.key) + "=" + option_value(option).dump());
    return settings;
}

std::string config_help() {
    Config defaults;
    std::string text;
    for (const Option& option : option_table(defaults))
        text += format("%-29s %s\n%-29s default %s, %s\n", option.key, option.help, "",
                       option_value(option).dump().c_str(), allowed_values(option).c_str());
    return text;
}

std::string config_markdown() {
    Config defaults;
    std::string text = "| key | default | range | meaning |\n|---|---|---|---|\n";
    for (const Option& option : option_table(defaults)) {
        // Escape bars, which separate the cells of the table.
        const std::string allowed = std::regex_replace(allowed_values(option), std::regex("\\|"), "\\|");
        text += format("| `%s` | `%s` | %s | %s |\n", option.key, option_value(option).dump().c_str(), allowed.c_str(),
                       option.help);
    }
    return text;
}
