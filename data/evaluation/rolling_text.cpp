#include "data/evaluation/rolling_text.h"

#include <algorithm>

#include "data/tokenizer/encoder.h"
#include "data/tokenizer/text_rules.h"
#include "kernels/base/check.h"

RollingText::RollingText(TextInput input, const Tokenizer& tokenizer, int seq_len, int stride)
    : seq_len_(uint64_t(seq_len)), stride_(uint64_t(stride > 0 ? stride : seq_len)) {
    input.count();
    input.set_cut(safe_cut_of(tokenizer.rules()));
    Encoder encoder(tokenizer);
    uint64_t begin = 0;  // start of the current document in ids_
    input.read(0, input.size(), [&](std::string_view text, bool starts_document) {
        if (starts_document) {
            add_windows(begin);
            begin = ids_.size();
            ids_.push_back(tokenizer.document_start());
        }
        encoder.append(text, ids_, 0, starts_document);
    });
    add_windows(begin);
    if (tokens_ == 0) fail(Exit::data, "%s: the input has no text", input.sources().front().file.path());
}

// Adds the windows of the document that spans from `begin` to the end of ids_.
void RollingText::add_windows(uint64_t begin) {
    const uint64_t count = ids_.size() - begin;  // includes kEndOfText
    for (uint64_t done = 0, next; done + 1 < count; done = next) {
        next = std::min(count - 1, done + (done == 0 ? seq_len_ : stride_));
        windows_.push_back(
            {begin + next - std::min(next, seq_len_), uint32_t(std::min(next, seq_len_)), uint32_t(next - done)});
        tokens_ += next - done;
    }
}

Batch RollingText::batch(uint64_t number, int rows) {
    inputs_.assign(size_t(rows) * seq_len_, 0);
    targets_.assign(inputs_.size(), -1);
    for (uint64_t row = 0; row < uint64_t(rows); row++) {
        const uint64_t index = number * uint64_t(rows) + row;
        if (index >= windows_.size()) break;
        const Window& window = windows_[index];
        const auto from = ids_.begin() + ptrdiff_t(window.begin);
        const ptrdiff_t at = ptrdiff_t(row * seq_len_), context = window.inputs - window.targets;
        std::copy(from, from + window.inputs, inputs_.begin() + at);
        std::copy(from + context + 1, from + window.inputs + 1, targets_.begin() + at + context);
    }
    return {inputs_.data(), targets_.data()};
}
