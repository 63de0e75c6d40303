// llm.c's eval files (hellaswag_val.bin): multiple-choice questions as tokens.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// One question. A model answers with the completion whose tokens it finds likeliest behind the context.
struct MultipleChoice {
    std::vector<int32_t> context;                   // at least one token
    std::vector<std::vector<int32_t>> completions;  // at least two, of at least one token each
    int label = 0;                                  // the right completion
    std::vector<int> characters = {};               // of each completion as text; empty: not known
};

// The most tokens of a question's context and one of its completions: a model needs one position fewer, since nothing
// follows the last token.
size_t longest_sequence(const std::vector<MultipleChoice>& questions);

// Whether a file with these first bytes is meant to be an eval file, sound or not.
bool is_eval_file(std::string_view first_bytes);

// Reads an eval file of version 1. Fails with Exit::data, naming the file, the number of the question, the field and
// the numbers, unless everything is sound: the number of questions, the length of the longest and of each, their order,
// labels, and a file that ends with the last question. Ids are whatever 16 bits hold: see check_vocabulary().
std::vector<MultipleChoice> read_eval_file(const std::string& path);

// Fails with Exit::data, naming `path`, the question and the token, if a token is not below `vocab_size`.
void check_vocabulary(const std::vector<MultipleChoice>& questions, int vocab_size, const std::string& path);
