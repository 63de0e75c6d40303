#include "training/models/generation.h"

#include "data/tokenizer/encoder.h"
#include "model/sample.h"
#include "runtime/io/json.h"

bool is_utf8(const std::string& text) { return valid_utf8(text) == text; }

std::string StopStrings::add(std::string_view part) {
    if (is_found_) return {};
    held_ += part;
    size_t first_end = std::string::npos, begin = 0;
    for (const std::string& stop : stops_) {
        const size_t at = held_.find(stop);
        if (at == std::string::npos) continue;
        const size_t end = at + stop.size();
        if (end < first_end || (end == first_end && at < begin)) first_end = end, begin = at;
    }
    is_found_ = first_end != std::string::npos;
    if (is_found_) return std::exchange(held_, {}).substr(0, begin);

    size_t possible = 0;  // bytes at the end that begin a stop string
    for (const std::string& stop : stops_)
        for (size_t length = std::min(stop.size() - 1, held_.size()); length > possible; length--)
            if (held_.ends_with(std::string_view(stop).substr(0, length))) possible = length;
    std::string certain = held_.substr(0, held_.size() - possible);
    held_.erase(0, certain.size());
    return certain;
}

std::string StopStrings::finish() { return std::exchange(held_, {}); }

namespace {

// The state of one prompt's text, from tokens to pieces.
struct Text {
    StreamDecoder decoder;
    StopStrings stops;
    std::string waiting;  // held back until the texts before it are complete
    bool has_ended = false;
};

}  // namespace

void generate(Gpt& gpt, const Tokenizer& tokenizer, const std::vector<std::string>& prompts,
              const GenerationOptions& options, const std::function<void(const std::string& piece)>& on_text,
              const std::function<void()>& on_end) {
    std::vector<std::vector<int>> tokens;
    std::vector<Text> texts;
    for (const std::string& prompt : prompts) {
        tokens.push_back(Encoder(tokenizer).encode(prompt));
        tokens.back().insert(tokens.back().begin(), tokenizer.document_start());
        texts.push_back({StreamDecoder(tokenizer, prompt.empty()), StopStrings(options.stops), {}, false});
        texts.back().waiting = texts.back().decoder.add(prompt);
    }
    size_t shown = 0;  // the text that is shown as it grows; those before it are complete
    auto show = [&] {
        for (; shown < texts.size(); shown++) {
            Text& text = texts[shown];
            if (!text.waiting.empty()) on_text(valid_utf8(std::exchange(text.waiting, {})));
            if (!text.has_ended) return;
            on_end();
        }
    };
    show();
    sample(
        gpt, tokens,
        {.tokens = options.sample.tokens,
         .temperature = options.sample.temperature,
         .top_k = options.sample.top_k,
         .top_p = options.sample.top_p,
         .min_p = options.sample.min_p,
         .seed = options.seed,
         .stop_token = tokenizer.eot()},
        [&](size_t prompt, int token) {
            Text& text = texts[prompt];
            if (token < tokenizer.vocab_size()) text.waiting += text.stops.add(text.decoder.add(token));
            show();
            return !text.stops.is_found();
        },
        [&](size_t prompt) {
            Text& text = texts[prompt];
            text.waiting += text.stops.add(text.decoder.finish());
            text.waiting += text.stops.finish();
            text.has_ended = true;
            show();
        });
}

std::string sample_text(Gpt& gpt, const Tokenizer& tokenizer, const Config::Sample& options, uint64_t seed,
                        const std::function<void()>& between) {
    std::string text;
    auto add = [&](const std::string& piece) {
        between();
        text += piece;
    };
    generate(gpt, tokenizer, {options.prompt}, {options, {}, seed}, add, [] {});
    return text;
}
