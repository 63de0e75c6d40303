
#include "runtime/checkpoint/manifest.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "runtime/checkpoint/fields.h"
#include "runtime/checkpoint/train_state.h"
#include "runtime/io/joined.h"
#include "runtime/io/json.h"
#include "runtime/io/reject_file.h"

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kFormat = "train_gpt checkpoint";
constexpr size_t kMaxBytes = std::numeric_limits<int64_t>::max();
constexpr size_t kHashDigits = 32;

}  // namespace

// ---- the members of each object, in the order of the file -----------------------------------------------------------

template <class Fields> static void describe(Fields& field, NamedTensor& tensor) {
    field("name", tensor.name);
    field("dtype", tensor.values.dtype);
    field("shape", tensor.shape);
}

template <class Fields> static void describe(Fields& field, Box& box) {
    field("row", box.row);
    field("rows", box.rows, 1);
    field("col", box.col);
    field("cols", box.cols, 1);
}

template <class Fields> static void describe(Fields& field, Piece& piece) {
    field("tensor", piece.tensor);
    field("file_offset", piece.file_offset);
    field("first", piece.first);
    field("count", piece.count, 1);
    field.optional("box", piece.box);
}

template <class Fields> static void describe(Fields& field, ShardFile& shard) {
    field("name", shard.name);
    field("bytes", shard.bytes);
    field("xxh3_128", shard.xxh3_128);
    field("crc32c_of_each_mib", shard.block_crc32cs);
    field("finite", shard.finite);
    field("pieces", shard.pieces);
}

template <class Fields> static void describe(Fields& field, Manifest& manifest) {
    field("step", manifest.info.step, 0, kMaxSteps);
    field("parent_step", manifest.info.parent_step, -1, kMaxSteps);
    field("run_id", manifest.info.run_id);
    field("config", manifest.info.config);
    field("config_digest", manifest.info.config_digest);
    field("dataset_digest", manifest.info.dataset_digest);
    field("healthy", manifest.info.healthy);
    field("state", manifest.info.progress);
    field("world_size", manifest.world_size, 1);
    field("tensors", manifest.tensors);
    field("shards", manifest.shards);
}

// ---- consistency between objects ------------------------------------------------------------------------------------

namespace {

// Returns the bytes of the whole tensor; nothing if they do not fit into 63 bits.
std::optional<size_t> bytes_if_few(const NamedTensor& tensor) {
    size_t bytes = size_of(tensor.values.dtype);
    for (size_t dim : tensor.shape)
        if (__builtin_mul_overflow(bytes, dim, &bytes) || bytes > kMaxBytes) return std::nullopt;
    return bytes;
}

// Checks that no count of steps exceeds the number of steps done.
void check_counts(const TrainState& state, const std::string& path) {
    const TrainState::Progress& progress = state.progress;
    for (const auto& [key, count] :
         {std::pair{"parent_step", state.parent_step},
          {"state.updates", progress.updates},
          {"state.loss_scale.good_steps", int64_t(progress.loss_scale.good_steps)},
          {"state.loss_scale.skipped_in_a_row", int64_t(progress.loss_scale.skipped_in_a_row)},
          {"state.loss_scale.total_skipped", progress.loss_scale.total_skipped},
          {"state.loss_scale.last_good_step", int64_t(progress.loss_scale.last_good_step)},
          {"state.best_validation.step", int64_t(progress.best.step)}})
        if (count > state.step) reject_file(path, "%s is %ld, but step is %d", key, count, state.step);
}

// Checks the number of digits only; their values are verified when the shard file is read.
void check_digits(const ShardFile& shard, const std::string& path) {
    if (shard.xxh3_128.size() != kHashDigits)
        reject_file(path, "xxh3_128 must have %zu hexadecimal digits", kHashDigits);
    const size_t blocks = shard.bytes / kBlockBytes + (shard.bytes % kBlockBytes != 0);
    if (shard.block_crc32cs.size() != blocks * kCrcDigits)
        reject_file(path, "crc32c_of_each_mib must have %zu x %zu hexadecimal digits, has %zu", blocks, kCrcDigits,
                    shard.block_crc32cs.size());
}

// A tensor and its pieces in the files.
struct Coverage {
    const NamedTensor* tensor;
    std::vector<Piece> pieces = {};
};
using Coverages = std::map<std::string_view, Coverage>;

// "rows [0, 0 + 4), columns [8, 8 + 8) of ", or nothing for the whole tensor.
std::string box_text(const Box& box) {
    if (box.rows == 0) return "";
    return format("rows [%zu, %zu + %zu), columns [%zu, %zu + %zu) of ", box.row, box.row, box.rows, box.col, box.col,
                  box.cols);
}

// Checks that the pieces fill the file in order, without gaps.
void check_file_is_filled(const ShardFile& shard, Coverages& coverages, const std::string& path) {
    const std::string where = path + ": " + shard.name;
    size_t end = 0;
    for (const Piece& piece : shard.pieces) {
        const auto found = coverages.find(piece.tensor);
        if (found == coverages.end())
            fail(Exit::data, "%s has a piece of tensor %s, which is not listed", where, printed(piece.tensor));
        const NamedTensor& tensor = *found->second.tensor;
        const size_t element = size_of(tensor.values.dtype);
        if (!is_within(piece, tensor.shape))
            reject_file(where, "elements [%zu, %zu + %zu) of %stensor %s, which has %zu in shape %s", piece.first,
                        piece.first, piece.count, box_text(piece.box), tensor.name, elements_of(tensor),
                        shape_text(tensor.shape));
        const size_t bytes = piece.count * element;
        if (piece.file_offset != end || end % element != 0 || bytes > shard.bytes - end)
            reject_file(where,
                        "the piece of tensor %s with %zu bytes is at offset %zu, must be at %zu, aligned to %zu bytes, "
                        "and end by %zu",
                        tensor.name, bytes, piece.file_offset, end, element, shard.bytes);
        found->second.pieces.push_back(piece);
        end += bytes;
    }
    if (end != shard.bytes) reject_file(where, "pieces end at %zu of %zu bytes", end, shard.bytes);
}

// Checks that the pieces of a tensor in all files cover every element exactly once.
void check_tensor_is_whole(const Coverage& coverage, const std::string& path) {
    const NamedTensor& tensor = *coverage.tensor;
    if (const auto found = find_overlap(coverage.pieces, tensor.shape))
        reject_file(path, "tensor %s: two pieces have row %zu, column %zu", tensor.name, found->row, found->col);
    size_t count = 0;
    for (const Piece& piece : coverage.pieces) count += piece.count;
    if (const size_t elements = elements_of(tensor); count != elements)
        reject_file(path, "tensor %s: its pieces have %zu of %zu elements", tensor.name, count, elements);
}

void check_shards(const Manifest& manifest, const std::string& path) {
    if (manifest.shards.size() != size_t(manifest.world_size))
        reject_file(path, "world_size is %d, but %zu shards are listed", manifest.world_size, manifest.shards.size());
    Coverages coverages;
    for (const NamedTensor& tensor : manifest.tensors) {
        const std::string& name = tensor.name;
        if (!is_name(name)) reject_file(path, "%s is not a valid name", printed(name));
        if (!bytes_if_few(tensor)) reject_file(path, "tensor %s has more bytes than fit into 63 bits", name);
        if (!coverages.emplace(name, Coverage{&tensor}).second) reject_file(path, "tensor %s is listed twice", name);
    }
    for (int rank = 0; rank < manifest.world_size; rank++) {
        const ShardFile& shard = manifest.shards[size_t(rank)];
        if (shard.name != shard_name(rank))
            reject_file(path, "the name of shard %d is %s, must be %s", rank, printed(shard.name), shard_name(rank));
        check_digits(shard, path + ": " + shard.name);
        check_file_is_filled(shard, coverages, path);
    }
    for (const auto& [name, coverage] : coverages) check_tensor_is_whole(coverage, path);
}

}  // namespace

bool Manifest::is_finite() const { return std::ranges::all_of(shards, &ShardFile::finite); }

size_t elements_of(const NamedTensor& tensor) { return bytes_of(tensor) / size_of(tensor.values.dtype); }

size_t bytes_of(const NamedTensor& tensor) {
    const std::optional<size_t> bytes = bytes_if_few(tensor);
    if (!bytes) fail(Exit::data, "tensor %s has more bytes than fit into 63 bits", tensor.name);
    return *bytes;
}

bool is_name(const std::string& text) {
    return !text.empty() && std::ranges::none_of(text, [](unsigned char c) { return c < ' ' || c == 127; });
}

std::string shape_text(const std::vector<size_t>& shape) { return "(" + joined(shape) + ")"; }

void NoiseScale::add(double small_squared, double small_tokens, double squared, double tokens) {
    const double new_noise = (small_squared - squared) / (1 / small_tokens - 1 / tokens);
    const double new_signal = (tokens * squared - small_tokens * small_squared) / (tokens - small_tokens);
    noise = kDecay * noise + (1 - kDecay) * new_noise;
    signal = kDecay * signal + (1 - kDecay) * new_signal;
}

std::optional<double> NoiseScale::tokens() const { return signal > 0 ? std::optional(noise / signal) : std::nullopt; }

bool BestValidation::note(double new_loss, int new_step) {
    const bool is_best = std::isfinite(new_loss) && (step == 0 || new_loss < loss);
    *this = is_best ? BestValidation{new_loss, new_step, 0} : BestValidation{loss, step, worse_since + 1};
    return is_best;
}

std::string shard_name(int rank) { return format("shard_%04d.bin", rank); }

std::string shard_to_text(const ShardFile& shard) { return Json(shard).dump(); }

ShardFile shard_from_text(std::string_view text, const std::string& path) {
    return value_of<ShardFile>(parse_json(text, path, Exit::data), path, ": ");
}

std::string manifest_to_text(const Manifest& manifest) {
    Json json = {{"format", kFormat}, {"version", kCheckpointVersion}};
    json.update(Json(manifest));
    return json.dump(1) + "\n";
}

Manifest manifest_from_text(std::string_view text, const std::string& path) {
    const Json json = parse_json(text, path, Exit::data);
    FieldReader field(json, path, ": ");
    std::string kind;
    field("format", kind);
    if (kind != kFormat) reject_file(path, "format is %s, must be \"%s\"", printed(kind), kFormat);
    int version = 0;
    field("version", version);
    const std::string mismatch =
        format("%s has version %d, this program reads versions 1 to %d", path.c_str(), version, kCheckpointVersion);
    if (version > kCheckpointVersion) throw NewerVersion(Exit::data, mismatch);
    if (version < 1) fail(Exit::data, "%s", mismatch);
    Manifest manifest;
    describe(field, manifest);
    field.end();
    check_counts(manifest.info, path);
    check_shards(manifest, path);
    return manifest;
}
