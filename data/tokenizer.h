// Byte-level byte pair encoding, as GPT-2 has it: the vocabulary, its files, and the way back from ids to bytes.
// The way from text to ids is data/encoder.h.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

inline constexpr const char* kEndOfText = "<|endoftext|>";

// Two neighbouring tokens that become one. Of all merges that apply in a word the one that stands first in the list
// does.
struct Merge {
    int32_t left, right;
};

// The single bytes in GPT-2's order, which is the order of the characters that its files write for them: first those
// that print ('!' to '~' and so on), then the rest.
std::array<uint8_t, 256> gpt2_byte_order();

// Does a file with these bytes mean to be tokenizer.json or llm.c's gpt2_tokenizer.bin?
bool is_tokenizer_file(std::string_view bytes);

// Bytes between quotation marks for a sentence: at most `max_bytes` of them, and as \xNN those that are no ASCII.
std::string quoted(std::string_view bytes, size_t max_bytes = 40);

// Immutable; any number of threads may use it at once.
class Tokenizer {
public:
    // Ids are places in `tokens`, which holds bytes. Fails with Exit::data, naming `origin`, unless every single byte
    // is a token, no two tokens have the same bytes, every merge names tokens whose concatenation is one, and the
    // special tokens (which text never becomes) include kEndOfText.
    Tokenizer(std::vector<std::string> tokens, std::vector<Merge> merges, std::vector<int32_t> special,
              const std::string& origin);

    // 256 bytes, id = byte, and kEndOfText as 256.
    static Tokenizer bytes();

    // Reads a file of any of these kinds, told apart by their content:
    //   tokenizer.json      Hugging Face, as written for GPT-2: model BPE, pre-tokenizer ByteLevel with use_regex and
    //                       without add_prefix_space. A file that asks for anything that changes the ids is refused
    //   vocab.json          Hugging Face's older pair, with merges.txt (for gpt2_vocab.json: gpt2_merges.txt) beside it
    //   gpt2_tokenizer.bin  llm.c, version 2
    // Fails with Exit::data, naming the file and what is wrong in it.
    static Tokenizer load(const std::string& path);

    int vocab_size() const { return int(tokens_.size()); }  // special tokens included
    int eot() const { return eot_; }                        // id of kEndOfText
    const std::string& token(int32_t id) const { return tokens_[size_t(id)]; }
    bool is_special(int32_t id) const { return special_[size_t(id)]; }
    const std::vector<Merge>& merges() const { return merges_; }

    // Bytes of text that the token stands for, 0 for special tokens: the denominator of bits per byte.
    int token_bytes(int32_t id) const { return is_special(id) ? 0 : int(token(id).size()); }

    // The bytes of all tokens, special ones as they are written. Ids must be in [0, vocab_size).
    std::string decode(std::span<const int32_t> ids) const;

    // What becomes of two neighbouring tokens: rank is the place in merges(), id the token. Null if they stay two.
    struct Merged {
        int32_t rank, id;
    };
    const Merged* merged(int32_t left, int32_t right) const;

    int32_t byte_id(uint8_t byte) const { return byte_ids_[byte]; }

    std::string json() const;                  // a Hugging Face tokenizer.json, readable by `tokenizers`
    void save(const std::string& path) const;  // writes it, all or nothing
    std::string digest() const;                // 32 hex digits over tokens, merges and special tokens

private:
    std::vector<std::string> tokens_;
    std::vector<Merge> merges_;
    std::vector<bool> special_;
    std::array<int32_t, 256> byte_ids_;
    std::unordered_map<uint64_t, Merged> merged_;
    int eot_ = -1;
};
