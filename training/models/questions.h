// Multiple-choice questions put to a model.
#pragma once

#include "data/evaluation/questions.h"
#include "runtime/logging/logging.h"
#include "training/models/model_io.h"

// The questions of eval.questions, the first eval.max_questions of each file. Fails as QuestionReader and
// check_fits() do, and with Exit::config, naming the key, if two files would have the same name in the records.
std::vector<QuestionSet> questions_of(const Config& config, const std::optional<Tokenizer>& tokenizer);

// Fails with Exit::data if a completion has more tokens than a sequence of the model.
void check_fits(const QuestionSet& set, int seq_len);

struct Answers {
    QuestionsRecord::File accuracy;
    size_t truncated = 0;                 // completions whose context lost its beginning: the model reads no more
    std::vector<double> log_likelihoods;  // of each completion in turn, in nats
};

// All ranks together; each has the result. Its bits do not depend on the number of ranks. `between` as in evaluate().
Answers answer_questions(
    Gpt& gpt, const QuestionSet& set, const std::function<void()>& between = [] {});
