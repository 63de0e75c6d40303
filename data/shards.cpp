#include "data/shards.h"

#include <algorithm>
#include <cstring>

#include "data/reject_file.h"
#include "kernels/check.h"

static constexpr std::string_view kLlmqMagic = "BIN.TOK\n";
static constexpr int32_t kLlmcGpt2Magic = 20240520, kLlmcLlamaMagic = 20240801, kNemoMagic = 278895051;
static constexpr size_t kWriteBufferBytes = size_t(1) << 20;

int32_t header_word(std::string_view bytes, size_t index) {
    int32_t word = 0;
    if (bytes.size() >= 4 * (index + 1)) std::memcpy(&word, bytes.data() + 4 * index, 4);
    return word;
}

bool is_token_shard(std::string_view first_bytes) {
    const int32_t magic = header_word(first_bytes, 0);
    return first_bytes.starts_with(kLlmqMagic) || magic == kLlmcGpt2Magic || magic == kLlmcLlamaMagic ||
           magic == kNemoMagic;
}

// The fields of a header, whose order depends on its format.
struct HeaderFields {
    const char* name;
    int32_t version, supported_version, token_bytes, token_count;
    bool masked;
};

static HeaderFields header_fields(std::string_view bytes) {
    auto word = [&](size_t index) { return header_word(bytes, index); };
    if (bytes.starts_with(kLlmqMagic)) return {"LLM.Q token file", word(2), 2, word(3), word(4), word(6) == 1};
    if (word(0) == kNemoMagic) return {"NeMo token shard", word(1), 1, word(3), word(2), false};
    if (word(0) == kLlmcLlamaMagic) return {"llm.c token shard (Llama 3)", word(1), 7, 4, word(2), false};
    return {"llm.c token shard (GPT-2)", word(1), 1, 2, word(2), false};
}

static ShardLayout read_layout(const std::string& path, std::string_view bytes) {
    if (!is_token_shard(bytes))
        reject_file(path, "not a token shard: it has %zu bytes and looks like %s", bytes.size(),
                    describe_content(bytes.substr(0, kShardHeaderBytes), bytes.size()));
    if (bytes.size() < kShardHeaderBytes)
        reject_file(path, "the header of a token shard has %zu bytes, but the file ends after %zu", kShardHeaderBytes,
                    bytes.size());

    HeaderFields header = header_fields(bytes);
    if (header.version != header.supported_version)
        reject_file(path, "%s of version %d, but only version %d is supported", header.name, header.version,
                    header.supported_version);
    if (header.token_bytes != 2 && header.token_bytes != 4)
        reject_file(path, "%s with %d bytes per token, but only 2 and 4 are supported", header.name,
                    header.token_bytes);
    if (header.token_count < 0)
        reject_file(path, "the header of this %s says %d tokens", header.name, header.token_count);

    ShardLayout layout = {header.name, uint64_t(header.token_count), header.token_bytes, 0};
    if (header.masked) layout.mask_bytes = (layout.token_count + 7) / 8;
    if (bytes.size() != layout.file_bytes())
        reject_file(path, "the header of this %s says %llu tokens, which make %llu bytes, but the file has %zu%s",
                    header.name, (unsigned long long)layout.token_count, (unsigned long long)layout.file_bytes(),
                    bytes.size(), bytes.size() < layout.file_bytes() ? ": it was cut short" : "");
    return layout;
}

TokenShard::TokenShard(const std::string& path) : file_(path), layout_(read_layout(path, file_.text())) {}

template <class Id> static void widen(const std::byte* ids, size_t count, int32_t* out) {
    for (size_t i = 0; i < count; i++) {
        Id id;
        std::memcpy(&id, ids + i * sizeof(Id), sizeof(Id));
        out[i] = int32_t(id);
    }
}

void TokenShard::copy(uint64_t begin, size_t count, int32_t* out) const {
    require(begin <= token_count() && count <= token_count() - begin, "%s: no tokens [%llu, %llu)", path(),
            (unsigned long long)begin, (unsigned long long)(begin + count));
    const std::byte* ids = file_.data() + kShardHeaderBytes + begin * uint64_t(layout_.token_bytes);
    if (layout_.token_bytes == 2)
        widen<uint16_t>(ids, count, out);
    else
        widen<uint32_t>(ids, count, out);
}

ShardWriter::ShardWriter(const std::string& directory, const std::string& split, int vocab_size, uint64_t shard_tokens)
    : directory_(directory),
      split_(split),
      vocab_size_(vocab_size),
      token_bytes_(vocab_size <= 65536 ? 2 : 4),
      shard_tokens_(shard_tokens) {
    require(vocab_size > 0, "shards: a vocabulary of %d tokens", vocab_size);
    require(shard_tokens >= 1 && shard_tokens <= INT32_MAX, "shards: %llu tokens do not fit into one shard",
            (unsigned long long)shard_tokens);
    buffer_.reserve(kWriteBufferBytes);
}

void ShardWriter::append(std::span<const int32_t> ids) {
    for (int32_t id : ids) {
        require(uint32_t(id) < uint32_t(vocab_size_), "shards: token %d in a vocabulary of %d", id, vocab_size_);
        if (names_.empty() || shard_fill_ == shard_tokens_) open_next();
        const std::byte* bytes = reinterpret_cast<const std::byte*>(&id);  // little-endian: the low bytes are first
        buffer_.insert(buffer_.end(), bytes, bytes + token_bytes_);
        if (buffer_.size() >= kWriteBufferBytes) flush();
        shard_fill_++, token_count_++;
    }
}

void ShardWriter::open_next() {
    close_current();
    names_.push_back(format("%s_%06zu.bin", split_.c_str(), names_.size()));
    file_ = OutputFile(directory_ + "/" + names_.back());
    buffer_.assign(kShardHeaderBytes, std::byte(0));
    shard_fill_ = 0;
}

void ShardWriter::flush() {
    file_.append(buffer_.data(), buffer_.size());
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
