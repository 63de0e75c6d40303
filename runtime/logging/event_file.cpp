#include "runtime/logging/event_file.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>

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

// TensorProto: dtype 1, tensor_shape 2 (dim 2: size 1), tensor_content 4 or string_val 8.
constexpr int kDouble = 2, kString = 7;
std::string tensor(int dtype, std::initializer_list<size_t> shape, int field, const std::string& content) {
    std::string dimensions;
    for (const size_t size : shape) dimensions += nested(2, integer(1, int64_t(size)));
    return integer(1, dtype) + nested(2, dimensions) + nested(field, content);
}

std::string event(int64_t step, double unix_time, const std::string& what) {
    return key(1, kFixed64) + raw(unix_time) + integer(2, step) + what;
}

std::string record(const std::string& event) {
    const std::string length = raw(uint64_t(event.size()));
    return length + raw(masked_crc(length.data(), length.size())) + event + raw(masked_crc(event.data(), event.size()));
}

template <class T> T read(std::string_view bytes, size_t offset) {
    T value;
    std::memcpy(&value, bytes.data() + offset, sizeof(T));
    return value;
}

std::optional<uint64_t> take_varint(std::string_view& bytes) {
    uint64_t value = 0;
    for (int shift = 0; shift < 64 && !bytes.empty(); shift += 7) {
        const auto byte = static_cast<unsigned char>(bytes.front());
        bytes.remove_prefix(1);
        value |= uint64_t(byte & 127) << shift;
        if (byte < 128) return value;
    }
    return std::nullopt;
}

// Returns the step of an event, its second field; 0 if absent.
std::optional<int64_t> step_of(std::string_view event) {
    constexpr size_t kTime = 1 + sizeof(double);
    if (event.size() <= kTime || event[kTime] != char(2 << 3)) return 0;
    event.remove_prefix(kTime + 1);
    return take_varint(event);
}

// Returns the length of the leading part of an event file that is intact and has no event after `committed_step`.
size_t committed_bytes(const InputFile& file, int committed_step) {
    constexpr size_t kHead = 12, kTail = 4;
    size_t begin = 0;
    std::string head(kHead, '\0'), rest;
    while (file.size() - begin >= kHead + kTail) {
        file.read_at(begin, head.data(), kHead);
        const auto size = read<uint64_t>(head, 0);
        if (read<uint32_t>(head, 8) != masked_crc(head.data(), 8)) break;
        if (size > file.size() - begin - kHead - kTail) break;
        rest.resize(size + kTail);
        file.read_at(begin + kHead, rest.data(), rest.size());
        const std::string_view event = std::string_view(rest).substr(0, size);
        if (read<uint32_t>(rest, size) != masked_crc(event.data(), size)) break;
        const std::optional<int64_t> step = step_of(event);
        if (!step || *step > committed_step) break;
        begin += kHead + size + kTail;
    }
    return begin;
}

constexpr std::string_view kPrefix = "events.out.tfevents.";

// Returns a name that sorts after all others, because TensorBoard reads the files of a directory in the order of their
// names.
std::string next_name(const std::vector<std::string>& names) {
    auto seconds = int64_t(unix_time());
    for (const std::string& name : names) {
        long long other = 0;
        if (std::sscanf(name.c_str(), "events.out.tfevents.%lld", &other) == 1)
            seconds = std::max(seconds, int64_t(other) + 1);
    }
    std::array<char, 256> host{};
    ::gethostname(host.data(), host.size() - 1);
    return std::string(kPrefix) +
           format("%010lld.%s.%d.0", static_cast<long long>(seconds), host.data(), int(::getpid()));
}

// Cuts the existing files and returns the path of a new, empty one.
std::string cut_and_begin(const std::string& directory, int committed_step) {
    make_directories(directory);
    std::vector<std::string> names = list_directory(directory);
    std::erase_if(names, [](const std::string& name) { return !name.starts_with(kPrefix); });
    for (const std::string& name : names) {
        const std::string path = directory + "/" + name;
        const InputFile file(path);
        const size_t kept = committed_bytes(file, committed_step);
        if (kept == 0 || kept == file.size()) continue;  // 0: written by another program
        OutputFile::open_to_continue(path, kept).sync();
    }
    const std::string path = directory + "/" + next_name(names);
    OutputFile{path};
    return path;
}

}  // namespace

void EventSummary::add_scalar(const std::string& tag, double value) {
    bytes_ += nested(1, nested(1, tag) + key(2, kFixed32) + raw(float(value)));
}

void EventSummary::add_text(const std::string& tag, const std::string& markdown) {
    add_tensor(tag, "text", tensor(kString, {1}, 8, markdown));
}

void EventSummary::add_histogram(const std::string& tag, const std::vector<double>& values) {
    constexpr size_t kMostBuckets = 30;
    std::vector<double> finite;
    std::ranges::copy_if(values, std::back_inserter(finite), [](double value) { return std::isfinite(value); });
    if (finite.empty()) return;
    const auto [least, most] = std::ranges::minmax(finite);
    const size_t count = least < most ? kMostBuckets : 1;
    const double low = count > 1 ? least : least - 0.5, width = count > 1 ? (most - least) / double(count) : 1;
    std::vector<double> inside(count);
    for (const double value : finite) inside[std::min(count - 1, size_t((value - low) / width))]++;
    std::string buckets;  // (count, 3): from, to, values
    for (size_t i = 0; i < count; i++) {
        const double to = i + 1 == count && count > 1 ? most : low + width * double(i + 1);
        buckets += raw(low + width * double(i)) + raw(to) + raw(inside[i]);
    }
    add_tensor(tag, "histograms", tensor(kDouble, {count, 3}, 4, buckets));
}

// SummaryMetadata: plugin_data 1 (plugin_name 1), data_class 4 (2: tensors).
void EventSummary::add_tensor(const std::string& tag, const char* plugin, const std::string& tensor) {
    const std::string metadata = nested(1, nested(1, plugin)) + integer(4, 2);
    bytes_ += nested(1, nested(1, tag) + nested(8, tensor) + nested(9, metadata));
}

EventFile::EventFile(const std::string& directory, int committed_step)
    : file_(cut_and_begin(directory, committed_step), 0) {
    constexpr int kStart = 1;  // SessionLog.status
    file_.append(record(event(0, unix_time(), nested(3, "brain.Event:2"))));
    file_.append(record(event(committed_step + 1, unix_time(), nested(7, integer(1, kStart)))));
}

bool EventFile::write(int step, double unix_time, const EventSummary& summary) {
    if (summary.bytes().empty()) return file_.write_missing();
    return file_.append(record(event(step, unix_time, nested(5, summary.bytes()))));
}
