// Eval files of llm.c (hellaswag_val.bin): tokenized multiple-choice questions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// One question. The model's answer is the completion with the highest probability after the context.
struct MultipleChoice {
    std::vector<int32_t> context;                   // at least one token
    std::vector<std::vector<int32_t>> completions;  // at least two, with at least one token each
    int label = 0;                                  // index of the correct completion
    std::vector<int> characters = {};               // text length of each completion; empty: unknown
};

// Returns the maximum number of tokens of a context plus a completion. A model needs one position fewer, because it
// does not read the last token.
size_t longest_sequence(const std::vector<MultipleChoice>& questions);

// Returns whether the first bytes identify an eval file, valid or not.
bool is_eval_file(std::string_view first_bytes);

// Reads an eval file of version 1. Fails with Exit::data, naming the file, question, field and numbers, if the question
// count, a length, the order, a label or the end of the file is invalid. Does not check token ids: see
// check_vocabulary().
std::vector<MultipleChoice> read_eval_file(const std::string& path);

// Fails with Exit::data, naming `path`, the question and the token, if a token is `vocab_size` or larger.
void check_vocabulary(const std::vector<MultipleChoice>& questions, int vocab_size, const std::string& path);
