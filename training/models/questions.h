// Multiple-choice questions: reads them and evaluates a model on them.
#pragma once

#include "data/evaluation/questions.h"
#include "data/tokenizer/tokenizer.h"
#include "model/gpt.h"
#include "runtime/config/config.h"
#include "runtime/logging/logging.h"
#include "training/models/model_io.h"

// Reads the first eval.max_questions of each file that matches a pattern; requires at least one pattern. `key` names
// the option with the patterns. Fails as QuestionReader does, with Exit::no_input if there is no tokenizer, and with
// Exit::data if a completion has more than train.seq_len tokens.
std::vector<QuestionSet> read_questions(const std::vector<std::string>& patterns, const std::string& key,
                                        const Config& config, const std::optional<Tokenizer>& tokenizer);

// The questions of eval.questions. Also fails with Exit::config if two files would have the same name in the records.
std::vector<QuestionSet> questions_of(const Config& config, const std::optional<Tokenizer>& tokenizer);

// Collective; returns the result on all ranks, with the same bits for any number of ranks. `between` as in evaluate().
QuestionsRecord::File answer_questions(
    Gpt& gpt, const QuestionSet& set, const std::function<void()>& between = [] {});
