#include "data/prepare/prepare_options.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "runtime/io/files.h"

std::optional<TextFormat> text_format(const std::string& name) {
    const auto found = std::ranges::find(kTextFormats, name);
    return found == kTextFormats.end() ? std::nullopt : std::optional(TextFormat(found - kTextFormats.begin()));
}

bool is_made_from_text(const std::string& tokenizer) { return tokenizer == "bpe" || tokenizer == "chars"; }

void check_options(const PrepareOptions& o, bool raw) {
    auto check = [](bool holds, const char* pattern, auto... values) {
        if (!holds) fail(Exit::usage, pattern, values...);
    };
    auto is_fraction = [](double value) { return value >= 0 && value < 1; };
    check(is_fraction(o.val_fraction), "prepare: --val-fraction is %g, but must be in [0, 1)", o.val_fraction);
    check(o.shard_tokens >= 1 && o.shard_tokens <= INT32_MAX,
          "prepare: --shard-tokens is %zu, but must be from 1 to %d", o.shard_tokens, INT32_MAX);
    const double bpe_dropout = o.bpe_dropout.value_or(0);
    check(is_fraction(bpe_dropout), "prepare: --bpe-dropout is %g, but must be in [0, 1)", bpe_dropout);
    const int copies = o.copies.value_or(1);
    check(copies >= 1 && copies <= 1000, "prepare: --copies is %d, but must be from 1 to 1000", copies);
    check(o.format == "auto" || o.format == kRawFormat || text_format(o.format),
          "prepare: unknown --format \"%s\"; supported: auto, text, jsonl, parquet and bin", o.format);
    check(o.threads >= 0 && o.threads <= 1024, "prepare: --threads is %d, but must be from 0 to 1024", o.threads);
    check(!raw || o.tokenizer != "chars",
          "prepare: --tokenizer chars is built from text, but the input is token ids; prepare the text first and pass "
          "the resulting tokenizer.json");
    check(o.end_of_text.empty() || (!is_made_from_text(o.tokenizer) && o.tokenizer != "bytes"),
          "prepare: --end-of-text requires a tokenizer file, but the tokenizer is \"%s\"", o.tokenizer);
    check(raw || o.tokenizer != "bpe" || o.vocab_size == 0 || (o.vocab_size >= 257 && o.vocab_size <= 1 << 20),
          "prepare: --vocab-size is %d, but must be from 257 to %d for the tokenizer \"bpe\"", o.vocab_size, 1 << 20);
}

int default_vocab_size(uint64_t train_bytes) {
    return 1 << std::clamp(int(std::lround(std::log2(double(std::max<uint64_t>(train_bytes, 1))) / 2)), 9, 15);
}

int default_copies(uint64_t train_bytes) {
    constexpr uint64_t kBytes = 50'000'000;
    return int(std::clamp<uint64_t>(kBytes / std::max<uint64_t>(train_bytes, 1), 1, 100));
}

void check_vocab_size(const PrepareOptions& options, const Tokenizer& tokenizer) {
    if (options.vocab_size != 0 && options.vocab_size != tokenizer.vocab_size())
        fail(Exit::usage, "prepare: --vocab-size is %d, but the tokenizer \"%s\" has %d tokens", options.vocab_size,
             options.tokenizer, tokenizer.vocab_size());
}

Tokenizer load_tokenizer(const PrepareOptions& options) {
    const std::filesystem::path gpt2 = options.gpt2_directory;
    if (options.tokenizer == "gpt2" && !file_exists(gpt2 / "vocab.json"))
        fail(Exit::no_input,
             "prepare: cannot load the tokenizer \"gpt2\": %s has no vocab.json; copy data/gpt2 from the source tree "
             "there, or pass --tokenizer PATH/vocab.json",
             gpt2.lexically_normal().string());
    Tokenizer tokenizer = options.tokenizer == "bytes"  ? Tokenizer::bytes()
                          : options.tokenizer == "gpt2" ? Tokenizer::load(gpt2 / "vocab.json")
                                                        : Tokenizer::load(options.tokenizer, options.end_of_text);
    check_vocab_size(options, tokenizer);
    return tokenizer;
}
