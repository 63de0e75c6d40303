// Token shards: files of token ids behind a header of 1024 bytes, read by position, alone or as one stream, and written
// in llm.c's format.
//
// Formats, recognized by their first words (little-endian int32):
//   20240520, 1, count            uint16 ids: llm.c's GPT-2 shards, which most published data sets use
//   20240801, 7, count            uint32 ids: llm.c's Llama 3 shards
//   278895051, 1, count, width    ids of 2 or 4 bytes: NeMo Automodel
//   "BIN.TOK\n", 2, 4, count, vocabulary, masked    int32 ids: LLM.Q. A loss mask is ignored
#pragma once

#include <atomic>
#include <span>

#include "data/shards/block_checksums.h"
#include "runtime/io/io.h"

// Paths of the files that match, as expand_glob() returns them. Where nothing matches `pattern` and its directory is
// named like a public data set, the error names the command that downloads it.
std::vector<std::string> find_shards(const std::string& pattern, const std::string& key);

inline constexpr size_t kShardHeaderBytes = 1024;
inline constexpr uint64_t kDefaultShardTokens = 100'000'000;

// What a header says, sound or not.
struct ShardHeader {
    const char* name;  // "llm.c token shard (GPT-2)"
    int32_t version, supported_version;
    int32_t token_bytes;  // width of an id: 2 or 4
    int32_t token_count;
    bool is_masked;  // a bit per token follows the tokens
    uint64_t file_bytes() const;
};

// The header of a file with these first bytes; nullopt if it is not meant to be a token shard of any format.
std::optional<ShardHeader> shard_header(std::string_view first_bytes);

// A shard that is open. Copies share the file and what has been verified. Threads may read at the same time.
class TokenShard {
public:
    // `checksums`, if given: BlockChecksums::hex() of its tokens. Fails with Exit::data if the file is not a shard, or
    // its size differs from what the header says or what the checksums cover.
    explicit TokenShard(const std::string& path, const std::string& checksums = "");

    const ShardHeader& header() const { return header_; }
    uint64_t token_count() const { return uint64_t(header_.token_count); }
    const InputFile& file() const { return file_; }
    bool has_checksums() const { return checks_ != nullptr; }

    // ids[i] = token index + i. Requires index + count <= token_count(). A block with a checksum is read as a whole and
    // compared when it is first read from. Exit::data, naming the offset, if it differs or the file has become shorter;
    // Exit::io if it cannot be read.
    void read(uint64_t index, size_t count, uint32_t* ids) const;
    // The same for bytes of the file, header included.
    void read_bytes(size_t offset, size_t count, void* bytes) const;

private:
    struct Checks {
        BlockChecksums expected;
        std::vector<std::atomic<bool>> verified;  // (blocks)
    };
    void verify(size_t begin, size_t end) const;

    InputFile file_;
    ShardHeader header_;
    std::shared_ptr<Checks> checks_;  // null: there are no checksums
};

// Concatenated shards as one stream of tokens with 64-bit positions.
//
// Window i of length T, one training sample, is the tokens [i T, i T + T] of the stream: T + 1 tokens, of which the
// last is also the first of window i + 1, so every token but the first is a target exactly once. Windows may span
// shards.
class TokenStream {
public:
    // Opens the shards in the order given, with the checksums of the dataset.json beside each, if it has them; ids must
    // be below `vocab_size`. Fails like TokenShard and find_dataset_record().
    TokenStream(const std::vector<std::string>& paths, int vocab_size);

    uint64_t token_count() const { return begins_.back(); }
    const std::vector<TokenShard>& shards() const { return shards_; }
    size_t shard_at(uint64_t position) const;  // the shard that holds this token. Requires position < token_count()

    // out[i] = token position + i. Requires position + count <= token_count(). Fails with Exit::data, naming the file
    // and the token's index in it, if an id is outside the vocabulary, and like TokenShard::read(). Threads may read at
    // the same time.
    void read(uint64_t position, size_t count, int32_t* out) const;

    // 32 hex digits over the number and order of the shards and each one's name (without directory), size and content:
    // all of it up to 4 MiB; of a longer file the first and last MiB and 64 blocks of 4 KiB spread evenly between, so
    // that hashing a thousand shards takes seconds. Detects renamed, reordered, replaced or grown shards; a change of a
    // few bytes in the middle of a large shard can go undetected. Fails like TokenShard::read().
    std::string digest() const;

    // "train_000000.bin and 2 more", for messages.
    std::string description() const;

private:
    std::vector<TokenShard> shards_;
    std::vector<uint64_t> begins_{0};  // (shards + 1), position of each shard's first token, then the total
    int vocab_size_;
};

// Writes DIRECTORY/SPLIT_000000.bin, SPLIT_000001.bin, ... of at most `shard_tokens` tokens each (1 to 2^31 - 1):
// uint16 ids, or uint32 if the vocabulary exceeds 65,536. A header is written last, so an incomplete shard is never
// taken for a whole one. The directory must exist and must not have files of these names.
class ShardWriter {
public:
    // `written`: goes on behind that many tokens of a writer that did not finish(), after its sync(), when it had these
    // checksums. Exit::data if they cannot be of so many tokens.
    ShardWriter(const std::string& directory, const std::string& split, int vocab_size,
                uint64_t shard_tokens = kDefaultShardTokens, uint64_t written = 0,
                const std::vector<std::string>& checksums = {});
    void append(std::span<const int32_t> ids);  // each in [0, vocab_size)
    void sync();                                // what was appended is on disk when this returns
    void finish();                              // all tokens are on disk when this returns

    uint64_t token_count() const { return token_count_; }
    const std::vector<std::string>& names() const { return names_; }  // of the files, without the directory
    std::vector<std::string> checksums() const;                       // BlockChecksums::hex() of each

private:
    void add_name();
    void open_next();
    void flush();
    void close_current();

    std::string directory_, split_;
    int vocab_size_;
    size_t token_bytes_;
    uint64_t shard_tokens_, token_count_ = 0, shard_fill_ = 0;
    std::vector<std::string> names_;
    std::vector<BlockChecksums> checksums_;  // of each file, without what buffer_ has
    OutputFile file_;
    std::string buffer_;  // what file_ lacks
};
