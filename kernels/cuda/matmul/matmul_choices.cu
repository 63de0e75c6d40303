// Host code; no kernel.
#include <cinttypes>
#include <sstream>

#include "kernels/base/check.h"
#include "kernels/cuda/matmul/matmul_choices.h"
#include "kernels/device.h"

namespace {

constexpr const char* kApart = "apart";

std::string header() {
    return format("train_gpt GEMM choices 1, cuBLASLt %zu, %s", cublasLtGetVersion(), gpu_name().c_str());
}

bool parse_line(const std::string& line, MatmulChoices& choices) {
    const size_t colon = line.find(": "), comma = line.find(", ", colon);
    if (colon == std::string::npos || comma == std::string::npos) return false;
    MatmulChoice& choice = choices[line.substr(0, colon)];
    choice.times = line.substr(comma + 2);
    const std::string value = line.substr(colon + 2, comma - colon - 2);
    if (value == kApart) return true;
    std::istringstream words(value);
    words >> std::hex;
    for (uint64_t& word : choice.algorithm.emplace()) words >> word;
    return !words.fail() && (words >> std::ws).eof();
}

}  // namespace

std::string text_of(const MatmulChoices& choices) {
    std::string text = header() + "\n";
    for (const auto& [gemm, choice] : choices) {
        text += gemm + ":";
        if (!choice.algorithm) text += format(" %s", kApart);
        for (size_t i = 0; choice.algorithm && i < choice.algorithm->size(); i++)
            text += format(" %" PRIx64, (*choice.algorithm)[i]);
        text += ", " + choice.times + "\n";
    }
    return text;
}

MatmulChoices matmul_choices_of(const std::string& text) {
    std::istringstream lines(text);
    std::string first, line;
    std::getline(lines, first);
    if (first != header())
        fail(Exit::config,
             "device.gemm_choices begins with \"%s\", but this machine's choices begin with \"%s\"; run train_gpt tune "
             "on this machine, or remove the key",
             first, header());
    MatmulChoices choices;
    while (std::getline(lines, line))
        if (!parse_line(line, choices)) fail(Exit::config, "device.gemm_choices has an invalid line: \"%s\"", line);
    return choices;
}
