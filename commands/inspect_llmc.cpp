#include "commands/inspect_llmc.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "data/evaluation/eval_file.h"
#include "data/shards/shards.h"
#include "data/tokenizer/tokenizer.h"
#include "model/inference.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/io/files.h"
#include "runtime/io/header_word.h"
#include "runtime/io/reject_file.h"
#include "runtime/logging/logging.h"
#include "training/models/llmc_files.h"

namespace {

void inspect_model(const std::string& path) {
    const LlmcModel model(path);
    const GptShape& s = model.shape;
    const size_t elements = llmc_elements(s, model.padded_vocab);
    constexpr size_t kBlock = size_t(1) << 20;
    const size_t padding_begin = size_t(s.vocab_size) * size_t(s.n_embd);
    const size_t padding_end = size_t(model.padded_vocab) * size_t(s.n_embd);
    size_t in_padding = 0;
    for (size_t begin = 0; begin < elements; begin += kBlock) {
        const std::vector<float> values = model.values(begin, std::min(kBlock, elements - begin));
        for (size_t i = 0; i < values.size(); i++) {
            if (!std::isfinite(values[i]))
                reject_file(path, "element %zu of %zu is %g", begin + i, elements, values[i]);
            in_padding += values[i] != 0 && begin + i >= padding_begin && begin + i < padding_end;
        }
    }
    print_line(format("%s: llm.c GPT-2 model, version %d (%s), valid", path.c_str(), header_word(model.file.text(), 1),
                      name_of(model.type)));
    print_line(format("%d layers, %d heads, %d channels, %d positions, vocabulary %d padded to %d: %zu parameters",
                      s.n_layer, s.n_head, s.n_embd, s.n_positions, s.vocab_size, model.padded_vocab, elements));
    if (in_padding > 0) print_line(format("%zu padding values are not zero; they are ignored", in_padding));
}

void inspect_debug_state(const std::string& path) {
    const LlmcDebugState state(path);
    print_line(format("%s: llm.c debug state: %d sequences of %d tokens, targets, logits, loss and gradients",
                      path.c_str(), state.batch, state.seq_len));
    const auto [smallest, largest] = std::ranges::minmax(state.tokens());
    print_line(format("tokens from %d to %d; use inspect --model MODEL.bin to compare it with train_gpt's results",
                      smallest, largest));
}

std::string counts_text(const std::vector<size_t>& counts) {
    std::string text;
    for (const size_t count : counts) text += (text.empty() ? "" : ", ") + std::to_string(count);
    return text;
}

void inspect_eval_file(const std::string& path) {
    const std::vector<MultipleChoice> questions = read_eval_file(path);
    std::vector<size_t> labels, choices;
    auto count = [](std::vector<size_t>& counts, size_t value) {
        counts.resize(std::max(counts.size(), value + 1));
        counts[value]++;
    };
    int32_t largest = 0;
    for (const MultipleChoice& question : questions) {
        count(labels, size_t(question.label));
        count(choices, question.completions.size());
        largest = std::max(largest, std::ranges::max(question.context));
        for (const auto& completion : question.completions) largest = std::max(largest, std::ranges::max(completion));
    }
    print_line(format("%s: llm.c eval file, %zu multiple-choice questions, valid", path.c_str(), questions.size()));
    for (size_t n = 0; n < choices.size(); n++)
        if (choices[n] > 0) print_line(format("%zu questions with %zu completions", choices[n], n));
    print_line("number of questions by label, from 0: " + counts_text(labels));
    print_line(format("ids up to %d; the longest context and completion have %zu tokens", largest,
                      longest_sequence(questions)));
    const std::string beside = std::filesystem::path(path).replace_filename("tokenizer.json");
    if (!file_exists(beside)) return;
    const Tokenizer tokenizer = Tokenizer::load(beside);
    check_vocabulary(questions, tokenizer.vocab_size(), path);
    const MultipleChoice& first = questions.front();
    print_line("first question: " + quoted(tokenizer.decode(first.context), 200));
    for (const auto& completion : first.completions) print_line("  " + quoted(tokenizer.decode(completion), 200));
}

// Prints what the file itself tells. It does not say which parameters the rank held, or where the data loader was.
void inspect_optimizer_state(const std::string& path) {
    constexpr size_t kHeaderBytes = 1024, kGeneratorBytes = 2520;
    const MappedFile file(path);
    auto word = [&](size_t index) { return header_word(file.text(), index); };
    const int32_t version = word(1), ranks = word(2), rank = word(3), masters = word(4), shuffled = word(5);
    if (file.size() < kHeaderBytes)
        reject_file(path, "the header has %zu bytes, but the file ends after %zu", kHeaderBytes, file.size());
    if (version != 1) reject_file(path, "llm.c optimizer state of version %d; only version 1 is supported", version);
    if (ranks < 1 || rank < 0 || rank >= ranks)
        reject_file(path, "words 3 and 2 of the header, rank and number of ranks, are %d and %d", rank, ranks);
    if ((masters | shuffled) & ~1)
        reject_file(path,
                    "words 4 and 5 of the header, master weights and shuffling, are %d and %d, but must be 0 or 1",
                    masters, shuffled);
    const size_t data = file.size() - kHeaderBytes, arrays = masters ? 3 : 2;
    if (shuffled ? data < kGeneratorBytes : data % (arrays * sizeof(float)) != 0)
        reject_file(path, "%zu bytes after the header are not %zu arrays of equal length: the file is truncated", data,
                    arrays);
    print_line(format("%s: llm.c optimizer state, step %d, rank %d of %d: AdamW's moments%s%s", path.c_str(), word(10),
                      rank, ranks, masters ? ", master weights" : "", shuffled ? ", the order of the data" : ""));
    if (!shuffled) print_line(format("%zu parameters on this rank", data / arrays / sizeof(float)));
    print_line("cannot be imported; use the model file of the same step for the weights (model.init_from)");
}

// ---------------------------------------------------------------------------------------------------------------------

// The difference of an array from the expected one. A NaN in either makes the norms NaN, and so worst().
struct Difference {
    double largest = 0;        // magnitude of an expected value
    double largest_error = 0;  // absolute
    double squares = 0, error_squares = 0;

    void add(float value, float expected) {
        const double error = std::abs(double(value) - double(expected));
        largest = std::max<double>(largest, std::abs(expected));
        largest_error = std::max(largest_error, error);
        squares += double(expected) * expected;
        error_squares += error * error;
    }
    static double ratio(double error, double of) { return error == 0 && of == 0 ? 0 : error / of; }
    double relative() const { return ratio(largest_error, largest); }  // to the largest value
    double relative_norm() const { return ratio(std::sqrt(error_squares), std::sqrt(squares)); }
    double worst() const {
        const double a = relative(), b = relative_norm();
        return std::isnan(b) ? b : std::max(a, b);
    }
    bool is_worse_than(const Difference& other) const {
        return !(worst() <= other.worst()) && !std::isnan(other.worst());
    }
};

// The relative error by which two FP32 computations may differ. The longest path from a token to a gradient has about
// 8 ops per block, forward and again backward, and a few at the ends. The rounding error of a sum of n terms is about
// sqrt(n) unit round-offs of its result, in any order (Higham, Mary, "A new approach to probabilistic rounding error
// analysis", SISC 2019); n is at most the longest sum of the model. Rounding errors are independent, so the errors of
// all ops of both computations accumulate like a random walk; this is 4 standard deviations of it. bf16 weights add one
// rounding per op if the weights that produced the debug state were not rounded.
double tolerance(const LlmcModel& model, size_t rows) {
    const GptShape& s = model.shape;
    const double ops = 2 * (8.0 * s.n_layer + 6);
    const double longest_sum = double(std::max({size_t(model.padded_vocab), size_t(s.hidden()), rows}));
    const double arithmetic = 2 * longest_sum * std::pow(unit_roundoff<float>, 2);
    const double weights = model.type == Dtype::bf16 ? std::pow(unit_roundoff<bf16>, 2) : 0;
    return 4 * std::sqrt(ops * (arithmetic + weights));
}

// Prints a table with a line per array; for an array that every layer has, the line of the worst layer.
class Comparison {
public:
    explicit Comparison(double limit) : limit_(limit) {
        print_line(format("%-21s %5s %10s %10s %9s %9s", "", "layer", "largest", "error", "relative", "in norm"));
    }

    // Arrays of the same name must be added in sequence. `layer`: -1 if there is only one.
    void add(const std::string& name, int layer, const Difference& difference) {
        if (name != name_) print_worst();
        if (name != name_ || difference.is_worse_than(worst_)) worst_ = difference, layer_ = layer;
        name_ = name;
        arrays++;
        differing += !(difference.worst() <= limit_);
    }

    void print_worst() const {
        if (name_.empty()) return;
        print_line(format("%-21s %5s %10.3e %10.3e %9.2e %9.2e  %s", name_.c_str(),
                          layer_ < 0 ? "" : std::to_string(layer_).c_str(), worst_.largest, worst_.largest_error,
                          worst_.relative(), worst_.relative_norm(), worst_.worst() <= limit_ ? "ok" : "differs"));
    }

    size_t arrays = 0, differing = 0;

private:
    double limit_;
    std::string name_;  // of the arrays being added; `layer_` is their worst layer
    Difference worst_;
    int layer_ = -1;
};

Gpt model_for(const LlmcModel& model, const LlmcDebugState& state) {
    GptOptions options{.shape = model.shape,
                       .batch = state.batch,
                       .seq_len = state.seq_len,
                       .precision = Dtype::fp32,
                       .optimizer = {.kind = OptimizerKind::sgd, .weight_decay = 0, .grad_clip = 0},
                       .head_rows = int(std::min<size_t>(state.rows(), 8192))};
    Gpt gpt(options, comm_single());
    model.load(gpt);
    gpt.masters_changed();
    return gpt;
}

}  // namespace

void compare_with_debug_state(const std::string& model_path, const std::string& path) {
    const LlmcModel model(model_path);
    const LlmcDebugState state(path);
    state.check(model);
    Gpt gpt = model_for(model, state);
    const double limit = tolerance(model, state.rows());
    Comparison comparison(limit);
    const std::span<const float> logits = state.logits(model);
    std::vector<float> row(size_t(model.shape.vocab_size));
    Difference of_logits, of_loss;
    gpt.begin_step({});
    gpt.forward(state.tokens().data());
    for (size_t i = 0; i < state.rows(); i++) {
        logits_of_row(gpt, int(i), row.data());
        for (size_t id = 0; id < row.size(); id++) of_logits.add(row[id], logits[i * row.size() + id]);
    }
    comparison.add("logits", -1, of_logits);
    gpt.backward(state.targets().data(), 1.0f / float(state.rows()));
    of_loss.add(float(gpt.end_step().loss_sum / double(state.rows())), state.loss(model));
    comparison.add("loss", -1, of_loss);

    const std::span<const float> gradients = state.gradients(model);
    size_t begin = 0;
    for (const LlmcTensor& entry : llmc_tensors(gpt.layout(), gpt.gradient_tensors(), model.padded_vocab)) {
        const std::vector<float> values = file_values(entry.tensor);
        Difference difference;
        for (size_t i = 0; i < values.size(); i++) difference.add(values[i], gradients[begin + i]);
        comparison.add(std::string("gradient of ") + entry.name, entry.layer, difference);
        begin += entry.file_elements;
    }
    comparison.print_worst();
    if (comparison.differing > 0)
        reject_file(path,
                    "%zu of %zu arrays differ from train_gpt's results with %s by more than %.2g of their largest "
                    "value or norm, the bound for FP32 rounding",
                    comparison.differing, comparison.arrays, model_path, limit);
    print_line(
        format("%s: matches; all errors are at most %.2g of the largest value and of the norm, the bound for FP32 "
               "rounding%s",
               path.c_str(), limit, model.type == Dtype::bf16 ? " with weights rounded to bf16" : ""));
}

bool inspect_llmc_file(const std::string& path) {
    const std::optional<LlmcKind> kind = llmc_kind(MappedFile(path).text());
    if (!kind) return false;
    switch (*kind) {
        case LlmcKind::model: inspect_model(path); break;
        case LlmcKind::debug_state: inspect_debug_state(path); break;
        case LlmcKind::eval: inspect_eval_file(path); break;
        case LlmcKind::optimizer_state: inspect_optimizer_state(path); break;
        case LlmcKind::llama3:
            reject_file(path,
                        "llm.c Llama 3 model or debug state; only llm.c's GPT-2 files are supported, as this header "
                        "stores the model's fractions (norm_eps) as integers");
    }
    return true;
}
