// Converts the table of options to a JSON schema.
#include <nlohmann/json.hpp>

#include "runtime/config/options.h"

namespace {

using Json = nlohmann::ordered_json;

// The schema of the values that assign_option() accepts, with two differences: assign_option() rejects integers with a
// decimal point (1.0), and it counts the length of a text in bytes.
Json value_schema(const Option& option) {
    const Allowed& allowed = option.allowed;
    auto describe = [&]<class T>(const T*) -> Json {
        if constexpr (std::is_same_v<T, bool>) {
            return {{"type", "boolean"}};
        } else if constexpr (std::is_same_v<T, DataParts>) {
            const Json path = {{"type", "string"}, {"minLength", 1}, {"maxLength", kLongestText}};
            const Json weight = {{"type", "number"}, {"exclusiveMinimum", 0}, {"maximum", kLargestWeight}};
            const Json part = {{"type", "object"},
                               {"properties", {{"path", path}, {"weight", weight}}},
                               {"required", {"path", "weight"}},
                               {"additionalProperties", false}};
            return {{"type", {"string", "array"}},
                    {"minLength", 1},
                    {"maxLength", kLongestText},
                    {"pattern", "^[^\\u0000]*$"},
                    {"items", part},
                    {"minItems", 1},
                    {"maxItems", kMostDataParts}};
        } else if constexpr (std::is_same_v<T, std::string>) {
            return {{"type", "string"},
                    {"minLength", allowed.may_be_empty ? 0 : 1},
                    {"maxLength", kLongestText},
                    {"pattern", "^[^\\u0000]*$"}};
        } else if constexpr (std::is_enum_v<T>) {
            Json names = Json::array();
            for (int i = 0; choice_name(T(i)); i++) names.push_back(choice_name(T(i)));
            return {{"enum", names}};
        } else if constexpr (std::is_same_v<T, double>) {
            return {{"type", "number"}, {"minimum", allowed.low}, {"maximum", allowed.high}};
        } else {
            using Limits = std::numeric_limits<T>;  // for options without a range, like the seed
            const T low = allowed.low > double(Limits::min()) ? T(allowed.low) : Limits::min();
            const T high = allowed.high < double(Limits::max()) ? T(allowed.high) : Limits::max();
            return {{"type", "integer"}, {"minimum", low}, {"maximum", high}};
        }
    };
    Json schema = std::visit(describe, option.value);
    schema["default"] = option_value(option);
    schema["description"] = option.help;
    return schema;
}

}  // namespace

std::string config_schema() {
    Config defaults;
    Json sections = {{"$schema", {{"type", "string"}, {"description", "URL or path of this schema, for editors"}}}};
    for (const Option& option : option_table(defaults)) {
        const std::string key = option.key, section = key.substr(0, key.find('.'));
        Json& object = sections[section];
        if (object.is_null())
            object = {{"type", "object"}, {"additionalProperties", false}, {"properties", Json::object()}};
        object["properties"][key.substr(section.size() + 1)] = value_schema(option);
    }
    const Json schema = {{"$schema", "https://json-schema.org/draft/2020-12/schema"},
                         {"title", "Configuration of a train_gpt run"},
                         {"type", "object"},
                         {"additionalProperties", false},
                         {"properties", sections}};
    return schema.dump(2) + "\n";
}
