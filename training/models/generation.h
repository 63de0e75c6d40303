// Text from a model: prompts as text go in, their continuations come out piece by piece.
#pragma once

#include <functional>

#include "training/models/model_io.h"

// Ends a text before a stop string. Where the text would have to be read further to know, it is held back.
class StopStrings {
public:
    explicit StopStrings(const std::vector<std::string>& stops) : stops_(stops) {}  // none of them empty

    // Takes the text's next part; returns what is certain not to belong to a stop string, and nothing once one is
    // complete. The one that is complete first counts, whatever the parts that the text comes in; of several that end
    // there the longest.
    std::string add(std::string_view part);
    bool is_found() const { return is_found_; }
    std::string finish();  // the rest of the text that has come to its end: nothing behind a stop string

private:
    std::vector<std::string> stops_;
    std::string held_;
    bool is_found_ = false;
};

// What the continuations of prompts have in common.
struct GenerationOptions {
    Config::Sample sample;  // its prompt is not used
    std::vector<std::string> stops;
    uint64_t seed = 1;
};

// Each prompt and its continuation, in order, each a function of the weights, the prompt and the options. The model
// reads Tokenizer::document_start() before the prompt. on_text gets whole characters of UTF-8 as soon as they are
// known: each sequence of bytes that is not UTF-8 is U+FFFD, as in Python's errors="replace". on_end follows a text's
// last piece.
void generate(Gpt& gpt, const Tokenizer& tokenizer, const std::vector<std::string>& prompts,
              const GenerationOptions& options, const std::function<void(const std::string& piece)>& on_text,
              const std::function<void()>& on_end);

// One text, whole: options.prompt and its continuation. `between` is called before each piece of it, and may throw to
// end this.
std::string sample_text(
    Gpt& gpt, const Tokenizer& tokenizer, const Config::Sample& options, uint64_t seed,
    const std::function<void()>& between = [] {});

// Whether all of it is UTF-8.
bool is_utf8(const std::string& text);
