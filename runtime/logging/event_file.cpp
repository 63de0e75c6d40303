#include "runtime/logging/event_file.h"

#include <unistd.h>

#include <algorithm>

#include "runtime/io/crc32c.h"
#include "runtime/io/files.h"
#include "runtime/io/process.h"

namespace {

// CRC32C as TFRecord stores it: rotated and shifted, because a CRC of data that contains CRCs is weak.
uint32_t masked_crc(const void* bytes, size_t count) {
    const uint32_t crc = crc32c(bytes, count);
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
}

template <class T> std::string raw(T value) { return {reinterpret_cast<const char*>(&value), sizeof(T)}; }

std::string varint(uint64_t value) {
    std::string bytes;
    for (; value >= 128; value >>= 7) bytes += char(value | 128);
    return bytes + char(value);
}

// Fields of a message. A negative number takes ten bytes, as in every int64.
enum WireType { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };
std::string key(int field, WireType type) { return varint(uint64_t(field) << 3 | type); }
std::string integer(int field, int64_t value) { return key(field, kVarint) + varint(uint64_t(value)); }
std::string nested(int field, const std::string& value) { return key(field, kBytes) + varint(value.size()) + value; }

std::string record(int64_t step, double unix_time, const std::string& what) {
    const std::string event = key(1, kFixed64) + raw(unix_time) + integer(2, step) + what;
    const std::string length = raw(uint64_t(event.size()));
    return length + raw(masked_crc(length.data(), length.size())) + event + raw(masked_crc(event.data(), event.size()));
}

// Returns a name that sorts after all others, because TensorBoard reads the files of a directory in the order of their
// names.
std::string next_name(const std::vector<std::string>& names) {
    auto seconds = int64_t(unix_time());
    for (const std::string& name : names) {
        long long other = 0;
        if (std::sscanf(name.c_str(), "events.out.tfevents.%lld", &other) == 1)
            seconds = std::max(seconds, int64_t(other) + 1);
    }
    return format("events.out.tfevents.%010lld.%s.%d.0", static_cast<long long>(seconds), host_name().c_str(),
                  int(::getpid()));
}

}  // namespace

std::unique_ptr<LogFile> begin_event_file(const std::string& directory, int committed_step) {
    constexpr int kStart = 1;  // SessionLog.status
    make_directory(directory);
    const std::string path = directory + "/" + next_name(list_directory(directory));
    OutputFile{path};
    auto file = std::make_unique<LogFile>(path, 0);
    file->append(record(0, unix_time(), nested(3, "brain.Event:2")));
    file->append(record(committed_step + 1, unix_time(), nested(7, integer(1, kStart))));
    return file;
}

std::string event_record(int step, double unix_time, const Scalars& scalars) {
    std::string summary;
    for (const auto& [tag, value] : scalars)
        summary += nested(1, nested(1, tag) + key(2, kFixed32) + raw(float(value)));
    return record(step, unix_time, nested(5, summary));
}
