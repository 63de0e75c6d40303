#include "data/shards.h"

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "data/digest.h"
#include "data/reject_file.h"

static constexpr std::string_view kLlmqMagic = "BIN.TOK\n";
static constexpr size_t kBufferBytes = size_t(1) << 20;  // written at a time
static constexpr int32_t kLlmcGpt2Magic = 20240520, kLlmcLlamaMagic = 20240801, kNemoMagic = 278895051;

// The data sets that data/get.sh downloads; test_get.py compares.
static constexpr const char* kPublicDatasets[] = {"tinyshakespeare", "tinystories",   "openwebtext",
                                                  "fineweb10B",      "finewebedu10B", "hellaswag"};

std::vector<std::string> find_shards(const std::string& pattern, const std::string& key) {
    try {
        return expand_glob(pattern, key);
    } catch (const Error& error) {
        const std::string name = std::filesystem::path(pattern).parent_path().filename();
        const std::string script = data_directory("get.sh");
        const bool is_public =
            std::find(std::begin(kPublicDatasets), std::end(kPublicDatasets), name) != std::end(kPublicDatasets);
        if (error.code != Exit::no_input || !is_public || !file_exists(script)) throw;
        fail(Exit::no_input, "%s; to download this data set: %s %s", std::string(error.what()), path_to_type(script),
             name);
    }
}

int32_t header_word(std::string_view bytes, size_t index) {
    int32_t word = 0;
    if (bytes.size() >= 4 * (index + 1)) std::memcpy(&word, bytes.data() + 4 * index, 4);
    return word;
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

static ShardHeader checked_header(const std::string& path, std::string_view bytes) {
    const std::optional<ShardHeader> header = shard_header(bytes);
    if (!header)
        reject_file(path, "not a token shard: it has %zu bytes and looks like %s", bytes.size(),
                    describe_content(bytes.substr(0, kShardHeaderBytes), bytes.size()));
    if (bytes.size() < kShardHeaderBytes)
        reject_file(path, "the header of a token shard has %zu bytes, but the file ends after %zu", kShardHeaderBytes,
                    bytes.size());
    if (header->version != header->supported_version)
        reject_file(path, "%s of version %d, but only version %d is supported", header->name, header->version,
                    header->supported_version);
    if (header->token_bytes != 2 && header->token_bytes != 4)
        reject_file(path, "%s with %d bytes per token, but only 2 and 4 are supported", header->name,
                    header->token_bytes);
    if (header->token_count < 0)
        reject_file(path, "the header of this %s says %d tokens", header->name, header->token_count);
    if (bytes.size() != header->file_bytes())
        reject_file(path, "the header of this %s says %d tokens, which make %zu bytes, but the file has %zu%s",
                    header->name, header->token_count, header->file_bytes(), bytes.size(),
                    bytes.size() < header->file_bytes() ? ": it was cut short" : "");
    return *header;
}

TokenShard::TokenShard(const std::string& path) : file(path), header(checked_header(path, file.text())) {}

uint32_t TokenShard::token(uint64_t index) const {
    const std::byte* ids = file.data() + kShardHeaderBytes;
    return header.token_bytes == 2 ? reinterpret_cast<const uint16_t*>(ids)[index]
                                   : reinterpret_cast<const uint32_t*>(ids)[index];
}

// ---------------------------------------------------------------------------------------------------------------------

TokenStream::TokenStream(const std::vector<std::string>& paths, int vocab_size) : vocab_size_(vocab_size) {
    for (const std::string& path : paths) {
        shards_.emplace_back(path);
        begins_.push_back(token_count() + shards_.back().token_count());
    }
}

void TokenStream::read(uint64_t position, size_t count, int32_t* out) const {
    require(position <= token_count() && count <= token_count() - position, "tokens: no tokens [%zu, %zu) of %zu",
            position, (position + count), token_count());
    size_t shard = size_t(std::upper_bound(begins_.begin(), begins_.end(), position) - begins_.begin()) - 1;
    for (size_t i = 0; i < count; i++, position++) {
        while (position >= begins_[shard + 1]) shard++;
        const uint32_t id = shards_[shard].token(position - begins_[shard]);
        if (id >= uint32_t(vocab_size_))
            reject_file(shards_[shard].file.path(), "token %zu is %u, but the vocabulary has %d tokens",
                        (position - begins_[shard]), id, vocab_size_);
        out[i] = int32_t(id);
    }
}

static std::string base_name(const TokenShard& shard) { return std::filesystem::path(shard.file.path()).filename(); }

static void add_content(Digest& digest, std::string_view bytes) {
    constexpr size_t kWholeBytes = size_t(4) << 20, kEndBytes = size_t(1) << 20, kBlockBytes = 4096, kBlocks = 64;
    if (bytes.size() <= kWholeBytes) return digest.add(bytes);
    std::string_view middle = bytes.substr(kEndBytes, bytes.size() - 2 * kEndBytes);
    size_t stride = (middle.size() - kBlockBytes) / (kBlocks - 1);
    digest.add(bytes.substr(0, kEndBytes));
    for (size_t block = 0; block < kBlocks; block++) digest.add(middle.substr(block * stride, kBlockBytes));
    digest.add(bytes.substr(bytes.size() - kEndBytes));
}

std::string TokenStream::digest() const {
    Digest digest;
    for (const TokenShard& shard : shards_) {
        const std::string name = base_name(shard);
        digest.add_number(name.size());
        digest.add_number(shard.file.size());
        digest.add(name);
        add_content(digest, shard.file.text());
    }
    return digest.hex();
}

std::string TokenStream::description() const {
    if (shards_.empty()) return "no shard";
    const std::string first = base_name(shards_.front());
    return shards_.size() == 1 ? first : format("%s and %zu more", first.c_str(), shards_.size() - 1);
}

// ---------------------------------------------------------------------------------------------------------------------

ShardWriter::ShardWriter(const std::string& directory, const std::string& split, int vocab_size, uint64_t shard_tokens,
                         uint64_t written)
    : directory_(directory),
      split_(split),
      vocab_size_(vocab_size),
      token_bytes_(vocab_size <= 65536 ? 2 : 4),
      shard_tokens_(shard_tokens),
      token_count_(written) {
    if (written == 0) return;
    while (names_.size() * shard_tokens < written) add_name();
    shard_fill_ = written - (names_.size() - 1) * shard_tokens;
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
            std::memcpy(out, &id, token_bytes_ == 2 ? 2 : 4);  // little-endian: the low bytes are first
            out += token_bytes_;
        }
        require(largest < uint32_t(vocab_size_), "shards: token %d in a vocabulary of %d", int(largest), vocab_size_);
        if (buffer_.size() >= kBufferBytes) flush();
        shard_fill_ += count, token_count_ += count;
        ids = ids.subspan(count);
    }
}

void ShardWriter::add_name() { names_.push_back(format("%s_%06zu.bin", split_.c_str(), names_.size())); }

void ShardWriter::open_next() {
    close_current();
    add_name();
    file_ = OutputFile(directory_ + "/" + names_.back());
    buffer_.assign(kShardHeaderBytes, '\0');
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
    buffer_.clear();
}

void ShardWriter::close_current() {
    if (names_.empty()) return;
    flush();
    file_.sync();  // the tokens are on disk before the header says so
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
