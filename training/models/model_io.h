// What connects the model to configurations, checkpoints, data and text: model/, runtime/ and data/ do not know each
// other.
#pragma once

#include "data/shards/dataset.h"
#include "data/shards/loader.h"
#include "model/evaluate.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/config/config.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

// The model that a configuration describes, as one of `ranks` ranks has it.
GptOptions gpt_options(const Config& config, int rank = 0, int ranks = 1);

// Fills in data.document_token where the mask needs it and it is not given.
void set_document_token(Config& config, const std::optional<Tokenizer>& tokenizer);

// The batches of a configuration, for the rank that `comm` is: training's, or with order `once` its evaluation's.
LoaderOptions loader_options(const Config& config, const Comm& comm, SampleOrder order);

// data.train.
std::vector<WeightedGlob> training_data(const Config& config);

// Floating-point operations of forward and backward, per token.
double flops_of_token(const GptOptions& options);

// model.init_from: the weights of a Hugging Face directory, of a model file of llm.c, of a checkpoint, or of a run's
// newest checkpoint, for `gpt`, which is `model`. Fails with Exit::data, naming file and tensor, unless it holds all of
// this model's weights and no others, and all are finite, and with Exit::config if the sizes or parts that it names are
// others.
void load_initial_weights(Gpt& gpt, const Config::Model& model, const std::string& path);

// Fails with Exit::config, naming `path` and the parts, if the model is no GPT-2: llm.c's files, as this program reads
// and writes them, have no other parts.
void check_llmc_parts(const Config::Model& model, const std::string& path);

// Fails with Exit::config if model.init_from has another vocabulary or another tokenizer than the data, whose tokenizer
// has the given digest ("": not known): the weights would read and predict other tokens than they were trained on.
void check_source_tokenizer(const Config& config, const std::string& tokenizer_digest);

// The model that is no checkpoint, but a Hugging Face directory or a model file of llm.c. Everything
// else is as in the defaults, but one sequence of the model's length at a time, in FP32. Fails with Exit::config or
// Exit::data, naming the file, if this program cannot have such a model.
Config config_of_weights(const std::string& path);

// The model that an argument names: a checkpoint as in open_checkpoint(), a Hugging Face directory or a model file of
// llm.c. Fails as open_checkpoint(), parse_config() and config_of_weights() do.
struct ModelSource {
    std::string path;
    std::optional<Checkpoint> checkpoint;  // none: only weights
    Config config;                         // that made it, or as in config_of_weights()

    explicit ModelSource(const std::string& path);
};

// --tokenizer and --end-of-text.
struct TokenizerChoice {
    std::string file;         // "gpt2" or a file; empty: in the directory of the weights
    std::string end_of_text;  // empty: as Tokenizer::load() says
};

// A model for inference, and the configuration that made it.
struct LoadedModel {
    Config config;
    Gpt gpt;
    std::optional<Tokenizer> tokenizer;
};

// `batch` sequences at a time; 0: as many as the configuration has. Each rank of `comm` has the whole model. Fails with
// Exit::data, naming the file and the tensor, if the weights cannot be read, and as find_tokenizer(tokenizer) does.
// cached_sequences as in GptOptions, or as many as it may be.
LoadedModel load_model(const ModelSource& source, int batch, const Comm& comm, const TokenizerChoice& tokenizer = {},
                       int cached_sequences = 0);
inline LoadedModel load_model(const std::string& path, int batch, const TokenizerChoice& tokenizer = {},
                              int cached_sequences = 0) {
    return load_model(ModelSource(path), batch, comm_single(), tokenizer, cached_sequences);
}

// The chosen one; else, if no file is, the tokenizer.json, vocab.json or gpt2_tokenizer.bin in the directory
// `weights` or beside the file `weights`, or none. Fails with Exit::config if it has more tokens than the model.
std::optional<Tokenizer> find_tokenizer(const TokenizerChoice& choice, const std::string& weights,
                                        const Config& config);
std::vector<CLI::Option*> add_tokenizer_options(CLI::App& parser, TokenizerChoice& choice);
inline constexpr const char* kEndOfTextHelp =
    "special token that ends a text (default: eos_token of tokenizer_config.json, or a usual one like <|endoftext|>)";

// An error of one rank that all ranks have agreed on: each throws it, with the same code, after the same step.
struct SharedError : Error {
    using Error::Error;
};

// What each rank throws, a SharedError, if one or more of them have an error (null: none): that of the first such rank,
// whose number begins the message where there are several ranks. Null if no rank has an error. A collective.
std::exception_ptr shared_error(Gpt& gpt, const std::exception_ptr& error);

// The loss over the first pass of a loader with order `once`; bits per byte too if there is a tokenizer. `between` as
// in evaluate(). Fails with SharedError if a rank cannot read its tokens.
Validation evaluate_pass(
    Gpt& gpt, Loader& loader, const std::optional<Tokenizer>& tokenizer, bool by_position = false,
    const std::function<void()>& between = [] {});
