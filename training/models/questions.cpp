#include "training/models/questions.h"

#include <algorithm>
#include <set>

#include "data/shards/shards.h"
#include "runtime/io/reject_file.h"

std::vector<QuestionSet> questions_of(const Config& config, const std::optional<Tokenizer>& tokenizer) {
    std::vector<QuestionSet> sets;
    if (config.eval.questions.empty()) return sets;
    std::set<std::string> names;
    QuestionReader reader(tokenizer ? &*tokenizer : nullptr);
    for (const std::string& path : find_shards(config.eval.questions, "eval.questions")) {
        sets.push_back(reader.read(path, size_t(config.eval.max_questions)));
        check_fits(sets.back(), config.train.seq_len);
        if (!names.insert(sets.back().name).second)
            fail(Exit::config, "eval.questions: %s and another file would both be recorded as %s; rename one", path,
                 sets.back().name);
    }
    return sets;
}

void check_fits(const QuestionSet& set, int seq_len) {
    if (set.completion_tokens > seq_len)
        reject_file(set.path, "a completion has %d tokens, but the model's sequences have %d", set.completion_tokens,
                    seq_len);
}

// The fraction of questions whose correct completion has the highest score. `score(i)` is the score of completion i,
// counted over all questions.
template <class Score> static double share_of_right(const std::vector<MultipleChoice>& questions, const Score& score) {
    size_t right = 0, first = 0;
    for (const MultipleChoice& question : questions) {
        size_t best = 0;
        for (size_t i = 1; i < question.completions.size(); i++)
            if (score(first + i) > score(first + best)) best = i;
        right += best == size_t(question.label);
        first += question.completions.size();
    }
    return double(right) / double(questions.size());
}

Answers answer_questions(Gpt& gpt, const QuestionSet& set, const std::function<void()>& between) {
    Answers answers;
    std::vector<Continuation> texts;
    std::vector<int> characters;
    for (const MultipleChoice& question : set.questions) {
        for (const std::vector<int32_t>& completion : question.completions) {
            texts.push_back({question.context, completion});
            answers.truncated += texts.back().tokens() - 1 > size_t(gpt.options().seq_len);
        }
        std::ranges::copy(question.characters, std::back_inserter(characters));
    }
    answers.completions = texts.size();
    const std::vector<double> scores = log_likelihoods(gpt, texts, between);
    QuestionsRecord::File& accuracy = answers.accuracy;
    accuracy.name = set.name;
    accuracy.questions = set.questions.size();
    accuracy.acc = share_of_right(set.questions, [&](size_t i) { return scores[i]; });
    accuracy.acc_norm = share_of_right(set.questions, [&](size_t i) { return scores[i] / double(characters[i]); });
    return answers;
}
