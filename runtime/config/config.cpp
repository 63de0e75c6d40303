
#include "runtime/config/config.h"

#include <xxhash.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "runtime/config/options.h"
#include "runtime/config/schedule.h"
#include "runtime/io/files.h"
#include "runtime/io/json.h"

namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxFile = 1 << 20;
constexpr size_t kDeepest = 8;
constexpr std::string_view kFamilyKey = "model.family", kOptimizerKey = "optim.name", kScalarKey = "optim.scalar_name";

std::string section_of(const std::string& key) { return key.substr(0, key.find('.')); }

// "max_steps" of "train.max_steps"; the whole key if it has no dot.
std::string name_in_section(const std::string& key) { return key.substr(key.find('.') + 1); }  // npos + 1 is 0

// The keys that the user may have meant by `key`: those with the same name in any section, else the nearest ones.
std::vector<std::string> meant_keys(const std::vector<Option>& table, const std::string& key) {
    if (const auto same = keys_with_name(key); !same.empty()) return same;
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
    return is_name ? keys_with_name(nearest) : std::vector{nearest};
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

// Whether a key sets the defaults of other keys.
bool sets_defaults(std::string_view key) { return key == kFamilyKey || key == kOptimizerKey || key == kScalarKey; }

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
    if (valid_utf8(text) != text) fail(Exit::config, "--set: %s must be valid UTF-8, is %s", option.key, printed(text));
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

// The options that differ from their defaults, which depend on the model's family and the optimizer.
std::vector<Option> changed_options(Config& config) {
    Config plain, defaults;
    set_family(defaults.model, config.model.family);
    defaults.optim.scalar_name = config.optim.scalar_name;
    set_optimizer(defaults.optim, config.optim.name);
    const std::vector<Option> plain_table = option_table(plain), table = option_table(defaults);
    std::vector<Option> changed = option_table(config);
    std::erase_if(changed, [&](const Option& option) {
        const std::vector<Option>& standard = sets_defaults(option.key) ? plain_table : table;
        return option_value(option) == option_value(option_named(standard, option.key, ""));
    });
    return changed;
}

}  // namespace

// Fills in the settings that depend on others: a batch size of 0, head rows of 0, and a warm-up too long for the run,
// which becomes a tenth of the run.
static void fill_in_defaults(Config& config, int world) {
    Config::Train& train = config.train;
    config.open = {.batch_size = train.batch_size == 0, .head_rows = train.head_rows == 0};
    if (train.batch_size == 0) train.batch_size = std::max(1, largest_batch_size(config, world, kMaxDefaultBatch));
    if (train.head_rows == 0) train.head_rows = default_head_rows(train.batch_size, train.seq_len);
    int& warmup = config.schedule.warmup_steps;
    const int cooldown = config.schedule.name == LrSchedule::wsd ? cooldown_steps(config, train.max_steps) : 0;
    if (train.max_steps > 0 && warmup + cooldown > train.max_steps) warmup = train.max_steps / 10;
}

Config load_config(const std::string& path, const std::vector<std::string>& overrides, int world) {
    // Apply the keys that set defaults first, wherever they are in the overrides.
    std::vector<std::string> first, others;
    for (const std::string& assignment : overrides) {
        check_assignment(assignment);
        const bool is_first = sets_defaults(canonical(assignment.substr(0, assignment.find('='))));
        (is_first ? first : others).push_back(assignment);
    }
    if (file_exists(path + "/config.json"))
        fail(Exit::no_input, "%s is a directory: use %s/config.json, with --resume to continue a run", path, path);
    Config config = parse_config(read_file(path, kMaxFile), path, first);
    for (const std::string& assignment : others) override_config(config, assignment);
    const Grid grid = grid_of(config, world);
    fill_in_defaults(config, grid.data);
    check_config(config, path, world == 0 ? grid.size() : world);
    return config;
}

namespace {

// Assigns the members of a section. Fails if a key is given under more than one of its names.
void assign_members(const std::vector<Option>& table, const std::string& section, const Json& members,
                    const std::string& origin) {
    std::map<std::string, std::string> names;  // by canonical key
    for (const auto& [name, value] : members.items()) {
        const std::string key = section + "." + name;
        if (key == "log.terminal") continue;  // of earlier versions
        const Option& option = option_named(table, key, origin);
        const auto [before, is_new] = names.emplace(option.key, key);
        if (!is_new)
            fail(Exit::config, "%s: %s and %s are names of the same key; use only one", origin, before->second, key);
        assign_option(option, value, origin);
    }
}

// Assigns the keys of a file that set defaults.
void assign_first(const std::vector<Option>& table, const Json& json, const std::string& origin) {
    for (const auto& [section, members] : json.items()) {
        if (!members.is_object()) continue;
        for (const auto& [name, value] : members.items())
            if (const std::string key = canonical(section + "." + name); sets_defaults(key))
                assign_option(option_named(table, key, origin), value, origin);
    }
}

// Assigns a "section.key=value" and returns its option.
const Option& assign(const std::vector<Option>& table, const std::string& assignment) {
    check_assignment(assignment);
    const size_t equals = assignment.find('=');
    const Option& option = option_named(table, assignment.substr(0, equals), "--set");
    assign_option(option, typed_value(assignment.substr(equals + 1), option), "--set");
    return option;
}

}  // namespace

Config parse_config(std::string_view json_text, const std::string& origin, const std::vector<std::string>& overrides) {
    const Json json = parse_json(json_text, origin, Exit::config, {.max_depth = kDeepest});
    if (!json.is_object()) fail(Exit::config, "%s must be an object of sections, is %s", origin, printed(json));
    Config config;
    const std::vector<Option> table = option_table(config);
    assign_first(table, json, origin);
    for (const std::string& assignment : overrides) assign(table, assignment);
    set_family(config.model, config.model.family);
    set_optimizer(config.optim, config.optim.name);
    for (const auto& [section, members] : json.items()) {
        if (section == "$schema" && members.is_string()) continue;  // for editors
        if (section == "cost") continue;                            // of earlier versions
        const auto known =
            std::ranges::find(table, section, [](const Option& option) { return section_of(option.key); });
        if (known == table.end()) fail_unknown(table, section, origin, &members);
        if (!members.is_object())
            fail(Exit::config, "%s: %s must be an object of keys, is %s", origin, section, printed(members));
        assign_members(table, section, members, origin);
    }
    for (const std::string& assignment : overrides) assign(table, assignment);
    return config;
}

void check_assignment(const std::string& assignment) {
    if (assignment.find('=') == std::string::npos)
        fail(Exit::usage, "--set: must be section.key=value, such as train.batch_size=4, is %s (see --help)",
             printed(assignment));
}

void override_config(Config& config, const std::string& assignment) {
    const std::vector<Option> table = option_table(config);
    const Option& option = assign(table, assignment);
    if (option.key == kFamilyKey) set_family(config.model, config.model.family);
    if (option.key == kOptimizerKey || option.key == kScalarKey) set_optimizer(config.optim, config.optim.name);
}

int default_head_rows(int batch_size, int seq_len) {
    constexpr int64_t kMaxRows = 8192;
    return int(std::min(int64_t(batch_size) * seq_len, kMaxRows));
}

// The value of a ramp in a step (from 1); `last` after all parts.
static int64_t value_at(const Ramp& ramp, int step, int64_t last) {
    const auto part = std::ranges::find_if(ramp, [&](const RampPart& p) { return step <= p.until_step; });
    return part == ramp.end() ? last : part->value;
}

int64_t batch_tokens(const Config& config, int step) {
    return value_at(config.train.batch_ramp, step, config.train.total_batch_tokens);
}

int sequence_length(const Config& config, int step) {
    return int(value_at(config.train.seq_ramp, step, config.train.seq_len));
}

int64_t tokens_of_steps(const Config& config, int steps) {
    int64_t tokens = 0;
    int counted = 0;
    for (const auto& [until_step, each] : config.train.batch_ramp) {
        const int until = std::min(until_step, steps);
        tokens += (until - counted) * each;
        counted = until;
    }
    return tokens + (steps - counted) * config.train.total_batch_tokens;
}

std::string batch_text(const Config& config) {
    const int64_t first = batch_tokens(config, 1), last = config.train.total_batch_tokens;
    return (first == last ? "" : format("%ld to ", first)) + std::to_string(last);
}

Grid grid_of(const Config& config, int world) {
    const Config::Parallel& parallel = config.parallel;
    const int others = parallel.tensor * parallel.context * parallel.pipeline;
    return {.data = std::max(1, world / others),
            .tensor = parallel.tensor,
            .pipeline = parallel.pipeline,
            .context = parallel.context};
}

int micro_steps(const Config& config, int world, int step) {
    return int(batch_tokens(config, step) / (int64_t(config.train.batch_size) * config.train.seq_len * world));
}

int max_micro_steps(const Config& config, int world) {
    int most = micro_steps(config, world, kMaxSteps);
    for (const auto& [until_step, tokens] : config.train.batch_ramp)
        most = std::max(most, micro_steps(config, world, until_step));
    return most;
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

std::vector<std::string> keys_with_name(const std::string& key) {
    Config defaults;
    std::vector<std::string> keys;
    for (const Option& option : option_table(defaults))
        if (name_in_section(option.key) == name_in_section(key)) keys.push_back(option.key);
    return keys;
}

std::string config_help() {
    Config defaults;
    std::string text;
    for (const Option& option : option_table(defaults))
        text += format("%-29s %s\n%-29s default %s, %s\n", option.key, option.help.c_str(), "",
                       option_value(option).dump().c_str(), allowed_values(option).c_str());
    return text;
}

std::string config_markdown() {
    Config defaults;
    std::string text = "| key | default | range | meaning |\n|---|---|---|---|\n";
    for (const Option& option : option_table(defaults)) {
        // Escape bars, which separate the cells of the table.
        std::string allowed;
        for (const char c : allowed_values(option)) allowed += c == '|' ? "\\|" : std::string(1, c);
        text += format("| `%s` | `%s` | %s | %s |\n", option.key, option_value(option).dump().c_str(), allowed.c_str(),
                       option.help.c_str());
    }
    return text;
}
