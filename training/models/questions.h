// Multiple-choice questions: reads them and evaluates a model on them.
#pragma once

#include "data/evaluation/questions.h"
#include "runtime/logging/logging.h"
#include "training/models/model_io.h"

// Reads the first eval.max_questions of each file of eval.questions. Fails as QuestionReader and check_fits() do, and
// with Exit::config if two files would have the same name in the records.
std::vector<QuestionSet> questions_of(const Config& config, const std::optional<Tokenizer>& tokenizer);

// Fails with Exit::data if a completion has more than `seq_len` tokens.
void check_fits(const QuestionSet& set, int seq_len);

struct Answers {
    QuestionsRecord::File accuracy;
    size_t completions = 0;
    size_t truncated = 0;  // completions whose context was cut at its beginning to fit the model
};

// Collective; returns the result on all ranks, with the same bits for any number of ranks. `between` as in evaluate().
Answers answer_questions(
    Gpt& gpt, const QuestionSet& set, const std::function<void()>& between = [] {});
