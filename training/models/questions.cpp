#include "training/models/questions.h"

#include <algorithm>
#include <set>

#include "data/shards/shards.h"
#include "kernels/base/check.h"
#include "model/evaluate.h"
#include "runtime/io/reject_file.h"

std::vector<QuestionSet> read_questions(const std::vector<std::string>& patterns, const std::string& key,
                                        const Config& config, const std::optional<Tokenizer>& tokenizer) {
    std::vector<std::string> paths;
    for (const std::string& pattern : patterns) std::ranges::copy(find_shards(pattern, key), std::back_inserter(paths));
    if (!tokenizer) fail(Exit::no_input, "%s has text, which requires a tokenizer", paths.front());
    QuestionReader reader(*tokenizer);
    std::vector<QuestionSet> sets;
    for (const std::string& path : paths) {
        const QuestionSet& set = sets.emplace_back(reader.read(path, size_t(config.eval.max_questions)));
        if (set.completion_tokens > config.train.seq_len)
            reject_file(path, "a completion has %d tokens, but the model's sequences have %d", set.completion_tokens,
                        config.train.seq_len);
    }
    return sets;
}

std::vector<QuestionSet> questions_of(const Config& config, const std::optional<Tokenizer>& tokenizer) {
    if (config.eval.questions.empty()) return {};
    const std::string key = "eval.questions";
    std::vector<QuestionSet> sets = read_questions({config.eval.questions}, key, config, tokenizer);
    std::set<std::string> names;
    for (const QuestionSet& set : sets)
        if (!names.insert(set.name).second)
            fail(Exit::config, "%s: %s and another file would both be recorded as %s; rename one", key, set.path,
                 set.name);
    return sets;
}

static int index_of_largest(const std::vector<double>& scores) {
    return int(std::ranges::max_element(scores) - scores.begin());
}

QuestionsRecord::File answer_questions(Gpt& gpt, const QuestionSet& set, const std::function<void()>& between) {
    std::vector<Continuation> texts;
    for (const MultipleChoice& question : set.questions)
        for (const std::vector<int32_t>& completion : question.completions)
            texts.push_back({question.context, completion});
    const std::vector<double> scores = log_likelihoods(gpt, texts, between);
    size_t right = 0, right_norm = 0, first = 0;
    for (const MultipleChoice& question : set.questions) {
        std::vector<double> sums, means;  // per completion: log-likelihood, and the same per character
        for (const int characters : question.characters) {
            sums.push_back(scores[first++]);
            means.push_back(sums.back() / double(characters));
        }
        right += index_of_largest(sums) == question.label;
        right_norm += index_of_largest(means) == question.label;
    }
    const double count = double(set.questions.size());
    return {set.name, set.questions.size(), double(right) / count, double(right_norm) / count};
}
