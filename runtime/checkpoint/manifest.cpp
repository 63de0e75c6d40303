#include "runtime/checkpoint/manifest.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "kernels/check.h"
#include "runtime/io/io.h"

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "train_gpt checkpoint";
constexpr size_t kMostBytes = std::numeric_limits<int64_t>::max();
constexpr size_t kCrcDigits = 8;
constexpr size_t kHashDigits = 32;

// Takes the fields of one JSON object, each of the right type; whatever is not taken is an error at the end.
class Fields {
public:
    Fields(const Json& object, std::string where) : object_(object), where_(std::move(where)) {
        if (!object.is_object()) fail(Exit::data, "%s: must be an object", where_.c_str());
    }

    const Json& take(const char* key, bool (Json::*is_right_type)() const noexcept, const char* type) {
        auto field = object_.find(key);
        if (field == object_.end()) fail(Exit::data, "%s: \"%s\" is missing", where_.c_str(), key);
        if (!((*field).*is_right_type)()) fail(Exit::data, "%s: \"%s\" must be %s", where_.c_str(), key, type);
        taken_++;
        return *field;
    }

    std::string text(const char* key) { return take(key, &Json::is_string, "a string").get<std::string>(); }
    bool flag(const char* key) { return take(key, &Json::is_boolean, "true or false").get<bool>(); }
    const Json& list(const char* key) { return take(key, &Json::is_array, "a list"); }
    const Json& object(const char* key) { return take(key, &Json::is_object, "an object"); }

    int64_t integer(const char* key) {
        const Json& field = take(key, &Json::is_number_integer, "an integer");
        if (field.is_number_unsigned() && field.get<uint64_t>() > kMostBytes)
            fail(Exit::data, "%s: \"%s\" is %s, more than 63 bits hold", where_.c_str(), key, field.dump().c_str());
        return field.get<int64_t>();
    }
    size_t size(const char* key) {
        int64_t value = integer(key);
        if (value < 0)
            fail(Exit::data, "%s: \"%s\" is %lld, must not be negative", where_.c_str(), key, (long long)value);
        return size_t(value);
    }

    void end() const {
        if (taken_ == object_.size()) return;
        fail(Exit::data, "%s: has %zu keys, %zu are known", where_.c_str(), object_.size(), taken_);
    }

    const std::string& where() const { return where_; }

private:
    const Json& object_;
    std::string where_;
    size_t taken_ = 0;
};

// For error sentences: what a file says may hold control characters.
std::string in_quotes(const std::string& text) { return Json(text).dump(); }

bool is_hex(std::string_view text) { return text.find_first_not_of("0123456789abcdef") == std::string_view::npos; }

std::string crcs_to_hex(const std::vector<uint32_t>& crcs) {
    std::string hex;
    for (uint32_t crc : crcs) hex += format("%08x", crc);
    return hex;
}

std::vector<uint32_t> crcs_from_hex(const std::string& hex, size_t chunks, const std::string& where) {
    if (hex.size() != chunks * kCrcDigits || !is_hex(hex))
        fail(Exit::data, "%s: \"crc32c_of_each_mib\" must have %zu x %zu hexadecimal digits, has %zu", where.c_str(),
             chunks, kCrcDigits, hex.size());
    std::vector<uint32_t> crcs(chunks);
    for (size_t i = 0; i < chunks; i++)
        crcs[i] = uint32_t(std::stoul(hex.substr(i * kCrcDigits, kCrcDigits), nullptr, 16));
    return crcs;
}

Dtype dtype_from_name(const std::string& name, const std::string& where) {
    for (Dtype dtype : {Dtype::fp32, Dtype::bf16, Dtype::fp16})
        if (name == name_of(dtype)) return dtype;
    fail(Exit::data, "%s: \"dtype\" is %s, must be fp32, bf16 or fp16", where.c_str(), in_quotes(name).c_str());
}

bool fits(const TensorInfo& tensor) {
    size_t bytes = size_of(tensor.dtype);
    for (size_t dim : tensor.shape)
        if (__builtin_mul_overflow(bytes, dim, &bytes) || bytes > kMostBytes) return false;
    return true;
}

Json tensor_to_json(const TensorInfo& tensor) {
    return {{"name", tensor.name}, {"dtype", name_of(tensor.dtype)}, {"shape", tensor.shape}};
}

TensorInfo tensor_from_json(const Json& json, const std::string& where) {
    Fields fields(json, where);
    TensorInfo tensor;
    tensor.name = fields.text("name");
    bool has_control = std::any_of(tensor.name.begin(), tensor.name.end(), [](unsigned char c) { return c < ' '; });
    if (tensor.name.empty() || has_control)
        fail(Exit::data, "%s: %s is not a name", where.c_str(), in_quotes(tensor.name).c_str());
    tensor.dtype = dtype_from_name(fields.text("dtype"), where);
    for (const Json& dim : fields.list("shape")) {
        if (!dim.is_number_unsigned() || dim.get<uint64_t>() > kMostBytes)
            fail(Exit::data, "%s: \"shape\" of %s has the dimension %s", where.c_str(), tensor.name.c_str(),
                 dim.dump().c_str());
        tensor.shape.push_back(dim.get<size_t>());
    }
    fields.end();
    if (!fits(tensor)) fail(Exit::data, "%s: %s has more bytes than 63 bits count", where.c_str(), tensor.name.c_str());
    return tensor;
}

Json shard_to_json(const ShardFile& shard) {
    Json pieces = Json::array();
    for (const Piece& piece : shard.pieces)
        pieces.push_back({{"tensor", piece.tensor},
                          {"file_offset", piece.file_offset},
                          {"first", piece.first},
                          {"count", piece.count}});
    return {{"name", shard.name},         {"bytes", shard.bytes},
            {"xxh3_128", shard.xxh3_128}, {"crc32c_of_each_mib", crcs_to_hex(shard.chunk_crc32c)},
            {"finite", shard.finite},     {"pieces", pieces}};
}

Piece piece_from_json(const Json& json, const std::string& where) {
    Fields fields(json, where);
    Piece piece;
    piece.tensor = fields.text("tensor");
    piece.file_offset = fields.size("file_offset");
    piece.first = fields.size("first");
    piece.count = fields.size("count");
    fields.end();
    return piece;
}

ShardFile shard_from_json(const Json& json, const std::string& where) {
    Fields fields(json, where);
    ShardFile shard;
    shard.name = fields.text("name");
    shard.bytes = fields.size("bytes");
    shard.xxh3_128 = fields.text("xxh3_128");
    if (shard.xxh3_128.size() != kHashDigits || !is_hex(shard.xxh3_128))
        fail(Exit::data, "%s: \"xxh3_128\" must have %zu hexadecimal digits", where.c_str(), kHashDigits);
    size_t chunks = shard.bytes / kChunkBytes + (shard.bytes % kChunkBytes != 0);
    shard.chunk_crc32c = crcs_from_hex(fields.text("crc32c_of_each_mib"), chunks, where);
    shard.finite = fields.flag("finite");
    for (const Json& piece : fields.list("pieces"))
        shard.pieces.push_back(piece_from_json(piece, where + ": pieces[" + std::to_string(shard.pieces.size()) + "]"));
    fields.end();
    return shard;
}

CheckpointInfo info_from(Fields& fields) {
    CheckpointInfo info;
    info.step = fields.integer("step");
    if (info.step < 0) fail(Exit::data, "%s: \"step\" is %lld", fields.where().c_str(), (long long)info.step);
    info.parent_step = fields.integer("parent_step");
    info.run_id = fields.text("run_id");
    info.config = fields.text("config");
    info.config_digest = fields.text("config_digest");
    info.dataset_digest = fields.text("dataset_digest");
    info.healthy = fields.flag("healthy");
    info.state = fields.object("state");
    return info;
}

using TensorTable = std::map<std::string_view, const TensorInfo*>;

TensorTable tensors_by_name(const Manifest& manifest, const std::string& path) {
    TensorTable table;
    for (const TensorInfo& tensor : manifest.tensors)
        if (!table.emplace(tensor.name, &tensor).second)
            fail(Exit::data, "%s: tensor %s stands twice", path.c_str(), tensor.name.c_str());
    return table;
}

const TensorInfo& tensor_of(const Piece& piece, const TensorTable& table, const std::string& where) {
    auto found = table.find(piece.tensor);
    if (found == table.end())
        fail(Exit::data, "%s: has a piece of tensor %s, which is not listed", where.c_str(),
             in_quotes(piece.tensor).c_str());
    const TensorInfo& tensor = *found->second;
    size_t elements = elements_of(tensor);
    if (piece.count == 0 || piece.first > elements || piece.count > elements - piece.first)
        fail(Exit::data, "%s: elements [%zu, %zu + %zu) of tensor %s, which has %zu", where.c_str(), piece.first,
             piece.first, piece.count, tensor.name.c_str(), elements);
    return tensor;
}

// The file is its pieces one after the other, and nothing else.
void check_file_is_filled(const ShardFile& shard, const TensorTable& table, const std::string& path) {
    std::string where = path + ": " + shard.name;
    size_t end = 0;
    for (const Piece& piece : shard.pieces) {
        const TensorInfo& tensor = tensor_of(piece, table, where);
        size_t bytes = piece.count * size_of(tensor.dtype);
        if (end % size_of(tensor.dtype) != 0)
            fail(Exit::data, "%s: the piece of tensor %s is at offset %zu, which is not aligned", where.c_str(),
                 piece.tensor.c_str(), end);
        if (piece.file_offset != end || bytes > shard.bytes - end)
            fail(Exit::data,
                 "%s: the piece of tensor %s with %zu bytes is at offset %zu, must be at %zu and end by %zu",
                 where.c_str(), piece.tensor.c_str(), bytes, piece.file_offset, end, shard.bytes);
        end += bytes;
    }
    if (end != shard.bytes) fail(Exit::data, "%s: pieces end at %zu of %zu bytes", where.c_str(), end, shard.bytes);
}

// Each tensor's pieces, over all files, hold every element exactly once.
void check_tensors_are_whole(const Manifest& manifest, const std::string& path) {
    std::map<std::string_view, std::vector<std::pair<size_t, size_t>>> ranges;
    for (const ShardFile& shard : manifest.shards)
        for (const Piece& piece : shard.pieces) ranges[piece.tensor].emplace_back(piece.first, piece.count);
    for (const TensorInfo& tensor : manifest.tensors) {
        auto& pieces = ranges[tensor.name];
        std::sort(pieces.begin(), pieces.end());
        size_t end = 0;
        for (auto [first, count] : pieces) {
            if (first != end)
                fail(Exit::data, "%s: tensor %s: a piece begins at element %zu, must begin at %zu", path.c_str(),
                     tensor.name.c_str(), first, end);
            end += count;
        }
        if (end != elements_of(tensor))
            fail(Exit::data, "%s: tensor %s: pieces end at element %zu of %zu", path.c_str(), tensor.name.c_str(), end,
                 elements_of(tensor));
    }
}

void check_shards(const Manifest& manifest, const std::string& path) {
    if (manifest.world_size < 1 || manifest.shards.size() != size_t(manifest.world_size))
        fail(Exit::data, "%s: \"world_size\" is %d, there are %zu shards", path.c_str(), manifest.world_size,
             manifest.shards.size());
    TensorTable table = tensors_by_name(manifest, path);
    for (size_t rank = 0; rank < manifest.shards.size(); rank++) {
        const ShardFile& shard = manifest.shards[rank];
        if (shard.name != shard_name(int(rank)))
            fail(Exit::data, "%s: shard %zu is called %s, must be %s", path.c_str(), rank,
                 in_quotes(shard.name).c_str(), shard_name(int(rank)).c_str());
        check_file_is_filled(shard, table, path);
    }
    check_tensors_are_whole(manifest, path);
}

void check_format(Fields& fields) {
    std::string form = fields.text("format");
    if (form != kFormat)
        fail(Exit::data, "%s: \"format\" is %s, must be \"%s\"", fields.where().c_str(), in_quotes(form).c_str(),
             kFormat);
    int64_t version = fields.integer("version");
    if (version != kCheckpointVersion)
        fail(Exit::data, "%s: is of version %lld, this program reads version %d", fields.where().c_str(),
             (long long)version, kCheckpointVersion);
}

}  // namespace

size_t elements_of(const TensorInfo& tensor) {
    if (!fits(tensor)) fail(Exit::data, "tensor %s has more bytes than 63 bits count", tensor.name.c_str());
    size_t elements = 1;
    for (size_t dim : tensor.shape) elements *= dim;
    return elements;
}

size_t bytes_of(const TensorInfo& tensor) { return elements_of(tensor) * size_of(tensor.dtype); }

std::string shard_name(int rank) { return format("shard_%04d.bin", rank); }

std::string shard_to_text(const ShardFile& shard) { return shard_to_json(shard).dump(); }

ShardFile shard_from_text(std::string_view text, const std::string& path) {
    return shard_from_json(parse_json(text, path, Exit::data), path);
}

std::string manifest_to_text(const Manifest& manifest) {
    Json tensors = Json::array(), shards = Json::array();
    for (const TensorInfo& tensor : manifest.tensors) tensors.push_back(tensor_to_json(tensor));
    for (const ShardFile& shard : manifest.shards) shards.push_back(shard_to_json(shard));
    const CheckpointInfo& info = manifest.info;
    Json json = {{"format", kFormat},
                 {"version", kCheckpointVersion},
                 {"step", info.step},
                 {"parent_step", info.parent_step},
                 {"run_id", info.run_id},
                 {"config", info.config},
                 {"config_digest", info.config_digest},
                 {"dataset_digest", info.dataset_digest},
                 {"healthy", info.healthy},
                 {"state", info.state},
                 {"world_size", manifest.world_size},
                 {"tensors", tensors},
                 {"shards", shards}};
    return json.dump(1) + "\n";
}

Manifest manifest_from_text(std::string_view text, const std::string& path) {
    Json json = parse_json(text, path, Exit::data);
    Fields fields(json, path);
    check_format(fields);
    Manifest manifest;
    manifest.info = info_from(fields);
    int64_t world_size = fields.integer("world_size");
    if (world_size > std::numeric_limits<int>::max())
        fail(Exit::data, "%s: \"world_size\" is %lld", path.c_str(), (long long)world_size);
    manifest.world_size = int(world_size);
    for (const Json& tensor : fields.list("tensors"))
        manifest.tensors.push_back(
            tensor_from_json(tensor, path + ": tensors[" + std::to_string(manifest.tensors.size()) + "]"));
    for (const Json& shard : fields.list("shards"))
        manifest.shards.push_back(
            shard_from_json(shard, path + ": shards[" + std::to_string(manifest.shards.size()) + "]"));
    fields.end();
    check_shards(manifest, path);
    return manifest;
}

bool is_newer_manifest(std::string_view text, const std::string& path) {
    try {
        Json json = parse_json(text, path, Exit::data);
        Fields fields(json, path);
        return fields.text("format") == kFormat && fields.integer("version") > kCheckpointVersion;
    } catch (const Error&) {
        return false;
    }
}
