// Reads Thrift's compact protocol, the format of Parquet metadata
// (https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md).
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/io/reject_file.h"

// Reads a byte range of a file. Reading past its end fails with Exit::data, naming the file and the part.
class BoundedBytes {
public:
    // `path` and `part` must outlive it.
    BoundedBytes(std::string_view bytes, const std::string& path, const char* part)
        : rest_(bytes), path_(path), part_(part) {}

    std::string_view rest() const { return rest_; }
    std::string_view take(uint64_t count) {
        if (count > rest_.size()) reject("ends too early: needs %zu bytes, but only %zu are left", count, rest_.size());
        const std::string_view taken = rest_.substr(0, count);
        rest_.remove_prefix(count);
        return taken;
    }
    uint8_t byte() { return uint8_t(take(1)[0]); }
    uint32_t uint32() {
        const std::string_view b = take(4);
        return uint32_t(uint8_t(b[0])) | uint32_t(uint8_t(b[1])) << 8 | uint32_t(uint8_t(b[2])) << 16 |
               uint32_t(uint8_t(b[3])) << 24;
    }
    uint64_t varint() {
        uint64_t value = 0;
        for (int shift = 0; shift < 64; shift += 7) {
            const uint8_t next = byte();
            value |= uint64_t(next & 0x7f) << shift;
            if (next < 0x80) return value;
        }
        reject("has a number of more than 64 bits");
    }
    template <class... Values> [[noreturn]] void reject(const std::string& pattern, const Values&... values) const {
        reject_file(path_, std::string(part_) + " " + pattern, values...);
    }

private:
    std::string_view rest_;
    const std::string& path_;
    const char* part_;
};

class ThriftReader {
public:
    explicit ThriftReader(BoundedBytes& bytes) : bytes_(bytes) {}

    enum Type : uint8_t { stop, yes, no, int8, int16, int32, int64, real, binary, list, set, map, structure };

    // Reads a struct: calls field(id, type) for each field. The callback reads the value and returns true, or returns
    // false to skip it. Returns true, for a callback that reads a struct.
    template <class Field> bool read_struct(const Field& field) {
        const Nesting nesting(*this);
        int id = 0;
        for (uint8_t header; (header = bytes_.byte()) != stop;) {
            const int step = header >> 4;
            id = step != 0 ? id + step : int(int16_t(integer()));
            const Type type = Type(header & 15);
            if (!field(id, type)) skip(type);
        }
        return true;
    }
    // Reads a list: calls element(type) for each element. Returns true, for a callback that reads a list.
    template <class Element> bool read_list(const Element& element) {
        const uint8_t header = bytes_.byte();
        const uint64_t count = header >> 4 == 15 ? bytes_.varint() : header >> 4;
        // Each element has at least one byte.
        if (count > bytes_.rest().size()) bytes_.reject("has a list of %zu elements in too few bytes", count);
        for (uint64_t i = 0; i < count; i++) element(Type(header & 15));
        return true;
    }
    int64_t integer() {
        const uint64_t zigzag = bytes_.varint();
        return int64_t(zigzag >> 1) ^ -int64_t(zigzag & 1);
    }
    std::string_view string() { return bytes_.take(bytes_.varint()); }
    // Reads the integer of a field if its id is listed. Returns false for other fields, for which it reads nothing.
    bool read_integer(int id, std::initializer_list<std::pair<int, int64_t*>> fields) {
        for (const auto& [listed, value] : fields) {
            if (listed != id) continue;
            *value = integer();
            return true;
        }
        return false;
    }

    void skip(Type type) {
        switch (type) {
            case yes:
            case no: return;  // the type is the value
            case int8: bytes_.take(1); return;
            case int16:
            case int32:
            case int64: bytes_.varint(); return;
            case real: bytes_.take(8); return;
            case binary: string(); return;
            case list:
            case set: skip_elements(); return;
            case map: skip_map(); return;
            case structure: read_struct([](int, Type) { return false; }); return;
            default: bytes_.reject("has a field of type %d, which does not exist", int(type));
        }
    }

private:
    struct Nesting {
        explicit Nesting(ThriftReader& owner) : reader(owner) {
            if (++reader.depth_ > 32) reader.bytes_.reject("is nested more than 32 levels deep");
        }
        ~Nesting() { reader.depth_--; }
        ThriftReader& reader;
    };
    void skip_element(Type type) {
        // In a list, a boolean takes one byte.
        if (type == yes || type == no)
            bytes_.take(1);
        else
            skip(type);
    }
    void skip_elements() {
        const Nesting nesting(*this);
        read_list([&](Type type) { skip_element(type); });
    }
    void skip_map() {
        const Nesting nesting(*this);
        const uint64_t count = bytes_.varint();
        if (count == 0) return;
        const uint8_t types = bytes_.byte();
        for (uint64_t i = 0; i < count; i++) {
            skip_element(Type(types >> 4));
            skip_element(Type(types & 15));
        }
    }

    BoundedBytes& bytes_;
    int depth_ = 0;
};
