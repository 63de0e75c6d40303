// main(): what each command does, and the recipe of a run. Read train() first; everything above it is how the model,
// the files and the data are introduced to each other, which happens only here.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <set>

#include "data/dataset.h"
#include "data/encoder.h"
#include "data/inspect.h"
#include "data/loader.h"
#include "data/prepare.h"
#include "model/gpt.h"
#include "model/huggingface.h"
#include "model/plan.h"
#include "model/sample.h"
#include "runtime/checkpoint.h"
#include "runtime/command_line.h"
#include "runtime/config.h"
#include "runtime/flops.h"
#include "runtime/inspect.h"
#include "runtime/json.h"
#include "runtime/log.h"
#include "runtime/loss_scaler.h"
#include "runtime/process.h"
#include "runtime/run_directory.h"
#include "runtime/safetensors.h"
#include "runtime/schedule.h"
#include "runtime/signals.h"
#include "runtime/train_state.h"

namespace {

double now_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---- the model from a configuration ---------------------------------------------------------------------------------

GptOptions gpt_options(const Config& config) {
    GptOptions options;
    options.shape = {.n_layer = config.model.n_layer,
                     .n_head = config.model.n_head,
                     .n_kv_head = config.model.n_head,
                     .n_embd = config.model.n_embd,
                     .n_positions = config.model.n_positions,
                     .vocab_size = config.model.vocab_size};
    options.batch = config.train.batch_size;
    options.seq_len = config.train.seq_len;
    options.precision = config.train.precision;
    options.recompute = recompute_named(config.train.recompute);
    options.optimizer = config.optim.name == "sgd" ? OptimizerKind::sgd : OptimizerKind::adamw;
    options.head_rows = config.train.head_rows;
    return options;
}

UpdateSettings update_settings(const Config& config) {
    return {.beta1 = config.optim.beta1,
            .beta2 = config.optim.beta2,
            .eps = float(config.optim.eps),
            .weight_decay = float(config.optim.weight_decay),
            .momentum = float(config.optim.momentum),
            .grad_clip = float(config.optim.grad_clip)};
}

// ---- the model in checkpoints and Hugging Face directories ----------------------------------------------------------

std::vector<SaveTensor> tensors_to_save(const Gpt& gpt) {
    std::vector<SaveTensor> list;
    for (const StateTensor& tensor : gpt.state_tensors()) {
        auto read = [values = tensor.values](void* to, size_t first, size_t count) {
            copy_to_host(to, values + first, count * sizeof(float), Stream{});
            synchronize(Stream{});
        };
        list.push_back({{tensor.name, Dtype::fp32, tensor.shape}, 0, tensor.count, read});
    }
    return list;
}

void load_tensors(const Checkpoint& checkpoint, const std::vector<StateTensor>& tensors, OtherTensors others) {
    std::vector<LoadTensor> list;
    for (const StateTensor& tensor : tensors) {
        auto write = [values = tensor.values](const void* from, size_t first, size_t count) {
            copy_to_device(values + first, from, count * sizeof(float), Stream{});
            synchronize(Stream{});
        };
        list.push_back({{tensor.name, Dtype::fp32, tensor.shape}, 0, tensor.count, write});
    }
    checkpoint.load(list, others);
}

// Every tensor of the model from a GPT2LMHeadModel, with or without its "transformer." prefix.
void import_huggingface(Gpt& gpt, const std::string& directory) {
    const std::string config_path = directory + "/config.json";
    check_hf_config(parse_json(read_file(config_path), config_path, Exit::data), gpt.options().shape, config_path);
    const Safetensors file(directory);
    const std::string prefix = file.find("transformer.wte.weight") ? "transformer." : "";
    std::set<std::string> expected;
    for (const HfTensor& tensor : hf_tensors(gpt)) {
        set_hf_values(tensor, float_values(file.at(prefix + tensor.name, tensor.shape)));
        expected.insert(prefix + tensor.name);
    }
    for (const SafetensorsView& view : file.tensors()) {
        if (expected.count(view.name) || is_hf_mask(view.name)) continue;
        const SafetensorsView& wte = file.at(prefix + "wte.weight");
        const bool is_tied_head = view.name == "lm_head.weight" && view.bytes == wte.bytes &&
                                  std::memcmp(view.data, wte.data, wte.bytes) == 0;
        if (!is_tied_head)
            fail(Exit::data, "%s: %s has no place in a GPT-2 with a tied head", view.file.c_str(), view.name.c_str());
    }
}

// model.init_from: a Hugging Face directory, one of our checkpoints, or a run directory, whose newest checkpoint
// counts.
void load_initial_weights(Gpt& gpt, const std::string& path) {
    if (file_exists(path + "/config.json") && !directory_exists(checkpoints_directory(path)))
        import_huggingface(gpt, path);
    else
        load_tensors(open_checkpoint(path), gpt.master_tensors(), OtherTensors::ignore);
}

// The model of a run's first step: from the checkpoint that is resumed, from model.init_from, or from the seed.
Gpt starting_model(const Config& config, const Comm& comm, const Checkpoint* checkpoint) {
    Gpt gpt(gpt_options(config), comm);
    if (checkpoint)
        load_tensors(*checkpoint, gpt.state_tensors(), OtherTensors::refuse);
    else if (!config.model.init_from.empty())
        load_initial_weights(gpt, config.model.init_from);
    else
        gpt.initialize(config.run.seed);
    gpt.masters_changed();
    return gpt;
}

// A model for inference from a checkpoint, and the configuration that made it.
struct LoadedModel {
    Config config;
    Gpt gpt;
    std::string tokenizer_path;
};

LoadedModel load_model(const std::string& path, int batch) {
    const Checkpoint checkpoint = open_checkpoint(path);
    Config config = parse_config(checkpoint.manifest().info.config, checkpoint.directory() + "/MANIFEST.json");
    GptOptions options = gpt_options(config);
    options.batch = batch > 0 ? batch : options.batch;
    options.training = false;
    Gpt gpt(options, comm_single());
    load_tensors(checkpoint, gpt.master_tensors(), OtherTensors::ignore);
    gpt.masters_changed();
    const std::string run_dir = run_directory_of(checkpoint.directory());
    return {std::move(config), std::move(gpt), run_dir + "/tokenizer.json"};
}

// ---- evaluation and samples -----------------------------------------------------------------------------------------

struct Validation {
    double loss = 0;  // nats per token
    std::optional<double> bits_per_byte;
};

// The mean loss over `batches` micro-batches from the start of the split, 0 for all of it; each token counts once.
Validation evaluate(Gpt& gpt, Loader& loader, int batches, const Tokenizer* tokenizer) {
    const uint64_t rows = uint64_t(gpt.options().batch) * uint64_t(gpt.options().seq_len);
    const uint64_t all = loader.batches_per_pass();
    double loss_sum = 0;
    int64_t targets = 0, bytes = 0;
    loader.seek(0);
    for (uint64_t i = 0; i < (batches > 0 ? std::min(uint64_t(batches), all) : all); i++) {
        const Batch batch = loader.next();
        loss_sum += gpt.evaluate(batch.inputs, batch.targets);
        for (uint64_t row = 0; row < rows; row++) {
            if (batch.targets[row] < 0) continue;
            targets++;
            if (tokenizer) bytes += tokenizer->token_bytes(batch.targets[row]);
        }
    }
    Validation result{loss_sum / double(targets), std::nullopt};
    if (bytes > 0) result.bits_per_byte = loss_sum / std::log(2.0) / double(bytes);
    return result;
}

std::string sample_text(Gpt& gpt, const Tokenizer& tokenizer, const Config::Sample& options, uint64_t seed) {
    std::vector<int> prompt{tokenizer.eot()};
    for (int id : Encoder(tokenizer).encode(options.prompt)) prompt.push_back(id);
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
    return options.prompt + tokenizer.decode(text);
}

// ---- a run ----------------------------------------------------------------------------------------------------------

struct Run {
    Config config;
    Dataset dataset;
    std::string dataset_digest;
    TrainState state;
    Comm comm;
    Loader train_loader;
    std::unique_ptr<Loader> val_loader;
    Gpt gpt;
    LossScaler scaler;
    RunLog log;
    Progress progress;
    CheckpointWriter writer;
    int failed_saves = 0;  // in a row

    // Members are made in their order: what can be wrong with the data shows before the model takes memory, and what
    // can be wrong with the weights before the log leaves anything in run.dir.
    Run(const Config& c, Dataset d, const TrainState& s, const Checkpoint* checkpoint)
        : config(c),
          dataset(std::move(d)),
          dataset_digest(dataset.train.digest()),
          state(s),
          comm(comm_single()),
          train_loader(dataset.train, loader_options(SampleOrder::shuffled), s.cursor),
          val_loader(dataset.val ? std::make_unique<Loader>(*dataset.val, loader_options(SampleOrder::once)) : nullptr),
          gpt(starting_model(c, comm, checkpoint)),
          scaler(c.loss_scale, s.loss_scale),
          log(c.run.dir, s.step),
          progress(stdout, c.train.max_steps, c.log.every_steps),
          writer(c.run.dir, comm) {}

    LoaderOptions loader_options(SampleOrder order) const {
        return {config.train.seq_len, config.train.batch_size, config.run.seed, order, comm.rank, comm.size,
                config.eval.stride};
    }
};

// One optimizer step: forward and backward over the micro-batches, then the update.
void train_step(Run& run) {
    const Config& config = run.config;
    const double start = now_ms();
    const int step = run.state.step + 1, micros = micro_steps(config, run.comm.size);
    const double rate = learning_rate(config, step), t = double(run.state.updates + 1);
    const float scale = run.scaler.scale();

    run.gpt.begin_step({.loss_scale = scale,
                        .learning_rate = float(rate),
                        .bias_correction1 = float(1.0 - std::pow(config.optim.beta1, t)),
                        .bias_correction2 = float(1.0 - std::pow(config.optim.beta2, t))});
    for (int micro = 0; micro < micros; micro++) {
        const Batch batch = run.train_loader.next();
        run.gpt.micro_step(batch.inputs, batch.targets,
                           {.first = micro == 0, .grad_scale = 1.0f / float(config.train.total_batch_tokens)});
    }
    const StepResult result = run.gpt.end_step(update_settings(config));

    const double tokens = double(config.train.total_batch_tokens), step_ms = now_ms() - start;
    const TrainRecord record{.step = step,
                             .loss = result.loss_sum / tokens,
                             .learning_rate = rate,
                             .grad_norm = result.grad_norm,
                             .loss_scale = scale,
                             .tokens = int64_t(step) * config.train.total_batch_tokens,
                             .step_ms = step_ms,
                             .tokens_per_s = tokens / step_ms * 1000.0,
                             .mfu = std::nullopt,
                             .skipped = result.non_finite_tensor};
    run.log.write(record);
    run.progress.show(record);

    run.state.step = step;
    run.state.cursor = run.train_loader.cursor();
    if (result.non_finite_tensor.empty()) {
        run.state.updates++;
        run.scaler.step_applied(step);
    } else {
        run.scaler.step_skipped(step, result.non_finite_tensor);
    }
    run.state.loss_scale = run.scaler.state();
}

void validate(Run& run) {
    const Tokenizer* tokenizer = run.dataset.tokenizer ? &*run.dataset.tokenizer : nullptr;
    const Validation result = evaluate(run.gpt, *run.val_loader, run.config.eval.batches, tokenizer);
    run.log.write(ValRecord{run.state.step, result.loss, result.bits_per_byte});
    std::string line = format("step %d | validation loss %.4f", run.state.step, result.loss);
    if (result.bits_per_byte) line += format(" | %.4f bits per byte", *result.bits_per_byte);
    run.progress.say(line);
}

// Commits a checkpoint. A failure (a full disk, say) is told and survived twice in a row: the older ones are intact.
void save(Run& run, bool may_fail) {
    constexpr int kMostFailures = 3;
    const CheckpointInfo info = checkpoint_info(run.state, run.config, run.dataset_digest);
    try {
        run.log.sync();
        const SaveStats stats = run.writer.save(info, tensors_to_save(run.gpt));
        run.progress.say(format("step %d | checkpoint %s, %.1f MiB in %.1f s", run.state.step, stats.directory.c_str(),
                                double(stats.bytes) / 0x1p20, stats.seconds));
        run.state.saved_step = run.state.step;
        run.failed_saves = 0;
        apply_retention(run.config.run.dir, run.state.run_id, run.config.checkpoint.keep);
    } catch (const Error& error) {
        if (++run.failed_saves == kMostFailures || !may_fail) throw;
        run.progress.say(format("step %d | save failed %d of %d times: %s", run.state.step, run.failed_saves,
                                kMostFailures, error.what()));
    }
}

bool is_due(int step, int every_steps) { return every_steps > 0 && step % every_steps == 0; }

Exit train_to_the_end(Run& run) {
    const Config& config = run.config;
    while (run.state.step < config.train.max_steps) {
        train_step(run);
        const int step = run.state.step;
        const bool is_last = step == config.train.max_steps;
        if (run.val_loader && (is_due(step, config.eval.every_steps) || (is_last && config.eval.every_steps > 0)))
            validate(run);
        if (run.dataset.tokenizer && is_due(step, config.sample.every_steps))
            run.progress.say(
                sample_text(run.gpt, *run.dataset.tokenizer, config.sample, config.run.seed + uint64_t(step)));
        if (is_last || stop_signal() || is_due(step, config.checkpoint.every_steps))
            save(run, !is_last && !stop_signal());
        if (stop_signal() && !is_last) {
            run.progress.say(format("step %d | stopped by signal %d; --resume continues", step, stop_signal()));
            return Exit::again;
        }
    }
    return Exit::ok;
}

void introduce(const Run& run) {
    const Config& config = run.config;
    const DeviceInfo device = device_info();
    std::printf("device   %s; %s\n", device.name.c_str(), device.matmul_path.c_str());
    std::printf("model    %d layers, %d heads, %d channels, vocabulary %d: %.2f M parameters, %s, %.1f MiB\n",
                config.model.n_layer, config.model.n_head, config.model.n_embd, config.model.vocab_size,
                double(run.gpt.layout().parameters) * 1e-6, name_of(config.train.precision),
                double(planned_bytes(run.gpt.options())) / 0x1p20);
    std::printf("data     %s: %llu tokens, %llu windows of %d\n", run.dataset.train.description().c_str(),
                static_cast<unsigned long long>(run.dataset.train.token_count()),
                static_cast<unsigned long long>(run.train_loader.windows()), config.train.seq_len);
    std::printf("run      %s: steps %d to %d of %lld tokens\n", config.run.dir.c_str(), run.state.step + 1,
                config.train.max_steps, static_cast<long long>(config.train.total_batch_tokens));
    std::fflush(stdout);
}

// The recipe of a run. Everything that can be wrong with the input is found before run.dir is touched.
Exit train(const std::string& config_path, const std::vector<std::string>& overrides, StartMode mode,
           bool accept_changes) {
    const Config config = load_config(config_path, overrides, 1);
    Dataset dataset = open_dataset(config.data.train, config.data.val, config.data.tokenizer, config.model.vocab_size);
    const std::string &dir = config.run.dir, &init_from = config.model.init_from;
    if (!init_from.empty() && !directory_exists(init_from))
        fail(Exit::no_input, "%s: model.init_from: %s is not a directory", config_path.c_str(), init_from.c_str());

    const OpenedRun opened = open_run_directory(dir, mode);
    std::optional<Checkpoint> checkpoint = checkpoint_to_resume(dir, opened.action);
    const TrainState state =
        checkpoint ? resumed_state(*checkpoint, config, dataset.train.digest(), accept_changes) : new_state(config);
    // Beside the program: the same machine and binary choose the same products, and so give the same bits.
    configure_device({config.device.tf32, config.device.debug_sync, program_directory() + "/matmul_choices.json"});
    Run run(config, std::move(dataset), state, checkpoint ? &*checkpoint : nullptr);
    checkpoint.reset();

    check_space(dir, run.gpt.layout().elements * sizeof(float) * 3);
    write_file_atomically(dir + "/config.json", config_json(config));
    write_file_atomically(dir + "/revision.txt", GIT_REVISION "\n");
    if (run.dataset.tokenizer) run.dataset.tokenizer->save(dir + "/tokenizer.json");
    introduce(run);
    install_signal_handlers();
    return train_to_the_end(run);
}

// ---- the other commands ---------------------------------------------------------------------------------------------

void plan(const std::string& config_path, const std::vector<std::string>& overrides) {
    const Config config = load_config(config_path, overrides, 1);
    const GptOptions options = gpt_options(config);
    const TensorLayout layout = lay_out_tensors(options.shape);
    const double flops =
        flops_per_token({int64_t(layout.parameters), config.model.n_layer, config.model.n_embd, config.train.seq_len});

    const size_t beside = resident_bytes() + device_info().working_bytes + CheckpointWriter::kStagingBytes;
    std::printf("%s", plan_table(options).c_str());
    std::printf("%-22s %16zu bytes %10.1f MiB\n", "program and buffers", beside, double(beside) / 0x1p20);
    std::printf("micro-steps        %14d per step of %lld tokens\n", micro_steps(config, 1),
                static_cast<long long>(config.train.total_batch_tokens));
    std::printf("FLOPs per token    %14.4e, per step %.4e\n", flops, flops * double(config.train.total_batch_tokens));
}

void print_line(const std::string& line) { std::printf("%s\n", line.c_str()); }

void prepare_data(const CommandLine::Prepare& p) {
    prepare({p.tokenizer, p.vocab_size, p.inputs, p.out_dir, p.val_fraction, p.shard_tokens}, print_line);
}

void inspect(const std::string& path) {
    if (inspect_runtime_path(path, print_line) || inspect_data_file(path, print_line)) return;
    const MappedFile file(path);
    fail(Exit::data,
         "%s: neither a checkpoint, a run, a token shard, a tokenizer nor a safetensors file; it looks like %s",
         path.c_str(), describe_content(file.text().substr(0, 512), file.size()).c_str());
}

void export_huggingface(const std::string& checkpoint, const std::string& directory) {
    LoadedModel model = load_model(checkpoint, 1);
    if (directory_exists(directory) && !list_directory(directory).empty())
        fail(Exit::cannot_create, "%s is not empty; nothing was written", directory.c_str());
    make_directories(directory);
    int eot = model.config.model.vocab_size - 1;
    if (file_exists(model.tokenizer_path)) {
        const Tokenizer tokenizer = Tokenizer::load(model.tokenizer_path);
        tokenizer.save(directory + "/tokenizer.json");
        eot = tokenizer.eot();
    }
    std::vector<SafetensorsItem> items;
    for (const HfTensor& tensor : hf_tensors(model.gpt)) {
        auto values = std::make_shared<std::vector<float>>();
        items.push_back({tensor.name, "F32", tensor.shape, [tensor, values](void* to, size_t first, size_t count) {
                             if (first == 0) *values = hf_values(tensor);
                             std::memcpy(to, values->data() + first, count * sizeof(float));
                             if (first + count == values->size()) values->clear(), values->shrink_to_fit();
                         }});
    }
    write_safetensors(directory + "/model.safetensors", items);
    write_file_atomically(directory + "/config.json", hf_config(model.gpt.options().shape, eot).dump(2) + "\n");
    std::printf("wrote %s: config.json, model.safetensors (%zu tensors)\n", directory.c_str(), items.size());
}

void evaluate_checkpoint(const CommandLine& line) {
    LoadedModel model = load_model(line.checkpoint, 0);
    const Config& config = model.config;
    const std::string glob = line.data.empty() ? config.data.val : line.data;
    const int stride = line.stride >= 0 ? line.stride : config.eval.stride;
    if (stride > config.train.seq_len)
        fail(Exit::usage, "--stride %d must be at most the run's train.seq_len, %d", stride, config.train.seq_len);
    const TokenStream stream(expand_glob(glob, line.data.empty() ? "data.val" : "--data"), config.model.vocab_size);
    Loader loader(stream, {config.train.seq_len, config.train.batch_size, 0, SampleOrder::once, 0, 1, stride});
    std::optional<Tokenizer> tokenizer;
    if (file_exists(model.tokenizer_path)) tokenizer = Tokenizer::load(model.tokenizer_path);
    const Validation result = evaluate(model.gpt, loader, line.batches, tokenizer ? &*tokenizer : nullptr);
    std::printf("%s: loss %.6f", glob.c_str(), result.loss);
    if (result.bits_per_byte) std::printf(", %.4f bits per byte", *result.bits_per_byte);
    std::printf("\n");
}

void sample_checkpoint(const std::string& path, const Config::Sample& options, uint64_t seed) {
    LoadedModel model = load_model(path, 1);
    const Tokenizer tokenizer = Tokenizer::load(model.tokenizer_path);
    std::printf("%s\n", sample_text(model.gpt, tokenizer, options, seed).c_str());
}

void run_command(const CommandLine& line) {
    switch (line.command) {
        case Command::train: break;  // main's
        case Command::plan: return plan(line.config, line.overrides);
        case Command::prepare: return prepare_data(line.prepare);
        case Command::sample: return sample_checkpoint(line.checkpoint, line.sample, line.seed);
        case Command::eval: return evaluate_checkpoint(line);
        case Command::inspect: return inspect(line.path);
        case Command::export_hf: return export_huggingface(line.checkpoint, line.path);
        case Command::help_config: std::fputs(config_help().c_str(), stdout); return;
        case Command::markdown_config: std::fputs(config_markdown().c_str(), stdout); return;
    }
}

std::string version() {
    const DeviceInfo device = device_info();
    return format("train_gpt %s\nbuilt for: %s\ndevice: %s\nmatrix products: %s", GIT_REVISION, device.build.c_str(),
                  device.name.c_str(), device.matmul_path.c_str());
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const CommandLine line = parse_command_line(argc, argv, version);
        if (line.command == Command::train)
            return int(train(line.config, line.overrides, line.start, line.accept_changes));
        run_command(line);
        return int(Exit::ok);
    } catch (const Error& error) {
        std::fprintf(stderr, "train_gpt: %s\n", error.what());
        return int(error.code);
    } catch (const std::bad_alloc&) {
        std::fprintf(stderr, "train_gpt: out of memory\n");
        return int(Exit::os);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "train_gpt: internal error: %s\n", error.what());
        return int(Exit::internal);
    }
}
