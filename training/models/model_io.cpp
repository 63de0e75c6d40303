#include "training/models/model_io.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/base/batch.h"
#include "kernels/device.h"
#include "model/fp8.h"
#include "model/huggingface.h"
#include "model/plan.h"
#include "model/update.h"
#include "runtime/io/files.h"
#include "runtime/io/installation.h"
#include "runtime/io/joined.h"
#include "runtime/performance/performance.h"
#include "training/models/hf_config.h"
#include "training/models/llmc_files.h"
#include "training/models/votes.h"

static int terms_of(const Config::Parallel& parallel) {
    if (!parallel.deterministic_reduce) return 1;
    if (parallel.terms > 0) return parallel.terms;
    return gpu_name().empty() ? 8 : 1;  // a GPU's library computes parts of a GEMM with other bits than the whole
}

GptOptions gpt_options(const Config& config, const Grid& grid, int rank) {
    const Grid::Place place = grid.place_of(rank);
    const Recompute given = config.train.recompute, level = given == Recompute::automatic ? Recompute::none : given;
    GptOptions options{.shape = config.model,
                       .batch = config.train.batch_size,
                       .seq_len = config.train.seq_len,
                       .precision = compute_type(config.train.precision),
                       .fp8 = config.train.precision == Precision::fp8,
                       .fp8_gradients = config.train.fp8_gradients == Fp8Gradients::e5m2 ? Dtype::e5m2 : Dtype::e4m3,
                       .recompute = level,
                       .optimizer = config.optim,
                       .offload_optimizer = config.offload.optimizer,
                       .offload_window_bytes = size_t(config.offload.window_mb) << 20,
                       .offload_activations = config.offload.activations,
                       .offload_weights = config.offload.weights,
                       .offload_gradients = config.offload.gradients,
                       .averages = config.average.kind != AverageKind::none,
                       .dropout = config.model.dropout,
                       .seed = config.run.seed,
                       .z_loss = float(config.model.z_loss),
                       .document_mask = config.data.document_mask,
                       .document_token = config.data.document_token,
                       .head_rows = config.train.head_rows,
                       .micro_steps = max_micro_steps(config, grid.data),
                       .votes = vote_count(grid),
                       .rank = grid.replica_of(place),
                       .ranks = grid.replicas(),
                       .context = {place.context, grid.context},
                       .tensor_parallel = {place.tensor, grid.tensor},
                       .zero_stage = config.parallel.zero_stage,
                       .deterministic_reduce = config.parallel.deterministic_reduce,
                       .max_terms = terms_of(config.parallel),
                       .bucket_bytes = size_t(config.parallel.bucket_mb) << 20};
    if (grid.pipeline > 1)
        options.pipeline = {place.pipeline, grid.pipeline, config.parallel.pipeline_schedule, config.parallel.chunks(),
                            config.parallel.pipeline_layers};
    int common_length = options.seq_len;
    for (const auto& [until_step, seq_len] : config.train.seq_ramp) {
        options.max_parts = std::max(options.max_parts, options.seq_len / int(seq_len));
        common_length = std::gcd(common_length, int(seq_len));
    }
    options.context.segments = segments_of_ring(options, common_length);
    if (const std::string unused = unused_group(options); !unused.empty())
        fail(Exit::config, "optim.groups: no tensor of the model is \"%s\"; `train_gpt plan` lists the tensors",
             unused);
    if (const std::string problem = tensor_parallel_problem(options); !problem.empty())
        fail(Exit::config, "%s", problem);
    if (const std::string problem = fp8_problem(options); !problem.empty()) fail(Exit::config, "%s", problem);
    if (grid.pipeline > 1) options.pipeline.layers = part_layers(options);
    return options;
}

void set_document_token(Config& config, const std::optional<Tokenizer>& tokenizer) {
    if (config.data.document_mask && config.data.document_token < 0 && tokenizer)
        config.data.document_token = tokenizer->eot();
}

LoaderOptions loader_options(const Config& config, const Grid& grid, int rank, SampleOrder order) {
    LoaderOptions options{.seq_len = config.train.seq_len,
                          .batch = config.train.batch_size,
                          .seed = config.run.seed,
                          .order = order,
                          .rank = grid.place_of(rank).data,
                          .world = grid.data,
                          .stride = config.eval.stride,
                          .max_windows = uint64_t(config.eval.batches) * uint64_t(config.train.batch_size)};
    if (order == SampleOrder::once) return options;
    options.micro_steps = max_micro_steps(config, grid.data);
    options.micro_steps_of = [config, world = grid.data](int step) { return micro_steps(config, world, step); };
    return options;
}

// Loads this rank's part of all tensors from a Hugging Face directory.
static void import_huggingface(Gpt& gpt, const std::string& directory, const Config::Model& model) {
    const std::string config_path = directory + "/config.json";
    check_hf_model(read_file(config_path), model, config_path);
    const Safetensors file(directory);
    const auto has = [&](const std::string& name) { return file.find(name) != nullptr; };
    const TensorLayout layout = lay_out_tensors(gpt.options().shape);
    const std::vector<NamedTensor> whole = hf_tensors(layout, whole_tensors(layout), has);
    file.load(hf_tensors(gpt, has), [&](const Safetensors::Entry& entry) {
        if (std::ranges::find(whole, entry.name, &NamedTensor::name) != whole.end()) return;  // on another stage
        const Safetensors::Entry& wte = file.at(whole[0].name);
        const bool is_tied_head = model.tie_embeddings && entry.name == "lm_head.weight" && entry.bytes == wte.bytes &&
                                  std::memcmp(entry.data, wte.data, wte.bytes) == 0;
        if (!is_tied_head && !is_hf_buffer(entry.name))
            fail(Exit::data, "%s: %s is not a tensor of the model in %s", entry.file, entry.name, config_path);
    });
}

std::vector<WeightedGlob> training_data(const Config& config) {
    std::vector<WeightedGlob> parts;
    for (const DataPart& part : config.data.train) parts.push_back({part.path, part.weight});
    return parts;
}

double flops_of_token(const GptOptions& options, int seq_len) {
    const TokenWork work = token_work(options.shape, seq_len);
    return flops_per_token({work.parameters, work.attended});
}

// A run has a config.json too, but it also has checkpoints or metrics.jsonl.
static bool is_huggingface(const std::string& path) {
    return file_exists(path + "/config.json") && !directory_exists(checkpoints_directory(path)) &&
           !file_exists(path + "/metrics.jsonl");
}

void check_source_tokenizer(const Config& config, const std::string& tokenizer_digest) {
    const std::string& from = config.model.init_from;
    const bool is_step = file_exists(from + "/MANIFEST.json");
    std::vector<std::string> steps;  // if none is readable, load_initial_weights() fails later
    if (is_step)
        steps.push_back(from);
    else if (!is_huggingface(from))
        for (const int64_t step : committed_steps(from)) steps.insert(steps.begin(), step_directory(from, step));
    for (const std::string& step : steps) {
        int vocab_size = 0;
        try {
            vocab_size = parse_config(read_manifest(step).info.config, step).model.vocab_size;
        } catch (const Error&) {
            continue;  // try an older one
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

// Fails with Exit::config, naming `path` and the differences, unless the model is a GPT-2, the only kind of model in
// the llm.c files that train_gpt reads.
static void check_llmc_parts(const Config::Model& model, const std::string& path) {
    Config::Model gpt2 = model;
    set_family(gpt2, ModelFamily::gpt2);
    gpt2.given_kv_heads = gpt2.given_head_size = gpt2.given_hidden = 0;
    const std::vector<std::string> differences = model_differences(model, gpt2);
    if (!differences.empty())
        fail(Exit::config, "%s: llm.c files support only GPT-2 models; this one differs in %s", path,
             joined(differences, "; "));
}

// Fails with Exit::data, naming file, tensor and element, if a master weight on this rank is not finite.
static void check_weights_are_finite(const Gpt& gpt, const std::string& path) {
    constexpr size_t kAtOnce = size_t(1) << 20;
    for (const NamedTensor& tensor : gpt.master_tensors())
        for (size_t done = 0; done < tensor.count; done += kAtOnce) {
            const std::vector<float> values =
                floats_of(tensor.values.from(done), std::min(kAtOnce, tensor.count - done));
            const auto bad = std::ranges::find_if_not(values, [](float value) { return std::isfinite(value); });
            if (bad != values.end())
                fail(Exit::data, "%s: element %zu of %s is %g, but weights must be finite", path,
                     tensor.first + done + size_t(bad - values.begin()), tensor.name.substr(tensor.name.find('.') + 1),
                     double(*bad));
        }
}

// Loads the weights of a checkpoint: the average if it has one.
static void load_weights(Gpt& gpt, const Checkpoint& checkpoint) {
    std::vector<NamedTensor> weights = gpt.master_tensors();
    if (checkpoint.config().average.kind != AverageKind::none)
        for (NamedTensor& tensor : weights) tensor.name.replace(0, tensor.name.find('.'), "average");
    checkpoint.load(weights, OtherTensors::ignore);
}

void load_initial_weights(Gpt& gpt, const Config::Model& model, const std::string& path) {
    if (!directory_exists(path)) {
        check_llmc_parts(model, path);
        LlmcModel(path).load(gpt);
    } else if (is_huggingface(path)) {
        import_huggingface(gpt, path, model);
    } else {
        load_weights(gpt, open_checkpoint(path));
    }
    check_weights_are_finite(gpt, path);
}

Config config_of_weights(const std::string& path) {
    Config config;
    if (is_huggingface(path)) {
        const std::string origin = path + "/config.json";
        config.model = hf_model(read_file(origin), origin);
    } else {
        static_cast<GptShape&>(config.model) = LlmcModel(path).shape;
    }
    config.train.batch_size = 1;
    config.train.seq_len = config.model.n_positions;
    config.train.total_batch_tokens = config.model.n_positions;
    config.train.precision = Precision::fp32;
    config.train.head_rows = default_head_rows(1, config.model.n_positions);
    config.schedule.warmup_steps = 0;
    config.eval.stride = 0;
    check_config(config, path, 1);
    return config;
}

ModelSource::ModelSource(const std::string& from)
    : path(from),
      checkpoint(is_huggingface(path) || (file_exists(path) && !directory_exists(path))
                     ? std::nullopt
                     : std::make_optional(open_checkpoint(path))),
      config(checkpoint ? checkpoint->config() : config_of_weights(path)) {}

std::optional<Tokenizer> find_tokenizer(const TokenizerChoice& choice, const std::string& weights,
                                        const Config& config) {
    const std::string directory = directory_exists(weights) ? weights : directory_of(weights);
    std::string path = choice.file == "gpt2" ? data_directory("gpt2") + "/vocab.json" : choice.file;
    for (const char* name : {"tokenizer.json", "vocab.json", "gpt2_tokenizer.bin"})
        if (path.empty() && file_exists(directory + "/" + name)) path = directory + "/" + name;
    if (path.empty()) return std::nullopt;
    Tokenizer tokenizer = Tokenizer::load(path, choice.end_of_text);
    if (tokenizer.vocab_size() > config.model.vocab_size)
        fail(Exit::config, "the tokenizer %s has %d tokens, but the model has a vocabulary of %d", path,
             tokenizer.vocab_size(), config.model.vocab_size);
    if (const std::string warning = tokenizer.warning(); !warning.empty())
        std::fprintf(stderr, "train_gpt: %s: %s\n", path.c_str(), warning.c_str());
    return tokenizer;
}

LoadedModel load_model(const ModelSource& source, int batch, const GridComm& comm, const TokenizerChoice& choice,
                       int cached_sequences) {
    const std::string weights = source.checkpoint ? run_directory_of(source.checkpoint->directory()) : source.path;
    std::optional<Tokenizer> tokenizer = find_tokenizer(choice, weights, source.config);
    Config config = source.config;
    if (batch > 0) config.train.batch_size = batch;
    if (config.train.precision == Precision::fp8) config.train.precision = Precision::bf16;  // 8 bits are for training
    GptOptions options = gpt_options(config, {.tensor = comm.tensor.size}, comm.tensor.rank);
    options.training = false;
    options.cached_sequences = std::min(cached_sequences, options.batch * options.seq_len);
    options.micro_steps = 1;
    options.rank = comm.data.rank, options.ranks = comm.data.size;
    options.zero_stage = 0;
    options.deterministic_reduce = false;
    options.offload_gradients = false;
    options.offload_weights = config.offload.weights && comm.world.size == 1;
    Gpt gpt(options, comm);
    if (source.checkpoint)
        load_weights(gpt, *source.checkpoint);
    else
        load_initial_weights(gpt, config.model, source.path);
    gpt.masters_changed();
    return {std::move(config), std::move(gpt), std::move(tokenizer)};
}

// A rank that cannot read its tokens completes the pass with batches of padding, since the passes of ZeRO-sharded ranks
// are collective.
Validation evaluate_pass(Gpt& gpt, ControlChannel& control, Loader& loader, const std::optional<Tokenizer>& tokenizer,
                         const std::function<void()>& between) {
    std::function<int(int)> token_bytes;
    if (tokenizer) token_bytes = [&](int token) { return tokenizer->token_bytes(token); };
    std::exception_ptr error;
    std::vector<int> no_inputs, no_targets;
    auto next = [&]() -> Batch {
        try {
            if (!error) return loader.next();
        } catch (const Error&) {
            error = std::current_exception();
            no_inputs.assign(size_t(gpt.options().batch) * size_t(gpt.options().seq_len), 0);
            no_targets.assign(no_inputs.size(), -1);
        }
        return {no_inputs.data(), no_targets.data()};
    };
    loader.seek(0);
    const Validation result = evaluate(gpt, loader.batches_per_pass(), next, token_bytes, between);
    if (const auto shared = shared_error(control, error)) std::rethrow_exception(shared);
    return result;
}
