// Strict conversion between JSON objects and C++ structs. A struct lists its members once, in a template that reading
// and writing share:
//
//   template <class Fields> void describe(Fields& field, Piece& piece) {
//       field("tensor", piece.tensor);
//       field("count", piece.count, 1);  // at least 1
//   }
//
// NLOHMANN_DEFINE_TYPE would read 1.5 as the integer 1, wrap negative sizes and ignore unknown keys, and its errors
// would not name the file and the place in it.
#pragma once

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "kernels/base/choices.h"
#include "kernels/numeric.h"
#include "runtime/io/json.h"

template <class T> T value_of(const nlohmann::ordered_json& json, const std::string& place, const char* separator);

class FieldWriter {
public:
    template <class T, class... Range> void operator()(const char* key, const T& value, Range...) { json[key] = value; }
    // Omits the value if it equals T{}: 0, an empty string, or an object of such values.
    template <class T> void optional(const char* key, const T& value) {
        if (!(value == T{})) json[key] = value;
    }
    void ignored(const char*) {}

    nlohmann::ordered_json json = nlohmann::ordered_json::object();
};

// Fails with Exit::data, naming the place ("FILE: shards[0].bytes"), the expected and the actual value.
class FieldReader {
public:
    using Json = nlohmann::ordered_json;

    // `separator` separates `where` from a key in error messages.
    FieldReader(const Json& object, std::string where, const char* separator)
        : object_(object), where_(std::move(where)), separator_(separator) {
        if (!object.is_object()) fail(Exit::data, "%s must be an object, is %s", where_, printed(object));
    }

    // Reads the member `key`. Fails if it is missing, has another type than `value`, or is a number outside the range.
    template <class T, class... Range> void operator()(const char* key, T& value, Range... range) {
        const std::string place = where_ + separator_ + key;
        const auto member = object_.find(key);
        if (member == object_.end()) fail(Exit::data, "%s is missing", place);
        read(*member, place, value, range...);
        read_++;
    }
    template <class T> void optional(const char* key, T& value) {
        if (object_.contains(key)) (*this)(key, value);
    }
    // Accepts a member that this version does not need.
    void ignored(const char* key) { read_ += object_.count(key); }

    // Fails if the object has unread members.
    void end() const {
        if (read_ != object_.size()) fail(Exit::data, "%s has %zu keys, only %zu known", where_, object_.size(), read_);
    }

private:
    static constexpr auto kMaxInteger = std::numeric_limits<int64_t>::max();

    [[noreturn]] static void refuse(const Json& json, const std::string& place, const std::string& expected) {
        fail(Exit::data, "%s must be %s, is %s", place, expected, printed(json));
    }

    static void read(const Json& json, const std::string& place, bool& value) {
        if (!json.is_boolean()) refuse(json, place, "true or false");
        value = json.get<bool>();
    }
    static void read(const Json& json, const std::string& place, std::string& value) {
        if (!json.is_string()) refuse(json, place, "a string");
        value = json.get<std::string>();
    }
    static void read(const Json& json, const std::string& place, Dtype& value) {
        const auto dtype = json.is_string() ? choice_named<Dtype>(json.get<std::string>()) : std::nullopt;
        if (!dtype) refuse(json, place, choice_names<Dtype>());
        value = *dtype;
    }
    // A long double holds every 64-bit integer exactly.
    template <class T>
    requires std::is_arithmetic_v<T>
    static void read(const Json& json, const std::string& place, T& value, long double low = 0,
                     long double high = std::is_integral_v<T>
                                            ? std::min<long double>(std::numeric_limits<T>::max(), kMaxInteger)
                                            : std::numeric_limits<T>::max()) {
        constexpr bool is_integer = std::is_integral_v<T>;
        const bool is_of_type = is_integer ? json.is_number_integer() : json.is_number();
        const bool is_right = is_of_type && json.get<long double>() >= low && json.get<long double>() <= high;
        if (!is_right)
            refuse(json, place,
                   format(is_integer ? "an integer from %.0Lf to %.0Lf" : "a number from %Lg to %Lg", low, high));
        value = json.get<T>();
    }
    template <class T> static void read(const Json& json, const std::string& place, std::vector<T>& list) {
        if (!json.is_array()) refuse(json, place, "a list");
        for (size_t i = 0; i < json.size(); i++)
            read(json[i], place + "[" + std::to_string(i) + "]", list.emplace_back());
    }
    template <class T>
    requires std::is_class_v<T>
    static void read(const Json& json, const std::string& place, T& value) { value = value_of<T>(json, place, "."); }

    const Json& object_;
    std::string where_;
    const char* separator_;
    size_t read_ = 0;
};

// Converts a described struct to JSON; found by nlohmann's library.
template <class T>
requires requires(FieldWriter& field, T& value) { describe(field, value); }
void to_json(nlohmann::ordered_json& json, const T& value) {
    FieldWriter writer;
    T copy = value;
    describe(writer, copy);
    json = std::move(writer.json);
}
inline void to_json(nlohmann::ordered_json& json, Dtype dtype) { json = name_of(dtype); }

// Reads a described struct from JSON. Fails if a member is missing or unknown; errors name the object `place`.
template <class T> T value_of(const nlohmann::ordered_json& json, const std::string& place, const char* separator) {
    T value;
    FieldReader reader(json, place, separator);
    describe(reader, value);
    reader.end();
    return value;
}
