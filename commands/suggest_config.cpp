#include "commands/suggest_config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "runtime/io/process.h"
#include "training/models/model_io.h"

namespace {

struct ModelSize {
    int n_layer, n_head, n_embd, seq_len;
};

// From less than the quickstart's model to the sizes of GPT-2; the head size grows from 32 to 64.
constexpr ModelSize kSeries[] = {{2, 2, 64, 64},      {4, 4, 128, 128},     {6, 6, 192, 128},
                                 {6, 6, 384, 256},    {8, 8, 512, 256},     {12, 10, 640, 512},
                                 {12, 12, 768, 1024}, {24, 16, 1024, 1024}, {36, 20, 1280, 1024}};

constexpr double kTokensPerParameter = 1.5, kParametersPerByte = 1.5, kMaxUsefulSteps = 20000;
// Muon's iterations take about 5 / kBatchPerChannel of the passes' time: see docs/optimizers.md.
constexpr int kBatchPerChannel = 16;    // tokens per step
constexpr int64_t kMinBatch = 8;        // sequences, for a short text
constexpr int64_t kMaxBatch = 1 << 19;  // tokens, as for GPT-2

Config config_of(const SuggestionInputs& inputs, const ModelSize& size) {
    namespace fs = std::filesystem;
    const std::string& directory = inputs.directory;
    Config c;
    c.run.dir = "runs/" + fs::path(directory + "/").lexically_normal().parent_path().filename().string();
    set_family(c.model, ModelFamily::qwen3);
    c.model.tie_embeddings = true;
    c.model.rope.theta = 10000;
    c.model.n_layer = size.n_layer;
    c.model.n_head = size.n_head;
    c.model.n_embd = size.n_embd;
    c.model.vocab_size = inputs.vocab_size;
    c.model.n_positions = size.seq_len;
    c.data.train = {{directory + "/train_*.bin"}};
    c.data.val = inputs.val_tokens > 1 ? directory + "/val_*.bin" : "";
    if (inputs.has_tokenizer) c.data.tokenizer = directory + "/tokenizer.json";
    c.train.seq_len = size.seq_len;
    const int64_t sequences = int64_t(inputs.train_tokens - 1) / size.seq_len;
    const int64_t wanted = kBatchPerChannel * size.n_embd / size.seq_len;
    c.train.batch_size = int(std::min(wanted, std::max(kMinBatch, sequences)));
    c.train.total_batch_tokens = c.train.batch_size * size.seq_len;
    c.train.max_steps = 0;
    c.train.max_minutes = inputs.minutes;
    set_optimizer(c.optim, OptimizerKind::muon);
    c.optim.learning_rate = 0.012 * std::sqrt(128.0 / size.n_embd);
    c.optim.beta2 = 0.99;
    c.schedule.name = LrSchedule::wsd;
    c.schedule.warmup_steps = 200;
    c.schedule.cooldown_fraction = 0.5;
    c.schedule.final_lr_fraction = 0;
    return c;
}

// Sets the batch size and the intervals, which depend on the number of steps.
void fit_to_pace(Suggestion& suggestion, const SuggestionInputs& inputs) {
    Config& c = suggestion.config;
    // With more steps than this, a larger batch is more useful.
    while (suggestion.steps() > 2 * kMaxUsefulSteps && c.train.total_batch_tokens < kMaxBatch) {
        c.train.total_batch_tokens *= 2;
        suggestion.step_s *= 2;
    }
    suggestion.passes = suggestion.tokens() / double(inputs.train_tokens) * inputs.copies;
    // A model that reads a text several times memorizes less of it with more decay.
    if (suggestion.passes >= 2) c.optim.weight_decay = suggestion.passes < 5 ? 0.3 : 0.5;
    auto every = [&](int times) { return std::max(1, int(std::min<double>(suggestion.steps() / times, kMaxSteps))); };
    c.log.every_steps = every(50);
    c.sample.every_steps = inputs.has_tokenizer ? every(5) : 0;
    c.sample.tokens = std::min(100, c.train.seq_len);
    c.sample.temperature = 0.8;
    c.sample.top_k = std::min(50, c.model.vocab_size);
    c.checkpoint.every_steps = every(5);
    c.eval.every_steps = c.data.val.empty() ? 0 : every(10);
    c.checkpoint.keep_best = !c.data.val.empty();
    // Ten validations, each of at most 1 % of the training's tokens or of 64 micro-batches.
    const double batch_tokens = double(c.train.batch_size) * c.train.seq_len;
    const double affordable = std::max(64.0, 0.01 * suggestion.tokens() / batch_tokens);
    c.eval.batches = double(inputs.val_tokens) <= affordable * batch_tokens ? 0 : int(std::min(affordable, 1e6));
    c.schedule.warmup_steps = std::min(c.schedule.warmup_steps, every(10));
}

}  // namespace

std::optional<Suggestion> suggest_config(const SuggestionInputs& inputs, const StepTime& step_time) {
    constexpr uint64_t kBytesPerToken = 4;  // English text with a tokenizer like GPT-2's
    const uint64_t text_bytes = inputs.text_bytes > 0 ? inputs.text_bytes : inputs.train_tokens * kBytesPerToken;
    std::optional<Suggestion> best;
    for (const ModelSize& size : kSeries) {
        Suggestion next{.config = config_of(inputs, size)};
        if (uint64_t(next.config.train.total_batch_tokens) >= inputs.train_tokens) break;
        next.parameters = int64_t(lay_out_tensors(gpt_options(next.config).shape).parameters);
        if (best && double(next.parameters) > kParametersPerByte * double(text_bytes)) break;
        next.step_s = step_time(next.config);
        if (best && next.tokens() < kTokensPerParameter * double(next.parameters)) break;
        best = std::move(next);
    }
    if (best) fit_to_pace(*best, inputs);
    return best;
}

double measured_step_s(const Config& config) {
    constexpr double kLong_s = 0.3;
    constexpr int kMin = 5;
    GptOptions options = gpt_options(config);
    options.head_rows = default_head_rows(options.batch, options.seq_len);
    Gpt gpt(options, comm_single());
    gpt.initialize(config.run.seed);
    gpt.masters_changed();
    std::vector<int> tokens(size_t(options.batch) * size_t(options.seq_len));
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = int(i * 7919 % size_t(config.model.vocab_size));

    std::vector<double> times_s;
    const double start_ms = now_ms();
    for (int step = 1; step <= kMin || now_ms() - start_ms < 1000 * kLong_s; step++) {
        const double before_ms = now_ms();
        gpt.begin_step({.learning_rate = 0, .update = step});
        gpt.forward(tokens.data());
        gpt.backward(tokens.data(), 1.0f / float(tokens.size()));
        gpt.end_step();
        if (step > 1) times_s.push_back((now_ms() - before_ms) / 1000);  // the first step is a warm-up
    }
    std::ranges::nth_element(times_s, times_s.begin() + std::ptrdiff_t(times_s.size() / 2));
    return times_s[times_s.size() / 2];
}
