// Connects the model to configurations, checkpoints, data and text. model/, runtime/ and data/ are independent of each
// other.
#pragma once

#include "data/shards/dataset.h"
#include "data/shards/loader.h"
#include "model/evaluate.h"
#include "model/gpt.h"  // IWYU pragma: export
#include "model/options.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/cluster/cluster.h"
#include "runtime/config/config.h"  // IWYU pragma: export

// The options of the model that a configuration describes, for a rank of a grid. Fails with Exit::config if the grid
// cannot divide the model.
GptOptions gpt_options(const Config& config, const Grid& grid = {}, int rank = 0);

// Sets data.document_token to the tokenizer's end-of-text token if the document mask needs it and it is not set.
void set_document_token(Config& config, const std::optional<Tokenizer>& tokenizer);

// The loader options of this rank: for evaluation if the order is `once`, else for training.
LoaderOptions loader_options(const Config& config, const Grid& grid, int rank, SampleOrder order);

// The parts of data.train.
std::vector<WeightedGlob> training_data(const Config& config);

// Floating-point operations of forward and backward, per token of a sequence of seq_len tokens.
double flops_of_token(const GptOptions& options, int seq_len);

// Loads the weights of `gpt` (described by `model`) from a Hugging Face directory, an llm.c model file, a checkpoint or
// the newest checkpoint of a run: model.init_from. A checkpoint's average of the weights takes precedence. Fails with
// Exit::data, naming file and tensor, unless `path` holds exactly this model's weights and all are finite; with
// Exit::config if its sizes or parts differ.
void load_initial_weights(Gpt& gpt, const Config::Model& model, const std::string& path);

// Fails with Exit::config if the vocabulary or tokenizer of model.init_from differs from the data's, as the weights
// would then get other tokens than they were trained on. `tokenizer_digest` is the data's; "": unknown.
void check_source_tokenizer(const Config& config, const std::string& tokenizer_digest);

// A configuration for the model in a Hugging Face directory or an llm.c model file: the defaults, with batches of one
// sequence of n_positions tokens, in FP32. Fails with Exit::config or Exit::data, naming the file, if the model is not
// supported.
Config config_of_weights(const std::string& path);

// The model that a command-line argument names: a checkpoint as in open_checkpoint(), a Hugging Face directory or an
// llm.c model file. Fails as open_checkpoint(), parse_config() and config_of_weights() do.
struct ModelSource {
    std::string path;
    std::optional<Checkpoint> checkpoint;  // empty: weights only
    Config config;                         // of the checkpoint, or config_of_weights()

    explicit ModelSource(const std::string& path);
};

// --tokenizer and --end-of-text.
struct TokenizerChoice {
    std::string file;         // "gpt2" or a file; empty: look in the directory of the weights
    std::string end_of_text;  // empty: the default of Tokenizer::load()
};

// A model for inference with its configuration.
struct LoadedModel {
    Config config;
    Gpt gpt;
    std::optional<Tokenizer> tokenizer;
};

// Loads a model for batches of `batch` sequences (0: the configuration's batch size). Ranks along `comm.tensor` divide
// it; the others hold the same part. `cached_sequences` is limited to the tokens of a batch. Fails with Exit::data,
// naming file and tensor, if the weights are invalid, and as find_tokenizer() does.
LoadedModel load_model(const ModelSource& source, int batch, const GridComm& comm,
                       const TokenizerChoice& tokenizer = {}, int cached_sequences = 0);

// Loads the chosen tokenizer or, if no file is chosen, tokenizer.json, vocab.json or gpt2_tokenizer.bin from the
// directory of the weights; nullopt if there is none. Fails with Exit::config if it has more tokens than the model.
std::optional<Tokenizer> find_tokenizer(const TokenizerChoice& choice, const std::string& weights,
                                        const Config& config);
inline constexpr const char* kEndOfTextHelp =
    "end-of-text token (default: eos_token of tokenizer_config.json, or a common one like <|endoftext|>)";

// Collective. Returns the loss over one pass of a loader with order `once`, and bits per byte if there is a tokenizer.
// `between` as in evaluate(). Fails with SharedError if a rank cannot read its tokens.
Validation evaluate_pass(
    Gpt& gpt, ControlChannel& control, Loader& loader, const std::optional<Tokenizer>& tokenizer,
    const std::function<void()>& between = [] {});
