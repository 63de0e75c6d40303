// The options of prepare: their checks, and the tokenizers that they name.
#pragma once

#include "data/prepare/prepare.h"
#include "data/text/text_input.h"
#include "data/tokenizer/tokenizer.h"

inline constexpr const char* kRawFormat = "bin";

// The text format with this name; nullopt if there is none, as for "auto" and kRawFormat.
std::optional<TextFormat> text_format(const std::string& name);

// Fails with Exit::usage. `raw`: the input is token ids.
void check_options(const PrepareOptions& options, bool raw);

// Whether the input is read to make this tokenizer.
bool is_made_from_text(const std::string& tokenizer);

// A tokenizer that is not made from text. Fails with Exit::usage if it has another size than the options say, with
// Exit::no_input if a file is missing, and as Tokenizer::load() does.
Tokenizer load_tokenizer(const PrepareOptions& options);
void check_vocab_size(const PrepareOptions& options, const Tokenizer& tokenizer);
