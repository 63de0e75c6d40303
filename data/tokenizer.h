// Byte-level byte pair encoding as in GPT-2: the vocabulary, its files, and decoding. data/encoder.h encodes.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

inline constexpr const char* kEndOfText = "<|endoftext|>";

// Two adjacent tokens that become one. Of all merges that apply to a word, the first in the list is made first.
struct Merge {
    int32_t left, right;
    uint64_t key() const { return uint64_t(uint32_t(left)) << 32 | uint32_t(right); }  // for maps; ordered like pairs
};

// The 256 bytes in GPT-2's order: first the 188 that its files write as themselves ('!' to '~' and so on), then the
// others, each in increasing order.
std::array<uint8_t, 256> gpt2_byte_order();

// Whether a file with these bytes is meant to be a tokenizer.json or llm.c's gpt2_tokenizer.bin, sound or not.
bool is_tokenizer_file(std::string_view bytes);

// The first `max_bytes` bytes in quotation marks, for messages; bytes other than printable ASCII are written as \xNN.
std::string quoted(std::string_view bytes, size_t max_bytes = 40);

// Immutable; threads may share it.
class Tokenizer {
public:
    // tokens[id] is a token's bytes. Fails with Exit::data, naming `origin`, unless every single byte is a token, no
    // two tokens have the same bytes, the concatenation of every merge's tokens is a token, and the special tokens
    // (which are never the result of encoding text) include kEndOfText.
    Tokenizer(std::vector<std::string> tokens, std::vector<Merge> merges, std::vector<int32_t> special,
              const std::string& origin);

    // 256 bytes, id = byte, and kEndOfText as 256.
    static Tokenizer bytes();

    // Reads a file in one of these formats, recognized by its content:
    //   tokenizer.json      Hugging Face, as written for GPT-2: model BPE, pre-tokenizer ByteLevel with use_regex and
    //                       without add_prefix_space. Settings that would change the ids are refused
    //   vocab.json          Hugging Face's older pair, with merges.txt (for my_vocab.json: my_merges.txt) beside it
    //   gpt2_tokenizer.bin  llm.c, version 2
    // Fails with Exit::no_input if a file is missing and with Exit::data, naming the file, if its content is invalid.
    static Tokenizer load(const std::string& path);

    int vocab_size() const { return int(tokens_.size()); }  // special tokens included
    int eot() const { return eot_; }                        // id of kEndOfText
    const std::string& token(int32_t id) const { return tokens_[size_t(id)]; }
    bool is_special(int32_t id) const { return special_[size_t(id)]; }
    const std::vector<Merge>& merges() const { return merges_; }

    // Bytes of text that the token stands for, 0 for special tokens: the denominator of bits per byte.
    int token_bytes(int32_t id) const { return is_special(id) ? 0 : int(token(id).size()); }

    // The bytes of all tokens; special tokens decode to their names. Requires ids in [0, vocab_size).
    std::string decode(std::span<const int32_t> ids) const;

    // The merge of two adjacent tokens: its index in merges() and the resulting token. Null if they do not merge.
    struct Merged {
        int32_t rank, id;
    };
    const Merged* merged(int32_t left, int32_t right) const;

    int32_t byte_id(uint8_t byte) const { return byte_ids_[byte]; }

    std::string json() const;  // a Hugging Face tokenizer.json, readable by `tokenizers`
    // llm.c's gpt2_tokenizer.bin, version 2. It lists the tokens alone, which is enough to decode; load() recovers the
    // merges from their order. Fails with Exit::data, naming the token, if one is longer than 255 bytes, or is special
    // and not kEndOfText.
    std::string llmc() const;
    std::string digest() const;  // 32 hex digits over tokens, merges and special tokens

private:
    std::vector<std::string> tokens_;
    std::vector<Merge> merges_;
    std::vector<bool> special_;
    std::array<int32_t, 256> byte_ids_;
    std::unordered_map<uint64_t, Merged> merged_;
    int eot_ = -1;
};
