// Reads multiple-choice questions from JSON Lines, with HellaSwag's or general fields.
#pragma once

#include "data/tokenizer/encoder.h"
#include "data/tokenizer/tokenizer.h"

// One question. The model's answer is the completion with the highest probability after the context.
struct MultipleChoice {
    std::vector<int32_t> context;                   // at least one token
    std::vector<std::vector<int32_t>> completions;  // at least two, with at least one token each
    int label = 0;                                  // index of the correct completion
    std::vector<int> characters;                    // text length of each completion
};

struct QuestionSet {
    std::string path;
    std::string name;  // the file name without directory and extensions: only letters, digits and "_-"
    std::vector<MultipleChoice> questions;
    int completion_tokens = 0;  // tokens of the longest completion
};

// read() returns the first `limit` questions (0: all) of a file, which may be compressed with gzip or zstd. It
// validates the whole file.
//
// Each line is a JSON object. Text is tokenized as in lm-evaluation-harness (lm_eval/api/model.py,
// TemplateLM._encode_pair): context, a space and a choice are encoded as a whole. If the context alone has n tokens,
// the completion consists of the tokens after the first n. White space at the end of a context belongs to the
// completion. An empty context is kEndOfText.
//   HellaSwag's fields   activity_label, ctx_a, ctx_b, endings, label; text is cleaned as in lm_eval/tasks/hellaswag,
//                        with Unicode's simple case mapping
//   general fields       context, question or query; choices or endings; label or gold
//
// Fails with Exit::data, naming the file, the line and the field, for other content.
class QuestionReader {
public:
    explicit QuestionReader(const Tokenizer& tokenizer)  // the tokenizer must outlive it
        : document_start_(tokenizer.document_start()), encoder_(tokenizer) {}
    QuestionSet read(const std::string& path, size_t limit);

private:
    const int document_start_;
    Encoder encoder_;
};
