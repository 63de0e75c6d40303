// JSON objects as C++ structs, strictly. A struct lists its members once, in a template that both directions use:
//
//   template <class Fields> void describe(Fields& field, Piece& piece) {
//       field("tensor", piece.tensor);
//       field("count", piece.count, 1);  // at least 1
//   }
//
// NLOHMANN_DEFINE_TYPE would read 1.5 as the integer 1, wrap negative sizes, ignore unknown keys, and could not say in
// which file and where in it the mistake is.
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/check.h"
#include "kernels/choices.h"
#include "runtime/io/io.h"

template <class T> nlohmann::ordered_json json_of(const T& value);
template <class T> T value_of(const nlohmann::ordered_json& json, const std::string& place, const char* separator);

class FieldWriter {
public:
    template <class T, class... Range> void operator()(const char* key, const T& value, Range...) {
        json[key] = json_of(value);
    }
    // A text that is omitted if it is empty.
    void optional(const char* key, const std::string& value) {
        if (!value.empty()) json[key] = value;
    }

    nlohmann::ordered_json json = nlohmann::ordered_json::object();
};

// Every failure is an Exit::data that names the place, "FILE: shards[0].bytes", what is expected and what is there.
class FieldReader {
public:
    using Json = nlohmann::ordered_json;

    // `separator` stands between `where` and a key.
    FieldReader(const Json& object, std::string where, const char* separator)
        : object_(object), where_(std::move(where)), separator_(separator) {
        if (!object.is_object()) fail(Exit::data, "%s must be an object, is %s", where_, printed(object));
    }

    // The member `key`, which must be there and of the type of `value`; a number must also lie in the range.
    template <class T, class... Range> void operator()(const char* key, T& value, Range... range) {
        const std::string place = where_ + separator_ + key;
        const auto member = object_.find(key);
        if (member == object_.end()) fail(Exit::data, "%s is missing", place);
        read(*member, place, value, range...);
        read_++;
    }
    void optional(const char* key, std::string& value) {
        if (object_.contains(key)) (*this)(key, value);
    }

    // Fails if the object has members that have not been read.
    void end() const {
        if (read_ != object_.size()) fail(Exit::data, "%s has %zu keys, %zu are known", where_, object_.size(), read_);
    }

private:
    static void expect(bool is_right, const Json& json, const std::string& place, const std::string& expected) {
        if (!is_right) fail(Exit::data, "%s must be %s, is %s", place, expected, printed(json));
    }

    static void read(const Json& json, const std::string& place, bool& value) {
        expect(json.is_boolean(), json, place, "true or false");
        value = json.get<bool>();
    }
    static void read(const Json& json, const std::string& place, std::string& value) {
        expect(json.is_string(), json, place, "a string");
        value = json.get<std::string>();
    }
    static void read(const Json& json, const std::string& place, Json& value) {
        expect(json.is_object(), json, place, "an object");
        value = json;
    }
    static void read(const Json& json, const std::string& place, Dtype& value) {
        const auto dtype = json.is_string() ? choice_named<Dtype>(json.get<std::string>()) : std::nullopt;
        expect(dtype.has_value(), json, place, choice_names<Dtype>());
        value = *dtype;
    }
    static void read(const Json& json, const std::string& place, float& value, float low, float high) {
        const bool is_right = json.is_number() && json.get<double>() >= low && json.get<double>() <= high;
        expect(is_right, json, place, format("a number from %g to %g", double(low), double(high)));
        value = json.get<float>();
    }
    template <class T>
    requires std::is_integral_v<T>
    static void read(const Json& json, const std::string& place, T& value, int64_t low = 0,
                     int64_t high = sizeof(T) == 8 ? std::numeric_limits<int64_t>::max()
                                                   : std::numeric_limits<T>::max()) {
        const bool fits =
            json.is_number_integer() && (!json.is_number_unsigned() || json.get<uint64_t>() <= uint64_t(high));
        expect(fits && json.get<int64_t>() >= low && json.get<int64_t>() <= high, json, place,
               "an integer from " + std::to_string(low) + " to " + std::to_string(high));
        value = json.get<T>();
    }
    template <class T> static void read(const Json& json, const std::string& place, std::vector<T>& list) {
        expect(json.is_array(), json, place, "a list");
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

template <class T> constexpr bool is_list = false;
template <class T> constexpr bool is_list<std::vector<T>> = true;

// A value or described struct as JSON.
template <class T> nlohmann::ordered_json json_of(const T& value) {
    if constexpr (is_list<T>) {
        auto list = nlohmann::ordered_json::array();
        for (const auto& element : value) list.push_back(json_of(element));
        return list;
    } else if constexpr (std::is_same_v<T, Dtype>) {
        return name_of(value);
    } else if constexpr (std::is_constructible_v<nlohmann::ordered_json, T>) {
        return value;
    } else {
        FieldWriter writer;
        T copy = value;
        describe(writer, copy);
        return writer.json;
    }
}

// A described struct from JSON that has its members and no others. Errors call the object `place`.
template <class T> T value_of(const nlohmann::ordered_json& json, const std::string& place, const char* separator) {
    T value;
    FieldReader reader(json, place, separator);
    describe(reader, value);
    reader.end();
    return value;
}
