// Byte pair encoding as in GPT-2, Llama and Qwen: the vocabulary, its files, and decoding. data/tokenizer/encoder.h
// encodes.
#pragma once

#include <set>
#include <span>
#include <utility>
#include <vector>

#include "data/tokenizer/text_rules.h"

inline constexpr const char* kEndOfText = "<|endoftext|>";
// What tokenizers call the end of a document, unless they put another token behind it.
inline constexpr std::array kEndNames = {kEndOfText, "<|end_of_text|>", "</s>", "<eos>"};

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
    // tokens[id] is a token's bytes. Fails with Exit::data, naming `origin`, unless every single byte is a token or
    // `rules` drop such bytes, no two tokens have the same bytes, the concatenation of every merge's tokens is a token,
    // and the special tokens (which are never the result of encoding text) include the end of text: the one that
    // `rules` name, or one of kEndNames. Added tokens may have the bytes of others, and so may SentencePiece's tokens
    // of bytes.
    Tokenizer(std::vector<std::string> tokens, std::vector<Merge> merges, std::vector<int32_t> special,
              const std::string& origin, TextRules rules = {});

    // 256 bytes, id = byte, and kEndOfText as 256.
    static Tokenizer bytes();

    // A token for each of these characters, as UTF-8 and in their order, then kEndOfText. Other bytes are dropped.
    // Hugging Face's tokenizers read its json().
    static Tokenizer characters(const std::set<std::string, std::less<>>& characters);

    // Reads a file in one of these formats, recognized by its content:
    //   tokenizer.json      Hugging Face: byte-level BPE, or BPE of characters with byte fallback as Llama 2's. What
    //                       would change the ids and is not supported is refused with its name. The end of text is
    //                       `end_of_text`, else eos_token of a tokenizer_config.json in the same directory, else as the
    //                       rules say
    //   vocab.json          Hugging Face's older pair, with merges.txt (for my_vocab.json: my_merges.txt) beside it
    //   gpt2_tokenizer.bin  llm.c, version 2
    // Fails with Exit::no_input if a file is missing and with Exit::data, naming the file, if its content is invalid.
    static Tokenizer load(const std::string& path, const std::string& end_of_text = "");

    // Writes DIRECTORY/tokenizer.json and, with the end of text, DIRECTORY/tokenizer_config.json.
    void save(const std::string& directory) const;

    int vocab_size() const { return int(tokens_.size()); }  // special tokens included
    int eot() const { return eot_; }                        // the end of text, which separates documents
    int document_start() const {
        return document_start_;
    }  // what a model reads before a text: eot() or a token of
       // its own, as Llama's <s>
    // What stands before each document in token shards: the end of the one before, then document_start() if that is
    // another token.
    std::span<const int32_t> document_prefix() const { return prefix_; }
    const TextRules& rules() const { return rules_; }
    const std::string& token(int32_t id) const { return tokens_[size_t(id)]; }
    bool is_special(int32_t id) const { return special_[size_t(id)]; }
    const std::vector<Merge>& merges() const { return merges_; }

    // Bytes of text that the token stands for, 0 for special tokens: the denominator of bits per byte.
    int token_bytes(int32_t id) const { return is_special(id) ? 0 : int(token(id).size()); }

    // The bytes of all tokens; special tokens decode to their names. Where the ids begin a text, a space that encoding
    // puts before it is left out. Requires ids in [0, vocab_size).
    std::string decode(std::span<const int32_t> ids, bool begins_text = false) const;

    // The merge of two adjacent tokens: its index in merges() and the resulting token. Null if they do not merge.
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
    std::string remark() const;  // how many bytes have no token, as a sentence; "" if each has one

    // The token with these bytes, neither special nor one of SentencePiece's for a byte; -1 if there is none.
    int32_t find(std::string_view bytes) const {
        for (size_t at = WordHash()(bytes) & (words_.size() - 1);; at = (at + 1) & (words_.size() - 1))
            if (words_[at] < 0 || token(words_[at]) == bytes) return words_[at];
    }

    std::string json() const;  // a Hugging Face tokenizer.json, readable by `tokenizers`; the one that was read
    // llm.c's gpt2_tokenizer.bin, version 2. It lists the tokens alone, which is enough to decode; load() recovers the
    // merges from their order. Fails with Exit::data, naming the token, if one is longer than 255 bytes, or is special
    // and not kEndOfText, and if the rules are not GPT-2's.
    std::string llmc() const;
    std::string digest() const;  // 32 hex digits over tokens, merges, special tokens and rules

private:
    void check_boundaries(const std::string& merged_bytes, size_t rank, const std::string& origin) const;

    std::vector<std::string> tokens_;
    std::vector<Merge> merges_;
    std::vector<bool> special_;
    std::array<int32_t, 256> byte_ids_;
    TextRules rules_;
    struct Slot {  // of a hash map with linear probing; empty if id < 0
        uint64_t key = ~uint64_t(0);
        Merged merged = {0, -1};
    };
    std::vector<Slot> slots_;  // a power of two
    int slot_shift_ = 0;
    size_t slot_of(uint64_t key) const { return size_t(key * 0x9e3779b97f4a7c15u >> slot_shift_); }
    bool has_chosen_end_ = false;
    std::vector<int32_t> words_;  // see find(): a hash map with linear probing, -1 where it is empty
    int eot_ = -1, document_start_ = -1;
    std::vector<int32_t> prefix_;
};

// Decodes tokens one by one, as they are generated: what add() returns ends between characters. Bytes that cannot be
// part of a character are passed on as they are.
class StreamDecoder {
public:
    explicit StreamDecoder(const Tokenizer& tokenizer, bool begins_text = false)
        : tokenizer_(tokenizer), begins_text_(begins_text) {}

    // The characters that are complete now.
    std::string add(int32_t id) { return add(tokenizer_.decode(std::array{id}, std::exchange(begins_text_, false))); }
    std::string add(std::string_view text);                    // no token's, as of a prompt
    std::string finish() { return std::exchange(held_, {}); }  // the rest

private:
    const Tokenizer& tokenizer_;
    bool begins_text_;
    std::string held_;
};
