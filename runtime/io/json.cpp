#include "runtime/io/json.h"

#include <iterator>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <vector>

namespace {

using Json = nlohmann::ordered_json;

// What the parser reads through, so that it can be asked how far it has come.
struct CountingIterator {
    using iterator_category = std::input_iterator_tag;
    using value_type = char;
    using difference_type = std::ptrdiff_t;
    using pointer = const char*;
    using reference = const char&;

    const char* at;
    const char** furthest;

    reference operator*() const { return *at; }
    CountingIterator& operator++() {
        *furthest = ++at;
        return *this;
    }
    bool operator==(const CountingIterator& other) const { return at == other.at; }
    bool operator!=(const CountingIterator& other) const { return at != other.at; }
};

struct Place {
    int line = 1, column = 1;
};

// Of the last character of `read`.
Place place_of_end(std::string_view read) {
    Place place;
    if (!read.empty()) read.remove_suffix(1);
    for (char c : read) {
        place.column++;
        if (c == '\n') place = {place.line + 1, 1};
    }
    return place;
}

// For a sentence: the last characters, bytes that are not plain ASCII as '?'.
std::string printable(std::string_view text) {
    constexpr size_t kLongest = 40;
    std::string end =
        text.size() <= kLongest ? std::string(text) : "..." + std::string(text.substr(text.size() - kLongest));
    for (char& c : end)
        if (c < ' ' || c > '~') c = '?';
    return end;
}

// The part of "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error while parsing value -
// REASON; last read: ...; expected ..." that says why. The place is told in our own words.
std::string reason_of(const std::string& what) {
    size_t dash = what.find(" - ");
    size_t begin = dash == std::string::npos ? 0 : dash + 3;
    std::string reason = what.substr(begin, what.find("; last read: ") - begin);
    size_t expected = what.rfind("; expected ");
    return expected == std::string::npos || expected < begin + reason.size() ? reason : reason + what.substr(expected);
}

// Builds the values as the parser reports their parts. Keys go to the end of an object without a search for an equal
// one (ordered_json searches from the front): a vocabulary of 50,000 tokens is one object.
class Builder {
public:
    Builder(std::string_view text, const std::string& origin, Exit code, JsonLimits limits)
        : text_(text), origin_(origin), code_(code), limits_(limits) {}

    Json parse() {
        CountingIterator begin{text_.data(), &furthest_}, end{text_.data() + text_.size(), &furthest_};
        Json::sax_parse(begin, end, this);
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
    bool end_object() { return close(); }
    bool end_array() { return close(); }

    bool key(std::string& name) {
        if (!open_.back().keys.insert(name).second)
            fail_here("the key \"%s\" stands twice in one object", printable(name).c_str());
        key_ = std::move(name);
        return true;
    }

    bool parse_error(size_t, const std::string& last_token, const nlohmann::detail::exception& error) {
        constexpr int kNumberOverflow = 406;
        if (error.id == kNumberOverflow)
            fail_here("the number %s is too large for a double", printable(last_token).c_str());
        std::string_view line = read().substr(read().rfind('\n') + 1);
        fail_here("%s, at: %s", reason_of(error.what()).c_str(), printable(line).c_str());
    }

private:
    struct OpenValue {
        Json* value;
        std::unordered_set<std::string> keys;
    };

    std::string_view read() const { return text_.substr(0, size_t(furthest_ - text_.data())); }

    template <class... Args> [[noreturn]] void fail_here(const char* pattern, Args... args) const {
        Place place = place_of_end(read());
        fail(code_, "%s, line %d, column %d: %s", origin_.c_str(), place.line, place.column,
             format(pattern, args...).c_str());
    }

    bool add(Json value) {
        place(std::move(value));
        return true;
    }

    bool open(Json value) {
        if (open_.size() >= limits_.max_depth) fail_here("values are nested more than %zu deep", limits_.max_depth);
        open_.push_back({place(std::move(value)), {}});
        return true;
    }

    bool close() {
        open_.pop_back();
        return true;
    }

    // Puts the value where it belongs. The address holds as long as nothing is added beside it, that is, while it is
    // open.
    Json* place(Json value) {
        if (++values_ > limits_.max_values) fail_here("there are more than %zu values", limits_.max_values);
        if (open_.empty()) {
            root_ = std::move(value);
            return &root_;
        }
        Json& parent = *open_.back().value;
        if (parent.is_array()) {
            parent.push_back(std::move(value));
            return &parent.back();
        }
        auto& members = parent.get_ref<Json::object_t&>();
        members.Json::object_t::Container::emplace_back(std::move(key_), std::move(value));
        return &members.Json::object_t::Container::back().second;
    }

    std::string_view text_;
    const std::string& origin_;
    Exit code_;
    JsonLimits limits_;
    const char* furthest_ = text_.data();
    size_t values_ = 0;
    Json root_;
    std::vector<OpenValue> open_;
    std::string key_;
};

}  // namespace

nlohmann::ordered_json parse_json(std::string_view text, const std::string& origin, Exit code, JsonLimits limits) {
    if (text.find_first_not_of(" \t\r\n") == std::string_view::npos)
        fail(code, "%s is empty: a JSON text was expected", origin.c_str());
    // The library takes a NUL for the end of the text and would ignore what follows.
    if (size_t nul = text.find('\0'); nul != std::string_view::npos) {
        Place place = place_of_end(text.substr(0, nul + 1));
        fail(code, "%s, line %d, column %d: a NUL byte stands in the text", origin.c_str(), place.line, place.column);
    }
    return Builder(text, origin, code, limits).parse();
}
