#include <cmath>

#include "commands/command_line.h"
#include "data/evaluation/questions.h"
#include "data/evaluation/rolling_text.h"
#include "data/shards/loader.h"
#include "data/text/text_input.h"
#include "kernels/base/check.h"
#include "model/evaluate.h"
#include "runtime/cluster/cluster.h"
#include "runtime/logging/logging.h"
#include "training/models/model_io.h"
#include "training/models/questions.h"

namespace {

struct Options {
    std::string model;
    TokenizerChoice tokenizer;
    std::string data;  // glob of shards; empty: the run's data.val, unless text or questions are given
    int batches = 0;   // micro-batches of `data`; 0: all
    std::string text;  // file or directory; empty: none
    int stride = -1;   // replaces the run's eval.stride; -1: keep it
    int batch = 0;     // sequences at a time; 0: the run's train.batch_size
    std::vector<std::string> questions;
    int limit = 0;  // questions of each file; 0: all
};

// Runs on all ranks; rank 0 prints.
class Evaluation {
public:
    // Checks all options before anything is computed.
    Evaluation(const Options& options, const ModelSource& source, Ranks& ranks)
        : options_(options), ranks_(ranks), model_(load_model(source, options.batch, ranks.comm(), options.tokenizer)) {
        Config& config = model_.config;
        config.eval.batches = options.batches;
        config.eval.max_questions = options.limit;
        if (options.stride >= 0) config.eval.stride = options.stride;
        if (options.stride > config.train.seq_len)
            fail(Exit::usage, "--stride is %d, but must be at most the model's sequence length, %d", options.stride,
                 config.train.seq_len);
        if (!model_.tokenizer && !options.text.empty())
            fail(Exit::no_input, "%s has no tokenizer; specify one with --tokenizer", options.model);
    }

    void data(const std::string& glob, const std::string& key) {
        const Config& config = model_.config;
        const TokenStream stream(find_shards(glob, key), config.model.vocab_size);
        Loader loader(stream,
                      loader_options(config, {.data = ranks_.comm().size}, ranks_.comm().rank, SampleOrder::once));
        const Validation result = noticed(
            "loss of " + glob, [&] { return evaluate_pass(model_.gpt, ranks_.control(), loader, model_.tokenizer); });
        if (!is_first()) return;
        std::printf("%s: loss %.6f", glob.c_str(), result.loss);
        if (result.bits_per_byte) std::printf(", %.4f bits per byte", *result.bits_per_byte);
        std::printf("\n");
    }

    void text() {
        const Config& config = model_.config;
        RollingText text(TextInput({options_.text}), *model_.tokenizer, config.train.seq_len, config.eval.stride);
        const int rows = config.train.batch_size;
        const uint64_t size = uint64_t(ranks_.comm().size), rows_of_all = uint64_t(rows) * size;
        uint64_t number = uint64_t(ranks_.comm().rank);
        auto next = [&] { return text.batch(std::exchange(number, number + size), rows); };
        const auto token_bytes = [&](int token) { return model_.tokenizer->token_bytes(token); };
        const uint64_t batches = (text.windows() + rows_of_all - 1) / rows_of_all;
        const Validation result =
            noticed("loss of " + options_.text, [&] { return evaluate(model_.gpt, batches, next, token_bytes); });
        if (!is_first()) return;
        std::printf("%s: %zu tokens, loss %.6f, perplexity %.6g, %.6f bits per byte\n", options_.text.c_str(),
                    text.tokens(), result.loss, std::exp(result.loss), *result.bits_per_byte);
    }

    void questions() {
        // All files are read first, so that an error in any of them is reported at once.
        for (const QuestionSet& set :
             read_questions(options_.questions, "--questions", model_.config, model_.tokenizer)) {
            const QuestionsRecord::File accuracy =
                noticed("questions of " + set.path, [&] { return answer_questions(model_.gpt, set); });
            if (is_first()) print_accuracy(set, accuracy);
        }
    }

private:
    bool is_first() const { return ranks_.comm().rank == 0; }

    // Returns the result of `work`. If it takes long, rank 0 shows `what` on stderr.
    template <class Work> std::invoke_result_t<Work> noticed(const std::string& what, const Work& work) const {
        TrainingProgress progress(is_first() ? stderr : nullptr, 0, 1);
        progress.begin(what);
        return work();
    }

    void print_accuracy(const QuestionSet& set, const QuestionsRecord::File& file) const {
        auto print = [&](const char* name, double share) {
            std::printf("  %-8s %.4f", name, share);
            if (file.questions > 1) std::printf(" +/- %.4f", file.standard_error(share));
            std::printf("\n");
        };
        std::printf("%s: %zu questions\n", set.path.c_str(), file.questions);
        print("acc", file.acc);
        print("acc_norm", file.acc_norm);
        const size_t longest = size_t(model_.config.train.seq_len) + 1;
        size_t completions = 0, truncated = 0;
        for (const MultipleChoice& question : set.questions)
            for (const std::vector<int32_t>& completion : question.completions) {
                completions++;
                truncated += question.context.size() + completion.size() > longest;
            }
        if (truncated > 0)
            std::printf("  %zu of %zu completions have a truncated context: it is too long for the model\n", truncated,
                        completions);
    }

    const Options& options_;
    Ranks& ranks_;
    LoadedModel model_;
};

void evaluate_model(const Options& options, const ModelSource& source, Ranks& ranks) {
    const bool has_other = !options.text.empty() || !options.questions.empty();
    const bool has_own = source.checkpoint && !source.config.data.val.empty();
    if (!has_own && options.data.empty() && !has_other)
        fail(Exit::usage, "%s has no data to evaluate: add --data, --text or --questions", options.model);
    Evaluation evaluation(options, source, ranks);
    if (!options.data.empty())
        evaluation.data(options.data, "--data");
    else if (!has_other)
        evaluation.data(source.config.data.val, "data.val");
    if (!options.text.empty()) evaluation.text();
    if (!options.questions.empty()) evaluation.questions();
}

}  // namespace

void add_eval(CLI::App& app, CommandLine& line) {
    auto options = std::make_shared<Options>();
    const Command command(app, "eval", "compute validation loss, perplexity of a text, or multiple-choice accuracy");
    command.add("MODEL", &options->model, kModelHelp).required();
    command.add("--data", &options->data,
                "glob of token shards (default: the run's data.val, unless --text or --questions is given)");
    command.add("--batches", &options->batches, "number of micro-batches of --data to evaluate; 0: all")
        .show_default()
        .integer_in(0, 1'000'000'000);
    command.add("--text", &options->text, "text to compute the perplexity of, in any format that prepare reads")
        .type_name("FILE");
    command
        .add("--stride", &options->stride,
             "tokens between the starts of successive windows (default: the run's eval.stride)")
        .integer_in(0, 1 << 24);
    const Argument questions =
        command.add("--questions", &options->questions, "multiple-choice questions as JSON Lines; may be repeated")
            .type_name("FILE")
            .repeatable();
    command.add("--limit", &options->limit, "number of questions to ask from each file; 0: all")
        .show_default()
        .integer_in(0, 1'000'000'000)
        .needs(questions);
    command.add("--batch", &options->batch, "sequences per batch (default: the run's train.batch_size, or 1)")
        .integer_in(1, 1 << 20);
    add_tokenizer_options(command, options->tokenizer);
    add_ranks(command, line);
    command.on_parsed([options, &line] {
        if (line.nproc > 0) return;  // main() starts the ranks
        const ModelSource source(options->model);
        evaluate_on_ranks(source, line.revision, [&](Ranks& ranks) { evaluate_model(*options, source, ranks); });
    });
}
