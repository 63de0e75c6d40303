// Text generation: takes prompts as text and returns their continuations piece by piece.
#pragma once

#include <functional>

#include "data/tokenizer/tokenizer.h"
#include "model/gpt.h"
#include "training/models/model_io.h"

// Ends a text before a stop string. Holds back the end of the text while it may be the beginning of one.
class StopStrings {
public:
    explicit StopStrings(const std::vector<std::string>& stops) : stops_(stops) {}  // requires: none is empty

    // Takes the next part of the text. Returns the part that cannot belong to a stop string, and nothing once one has
    // been found. The stop string that ends first counts, however the text is split into parts; of several that end at
    // the same place, the longest.
    std::string add(std::string_view part);
    bool is_found() const { return is_found_; }
    std::string finish();  // returns the rest of a text that has ended; nothing after a stop string

private:
    std::vector<std::string> stops_;
    std::string held_;
    bool is_found_ = false;
};

// Options for all prompts of a call.
struct GenerationOptions {
    Config::Sample sample;  // its prompt is not used
    std::vector<std::string> stops;
    uint64_t seed = 1;
};

// Generates the continuation of each prompt. Passes the texts (prompt and continuation) to on_text in order, in pieces
// of whole UTF-8 characters as soon as they are known, and calls on_end after each text. Invalid UTF-8 becomes U+FFFD,
// as with Python's errors="replace". A continuation depends only on the weights, its prompt and the options. The model
// reads Tokenizer::document_start() before the prompt.
void generate(Gpt& gpt, const Tokenizer& tokenizer, const std::vector<std::string>& prompts,
              const GenerationOptions& options, const std::function<void(const std::string& piece)>& on_text,
              const std::function<void()>& on_end);

// Returns options.prompt and its continuation. Calls `between` before each piece; it may throw to end the generation.
std::string sample_text(
    Gpt& gpt, const Tokenizer& tokenizer, const Config::Sample& options, uint64_t seed,
    const std::function<void()>& between = [] {});

// Whether `text` is valid UTF-8.
bool is_utf8(const std::string& text);
