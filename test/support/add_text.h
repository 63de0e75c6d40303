#pragma once

#include "data/tokenizer/bpe_trainer.h"

// Counts the words of a text that begins and ends between pre-tokens.
inline void add_text(BpeTrainer& trainer, std::string_view text) {
    WordCounter counter;
    counter.add(text);
    trainer.add(counter.counts(), counter.text_bytes());
}
