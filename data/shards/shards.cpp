#include "data/shards/shards.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <map>

#include "data/shards/dataset_record.h"
#include "runtime/io/digest.h"
#include "runtime/io/header_word.h"
#include "runtime/io/installation.h"
#include "runtime/io/process.h"
#include "runtime/io/reject_file.h"

static constexpr std::string_view kLlmqMagic = "BIN.TOK\n";
static constexpr size_t kBufferBytes = size_t(1) << 20;  // bytes per write
static constexpr int32_t kLlmcGpt2Magic = 20240520, kLlmcLlamaMagic = 20240801, kNemoMagic = 278895051;

// The data sets of data/get.sh; test_get.py compares the lists.
static constexpr const char* kPublicDatasets[] = {"tinyshakespeare", "tinystories",   "openwebtext",
                                                  "fineweb10B",      "finewebedu10B", "hellaswag"};

std::vector<std::string> find_shards(const std::string& pattern, const std::string& key) {
    try {
        return expand_glob(pattern, key);
    } catch (const Error& error) {
        const std::string name = std::filesystem::path(pattern).parent_path().filename();
        const std::string script = data_directory("get.sh");
        const bool is_public = std::ranges::find(kPublicDatasets, name) != std::end(kPublicDatasets);
        if (error.code != Exit::no_input || !is_public || !file_exists(script)) throw;
        fail(Exit::no_input, "%s; to download the data set, run %s %s", error.what(), command_path(script), name);
    }
}

std::optional<ShardHeader> shard_header(std::string_view bytes) {
    auto word = [&](size_t index) { return header_word(bytes, index); };
    if (bytes.starts_with(kLlmqMagic))
        return ShardHeader{"LLM.Q token file", word(2), 2, word(3), word(4), word(6) == 1};
    switch (word(0)) {
        case kNemoMagic: return ShardHeader{"NeMo token shard", word(1), 1, word(3), word(2), false};
        case kLlmcLlamaMagic: return ShardHeader{"llm.c token shard (Llama 3)", word(1), 7, 4, word(2), false};
        case kLlmcGpt2Magic: return ShardHeader{"llm.c token shard (GPT-2)", word(1), 1, 2, word(2), false};
        default: return std::nullopt;
    }
}

uint64_t ShardHeader::file_bytes() const {
    const uint64_t count = uint64_t(token_count);
    return kShardHeaderBytes + count * uint64_t(token_bytes) + (is_masked ? (count + 7) / 8 : 0);
}

static ShardHeader checked_header(const InputFile& file) {
    const std::string& path = file.path();
    std::string bytes(std::min(file.size(), kShardHeaderBytes), '\0');
    file.read_at(0, bytes.data(), bytes.size());
    const std::optional<ShardHeader> header = shard_header(bytes);
    if (!header) {
        const std::string content = describe_content(bytes, file.size());
        const bool is_input = content == "plain text" || content == "unknown binary data";
        reject_file(path, "not a token shard: it has %zu bytes and looks like %s%s", file.size(), content,
                    is_input ? "; prepare converts text and nanoGPT's .bin files to token shards" : "");
    }
    if (bytes.size() < kShardHeaderBytes)
        reject_file(path, "the header of a token shard has %zu bytes, but the file ends after %zu", kShardHeaderBytes,
                    bytes.size());
    if (header->version != header->supported_version)
        reject_file(path, "%s of version %d; only version %d is supported", header->name, header->version,
                    header->supported_version);
    if (header->token_bytes != 2 && header->token_bytes != 4)
        reject_file(path, "%s with %d bytes per token; only 2 and 4 are supported", header->name, header->token_bytes);
    if (header->token_count < 0)
        reject_file(path, "the header of this %s says %d tokens", header->name, header->token_count);
    if (file.size() != header->file_bytes())
        reject_file(path, "the header of this %s says %d tokens, which make %zu bytes, but the file has %zu%s",
                    header->name, header->token_count, header->file_bytes(), file.size(),
                    file.size() < header->file_bytes() ? ": it was cut short" : "");
    return *header;
}

TokenShard::TokenShard(const std::string& path, const std::string& checksums)
    : file_(path), header_(checked_header(file_)) {
    if (checksums.empty()) return;
    std::optional<BlockChecksums> expected =
        BlockChecksums::parse(checksums, token_count() * uint64_t(header_.token_bytes));
    if (!expected)
        reject_file(path, "has %zu tokens of %d bytes, but dataset.json in its directory has %zu digits of checksums",
                    token_count(), header_.token_bytes, checksums.size());
    const size_t blocks = expected->blocks();
    checks_.reset(new Checks{std::move(*expected), std::vector<std::atomic<bool>>(blocks)});
}

void TokenShard::read(uint64_t index, size_t count, uint32_t* ids) const {
    const size_t width = size_t(header_.token_bytes), begin = kShardHeaderBytes + size_t(index) * width;
    if (width == sizeof(uint32_t)) return read_bytes(begin, count * width, ids);
    std::array<uint16_t, 8192> piece;
    for (size_t done = 0; done < count;) {
        const size_t now = std::min(count - done, piece.size());
        read_bytes(begin + done * width, now * width, piece.data());
        std::copy_n(piece.begin(), now, ids + done);
        done += now;
    }
}

void TokenShard::read_bytes(size_t offset, size_t count, void* bytes) const {
    if (checks_) verify(offset, offset + count);
    file_.read_at(offset, bytes, count);
}

// Verifies the blocks that overlap bytes [begin, end) of the file and have not been verified yet.
void TokenShard::verify(size_t begin, size_t end) const {
    constexpr size_t kBlock = BlockChecksums::kBlockBytes;
    const size_t all = kShardHeaderBytes + size_t(checks_->expected.bytes());  // a loss mask may follow
    begin = std::max(begin, kShardHeaderBytes), end = std::min(end, all);
    for (size_t block = (begin - kShardHeaderBytes) / kBlock; kShardHeaderBytes + block * kBlock < end; block++) {
        if (checks_->verified[block].load(std::memory_order_relaxed)) continue;
        std::array<char, kBlock> content;
        const size_t offset = kShardHeaderBytes + block * kBlock, count = std::min(kBlock, all - offset);
        const uint32_t expected = checks_->expected[block];
        const uint32_t actual = file_.read_checked(offset, content.data(), count, expected);
        if (actual != expected)
            reject_file(file_.path(),
                        "damaged in the %zu bytes from offset %zu: their CRC32C is %08x, dataset.json records %08x",
                        count, offset, actual, expected);
        checks_->verified[block].store(true, std::memory_order_relaxed);
    }
}

// ---------------------------------------------------------------------------------------------------------------------

TokenStream::TokenStream(const std::vector<std::string>& paths, int vocab_size) : vocab_size_(vocab_size) {
    allow_open_files(paths.size());
    std::map<std::string, DatasetRecord> records;  // by directory
    for (const std::string& path : paths) {
        const std::string directory = directory_of(path), name = std::filesystem::path(path).filename();
        if (!records.contains(directory)) records[directory] = find_dataset_record(directory).value_or(DatasetRecord());
        shards_.emplace_back(path, records[directory].checksums_of(name));
        begins_.push_back(token_count() + shards_.back().token_count());
    }
}

size_t TokenStream::shard_at(uint64_t position) const {
    return size_t(std::upper_bound(begins_.begin(), begins_.end(), position) - begins_.begin()) - 1;
}

void TokenStream::read(uint64_t position, size_t count, int32_t* out) const {
    require(position <= token_count() && count <= token_count() - position, "tokens: [%zu, %zu) is outside [0, %zu)",
            position, (position + count), token_count());
    for (size_t shard = shard_at(position); count > 0; shard++) {
        const uint64_t first = position - begins_[shard];
        const size_t here = size_t(std::min<uint64_t>(count, begins_[shard + 1] - position));
        shards_[shard].read(first, here, reinterpret_cast<uint32_t*>(out));
        for (size_t i = 0; i < here; i++)
            if (uint32_t(out[i]) >= uint32_t(vocab_size_))
                reject_file(shards_[shard].file().path(), "token %zu is %u, but the vocabulary has %d tokens",
                            first + i, uint32_t(out[i]), vocab_size_);
        position += here, count -= here, out += here;
    }
}

static std::string base_name(const TokenShard& shard) { return std::filesystem::path(shard.file().path()).filename(); }

// Verifies checksums before hashing, so that no run stores the digest of damaged data.
static void add_content(Digest& digest, const TokenShard& shard) {
    constexpr size_t kWholeBytes = size_t(4) << 20, kEndBytes = size_t(1) << 20, kBlockBytes = 4096, kBlocks = 64;
    std::string bytes;
    auto add = [&](size_t offset, size_t count) {
        bytes.resize(count);
        shard.read_bytes(offset, count, bytes.data());
        digest.add(bytes);
    };
    const size_t size = shard.file().size();
    if (size <= kWholeBytes) return add(0, size);
    const size_t middle = size - 2 * kEndBytes, stride = (middle - kBlockBytes) / (kBlocks - 1);
    add(0, kEndBytes);
    for (size_t block = 0; block < kBlocks; block++) add(kEndBytes + block * stride, kBlockBytes);
    add(size - kEndBytes, kEndBytes);
}

std::string TokenStream::digest() const {
    Digest digest;
    for (const TokenShard& shard : shards_) {
        const std::string name = base_name(shard);
        digest.add_number(name.size());
        digest.add_number(shard.file().size());
        digest.add(name);
        add_content(digest, shard);
    }
    return digest.hex();
}

std::string TokenStream::description() const {
    if (shards_.empty()) return "no shards";
    const std::string first = base_name(shards_.front());
    return shards_.size() == 1 ? first : format("%s and %zu more", first.c_str(), shards_.size() - 1);
}

// ---------------------------------------------------------------------------------------------------------------------

ShardWriter::ShardWriter(const std::string& directory, const std::string& split, int vocab_size, uint64_t shard_tokens,
                         uint64_t written, const std::vector<std::string>& checksums)
    : directory_(directory),
      split_(split),
      vocab_size_(vocab_size),
      token_bytes_(vocab_size <= 65536 ? 2 : 4),
      shard_tokens_(shard_tokens),
      token_count_(written) {
    if (written == 0) return;
    while (names_.size() * shard_tokens < written) add_name();
    shard_fill_ = written - (names_.size() - 1) * shard_tokens;
    if (checksums.size() != names_.size())
        fail(Exit::data, "%s: cannot resume: %zu shards were written, but %zu have checksums", directory, names_.size(),
             checksums.size());
    for (size_t i = 0; i < names_.size(); i++) {
        const uint64_t tokens = i + 1 < names_.size() ? shard_tokens : shard_fill_;
        const std::optional<BlockChecksums> parsed = BlockChecksums::parse(checksums[i], tokens * token_bytes_);
        if (!parsed) reject_file(directory_ + "/" + names_[i], "the checksums do not match %zu tokens", tokens);
        checksums_.push_back(*parsed);
    }
    file_ = OutputFile::open_to_continue(directory_ + "/" + names_.back(),
                                         kShardHeaderBytes + size_t(shard_fill_) * token_bytes_);
}

void ShardWriter::append(std::span<const int32_t> ids) {
    while (!ids.empty()) {
        if (names_.empty() || shard_fill_ == shard_tokens_) open_next();
        const size_t count = std::min(ids.size(), size_t(shard_tokens_ - shard_fill_)), filled = buffer_.size();
        buffer_.resize(filled + count * token_bytes_);
        char* out = buffer_.data() + filled;
        uint32_t largest = 0;
        for (const int32_t& id : ids.first(count)) {
            largest = std::max(largest, uint32_t(id));
            std::memcpy(out, &id, token_bytes_ == 2 ? 2 : 4);  // little-endian: the low bytes come first
            out += token_bytes_;
        }
        require(largest < uint32_t(vocab_size_), "shards: token %d is outside the vocabulary of %d", int(largest),
                vocab_size_);
        if (buffer_.size() >= kBufferBytes) flush();
        shard_fill_ += count, token_count_ += count;
        ids = ids.subspan(count);
    }
}

void ShardWriter::add_name() { names_.push_back(format("%s_%06zu.bin", split_.c_str(), names_.size())); }

void ShardWriter::open_next() {
    close_current();
    add_name();
    checksums_.emplace_back();
    file_ = OutputFile(directory_ + "/" + names_.back());
    file_.append(std::string(kShardHeaderBytes, '\0'));
    shard_fill_ = 0;
}

void ShardWriter::sync() {
    if (names_.empty()) return;
    flush();
    file_.sync();
    sync_directory(directory_);
}

void ShardWriter::flush() {
    file_.append(buffer_);
    checksums_.back().add(buffer_);
    buffer_.clear();
}

void ShardWriter::close_current() {
    if (names_.empty()) return;
    flush();
    file_.sync();  // the tokens must be on disk before the header
    bool is_wide = token_bytes_ == 4;
    int32_t words[3] = {is_wide ? kLlmcLlamaMagic : kLlmcGpt2Magic, is_wide ? 7 : 1, int32_t(shard_fill_)};
    file_.write_at(0, words, sizeof(words));
    file_.sync();
    file_.close();
}

void ShardWriter::finish() {
    close_current();
    sync_directory(directory_);
}

std::vector<std::string> ShardWriter::checksums() const {
    std::vector<std::string> all;
    for (const BlockChecksums& shard : checksums_) all.push_back(shard.hex());
    return all;
}
