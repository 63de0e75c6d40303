// Answers to multiple-choice questions, compared with lm-evaluation-harness's in test/recorded/lm_eval.
#include <cmath>
#include <nlohmann/json.hpp>

#include "runtime/io/files.h"
#include "test/support/catch.h"
#include "training/models/questions.h"

TEST_CASE("answers: tokens, characters and log-likelihoods equal lm-evaluation-harness's", "[model]") {
    const std::string directory = "test/recorded/lm_eval";
    const auto recorded = nlohmann::json::parse(read_file(directory + "/expected.json"));
    for (const int batch : {1, 2, 5, 64}) {
        LoadedModel model = load_model(ModelSource(directory), batch, comm_single());
        for (const std::string name : {"general", "hellaswag"}) {
            INFO(name << ", batch " << batch);
            const QuestionSet set = QuestionReader(*model.tokenizer).read(directory + "/" + name + ".jsonl", 0);
            const auto& expected = recorded[name];
            REQUIRE(set.questions.size() == expected["tokens"].size());
            std::vector<Continuation> texts;
            std::vector<double> expected_scores;
            for (size_t i = 0; i < set.questions.size(); i++) {
                const MultipleChoice& question = set.questions[i];
                std::vector<size_t> tokens;
                for (const std::vector<int32_t>& completion : question.completions) {
                    tokens.push_back(completion.size());
                    texts.push_back({question.context, completion});
                }
                CHECK(tokens == expected["tokens"][i].get<std::vector<size_t>>());
                CHECK(question.characters == expected["characters"][i].get<std::vector<int>>());
                for (const double score : expected["log_likelihoods"][i]) expected_scores.push_back(score);
            }
            const std::vector<double> scores = log_likelihoods(model.gpt, texts);
            REQUIRE(scores.size() == expected_scores.size());
            for (size_t i = 0; i < scores.size(); i++) CHECK(std::abs(scores[i] - expected_scores[i]) < 1e-4);
            const QuestionsRecord::File accuracy = answer_questions(model.gpt, set);
            CHECK(std::abs(accuracy.acc - expected["acc"].get<double>()) < 1e-12);
            CHECK(std::abs(accuracy.acc_norm - expected["acc_norm"].get<double>()) < 1e-12);
        }
    }
}
