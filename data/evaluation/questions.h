// Files of multiple-choice questions: JSON Lines, with HellaSwag's fields or general ones, and llm.c's eval files.
#pragma once

#include "data/evaluation/eval_file.h"
#include "data/tokenizer/tokenizer.h"
#include "runtime/io/io.h"

struct QuestionSet {
    std::string path;
    std::string name;  // the file's, without directory and endings: letters, digits and "_-" only
    std::vector<MultipleChoice> questions;
    int completion_tokens = 0;  // the most of a completion
};

// The first `limit` questions (0: all) of the file, which may be compressed with gzip or zstd; all of it is checked.
//
// JSON Lines: an object per line. Text is tokenized as lm-evaluation-harness does (lm_eval/api/model.py,
// TemplateLM._encode_pair): context, a space and a choice as a whole; what the tokens of the context alone do not cover
// is the completion. White space at the end of a context belongs to the completion; an empty context is kEndOfText.
//   HellaSwag's fields   activity_label, ctx_a, ctx_b, endings, label; text as in lm_eval/tasks/hellaswag, where
//                        letters have a simple upper and lower case in Unicode
//   general ones         context, question or query; choices or endings; label or gold
// An eval file of llm.c has tokens; with a tokenizer, the characters of its completions are known too.
//
// Fails with Exit::data, naming the file, its line and the field, for anything else, and for tokens that are not below
// `vocab_size`; with Exit::no_input if text needs a tokenizer and `tokenizer` is null.
//
// Of several files: what encodes text is made once, when the first text is read.
class QuestionReader {
public:
    QuestionReader(const Tokenizer* tokenizer, int vocab_size);  // the tokenizer must outlive it
    ~QuestionReader();
    QuestionSet read(const std::string& path, size_t limit);

private:
    class TextEncoder;
    void read_json_lines(const MappedFile& file, size_t limit, QuestionSet& set);

    const Tokenizer* tokenizer_;
    int vocab_size_;
    std::unique_ptr<TextEncoder> encoder_;
};
