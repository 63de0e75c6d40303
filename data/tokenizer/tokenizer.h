// Byte pair encoding as in GPT-2, Llama and Qwen: vocabulary, files and decoding. data/tokenizer/encoder.h encodes.
#pragma once

#include <set>
#include <span>
#include <utility>
#include <vector>

#include "data/tokenizer/pretokenizer.h"
#include "data/tokenizer/text_rules.h"

inline constexpr const char* kEndOfText = "<|endoftext|>";
// Default names of the end of text, for tokenizers whose post-processor appends no token.
inline constexpr std::array kEndNames = {kEndOfText, "<|end_of_text|>", "</s>", "<eos>"};

// Two adjacent tokens that become one. Among the merges that apply to a word, the first in the list has priority.
struct Merge {
    int32_t left, right;
    uint64_t key() const { return uint64_t(uint32_t(left)) << 32 | uint32_t(right); }  // for maps; ordered like a pair
};

// Returns the 256 bytes in GPT-2's order: first the 188 bytes that its files write literally ('!' to '~' and others),
// then the rest, each group in increasing order.
std::array<uint8_t, 256> gpt2_byte_order();

// Returns whether the bytes identify a tokenizer.json or llm.c's gpt2_tokenizer.bin, valid or not.
bool is_tokenizer_file(std::string_view bytes);

// Returns the first `max_bytes` bytes in quotation marks, for messages. Non-printable and non-ASCII bytes become \xNN.
std::string quoted(std::string_view bytes, size_t max_bytes = 40);

// Immutable and thread-safe.
class Tokenizer {
public:
    // tokens[id] is the bytes of a token. Special tokens never result from encoding text. Fails with Exit::data, naming
    // `origin`, unless all of these hold:
    // - every byte is a token, or `rules` allow to drop bytes;
    // - no two tokens have the same bytes, except added tokens and SentencePiece's byte tokens;
    // - the concatenation of the two tokens of each merge is a token;
    // - the special tokens include the end of text: the one named by `rules`, or one of kEndNames.
    Tokenizer(std::vector<std::string> tokens, std::vector<Merge> merges, std::vector<int32_t> special,
              const std::string& origin, TextRules rules = {});

    // Returns a tokenizer with the 256 bytes (id = byte) and kEndOfText (id 256).
    static Tokenizer bytes();

    // Returns a tokenizer with a token per UTF-8 character, in the order of the set, then kEndOfText. It drops other
    // bytes. Hugging Face's tokenizers can read its json().
    static Tokenizer characters(const std::set<std::string, std::less<>>& characters);

    // Reads a file in one of these formats, detected by content:
    //   tokenizer.json      Hugging Face: byte-level BPE, or character BPE with byte fallback as in Llama 2. An
    //                       unsupported part that would change the ids is an error that names it. The end of text is
    //                       `end_of_text`, or else eos_token of tokenizer_config.json in the same directory, or else
    //                       set by the rules
    //   vocab.json          Hugging Face's older format, with merges.txt (my_vocab.json: my_merges.txt) next to it
    //   gpt2_tokenizer.bin  llm.c, version 2
    // Fails with Exit::no_input if a file is missing, and with Exit::data, naming the file, if its content is invalid.
    static Tokenizer load(const std::string& path, const std::string& end_of_text = "");

    // Writes DIRECTORY/tokenizer.json, and DIRECTORY/tokenizer_config.json with the end of text.
    void save(const std::string& directory) const;

    int vocab_size() const { return int(tokens_.size()); }  // includes special tokens
    int eot() const { return eot_; }                        // the end of text, which separates documents
    // The token that a model reads before a text: eot(), or a separate token such as Llama's <s>.
    int document_start() const { return document_start_; }
    // The tokens before each document in token shards: the end of the previous document, then document_start() if it
    // differs from eot().
    std::span<const int32_t> document_prefix() const { return prefix_; }
    const TextRules& rules() const { return rules_; }
    const std::string& token(int32_t id) const { return tokens_[size_t(id)]; }
    bool is_special(int32_t id) const { return special_[size_t(id)]; }
    const std::vector<Merge>& merges() const { return merges_; }

    // Returns the bytes of text of the token, 0 for special tokens: the denominator of bits per byte.
    int token_bytes(int32_t id) const { return is_special(id) ? 0 : int(token(id).size()); }

    // Returns the bytes of the tokens; special tokens decode to their names. If `begins_text`, removes the space that
    // encoding inserts before a text. Requires ids in [0, vocab_size).
    std::string decode(std::span<const int32_t> ids, bool begins_text = false) const;

    // A merge of two adjacent tokens: its index in merges() and the resulting token. merged() returns null if the
    // tokens do not merge.
    struct Merged {
        int32_t rank, id;
    };
    const Merged* merged(int32_t left, int32_t right) const {
        const uint64_t key = Merge{left, right}.key();
        for (size_t at = slot_of(key);; at = (at + 1) & (slots_.size() - 1)) {
            if (slots_[at].key == key) return &slots_[at].merged;
            if (slots_[at].merged.id < 0) return nullptr;
        }
    }

    int32_t byte_id(uint8_t byte) const { return byte_ids_[byte]; }  // -1: encoding drops the byte
    std::string warning() const;  // a message with the number of bytes without a token; "" if there are none

    // Returns the token with these bytes, ignoring special tokens and SentencePiece's byte tokens; -1 if there is none.
    int32_t find(std::string_view bytes) const {
        for (size_t at = WordHash()(bytes) & (words_.size() - 1);; at = (at + 1) & (words_.size() - 1))
            if (words_[at] < 0 || token(words_[at]) == bytes) return words_[at];
    }

    std::string json() const;    // a tokenizer.json for Hugging Face's tokenizers: the file that was read, or a new one
    std::string digest() const;  // 32 hex digits: a hash of tokens, merges, special tokens and rules

private:
    void check_boundaries(const std::string& merged_bytes, size_t rank, const std::string& origin) const;

    std::vector<std::string> tokens_;
    std::vector<Merge> merges_;
    std::vector<bool> special_;
    std::array<int32_t, 256> byte_ids_;
    TextRules rules_;
    struct Slot {  // slot of a hash map with linear probing; empty if id < 0
        uint64_t key = ~uint64_t(0);
        Merged merged = {0, -1};
    };
    std::vector<Slot> slots_;  // the size is a power of two
    int slot_shift_ = 0;
    size_t slot_of(uint64_t key) const { return size_t(key * 0x9e3779b97f4a7c15u >> slot_shift_); }
    bool has_chosen_end_ = false;
    std::vector<int32_t> words_;  // for find(): a hash map with linear probing; -1: empty slot
    int eot_ = -1, document_start_ = -1;
    std::vector<int32_t> prefix_;
};

// Decodes tokens one at a time during generation. add() returns only complete characters. Bytes that cannot be part of
// a character are returned unchanged.
class StreamDecoder {
public:
    explicit StreamDecoder(const Tokenizer& tokenizer, bool begins_text = false)
        : tokenizer_(tokenizer), begins_text_(begins_text) {}

    // Returns the characters that this token completes.
    std::string add(int32_t id) { return add(tokenizer_.decode(std::array{id}, std::exchange(begins_text_, false))); }
    std::string add(std::string_view text);                    // for text without tokens, such as a prompt
    std::string finish() { return std::exchange(held_, {}); }  // returns the remaining bytes

private:
    const Tokenizer& tokenizer_;
    bool begins_text_;
    std::string held_;
};
