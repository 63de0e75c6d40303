#include "test/fuzz/mutations.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

namespace {

using Json = nlohmann::json;  // an ordered object would search all of its keys for each new one

size_t below(size_t limit, Random& random) { return limit == 0 ? 0 : random() % limit; }

template <class List> auto& any_of(List& list, Random& random) { return list[below(std::size(list), random)]; }

struct Range {
    size_t begin, end;
};

// A random one of the ranges between separators.
Range any_stretch(std::string_view text, Range in, char separator, Random& random) {
    std::vector<Range> stretches;
    for (size_t begin = in.begin; begin <= in.end;) {
        const size_t end = std::min(text.find(separator, begin), in.end);
        stretches.push_back({begin, end});
        begin = end + 1;
    }
    return any_of(stretches, random);
}

// Text that begins like a list or an object and is not nested deeply enough to exhaust the stack. Other mutations
// handle the rest, because attempting to parse it takes as long as many parsers.
bool may_be_document(std::string_view text) {
    return (text.starts_with('{') || text.starts_with('[')) &&
           std::ranges::count_if(text, [](char c) { return c == '[' || c == '{'; }) < 500;
}

void collect(Json& json, std::vector<Json*>& values, std::vector<Json*>& numbers, std::vector<Json*>& lists) {
    values.push_back(&json);
    if (json.is_number()) numbers.push_back(&json);
    if (json.is_structured() && !json.empty()) lists.push_back(&json);
    if (json.is_structured())
        for (Json& inner : json) collect(inner, values, numbers, lists);
}

void add(Json& number, int64_t step) {
    if (number.is_number_float())
        number = number.get<double>() + double(step);
    else if (number.is_number_unsigned())
        number = number.get<uint64_t>() + uint64_t(step);
    else
        number = int64_t(uint64_t(number.get<int64_t>()) + uint64_t(step));
}

Json any_edge(Random& random) {
    static const Json edges[] = {nullptr,
                                 true,
                                 "",
                                 "x",
                                 Json::array(),
                                 Json::object(),
                                 0,
                                 1,
                                 -1,
                                 1e300,
                                 0.5,
                                 -0.0,
                                 INT64_MIN,
                                 UINT64_MAX,
                                 1u << 31,
                                 INT32_MAX,
                                 uint64_t(1) << 62,
                                 1000000,
                                 "nan",
                                 "/",
                                 "a\nb",
                                 {nullptr}};
    return any_of(edges, random);
}

void change(Json& json, Random& random) {
    std::vector<Json*> values, numbers, lists;
    collect(json, values, numbers, lists);
    const int64_t steps[] = {1, -1, 2, -2, 4, -4, 8, -8};
    const int64_t step = any_of(steps, random);
    Json& value = *any_of(values, random);
    switch (below(6, random)) {
        case 0:  // several numbers may have to change together
            for (size_t count = 1 + below(3, random); count > 0 && !numbers.empty(); count--)
                add(*any_of(numbers, random), step);
            break;
        case 1:
            if (!numbers.empty()) *any_of(numbers, random) = Json(*any_of(numbers, random));
            break;
        case 2: value = Json(*any_of(values, random)); break;
        case 3: value = any_edge(random); break;
        case 4:
            if (!lists.empty()) {
                Json& list = *any_of(lists, random);
                list.erase(std::next(list.begin(), ptrdiff_t(below(list.size(), random))));
            }
            break;
        default:
            if (value.is_array())
                value.insert(std::next(value.begin(), ptrdiff_t(below(value.size() + 1, random))),
                             Json(*any_of(values, random)));
            else if (value.is_object())
                value[std::string(1, char('a' + below(26, random)))] = Json(*any_of(values, random));
            else if (value.is_string())
                value = value.get<std::string>() + value.get<std::string>();
    }
}

size_t element_bytes(const Json& dtype) {
    const std::string name = dtype.is_string() ? dtype.get<std::string>() : "";
    return name.ends_with("64") ? 8 : name.ends_with("32") ? 4 : name.ends_with("16") ? 2 : 1;
}

// Gives each tensor of a safetensors header the size of its type and shape. Returns the total size.
size_t lay_out(Json& header) {
    size_t end = 0;
    if (!header.is_object()) return end;
    for (auto& [name, tensor] : header.items()) {
        if (!tensor.is_object() || !tensor.contains("shape") || !tensor["shape"].is_array()) continue;
        size_t bytes = element_bytes(tensor.value("dtype", Json()));
        for (const Json& size : tensor["shape"]) bytes *= size.is_number_unsigned() ? size.get<size_t>() : 1;
        tensor["data_offsets"] = {end, end + bytes};
        end += bytes;
    }
    return end;
}

}  // namespace

std::optional<std::string> with_changed_json(std::string_view input, bool is_safetensors, Random& random) {
    constexpr size_t kMaxDataBytes = 1 << 12;
    uint64_t length = 0;
    Range at{0, input.size()};
    if (is_safetensors) {
        if (input.size() < sizeof(length)) return std::nullopt;
        std::memcpy(&length, input.data(), sizeof(length));
        at = {sizeof(length), sizeof(length) + std::min(length, input.size() - sizeof(length))};
    } else {
        at = any_stretch(input, at, '\0', random);
    }
    const auto parsed = [&] {
        const std::string_view text = input.substr(at.begin, at.end - at.begin);
        return may_be_document(text) ? Json::parse(text, nullptr, false) : Json(Json::value_t::discarded);
    };
    Json json = parsed();
    if (json.is_discarded()) at = any_stretch(input, at, '\n', random), json = parsed();
    if (json.is_discarded()) return std::nullopt;
    change(json, random);
    std::string rest(input.substr(at.end));
    if (is_safetensors && below(4, random) != 0)
        if (const size_t bytes = lay_out(json); bytes <= kMaxDataBytes) rest.resize(bytes);
    const std::string text = json.dump(-1, ' ', false, Json::error_handler_t::replace);
    std::string changed(input.substr(0, at.begin));
    length = text.size();
    if (is_safetensors) std::memcpy(changed.data(), &length, sizeof(length));
    return changed + text + rest;
}

std::string with_changed_end(std::string_view input, Random& random) {
    const Range part = any_stretch(input, {0, input.size()}, '\0', random);
    const size_t sizes[] = {1, 2, 4, 8, 1 + below(16, random)}, bytes = any_of(sizes, random);
    std::string changed(input);
    const std::string_view marks = "\"\\{}[],\n";
    switch (below(6, random)) {
        case 0: return changed.insert(part.end, bytes, char(below(256, random)));
        case 1: return changed.insert(part.end, 1, any_of(marks, random));
    }
    const size_t cut = std::min(bytes, part.end - part.begin);
    return changed.erase(part.end - cut, cut);
}

std::string with_changed_number(std::string_view input, Random& random) {
    const int steps[] = {1, -1, 2, -2, 4, -4, 8, -8};
    std::string changed(input);
    if (!changed.empty()) any_of(changed, random) += char(any_of(steps, random));
    return changed;
}
