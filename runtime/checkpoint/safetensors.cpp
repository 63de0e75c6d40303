#include "runtime/checkpoint/safetensors.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>

#include "runtime/checkpoint/fields.h"
#include "runtime/checkpoint/manifest.h"
#include "runtime/io/json.h"

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

namespace {

using Json = nlohmann::ordered_json;
using Entry = Safetensors::Entry;

constexpr size_t kLengthBytes = 8;
constexpr size_t kMaxHeaderBytes = 100'000'000;  // the limit of the format's own library
constexpr JsonLimits kJsonLimits = {.max_depth = 4, .max_values = 1'000'000};
constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

void check_name(const std::string& name, const std::string& path) {
    if (!is_name(name)) fail(Exit::data, "%s: a tensor's name is empty or has control characters", path);
}

bool is_object_of_strings(const Json& json) { return json.is_object() && std::ranges::all_of(json, &Json::is_string); }

// Parses the header's record of a tensor. `data`: the part of the file after the header.
Entry parse_record(const std::string& name, const Json& json, std::string_view data, const std::string& path) {
    check_name(name, path);
    const std::string where = path + ": tensor " + name;
    std::string dtype;
    std::vector<size_t> shape, offsets;
    FieldReader field(json, where, ": ");
    field("dtype", dtype);
    field("shape", shape);
    field("data_offsets", offsets);  // begin and end in `data`
    field.end();
    static const std::map<std::string_view, size_t> kElementBytes = {
        {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1},
        {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
        {"F32", 4},  {"F64", 8}, {"I64", 8}, {"U64", 8},     {"C64", 8}};
    if (!kElementBytes.contains(dtype)) fail(Exit::data, "%s: unknown dtype %s", where, printed(dtype));
    if (offsets.size() != 2) fail(Exit::data, "%s: data_offsets must be two numbers", where);
    size_t bytes = kElementBytes.at(dtype);
    for (size_t dim : shape)
        if (__builtin_mul_overflow(bytes, dim, &bytes))
            fail(Exit::data, "%s: shape %s overflows 64 bits", where, shape_text(shape));
    const size_t begin = offsets[0], end = offsets[1];
    if (end < begin || end - begin != bytes)
        fail(Exit::data, "%s: %s %s has %zu bytes, data_offsets are [%zu, %zu]", where, dtype, shape_text(shape), bytes,
             begin, end);
    if (end > data.size())
        fail(Exit::data, "%s ends at offset %zu of the data, after the end of the file at %zu", where, end,
             data.size());
    return {name, dtype, shape, reinterpret_cast<const std::byte*>(data.data()) + begin, bytes, path};
}

// Returns the text of the header. If the file is of another kind, the error describes it by its first bytes.
std::string_view header_of(const MappedFile& file) {
    uint64_t length = 0;
    if (file.size() > kLengthBytes) std::memcpy(&length, file.data(), kLengthBytes);
    if (length < 2 || length > std::min(kMaxHeaderBytes, file.size() - kLengthBytes) ||
        file.text()[kLengthBytes] != '{')
        fail(Exit::data,
             "%s is not a complete safetensors file: it has %zu bytes, claims a header of %lu and looks like %s",
             file.path(), file.size(), length, describe_content(file.text().substr(0, 512), file.size()));
    return file.text().substr(kLengthBytes, length);
}

// Returns the entries in the order of their bytes. Fails unless they cover the data without overlap or gap.
std::vector<Entry> entries_of(const MappedFile& file) {
    const std::string_view header = header_of(file), data = file.text().substr(kLengthBytes + header.size());
    const std::string& path = file.path();
    std::vector<Entry> entries;
    const Json json = parse_json(header, path + " (header)", Exit::data, kJsonLimits);
    for (auto& [name, value] : json.items()) {
        if (name != "__metadata__")
            entries.push_back(parse_record(name, value, data, path));
        else if (!is_object_of_strings(value))
            fail(Exit::data, "%s: __metadata__ must be an object of strings", path);
    }
    // A tensor without elements comes before the tensor that starts at the same byte.
    std::ranges::stable_sort(entries, {}, [](const Entry& entry) { return std::pair(entry.data, entry.bytes); });
    const std::byte* const begin = file.data() + (file.size() - data.size());
    size_t end = 0;
    for (const Entry& entry : entries) {
        if (entry.data != begin + end)
            fail(Exit::data, "%s: tensor %s begins at offset %zu of the data, must begin at %zu", path, entry.name,
                 size_t(entry.data - begin), end);
        end += entry.bytes;
    }
    if (end != data.size())
        fail(Exit::data, "%s has %zu bytes, but its tensors end at %zu", path, file.size(),
             file.size() - data.size() + end);
    return entries;
}

// Returns the path of a file that an index lists. Fails unless it is a plain name of a regular file next to the index.
std::string file_beside(const std::string& index, const std::string& name) {
    const bool is_plain = is_name(name) && name.ends_with(".safetensors") && !name.starts_with('.') &&
                          name.find_first_of("/\\") == std::string::npos;
    if (!is_plain) fail(Exit::data, "%s: %s is not a plain file name", index, printed(name));
    const std::string path = std::filesystem::path(index).replace_filename(name);
    std::error_code ignored;
    const auto status = std::filesystem::symlink_status(path, ignored);
    if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
        fail(Exit::data, "%s: %s must be a regular file, not a link or a device", index, path);
    return path;
}

std::string file_at(const std::string& path) {
    if (!directory_exists(path)) return path;
    for (const char* name : {kIndexFile, kSingleFile})
        if (file_exists(path + "/" + name)) return path + "/" + name;
    fail(Exit::no_input, "%s has neither %s nor %s", path, kSingleFile, kIndexFile);
}

const char* type_name(Dtype type) {
    constexpr const char* kNames[] = {"F32", "BF16", "F16"};  // by Dtype
    require(type != Dtype::fp64, "safetensors: can write fp32, bf16 or fp16, not %s", name_of(type));
    return kNames[int(type)];
}

// The values as `type`, rounded to nearest even, in the byte order of a file.
std::string bytes_as(Dtype type, const std::vector<float>& values) {
    std::string bytes(values.size() * size_of(type), '\0');
    auto store = [&]<class T>(T) {
        for (size_t i = 0; i < values.size(); i++) {
            const T value = from_float<T>(values[i]);
            std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
        }
    };
    switch (type) {
        case Dtype::fp32: store(float()); break;
        case Dtype::bf16: store(bf16()); break;
        case Dtype::fp16: store(fp16()); break;
        default: fail(Exit::internal, "weights cannot be %s", name_of(type));
    }
    return bytes;
}

size_t file_bytes(const NamedTensor& tensor, Dtype type) { return elements_of(tensor) * size_of(type); }

// The header: its length, then JSON padded with spaces to a multiple of 8 bytes, as the format requires.
std::string make_header(const std::vector<NamedTensor>& tensors, Dtype type) {
    Json json = {{"__metadata__", {{"format", "pt"}}}};
    size_t end = 0;
    for (const NamedTensor& tensor : tensors) {
        check_name(tensor.name, "safetensors");
        require(!json.contains(tensor.name), "safetensors: tensor %s is listed twice", tensor.name);
        const size_t begin = end;
        end += file_bytes(tensor, type);
        json[tensor.name] = {{"dtype", type_name(type)}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
    }
    std::string text = json.dump();
    text.resize((text.size() + kLengthBytes - 1) / kLengthBytes * kLengthBytes, ' ');
    require(text.size() <= kMaxHeaderBytes, "safetensors: the header has %zu bytes", text.size());
    const uint64_t length = text.size();
    return std::string(reinterpret_cast<const char*>(&length), kLengthBytes) + text;
}

// Elements of (rows, cols) as (cols, rows).
std::vector<float> transpose(const std::vector<float>& from, size_t rows, size_t cols) {
    std::vector<float> to(from.size());
    for (size_t row = 0; row < rows; row++)
        for (size_t col = 0; col < cols; col++) to[col * rows + row] = from[row * cols + col];
    return to;
}

float rounded(double value) { return float(value); }
template <class T> float rounded(T value) { return to_float(value); }

template <class T> std::vector<float> floats_of(const Entry& entry) {
    std::vector<float> values(entry.bytes / sizeof(T));
    for (size_t i = 0; i < values.size(); i++) {
        T value;
        std::memcpy(&value, entry.data + i * sizeof(T), sizeof(T));
        values[i] = rounded(value);
        if constexpr (std::is_same_v<T, double>)
            if (std::isinf(values[i]) && std::isfinite(value))
                fail(Exit::data, "%s: element %zu of %s is %g, beyond FP32's range", entry.file, i, entry.name, value);
    }
    return values;
}

}  // namespace

std::vector<float> Safetensors::Entry::floats() const {
    if (type == "F32") return floats_of<float>(*this);
    if (type == "BF16") return floats_of<bf16>(*this);
    if (type == "F16") return floats_of<fp16>(*this);
    if (type == "F64") return floats_of<double>(*this);
    fail(Exit::data, "%s: %s has type %s; only F64, F32, BF16 and F16 can be read as numbers", file, name, type);
}

Safetensors::Safetensors(const std::string& path) : path_(file_at(path)) {
    path_.ends_with(".json") ? add_index(path_) : add_file(path_);
}

void Safetensors::add_file(const std::string& path) {
    files_.emplace_back(path);
    for (Entry& entry : entries_of(files_.back())) {
        if (!by_name_.emplace(entry.name, entries_.size()).second)
            fail(Exit::data, "%s: tensor %s is also in %s", path, entry.name, at(entry.name).file);
        entries_.push_back(std::move(entry));
    }
}

void Safetensors::add_index(const std::string& path) {
    const Json index = parse_json(read_file(path, kMaxHeaderBytes), path, Exit::data, kJsonLimits);
    if (!index.is_object() || !index.contains("weight_map") || !is_object_of_strings(index["weight_map"]))
        fail(Exit::data, "%s: weight_map must be an object of strings", path);
    const auto weight_map = index["weight_map"].get<std::map<std::string, std::string>>();
    std::set<std::string> names;
    for (auto& [tensor, file] : weight_map) {
        check_name(tensor, path);
        names.insert(file);
    }
    for (const std::string& name : names) add_file(file_beside(path, name));
    for (auto& [tensor, file] : weight_map)
        if (at(tensor).file != file_beside(path, file))
            fail(Exit::data, "%s: tensor %s is in %s, must be in %s", path, tensor, at(tensor).file, file);
    for (const Entry& entry : entries_)
        if (!weight_map.contains(entry.name))
            fail(Exit::data, "%s has tensor %s, which %s does not list", entry.file, entry.name, path);
}

const Entry* Safetensors::find(const std::string& name) const {
    return by_name_.contains(name) ? &entries_[by_name_.at(name)] : nullptr;
}

const Entry& Safetensors::at(const std::string& name) const {
    const Entry* entry = find(name);
    if (!entry) fail(Exit::data, "%s has no tensor %s", path_, name);
    return *entry;
}

const Entry& Safetensors::at(const std::string& name, const std::vector<size_t>& shape) const {
    const Entry& entry = at(name);
    if (entry.shape != shape)
        fail(Exit::data, "%s: tensor %s has shape %s, must have %s", entry.file, name, shape_text(entry.shape),
             shape_text(shape));
    return entry;
}

void Safetensors::load(const std::vector<NamedTensor>& tensors, const std::function<void(const Entry&)>& other) const {
    std::set<std::string> wanted;
    for (const NamedTensor& tensor : tensors) {
        set_file_values(tensor, at(tensor.name, tensor.shape).floats());
        wanted.insert(tensor.name);
    }
    for (const Entry& entry : entries_)
        if (!wanted.contains(entry.name)) other(entry);
}

void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors, Dtype type) {
    const std::string header = make_header(tensors, type);
    size_t bytes = header.size();
    for (const NamedTensor& tensor : tensors) bytes += file_bytes(tensor, type);
    write_file_atomically(path, bytes, [&](OutputFile& file) {
        file.append(header);
        for (const NamedTensor& tensor : tensors) {
            const std::vector<float> values = file_values(tensor);
            if (type == Dtype::fp16)
                for (const float value : values)
                    if (std::isfinite(value) && std::isinf(to_float(from_float<fp16>(value))))
                        fail(Exit::data, "%s: %g in %s is beyond fp16's range", path, double(value), tensor.name);
            file.append(bytes_as(type, values));
        }
    });
}

std::vector<std::string> write_safetensors_directory(const std::string& directory,
                                                     const std::vector<NamedTensor>& tensors, Dtype type,
                                                     size_t most_bytes) {
    std::vector<std::vector<NamedTensor>> files;
    size_t total = 0, in_file = 0;
    for (const NamedTensor& tensor : tensors) {
        const size_t bytes = file_bytes(tensor, type);
        if (files.empty() || in_file + bytes > most_bytes) files.emplace_back(), in_file = 0;
        files.back().push_back(tensor);
        in_file += bytes, total += bytes;
    }
    if (files.size() == 1) {
        write_safetensors(directory + "/" + kSingleFile, tensors, type);
        return {kSingleFile};
    }
    Json index = {{"metadata", {{"total_size", total}}}, {"weight_map", Json::object()}};
    std::vector<std::string> names;
    for (size_t i = 0; i < files.size(); i++) {
        names.push_back(format("model-%05zu-of-%05zu.safetensors", i + 1, files.size()));
        write_safetensors(directory + "/" + names.back(), files[i], type);
        for (const NamedTensor& tensor : files[i]) index["weight_map"][tensor.name] = names.back();
    }
    names.push_back(kIndexFile);
    write_file_atomically(directory + "/" + kIndexFile, index.dump(2) + "\n");
    return names;
}

std::vector<float> file_values(const NamedTensor& tensor) {
    const size_t count = elements_of(tensor);
    require((tensor.values || count == 0) && tensor.first == 0 && tensor.count >= count,
            "tensor %s is not completely on this rank", tensor.name);
    const std::vector<float> values = floats_of(tensor.values, count);
    return tensor.transposed ? transpose(values, tensor.shape.at(1), tensor.shape.at(0)) : values;
}

void set_file_values(const NamedTensor& tensor, std::vector<float> values) {
    require(values.size() == elements_of(tensor), "%s: %zu values for %zu elements", tensor.name, values.size(),
            elements_of(tensor));
    if (tensor.count == 0) return;
    if (tensor.transposed) values = transpose(values, tensor.shape.at(0), tensor.shape.at(1));
    std::vector<size_t> shape = tensor.shape;
    if (tensor.transposed) std::swap(shape[0], shape[1]);
    std::vector<float> part;
    for (const Piece& piece : pieces_of(tensor))
        for_each_common_run(piece, {.count = values.size()}, shape, [&](size_t, size_t at, size_t count) {
            part.insert(part.end(), values.data() + at, values.data() + at + count);
        });
    set_floats(tensor.values, part.data(), tensor.count);
}
