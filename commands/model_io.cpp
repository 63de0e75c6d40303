#include "commands/model_io.h"

#include <cstring>

#include "commands/llmc_files.h"
#include "data/encoder.h"
#include "model/huggingface.h"
#include "model/sample.h"
#include "runtime/performance/performance.h"

GptOptions gpt_options(const Config& config, int rank, int ranks) {
    return {.shape = {.n_layer = config.model.n_layer,
                      .n_head = config.model.n_head,
                      .n_kv_head = config.model.n_head,
                      .n_embd = config.model.n_embd,
                      .n_positions = config.model.n_positions,
                      .vocab_size = config.model.vocab_size},
            .batch = config.train.batch_size,
            .seq_len = config.train.seq_len,
            .precision = config.train.precision,
            .recompute = config.train.recompute,
            .optimizer = {.kind = config.optim.name,
                          .beta1 = config.optim.beta1,
                          .beta2 = config.optim.beta2,
                          .eps = float(config.optim.eps),
                          .weight_decay = float(config.optim.weight_decay),
                          .momentum = float(config.optim.momentum),
                          .grad_clip = float(config.optim.grad_clip)},
            .dropout = config.model.dropout,
            .dropout_seed = config.run.seed,
            .head_rows = config.train.head_rows,
            .micro_steps = micro_steps(config, ranks),
            .rank = rank,
            .ranks = ranks,
            .zero_stage = config.parallel.zero_stage,
            .deterministic_reduce = config.parallel.deterministic_reduce,
            .bucket_bytes = size_t(config.parallel.bucket_mb) << 20};
}

LoaderOptions loader_options(const Config& config, const Comm& comm, SampleOrder order) {
    return {.seq_len = config.train.seq_len,
            .batch = config.train.batch_size,
            .seed = config.run.seed,
            .order = order,
            .rank = comm.rank,
            .world = comm.size,
            .stride = config.eval.stride,
            .micro_steps = order == SampleOrder::once ? 1 : micro_steps(config, comm.size),
            .max_windows = uint64_t(config.eval.batches) * uint64_t(config.train.batch_size)};
}

// Every tensor of the model from a GPT2LMHeadModel, with or without its "transformer." prefix.
static void import_huggingface(Gpt& gpt, const std::string& directory) {
    const std::string config_path = directory + "/config.json";
    check_hf_config(parse_json(read_file(config_path), config_path, Exit::data), gpt.options().shape, config_path);
    const Safetensors file(directory);
    const std::string prefix = file.find("transformer.wte.weight") ? "transformer." : "";
    std::vector<NamedTensor> tensors = hf_tensors(gpt);
    for (NamedTensor& tensor : tensors) tensor.name = prefix + tensor.name;
    file.load(tensors, [&](const Safetensors::Entry& entry) {
        const Safetensors::Entry& wte = file.at(prefix + "wte.weight");
        const bool is_tied_head = entry.name == "lm_head.weight" && entry.bytes == wte.bytes &&
                                  std::memcmp(entry.data, wte.data, wte.bytes) == 0;
        if (!is_tied_head && !is_hf_mask(entry.name))
            fail(Exit::data, "%s: %s has no place in a GPT-2 with a tied head", entry.file, entry.name);
    });
}

std::vector<WeightedGlob> training_data(const Config& config) {
    std::vector<WeightedGlob> parts;
    for (const DataPart& part : config.data.train) parts.push_back({part.path, part.weight});
    return parts;
}

double flops_of_token(const GptOptions& o) {
    return flops_per_token({int64_t(lay_out_tensors(o.shape).parameters), o.shape.n_layer, o.shape.n_embd, o.seq_len});
}

// A run has a config.json too, and before that its metrics.jsonl.
static bool is_huggingface(const std::string& path) {
    return file_exists(path + "/config.json") && !directory_exists(checkpoints_directory(path)) &&
           !file_exists(path + "/metrics.jsonl");
}

void check_source_tokenizer(const Config& config, const std::string& tokenizer_digest) {
    const std::string& from = config.model.init_from;
    const bool is_step = file_exists(from + "/MANIFEST.json");
    std::vector<std::string> steps;  // none that is readable: load_initial_weights() says so
    if (is_step)
        steps.push_back(from);
    else if (!is_huggingface(from))
        for (const int64_t step : committed_steps(from)) steps.insert(steps.begin(), step_directory(from, step));
    for (const std::string& step : steps) {
        int vocab_size = 0;
        try {
            vocab_size = parse_config(read_manifest(step).info.config, step).model.vocab_size;
        } catch (const Error&) {
            continue;  // an older one is used
        }
        if (vocab_size != config.model.vocab_size)
            fail(Exit::config, "model.init_from: %s has a vocabulary of %d, but model.vocab_size is %d", step,
                 vocab_size, config.model.vocab_size);
        break;
    }
    const std::string path = (is_step ? run_directory_of(from) : from) + "/tokenizer.json";
    if (tokenizer_digest.empty() || !file_exists(path)) return;
    const std::string digest = Tokenizer::load(path).digest();
    if (digest != tokenizer_digest)
        fail(Exit::config,
             "model.init_from: %s (digest %s) is not the tokenizer of this run's data (digest %s): prepare the data "
             "with --tokenizer %s",
             path, digest, tokenizer_digest, path);
}

void load_initial_weights(Gpt& gpt, const std::string& path) {
    if (!directory_exists(path))
        LlmcModel(path).load(gpt);
    else if (is_huggingface(path))
        import_huggingface(gpt, path);
    else
        open_checkpoint(path).load(gpt.master_tensors(), OtherTensors::ignore);
}

Config config_of_weights(const std::string& path) {
    GptShape shape;
    if (is_huggingface(path)) {
        const std::string origin = path + "/config.json";
        shape = hf_shape(parse_json(read_file(origin), origin, Exit::data), origin);
    } else {
        shape = LlmcModel(path).shape;
    }
    Config config;
    config.model.n_layer = shape.n_layer;
    config.model.n_head = shape.n_head;
    config.model.n_embd = shape.n_embd;
    config.model.n_positions = shape.n_positions;
    config.model.vocab_size = shape.vocab_size;
    config.train.batch_size = 1;
    config.train.seq_len = shape.n_positions;
    config.train.total_batch_tokens = shape.n_positions;
    config.train.precision = Dtype::fp32;
    config.train.head_rows = default_head_rows(1, shape.n_positions);
    config.schedule.warmup_steps = 0;
    config.eval.stride = 0;
    check_config(config, path, 1);
    return config;
}

static Config config_of(const Checkpoint& checkpoint) {
    return parse_config(checkpoint.manifest().info.config, checkpoint.directory() + "/MANIFEST.json");
}

ModelSource::ModelSource(const std::string& from)
    : path(from),
      checkpoint(is_huggingface(path) || (file_exists(path) && !directory_exists(path))
                     ? std::nullopt
                     : std::make_optional(open_checkpoint(path))),
      config(checkpoint ? config_of(*checkpoint) : config_of_weights(path)) {}

std::optional<Tokenizer> find_tokenizer(const std::string& given, const std::string& weights, const Config& config) {
    const std::string directory = directory_exists(weights) ? weights : directory_of(weights);
    std::string path = given == "gpt2" ? data_directory("gpt2") + "/vocab.json" : given;
    for (const char* name : {"tokenizer.json", "vocab.json", "gpt2_tokenizer.bin"})
        if (path.empty() && file_exists(directory + "/" + name)) path = directory + "/" + name;
    if (path.empty()) return std::nullopt;
    Tokenizer tokenizer = Tokenizer::load(path);
    if (tokenizer.vocab_size() > config.model.vocab_size)
        fail(Exit::config, "the tokenizer %s has %d tokens, but the model has a vocabulary of %d", path,
             tokenizer.vocab_size(), config.model.vocab_size);
    return tokenizer;
}

LoadedModel load_model(const ModelSource& source, int batch, const Comm& comm, const std::string& given) {
    const std::string weights = source.checkpoint ? run_directory_of(source.checkpoint->directory()) : source.path;
    std::optional<Tokenizer> tokenizer = find_tokenizer(given, weights, source.config);
    Config config = source.config;
    if (batch > 0) config.train.batch_size = batch;
    GptOptions options = gpt_options(config);
    options.training = false;
    options.micro_steps = 1;
    options.rank = comm.rank, options.ranks = comm.size;
    options.zero_stage = 0;
    Gpt gpt(options, comm);
    if (source.checkpoint)
        source.checkpoint->load(gpt.master_tensors(), OtherTensors::ignore);
    else
        load_initial_weights(gpt, source.path);
    gpt.masters_changed();
    return {std::move(config), std::move(gpt), std::move(tokenizer)};
}

Validation evaluate_pass(Gpt& gpt, Loader& loader, const std::optional<Tokenizer>& tokenizer, bool by_position) {
    std::function<int(int)> token_bytes;
    if (tokenizer) token_bytes = [&](int token) { return tokenizer->token_bytes(token); };
    loader.seek(0);
    return evaluate(
        gpt, loader.batches_per_pass(), [&] { return loader.next(); }, token_bytes, by_position);
}

std::string sample_text(Gpt& gpt, const Tokenizer& tokenizer, const Config::Sample& options, uint64_t seed) {
    std::vector<int> prompt = Encoder(tokenizer).encode(options.prompt);
    prompt.insert(prompt.begin(), tokenizer.document_start());
    std::vector<int32_t> text;
    sample(gpt, prompt,
           {.tokens = options.tokens,
            .temperature = options.temperature,
            .top_k = options.top_k,
            .seed = seed,
            .stop_token = tokenizer.eot()},
           [&](int token) {
               if (token < tokenizer.vocab_size()) text.push_back(token);
           });
    // The library replaces what is not UTF-8 where it writes JSON.
    using Json = nlohmann::json;
    const Json bytes = options.prompt + tokenizer.decode(text);
    return Json::parse(bytes.dump(-1, ' ', false, Json::error_handler_t::replace)).get<std::string>();
}
