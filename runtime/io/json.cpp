#include "runtime/io/json.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

namespace {

using Json = nlohmann::ordered_json;

// "line 2, column 5": the position of the last character of `read`.
std::string place_of_end(std::string_view read) {
    if (!read.empty()) read.remove_suffix(1);
    const auto lines = std::count(read.begin(), read.end(), '\n');
    const size_t column = read.size() - (read.rfind('\n') + 1);  // npos + 1 is 0
    return format("line %zu, column %zu", size_t(lines) + 1, column + 1);
}

// The last characters of a text, for error messages; bytes other than printable ASCII become '?'.
std::string printable(std::string_view text) {
    constexpr size_t kLongest = 40;
    std::string end =
        text.size() <= kLongest ? std::string(text) : "..." + std::string(text.substr(text.size() - kLongest));
    const auto is_special = [](char c) { return c < ' ' || c > '~'; };
    std::ranges::replace_if(end, is_special, '?');
    return end;
}

// Extracts REASON and "; expected ..." from the library's message "[json.exception.parse_error.101] parse error at line
// 1, column 2: syntax error while parsing value - REASON; last read: ...; expected ...".
std::string reason_of(const std::string& what) {
    const size_t dash = what.find(" - ");
    const size_t begin = dash == std::string::npos ? 0 : dash + 3;
    const std::string reason = what.substr(begin, what.find("; last read: ") - begin);
    const size_t expected = what.rfind("; expected ");
    return expected == std::string::npos || expected < begin + reason.size() ? reason : reason + what.substr(expected);
}

// An iterator that passes the text to the parser and records the position reached.
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

// Builds the value from the parser's events. The library's own builder searches an ordered object linearly for each
// key, which is too slow for a vocabulary of 50,000 tokens, and does not pass the position to its callback. Members are
// collected until their object ends, since an ordered object copies all its members when it grows.
class Builder {
public:
    Builder(std::string_view text, const std::string& origin, Exit code, JsonLimits limits)
        : text_(text), origin_(origin), code_(code), limits_(limits), reached_(text.data()) {}

    Json parse() {
        Json::sax_parse(Cursor{reached_, &reached_}, Cursor{reached_ + text_.size(), nullptr}, this);
        return std::move(root_);
    }

    bool null() { return add(nullptr); }
    bool boolean(bool value) { return add(value); }
    bool number_integer(int64_t value) { return add(value); }
    bool number_unsigned(uint64_t value) { return add(value); }
    bool number_float(double value, const std::string&) { return add(value); }
    bool string(std::string& value) { return add(std::move(value)); }
    bool binary(Json::binary_t&) { return false; }
    bool start_object(size_t) { return open(Json::object()); }
    bool start_array(size_t) { return open(Json::array()); }

    bool key(std::string& name) {
        if (!open_.back().names.insert(name).second) fail_here("duplicate key \"%s\"", printable(name));
        key_ = std::move(name);
        return true;
    }

    bool end_object() {
        const auto first = members_.begin() + ptrdiff_t(open_.back().first_member);
        Json::object_t::Container& members = open_.back().value.get_ref<Json::object_t&>();
        members.reserve(size_t(members_.end() - first));
        std::move(first, members_.end(), std::back_inserter(members));
        members_.erase(first, members_.end());
        return close();
    }
    bool end_array() { return close(); }

    bool parse_error(size_t, const std::string& last_token, const nlohmann::detail::exception& error) {
        constexpr int kNumberOverflow = 406;
        if (error.id == kNumberOverflow) fail_here("the number %s is too large for a double", printable(last_token));
        const std::string_view read = text_.substr(0, bytes_read());
        const size_t before = read.substr(0, read.size() - 1).find_last_not_of(" \t\r\n");
        if ((read.ends_with('}') || read.ends_with(']')) && before != std::string_view::npos && read[before] == ',')
            fail(code_, "%s, %s: unexpected comma before \"%c\"", origin_, place_of_end(read.substr(0, before + 1)),
                 read.back());
        fail_here("%s, at: %s", reason_of(error.what()), printable(read.substr(read.rfind('\n') + 1)));
    }

private:
    struct OpenValue {
        Json value;
        std::string key;  // of the value, in an object
        size_t first_member;
        std::set<std::string> names = {};  // its keys so far
    };

    size_t bytes_read() const { return size_t(reached_ - text_.data()); }

    template <class... Args> [[noreturn]] void fail_here(const char* pattern, const Args&... args) const {
        const std::string place = place_of_end(text_.substr(0, bytes_read()));
        fail(code_, "%s, %s: %s", origin_, place, format(pattern, printf_argument(args)...));
    }

    void count() {
        if (++values_ > limits_.max_values) fail_here("more than %zu values", limits_.max_values);
    }

    bool add(Json value) {
        count();
        return place(std::move(value), std::move(key_));
    }

    bool open(Json value) {
        if (open_.size() >= limits_.max_depth) fail_here("values are nested more than %zu deep", limits_.max_depth);
        count();
        open_.push_back({std::move(value), std::move(key_), members_.size()});
        return true;
    }

    bool close() {
        OpenValue whole = std::move(open_.back());
        open_.pop_back();
        return place(std::move(whole.value), std::move(whole.key));
    }

    bool place(Json&& value, std::string&& key) {
        if (open_.empty())
            root_ = std::move(value);
        else if (Json& parent = open_.back().value; parent.is_array())
            parent.emplace_back(std::move(value));
        else
            members_.emplace_back(std::move(key), std::move(value));
        return true;
    }

    const std::string_view text_;
    const std::string& origin_;
    const Exit code_;
    const JsonLimits limits_;
    const char* reached_;
    size_t values_ = 0;
    Json root_;
    std::string key_;                                    // of the next value
    std::vector<OpenValue> open_;                        // nested, the outermost first
    std::vector<std::pair<std::string, Json>> members_;  // of all open objects
};

}  // namespace

Json parse_json(std::string_view text, const std::string& origin, Exit code, JsonLimits limits) {
    if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) fail(code, "%s is empty, expected JSON", origin);
    // The library treats a NUL as the end of the text and would ignore the rest.
    if (size_t nul = text.find('\0'); nul != std::string_view::npos)
        fail(code, "%s, %s: the text contains a NUL byte", origin, place_of_end(text.substr(0, nul + 1)));
    return Builder(text, origin, code, limits).parse();
}

Json parse_json_or_null(std::string_view text) {
    try {
        return parse_json(text, "", Exit::data);
    } catch (const Error&) {
        return nullptr;
    }
}

JsonRecord parse_record(std::string_view text) {
    JsonRecord record;
    const Json json = parse_json_or_null(text);
    if (!json.is_object()) return record;
    for (const auto& [name, value] : json.items()) {
        if (value.is_number()) record.numbers[name] = value.get<double>();
        if (value.is_string()) record.texts[name] = value.get<std::string>();
    }
    return record;
}

double JsonRecord::number(const std::string& key) const { return numbers.contains(key) ? numbers.at(key) : NAN; }

std::string JsonRecord::text(const std::string& key) const { return texts.contains(key) ? texts.at(key) : ""; }

std::string printed(const Json& value) {
    constexpr size_t kLongest = 60;
    const std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
    return text.size() <= kLongest ? text : text.substr(0, kLongest) + "...";
}

std::string printed(const std::string& text) { return printed(Json(text)); }

std::string json_object(const std::vector<JsonMember>& members) {
    Json object = Json::object();
    for (const auto& [key, value] : members)
        object[key] = std::visit([](const auto& of_type) { return Json(of_type); }, value);
    return object.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string quoted(const std::string& text) { return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace); }

std::string valid_utf8(const std::string& text) { return parse_json(quoted(text), "", Exit::data).get<std::string>(); }
