#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "runtime/io/io.h"

namespace {

using Json = nlohmann::ordered_json;

// "line 2, column 5": the place of the last character of `read`.
std::string place_of_end(std::string_view read) {
    if (!read.empty()) read.remove_suffix(1);
    const auto lines = std::count(read.begin(), read.end(), '\n');
    const size_t column = read.size() - (read.rfind('\n') + 1);  // npos + 1 is 0
    return format("line %zu, column %zu", size_t(lines) + 1, column + 1);
}

// For error messages: the last characters, bytes that are not plain ASCII as '?'.
std::string printable(std::string_view text) {
    constexpr size_t kLongest = 40;
    std::string end =
        text.size() <= kLongest ? std::string(text) : "..." + std::string(text.substr(text.size() - kLongest));
    const auto is_special = [](char c) { return c < ' ' || c > '~'; };
    std::ranges::replace_if(end, is_special, '?');
    return end;
}

// The part of "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while parsing value -
// REASON; last read: ...; expected ..." that says why, without the place.
std::string reason_of(const std::string& what) {
    const size_t dash = what.find(" - ");
    const size_t begin = dash == std::string::npos ? 0 : dash + 3;
    const std::string reason = what.substr(begin, what.find("; last read: ") - begin);
    const size_t expected = what.rfind("; expected ");
    return expected == std::string::npos || expected < begin + reason.size() ? reason : reason + what.substr(expected);
}

// Hands the text to the parser byte by byte and notes how far it has come.
struct Cursor {
    using iterator_category = std::input_iterator_tag;
    using value_type = char;
    using difference_type = std::ptrdiff_t;
    using pointer = const char*;
    using reference = const char&;

    const char* at;
    const char** reached;

    const char& operator*() const { return *at; }
    Cursor& operator++() {
        *reached = ++at;
        return *this;
    }
    bool operator==(const Cursor& other) const { return at == other.at; }
};

// Receives the parser's events. The library's own builder with its callback would search an ordered object from the
// front for each key, which takes too long for a vocabulary of 50,000 tokens, and does not pass the position to a
// callback.
struct Builder {
    struct OpenValue {
        Json* value;
        std::unordered_set<size_t> key_hashes;  // a set of the keys takes twice the memory of a vocabulary
    };

    const std::string_view text;
    const std::string& origin;
    const Exit code;
    const JsonLimits limits;
    const char* reached = text.data();
    size_t values = 0;
    Json root = {};
    std::vector<OpenValue> stack = {};
    std::string next_key = {};

    Json parse() {
        Json::sax_parse(Cursor{reached, &reached}, Cursor{reached + text.size(), nullptr}, this);
        return std::move(root);
    }

    bool null() { return place(nullptr); }
    bool boolean(bool value) { return place(value); }
    bool number_integer(int64_t value) { return place(value); }
    bool number_unsigned(uint64_t value) { return place(value); }
    bool number_float(double value, const std::string&) { return place(value); }
    bool string(std::string& value) { return place(std::move(value)); }
    bool binary(Json::binary_t&) { return false; }
    bool start_object(size_t) { return open(Json::object()); }
    bool start_array(size_t) { return open(Json::array()); }
    bool end_array() { return end_object(); }

    bool end_object() {
        stack.pop_back();
        return true;
    }

    bool key(std::string& name) {
        const bool is_new = stack.back().key_hashes.insert(std::hash<std::string>()(name)).second;
        if (!is_new && stack.back().value->contains(name)) fail_here("duplicate key \"%s\"", printable(name));
        next_key = std::move(name);
        return true;
    }

    bool parse_error(size_t, const std::string& last_token, const nlohmann::detail::exception& error) {
        constexpr int kNumberOverflow = 406;
        if (error.id == kNumberOverflow) fail_here("the number %s is too large for a double", printable(last_token));
        const std::string_view line = read().substr(read().rfind('\n') + 1);
        fail_here("%s, at: %s", reason_of(error.what()), printable(line));
    }

    std::string_view read() const { return text.substr(0, size_t(reached - text.data())); }

    template <class... Args> [[noreturn]] void fail_here(const char* pattern, const Args&... args) {
        fail(code, "%s, %s: %s", origin, place_of_end(read()), format(pattern, printf_argument(args)...));
    }

    bool open(Json value) {
        if (stack.size() >= limits.max_depth) fail_here("values are nested more than %zu deep", limits.max_depth);
        stack.push_back({place(std::move(value)), {}});
        return true;
    }

    // Stores the value where it belongs and returns its address, which holds until something is added beside it.
    Json* place(Json value) {
        if (++values > limits.max_values) fail_here("there are more than %zu values", limits.max_values);
        if (stack.empty()) return &(root = std::move(value));
        Json& parent = *stack.back().value;
        if (parent.is_array()) return &parent.emplace_back(std::move(value));
        auto& members = parent.get_ref<Json::object_t&>();
        return &members.Json::object_t::Container::emplace_back(std::move(next_key), std::move(value)).second;
    }
};

}  // namespace

Json parse_json(std::string_view text, const std::string& origin, Exit code, JsonLimits limits) {
    if (text.find_first_not_of(" \t\r\n") == std::string_view::npos)
        fail(code, "%s is empty: a JSON text was expected", origin);
    // The library takes a NUL for the end of the text and would ignore what follows.
    if (size_t nul = text.find('\0'); nul != std::string_view::npos)
        fail(code, "%s, %s: the text contains a NUL byte", origin, place_of_end(text.substr(0, nul + 1)));
    return Builder{text, origin, code, limits}.parse();
}

Json parse_json_or_null(std::string_view text) {
    try {
        return parse_json(text, "", Exit::data);
    } catch (const Error&) {
        return nullptr;
    }
}

std::string printed(const Json& value) {
    constexpr size_t kLongest = 60;
    const std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
    return text.size() <= kLongest ? text : text.substr(0, kLongest) + "...";
}
