#include "model/shape.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/base/check.h"

int GptShape::hidden() const {
    constexpr int kMultiple = 256;
    if (given_hidden > 0) return given_hidden;
    return gated_mlp ? (8 * n_embd / 3 + kMultiple - 1) / kMultiple * kMultiple : 4 * n_embd;
}

double GptShape::attention_scale() const {
    return given_attention_scale > 0 ? given_attention_scale : double(1.0f / std::sqrt(float(head_size())));
}

void GptShape::fill_in_sizes() {
    given_kv_heads = kv_heads();
    given_head_size = head_size();
    given_hidden = hidden();
    rope.original_positions = original_positions();
}

GptShape GptShape::part(int parts) const {
    GptShape part = *this;
    if (parts == 1) return part;
    part.fill_in_sizes();
    part.kv_head_parts = std::max(1, parts / kv_heads());
    part.given_kv_heads = kv_heads() * part.kv_head_parts / parts;
    part.n_head /= parts, part.given_hidden /= parts;
    part.vocabulary_parts = parts;
    return part;
}

std::string GptShape::parts_problem(int parts) const {
    if (parts == 1) return "";
    constexpr int kMost = 16;  // of a padded vocabulary, whose parts stay aligned
    if (parts > kMost || (parts & (parts - 1)) != 0)
        return format("parallel.tensor must be a power of two up to %d, is %d", kMost, parts);
    const bool shares_heads = kv_heads() < parts && parts % kv_heads() == 0;
    const std::pair<const char*, int> sizes[] = {{"model.n_head", n_head},
                                                 {"model.n_kv_head", shares_heads ? parts : kv_heads()},
                                                 {"model.hidden_size_mlp", hidden()}};
    for (const auto& [key, size] : sizes) {
        if (size % parts == 0) continue;
        int most = parts;
        while (size % most != 0) most /= 2;
        return format("parallel.tensor (%d) must divide %s (%d); the largest power of two that divides it is %d", parts,
                      key, size, most);
    }
    constexpr int kAligned = 8;
    if (n_embd % kAligned != 0)
        return format("parallel.tensor (%d) needs model.n_embd to be a multiple of %d, is %d", parts, kAligned, n_embd);
    if (shares_heads && head_size() % (kAligned * parts / kv_heads()) != 0)
        return format(
            "parallel.tensor (%d) with model.n_kv_head (%d) needs model.head_size to be a multiple of %d, is %d", parts,
            kv_heads(), kAligned * parts / kv_heads(), head_size());
    return "";
}

int GptShape::window(int layer) const {
    return window_pattern[size_t(layer) % window_pattern.size()] == 'S' ? sliding_window : 0;
}

double GptShape::attended(int layer, int seq_len) const {
    const double keys = window(layer) > 0 ? std::min(window(layer), seq_len) : seq_len;
    return attention_channels() * (keys - keys * keys / (2.0 * seq_len));
}

namespace {

std::string sizes_problem(const GptShape& s) {
    if (s.given_head_size == 0 && s.n_embd % s.n_head != 0) {
        int below = s.n_head, above = std::min(s.n_head, s.n_embd);
        while (s.n_embd % below != 0) below--;
        while (s.n_embd % above != 0) above++;
        return format("model.n_embd (%d) must be a multiple of model.n_head (%d); the nearest valid n_head is %d%s",
                      s.n_embd, s.n_head, below, below < above ? format(" or %d", above).c_str() : "");
    }
    if (s.n_head % s.kv_heads() != 0)
        return format("model.n_head (%d) must be a multiple of model.n_kv_head (%d)", s.n_head, s.kv_heads());
    return "";
}

std::string rope_problem(const GptShape& s) {
    const RopeSettings& rope = s.rope;
    const char* scaling = name_of(rope.scaling);
    if (s.position != PositionKind::rope) {
        const char* position = name_of(s.position);
        if (rope.scaling != RopeScaling::none)
            return format("model.rope_scaling \"%s\" needs model.position \"rope\", is \"%s\"", scaling, position);
        if (rope.fraction != 1)
            return format("model.rope_fraction (%g) needs model.position \"rope\", is \"%s\"", rope.fraction, position);
        return "";
    }
    const double rotated = s.head_size() * rope.fraction;
    if (rotated < 2 || std::fmod(rotated, 2) != 0)
        return format("model.rope_fraction (%g) of model.head_size (%d) must be an even number of elements, is %g",
                      rope.fraction, s.head_size(), rotated);
    if (rope.scaling == RopeScaling::none && rope.factor != 1)
        return format("model.rope_factor (%g) needs model.rope_scaling \"linear\", \"llama3\" or \"yarn\"",
                      rope.factor);
    if (rope.scaling == RopeScaling::llama3 && rope.high_freq_factor <= rope.low_freq_factor)
        return format("model.rope_high_freq_factor (%g) must be larger than model.rope_low_freq_factor (%g)",
                      rope.high_freq_factor, rope.low_freq_factor);
    if (rope.scaling == RopeScaling::yarn && rope.beta_fast <= rope.beta_slow)
        return format("model.rope_beta_fast (%g) must be larger than model.rope_beta_slow (%g)", rope.beta_fast,
                      rope.beta_slow);
    return "";
}

std::string windows_problem(const GptShape& s) {
    const std::string& pattern = s.window_pattern;
    if (pattern.empty() || pattern.find_first_not_of("SL") != std::string::npos)
        return "model.window_pattern must consist of S and L, is \"" + pattern + "\"";
    if (s.sliding_window == 0 && pattern != "S")
        return format("model.window_pattern \"%s\" needs model.sliding_window, which is 0", pattern.c_str());
    if (pattern.size() > size_t(s.n_layer))
        return format("model.window_pattern (%zu letters) must not be longer than model.n_layer (%d)", pattern.size(),
                      s.n_layer);
    return "";
}

}  // namespace

std::string GptShape::problem() const {
    for (const auto& check : {sizes_problem, rope_problem, windows_problem})
        if (std::string problem = check(*this); !problem.empty()) return problem;
    return "";
}

namespace {

constexpr double kFullCircle = 2 * std::numbers::pi;

double llama3_frequency(double frequency, const RopeSettings& rope) {
    const double periods = rope.original_positions * frequency / kFullCircle;
    const double low = rope.low_freq_factor, high = rope.high_freq_factor;
    const double unscaled = std::clamp((periods - low) / (high - low), 0.0, 1.0);
    return (1 - unscaled) * frequency / rope.factor + unscaled * frequency;
}

// Returns the fractional index i of the frequency with this many periods in original_positions.
double place_of(double periods, int rotary, const RopeSettings& rope) {
    return rotary * std::log(rope.original_positions / (periods * kFullCircle)) / (2 * std::log(rope.theta));
}

double yarn_frequency(double frequency, int i, int rotary, const RopeSettings& rope) {
    const double low = std::max(std::floor(place_of(rope.beta_fast, rotary, rope)), 0.0);
    double high = std::min(std::ceil(place_of(rope.beta_slow, rotary, rope)), rotary - 1.0);
    if (high == low) high += 0.001;
    const double scaled = std::clamp((i - low) / (high - low), 0.0, 1.0);
    return scaled * frequency / rope.factor + (1 - scaled) * frequency;
}

double scaled_frequency(double frequency, int i, int rotary, const RopeSettings& rope) {
    switch (rope.scaling) {
        case RopeScaling::none: return frequency;
        case RopeScaling::linear: return frequency / rope.factor;
        case RopeScaling::llama3: return llama3_frequency(frequency, rope);
        case RopeScaling::yarn: return yarn_frequency(frequency, i, rotary, rope);
    }
    return frequency;
}

double attention_factor(const RopeSettings& rope) {
    if (rope.scaling != RopeScaling::yarn) return 1;
    return rope.attention_factor > 0 ? rope.attention_factor : 0.1 * std::log(rope.factor) + 1;
}

}  // namespace

std::vector<float> rope_table(const GptShape& shape, int positions) {
    const int rotary = shape.rotary();
    RopeSettings rope = shape.rope;
    rope.original_positions = shape.original_positions();
    const double factor = attention_factor(rope);
    std::vector<double> frequencies;
    for (int i = 0; i < rotary / 2; i++)
        frequencies.push_back(scaled_frequency(std::pow(rope.theta, -2.0 * i / rotary), i, rotary, rope));
    std::vector<float> table;
    table.reserve(size_t(positions) * size_t(rotary));
    for (int position = 0; position < positions; position++)
        for (const double frequency : frequencies) {
            table.push_back(float(factor * std::cos(position * frequency)));
            table.push_back(float(factor * std::sin(position * frequency)));
        }
    return table;
}
