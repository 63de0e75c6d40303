#include "runtime/checkpoint/safetensors.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <string_view>

#include "kernels/check.h"
#include "runtime/io/io.h"

static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kLengthBytes = 8;
constexpr size_t kMostHeaderBytes = 100'000'000;  // the limit of the format's own library
constexpr JsonLimits kJsonLimits = {.max_depth = 4, .max_values = 1'000'000};
constexpr size_t kStagingBytes = size_t(4) << 20;
constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

bool multiply(size_t a, size_t b, size_t* product) { return !__builtin_mul_overflow(a, b, product); }

std::string shape_to_text(const std::vector<size_t>& shape) {
    std::string text;
    for (size_t dim : shape) text += (text.empty() ? "" : ", ") + std::to_string(dim);
    return "(" + text + ")";
}

size_t natural(const Json& json, const char* what, const std::string& where) {
    if (!json.is_number_unsigned())
        fail(Exit::data, "%s: %s is %s, must be a natural number", where.c_str(), what, json.dump().c_str());
    return json.get<size_t>();
}

size_t bytes_of_shape(const std::vector<size_t>& shape, size_t element_bytes, const std::string& where) {
    size_t bytes = element_bytes;
    for (size_t dim : shape)
        if (!multiply(bytes, dim, &bytes))
            fail(Exit::data, "%s: shape %s overflows 64 bits", where.c_str(), shape_to_text(shape).c_str());
    return bytes;
}

void check_name(const std::string& name, const std::string& path) {
    bool is_printable = std::all_of(name.begin(), name.end(), [](unsigned char c) { return c >= ' ' && c != 127; });
    if (name.empty() || !is_printable)
        fail(Exit::data, "%s: a tensor's name is empty or has control characters", path.c_str());
}

const Json& member(const Json& object, const char* key, const std::string& where) {
    auto found = object.find(key);
    if (found == object.end()) fail(Exit::data, "%s: \"%s\" is missing", where.c_str(), key);
    return *found;
}

// One entry of the header; `begin` receives its offset in the buffer behind the header.
SafetensorsView parse_entry(const std::string& name, const Json& entry, const std::string& path, size_t* begin) {
    check_name(name, path);
    std::string where = path + ": tensor " + name;
    if (!entry.is_object()) fail(Exit::data, "%s: must be an object", where.c_str());
    SafetensorsView tensor;
    tensor.name = name;
    tensor.file = path;
    const Json& dtype = member(entry, "dtype", where);
    if (dtype.is_string()) tensor.dtype = dtype.get<std::string>();
    size_t element_bytes = safetensors_element_bytes(tensor.dtype);  // 0 for what is not a string, too
    if (element_bytes == 0) fail(Exit::data, "%s: dtype %s is not known", where.c_str(), dtype.dump().c_str());

    const Json& shape = member(entry, "shape", where);
    if (!shape.is_array()) fail(Exit::data, "%s: shape must be a list", where.c_str());
    for (const Json& dim : shape) tensor.shape.push_back(natural(dim, "a dimension", where));
    size_t shape_bytes = bytes_of_shape(tensor.shape, element_bytes, where);

    const Json& offsets = member(entry, "data_offsets", where);
    if (!offsets.is_array() || offsets.size() != 2)
        fail(Exit::data, "%s: data_offsets must be two numbers", where.c_str());
    *begin = natural(offsets[0], "data_offsets[0]", where);
    size_t end = natural(offsets[1], "data_offsets[1]", where);
    if (end < *begin || end - *begin != shape_bytes)
        fail(Exit::data, "%s: %s %s has %zu bytes, data_offsets are [%zu, %zu]", where.c_str(), tensor.dtype.c_str(),
             shape_to_text(tensor.shape).c_str(), shape_bytes, *begin, end);
    tensor.bytes = shape_bytes;
    if (entry.size() != 3) fail(Exit::data, "%s: has keys beside dtype, shape and data_offsets", where.c_str());
    return tensor;
}

void check_metadata(const Json& metadata, const std::string& path) {
    bool is_text = metadata.is_object() &&
                   std::all_of(metadata.begin(), metadata.end(), [](const Json& value) { return value.is_string(); });
    if (!is_text) fail(Exit::data, "%s: __metadata__ must be an object of strings", path.c_str());
}

// The header's text; what is not a safetensors file is told by its first bytes.
std::string_view header_of(const MappedFile& file) {
    const char* path = file.path().c_str();
    if (file.size() < kLengthBytes)
        fail(Exit::data, "%s has %zu bytes, too few for a safetensors file", path, file.size());
    uint64_t length = 0;
    std::memcpy(&length, file.data(), kLengthBytes);
    size_t most = std::min(kMostHeaderBytes, file.size() - kLengthBytes);
    bool is_object = length >= 2 && length <= most && file.text()[kLengthBytes] == '{';
    if (!is_object)
        fail(Exit::data,
             "%s is not a whole safetensors file: it has %zu bytes, claims a header of %llu and looks like %s", path,
             file.size(), static_cast<unsigned long long>(length),
             describe_content(file.text().substr(0, 512), file.size()).c_str());
    return file.text().substr(kLengthBytes, length);
}

struct Entry {
    size_t begin;  // in the buffer
    SafetensorsView view;
};

// Entries in the order of their bytes, which they share out without overlap or gap.
std::vector<SafetensorsView> tensors_of(const MappedFile& file) {
    std::string_view header = header_of(file);
    Json json = parse_json(header, file.path() + " (header)", Exit::data, kJsonLimits);
    std::vector<Entry> entries;
    for (auto& [name, value] : json.items()) {
        if (name == "__metadata__") {
            check_metadata(value, file.path());
            continue;
        }
        size_t begin = 0;
        SafetensorsView view = parse_entry(name, value, file.path(), &begin);
        entries.push_back({begin, std::move(view)});
    }
    std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
        return a.begin != b.begin ? a.begin < b.begin : a.view.bytes < b.view.bytes;
    });

    size_t buffer_begin = kLengthBytes + header.size(), end = 0;
    std::vector<SafetensorsView> tensors;
    for (Entry& entry : entries) {
        if (entry.begin != end)
            fail(Exit::data, "%s: tensor %s begins at offset %zu of the data, must begin at %zu", file.path().c_str(),
                 entry.view.name.c_str(), entry.begin, end);
        if (entry.view.bytes > file.size() - buffer_begin - end)
            fail(Exit::data, "%s: tensor %s ends behind the end of the file, which has %zu bytes", file.path().c_str(),
                 entry.view.name.c_str(), file.size());
        entry.view.data = file.data() + buffer_begin + end;
        end += entry.view.bytes;
        tensors.push_back(std::move(entry.view));
    }
    if (buffer_begin + end != file.size())
        fail(Exit::data, "%s has %zu bytes, its tensors end at %zu", file.path().c_str(), file.size(),
             buffer_begin + end);
    return tensors;
}

// What an index may name: a plain file beside it.
void check_file_name(const std::string& name, const std::string& directory, const std::string& index) {
    bool is_plain = name.ends_with(".safetensors") && name.find_first_of("/\\") == std::string::npos &&
                    !name.starts_with('.') &&
                    std::all_of(name.begin(), name.end(), [](unsigned char c) { return c >= ' ' && c != 127; });
    if (!is_plain) fail(Exit::data, "%s: %s is not a plain file name", index.c_str(), Json(name).dump().c_str());
    std::string path = directory + name;
    struct stat status;
    if (::lstat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode))
        fail(Exit::data, "%s: %s is a link or a device, must be a file", index.c_str(), path.c_str());
}

std::map<std::string, std::string> weight_map_of(const std::string& index) {
    Json json = parse_json(read_file(index, kMostHeaderBytes), index, Exit::data, kJsonLimits);
    if (!json.is_object()) fail(Exit::data, "%s: must be an object", index.c_str());
    const Json& weight_map = member(json, "weight_map", index);
    bool is_text = weight_map.is_object() && std::all_of(weight_map.begin(), weight_map.end(),
                                                         [](const Json& value) { return value.is_string(); });
    if (!is_text) fail(Exit::data, "%s: weight_map must be an object of strings", index.c_str());
    return weight_map.get<std::map<std::string, std::string>>();
}

// "runs/export/" of "runs/export/model.safetensors"
std::string directory_prefix(const std::string& path) { return path.substr(0, path.find_last_of('/') + 1); }

std::string file_at(const std::string& path) {
    if (!directory_exists(path)) return path;
    for (const char* name : {kIndexFile, kSingleFile})
        if (file_exists(path + "/" + name)) return path + "/" + name;
    fail(Exit::no_input, "%s has neither %s nor %s", path.c_str(), kSingleFile, kIndexFile);
}

size_t bytes_of(const SafetensorsItem& item) {
    size_t element_bytes = safetensors_element_bytes(item.dtype);
    require(element_bytes != 0, "safetensors: tensor %s: dtype %s is not known", item.name.c_str(), item.dtype.c_str());
    return bytes_of_shape(item.shape, element_bytes, "safetensors: tensor " + item.name);
}

// Larger elements first, so that no tensor of smaller ones moves another off its alignment.
std::vector<const SafetensorsItem*> in_file_order(const std::vector<SafetensorsItem>& items) {
    std::vector<const SafetensorsItem*> order;
    for (const SafetensorsItem& item : items) order.push_back(&item);
    std::stable_sort(order.begin(), order.end(), [](auto* a, auto* b) {
        return safetensors_element_bytes(a->dtype) > safetensors_element_bytes(b->dtype);
    });
    return order;
}

// Length and JSON, padded with spaces to whole words, as the format asks for.
std::string make_header(const std::vector<const SafetensorsItem*>& order,
                        const std::map<std::string, std::string>& metadata) {
    Json json = {{"__metadata__", metadata}};
    size_t end = 0;
    for (const SafetensorsItem* item : order) {
        check_name(item->name, "safetensors");
        require(!json.contains(item->name), "safetensors: tensor %s stands twice", item->name.c_str());
        size_t begin = end;
        require(!__builtin_add_overflow(begin, bytes_of(*item), &end), "safetensors: more bytes than 64 bits count");
        json[item->name] = {{"dtype", item->dtype}, {"shape", item->shape}, {"data_offsets", {begin, end}}};
    }
    std::string text = json.dump();
    text.resize((text.size() + kLengthBytes - 1) / kLengthBytes * kLengthBytes, ' ');
    require(text.size() <= kMostHeaderBytes, "safetensors: the header has %zu bytes", text.size());
    uint64_t length = text.size();
    return std::string(reinterpret_cast<const char*>(&length), kLengthBytes) + text;
}

void append_tensor(OutputFile& file, const SafetensorsItem& item, std::vector<std::byte>& staging) {
    size_t element_bytes = safetensors_element_bytes(item.dtype);
    size_t elements = bytes_of(item) / element_bytes;
    for (size_t first = 0; first < elements;) {
        size_t count = std::min(elements - first, staging.size() / element_bytes);
        item.fill(staging.data(), first, count);
        file.append(staging.data(), count * element_bytes);
        first += count;
    }
}

void write_whole(const std::string& path, const std::vector<const SafetensorsItem*>& order, const std::string& header) {
    size_t bytes = header.size();
    for (const SafetensorsItem* item : order) bytes += bytes_of(*item);
    std::vector<std::byte> staging(kStagingBytes);
    OutputFile file(path, bytes);
    file.append(header);
    for (const SafetensorsItem* item : order) append_tensor(file, *item, staging);
    file.sync();
    file.close();
}

}  // namespace

size_t safetensors_element_bytes(const std::string& dtype) {
    static const std::map<std::string_view, size_t> kBytes = {
        {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E5M2", 1}, {"F8_E4M3", 1}, {"F8_E8M0", 1},
        {"I16", 2},  {"U16", 2}, {"F16", 2}, {"BF16", 2},    {"I32", 4},     {"U32", 4},
        {"F32", 4},  {"F64", 8}, {"I64", 8}, {"U64", 8},     {"C64", 8}};
    auto found = kBytes.find(dtype);
    return found == kBytes.end() ? 0 : found->second;
}

const char* safetensors_dtype(Dtype dtype) {
    return dtype == Dtype::fp32 ? "F32" : dtype == Dtype::bf16 ? "BF16" : "F16";
}

Safetensors::Safetensors(const std::string& path) : path_(file_at(path)) {
    if (path_.ends_with(".json"))
        add_index(path_);
    else
        add_file(path_);
}

void Safetensors::add_file(const std::string& path) {
    files_.emplace_back(path);
    for (SafetensorsView& tensor : tensors_of(files_.back())) {
        if (!by_name_.emplace(tensor.name, tensors_.size()).second)
            fail(Exit::data, "%s: tensor %s is in %s too", path.c_str(), tensor.name.c_str(),
                 at(tensor.name).file.c_str());
        tensors_.push_back(std::move(tensor));
    }
}

void Safetensors::add_index(const std::string& path) {
    std::string directory = directory_prefix(path);
    std::map<std::string, std::string> weight_map = weight_map_of(path);
    std::vector<std::string> names;
    for (auto& [tensor, file] : weight_map) {
        check_name(tensor, path);
        names.push_back(file);
    }
    std::sort(names.begin(), names.end());
    names.erase(std::unique(names.begin(), names.end()), names.end());
    for (const std::string& name : names) {
        check_file_name(name, directory, path);
        add_file(directory + name);
    }
    for (auto& [tensor, file] : weight_map)
        if (at(tensor).file != directory + file)
            fail(Exit::data, "%s: tensor %s is in %s, must be in %s", path.c_str(), tensor.c_str(),
                 at(tensor).file.c_str(), file.c_str());
    for (const SafetensorsView& tensor : tensors_)
        if (!weight_map.contains(tensor.name))
            fail(Exit::data, "%s: has tensor %s, which %s does not list", tensor.file.c_str(), tensor.name.c_str(),
                 path.c_str());
}

const SafetensorsView* Safetensors::find(const std::string& name) const {
    auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

const SafetensorsView& Safetensors::at(const std::string& name) const {
    const SafetensorsView* tensor = find(name);
    if (!tensor) fail(Exit::data, "%s has no tensor %s", path_.c_str(), name.c_str());
    return *tensor;
}

const SafetensorsView& Safetensors::at(const std::string& name, const std::vector<size_t>& shape) const {
    const SafetensorsView& tensor = at(name);
    if (tensor.shape != shape)
        fail(Exit::data, "%s: tensor %s has shape %s, must have %s", tensor.file.c_str(), name.c_str(),
             shape_to_text(tensor.shape).c_str(), shape_to_text(shape).c_str());
    return tensor;
}

void write_safetensors(const std::string& path, const std::vector<SafetensorsItem>& items,
                       const std::map<std::string, std::string>& metadata) {
    std::vector<const SafetensorsItem*> order = in_file_order(items);
    std::string header = make_header(order, metadata);
    std::string temporary = format("%s.tmp.%08x", path.c_str(), std::random_device()());
    try {
        write_whole(temporary, order, header);
        rename_path(temporary, path);
    } catch (...) {
        ::unlink(temporary.c_str());
        throw;
    }
    std::string directory = directory_prefix(path);
    sync_directory(directory.empty() ? "." : directory);
}

namespace {

template <class T> std::vector<float> values_as(const SafetensorsView& view) {
    std::vector<float> values(view.bytes / sizeof(T));
    for (size_t i = 0; i < values.size(); i++) {
        T value;
        std::memcpy(&value, view.data + i * sizeof(T), sizeof(T));
        values[i] = to_float(value);
    }
    return values;
}

}  // namespace

std::vector<float> float_values(const SafetensorsView& view) {
    if (view.dtype == "F32") return values_as<float>(view);
    if (view.dtype == "BF16") return values_as<bf16>(view);
    if (view.dtype == "F16") return values_as<fp16>(view);
    fail(Exit::data, "%s: %s is of type %s; F32, BF16 and F16 can be read as numbers", view.file.c_str(),
         view.name.c_str(), view.dtype.c_str());
}

void read_float_tensors(const Safetensors& file, const std::vector<FloatTensor>& tensors,
                        const std::function<void(const SafetensorsView&)>& other) {
    std::set<std::string> wanted;
    for (const FloatTensor& tensor : tensors) {
        tensor.set(float_values(file.at(tensor.name, tensor.shape)));
        wanted.insert(tensor.name);
    }
    for (const SafetensorsView& view : file.tensors())
        if (!wanted.count(view.name)) other(view);
}

void write_float_tensors(const std::string& path, const std::vector<FloatTensor>& tensors) {
    std::vector<SafetensorsItem> items;
    for (const FloatTensor& tensor : tensors) {
        auto values = std::make_shared<std::vector<float>>();
        items.push_back({tensor.name, "F32", tensor.shape, [tensor, values](void* to, size_t first, size_t count) {
                             if (first == 0) *values = tensor.get();
                             std::memcpy(to, values->data() + first, count * sizeof(float));
                             if (first + count == values->size()) values->clear(), values->shrink_to_fit();
                         }});
    }
    write_safetensors(path, items);
}
