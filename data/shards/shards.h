// Token shards: files of token ids after a 1024-byte header. Shards can be read by position, individually or as one
// stream, and written in llm.c's format.
//
// Formats, detected by the first words (little-endian int32):
//   20240520, 1, count            uint16 ids: llm.c's GPT-2 shards, the format of most published data sets
//   20240801, 7, count            uint32 ids: llm.c's Llama 3 shards
//   278895051, 1, count, width    ids of 2 or 4 bytes: NeMo Automodel
//   "BIN.TOK\n", 2, 4, count, vocabulary, masked    int32 ids: LLM.Q. The loss mask is ignored
#pragma once

#include <atomic>
#include <span>

#include "data/shards/block_checksums.h"
#include "runtime/io/files.h"

// Returns the paths that match `pattern`, like expand_glob(). If no file matches and the directory has the name of a
// public data set, the error names the command that downloads it.
std::vector<std::string> find_shards(const std::string& pattern, const std::string& key);

inline constexpr size_t kShardHeaderBytes = 1024;
inline constexpr uint64_t kDefaultShardTokens = 100'000'000;

// The contents of a header, not validated.
struct ShardHeader {
    const char* name;  // such as "llm.c token shard (GPT-2)"
    int32_t version, supported_version;
    int32_t token_bytes;  // width of an id: 2 or 4
    int32_t token_count;
    bool is_masked;  // a bit per token follows the tokens
    uint64_t file_bytes() const;
};

// Parses the header from the first bytes of a file. Returns nullopt if they do not identify a token shard.
std::optional<ShardHeader> shard_header(std::string_view first_bytes);

// An open shard. Copies share the file and the set of verified blocks. Reading is thread-safe.
class TokenShard {
public:
    // `checksums`, if not empty: BlockChecksums::hex() of the tokens. Fails with Exit::data if the file is not a shard,
    // or if its size does not match the header or the checksums.
    explicit TokenShard(const std::string& path, const std::string& checksums = "");

    const ShardHeader& header() const { return header_; }
    uint64_t token_count() const { return uint64_t(header_.token_count); }
    const InputFile& file() const { return file_; }
    bool has_checksums() const { return checks_ != nullptr; }

    // Reads tokens [index, index + count) into `ids`. Requires index + count <= token_count(). Verifies the checksum of
    // each block on its first read. Fails with Exit::data, naming the offset, if a checksum differs or the file has
    // become shorter, and with Exit::io if it cannot be read.
    void read(uint64_t index, size_t count, uint32_t* ids) const;
    // Reads bytes of the file, including the header. Verifies and fails like read().
    void read_bytes(size_t offset, size_t count, void* bytes) const;

private:
    struct Checks {
        BlockChecksums expected;
        std::vector<std::atomic<bool>> verified;  // (blocks)
    };
    void verify(size_t begin, size_t end) const;

    InputFile file_;
    ShardHeader header_;
    std::shared_ptr<Checks> checks_;  // null: no checksums
};

// Concatenated shards as one stream of tokens with 64-bit positions.
//
// Window i of length T is one training sample: the T + 1 tokens [i T, i T + T] of the stream. Its last token is also
// the first token of window i + 1, so every token except the first is a target exactly once. Windows may span shards.
class TokenStream {
public:
    // Opens the shards in the given order. Uses the checksums in the dataset.json next to each shard, if recorded.
    // Requires ids below `vocab_size`; read() checks them. Fails like TokenShard and find_dataset_record().
    TokenStream(const std::vector<std::string>& paths, int vocab_size);

    uint64_t token_count() const { return begins_.back(); }
    const std::vector<TokenShard>& shards() const { return shards_; }
    size_t shard_at(uint64_t position) const;  // index of the shard with this token; requires position < token_count()

    // Reads tokens [position, position + count) into `out`. Requires position + count <= token_count(). Fails with
    // Exit::data, naming the file and the index of the token in it, if an id is outside the vocabulary, and like
    // TokenShard::read(). Thread-safe.
    void read(uint64_t position, size_t count, int32_t* out) const;

    // Returns 32 hex digits: a hash of the number and order of the shards and of each shard's file name, size and
    // content. Files above 4 MiB are sampled (the first and last MiB and 64 evenly spaced blocks of 4 KiB), so that a
    // thousand shards take seconds. Detects renamed, reordered, replaced or grown shards; can miss a change of a few
    // bytes in the middle of a large shard. Fails like TokenShard::read().
    std::string digest() const;

    // Returns a description for messages, such as "train_000000.bin and 2 more".
    std::string description() const;

private:
    std::vector<TokenShard> shards_;
    std::vector<uint64_t> begins_{0};  // (shards + 1): position of the first token of each shard, then the total
    int vocab_size_;
};

// Writes DIRECTORY/SPLIT_000000.bin, SPLIT_000001.bin, ... with at most `shard_tokens` tokens each (1 to 2^31 - 1):
// uint16 ids, or uint32 if the vocabulary exceeds 65,536. The header is written last, so an incomplete shard is never
// mistaken for a complete one. The directory must exist and must not contain files with these names.
class ShardWriter {
public:
    // If `written` > 0, resumes an unfinished writer that had this token count and these checksums at its last sync().
    // Fails with Exit::data if the checksums do not match the token count.
    ShardWriter(const std::string& directory, const std::string& split, int vocab_size,
                uint64_t shard_tokens = kDefaultShardTokens, uint64_t written = 0,
                const std::vector<std::string>& checksums = {});
    void append(std::span<const int32_t> ids);  // each in [0, vocab_size)
    void sync();                                // flushes all appended tokens to disk
    void finish();                              // writes the last header and flushes to disk

    uint64_t token_count() const { return token_count_; }
    const std::vector<std::string>& names() const { return names_; }  // file names without the directory
    std::vector<std::string> checksums() const;                       // BlockChecksums::hex() of each file

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
    std::vector<BlockChecksums> checksums_;  // of each file, without the bytes in buffer_
    OutputFile file_;
    std::string buffer_;  // bytes not yet written to file_
};
