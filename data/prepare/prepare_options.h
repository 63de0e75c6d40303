// Checks the options of prepare and loads the tokenizer that they name.
#pragma once

#include "data/prepare/prepare.h"
#include "data/text/text_formats.h"
#include "data/tokenizer/tokenizer.h"

inline constexpr const char* kRawFormat = "bin";

// Returns the text format with this name; nullopt for other names, including "auto" and kRawFormat.
std::optional<TextFormat> text_format(const std::string& name);

// Fails with Exit::usage if an option is invalid. `raw`: the input is token ids.
void check_options(const PrepareOptions& options, bool raw);

// Returns whether this tokenizer is built from the input text.
bool is_made_from_text(const std::string& tokenizer);

// Loads a tokenizer that is not built from text. Fails with Exit::usage if its size differs from options.vocab_size,
// with Exit::no_input if a file is missing, and like Tokenizer::load().
Tokenizer load_tokenizer(const PrepareOptions& options);
void check_vocab_size(const PrepareOptions& options, const Tokenizer& tokenizer);
