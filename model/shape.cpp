#include "model/shape.h"

#include <algorithm>
#include <cmath>
#include <numbers>

float GptShape::attention_scale() const {
    return given_attention_scale > 0 ? float(given_attention_scale) : 1.0f / std::sqrt(float(head_size()));
}

int GptShape::window(int layer) const {
    return window_pattern[size_t(layer) % window_pattern.size()] == 'S' ? sliding_window : 0;
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
    const double factor = attention_factor(shape.rope);
    std::vector<double> frequencies;
    for (int i = 0; i < rotary / 2; i++)
        frequencies.push_back(scaled_frequency(std::pow(shape.rope.theta, -2.0 * i / rotary), i, rotary, shape.rope));
    std::vector<float> table;
    table.reserve(size_t(positions) * size_t(rotary));
    for (int position = 0; position < positions; position++)
        for (const double frequency : frequencies) {
            table.push_back(float(factor * std::cos(position * frequency)));
            table.push_back(float(factor * std::sin(position * frequency)));
        }
    return table;
}
