// main(): what each command does, and the recipe of a run. Read train() first; everything above it is how the model,
// the files and the data are introduced to each other, which happens only here.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>

#include "commands/command_line.h"
#include "data/dataset.h"
#include "data/encoder.h"
#include "data/inspect.h"
#include "data/loader.h"
#include "data/prepare.h"
#include "model/evaluate.h"
#include "model/gpt.h"
#include "model/huggingface.h"
#include "model/plan.h"
#include "model/sample.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/cluster/ranks.h"
#include "runtime/cluster/together.h"
#include "runtime/config/config.h"
#include "runtime/io/io.h"
#include "runtime/logging/logging.h"
#include "runtime/performance/performance.h"

namespace {

// ---- the model from a configuration ---------------------------------------------------------------------------------

GptOptions gpt_options(const Config& config, int rank = 0, int ranks = 1) {
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
    options.recompute = config.train.recompute;
    options.optimizer = config.optim.name;
    options.head_rows = config.train.head_rows;
    options.micro_steps = micro_steps(config, ranks);
    options.rank = rank;
    options.ranks = ranks;
    options.zero_stage = config.parallel.zero_stage;
    options.deterministic_reduce = config.parallel.deterministic_reduce;
    options.bucket_bytes = size_t(config.parallel.bucket_mb) << 20;
    return options;
}

double flops_of_token(const GptOptions& o) {
    return flops_per_token({int64_t(lay_out_tensors(o.shape).parameters), o.shape.n_layer, o.shape.n_embd, o.seq_len});
}

UpdateSettings update_settings(const Config::Optim& o) {
    return {o.beta1, o.beta2, float(o.eps), float(o.weight_decay), float(o.momentum), float(o.grad_clip)};
}

// ---- the model in checkpoints and Hugging Face directories ----------------------------------------------------------

// Every tensor of the model from a GPT2LMHeadModel, with or without its "transformer." prefix.
void import_huggingface(Gpt& gpt, const std::string& directory) {
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
            fail(Exit::data, "%s: %s has no place in a GPT-2 with a tied head", entry.file.c_str(), entry.name.c_str());
    });
}

// model.init_from: a Hugging Face directory, one of our checkpoints, or a run directory: its newest checkpoint.
void load_initial_weights(Gpt& gpt, const std::string& path) {
    if (file_exists(path + "/config.json") && !directory_exists(checkpoints_directory(path)))
        import_huggingface(gpt, path);
    else
        open_checkpoint(path).load(gpt.master_tensors(), OtherTensors::ignore);
}

// The model of a run's first step: from the checkpoint that is resumed, from model.init_from, or from the seed.
Gpt starting_model(const Config& config, const Comm& comm, const Checkpoint* checkpoint) {
    Gpt gpt(gpt_options(config, comm.rank, comm.size), comm);
    if (checkpoint)
        checkpoint->load(gpt.state_tensors(), OtherTensors::refuse);
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
    checkpoint.load(gpt.master_tensors(), OtherTensors::ignore);
    gpt.masters_changed();
    const std::string run_dir = run_directory_of(checkpoint.directory());
    return {std::move(config), std::move(gpt), run_dir + "/tokenizer.json"};
}

// ---- evaluation and samples -----------------------------------------------------------------------------------------

// The loss over what the loader gives in one pass.
Validation evaluate_pass(Gpt& gpt, Loader& loader, const std::optional<Tokenizer>& tokenizer) {
    std::function<int(int)> token_bytes;
    if (tokenizer) token_bytes = [&](int token) { return tokenizer->token_bytes(token); };
    loader.seek(0);
    return evaluate(
        gpt, loader.batches_per_pass(), [&] { return loader.next(); }, token_bytes);
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
    ControlChannel& control;
    Loader train_loader;
    std::unique_ptr<Loader> val_loader;
    Gpt gpt;
    LossScaler scaler;
    std::optional<RunLog> log;  // rank 0's
    TrainingProgress progress;
    CheckpointWriter writer;
    double token_flops;       // of forward and backward, per token
    double peak_flops_per_s;  // of all ranks' GPUs; 0: not known
    int failed_saves = 0;     // in a row

    // Members are made in their order: what can be wrong with the data shows before the model takes memory, and what
    // can be wrong with the weights before the log leaves anything in run.dir.
    Run(const Config& c, Ranks& ranks, Dataset d, const RunStart& start)
        : config(c),
          dataset(std::move(d)),
          dataset_digest(start.dataset_digest),
          state(start.state),
          comm(ranks.comm()),
          control(ranks.control()),
          train_loader(dataset.train, loader_options(SampleOrder::shuffled), state.cursor),
          val_loader(dataset.val ? std::make_unique<Loader>(*dataset.val, loader_options(SampleOrder::once)) : nullptr),
          gpt(starting_model(c, comm, start.checkpoint ? &*start.checkpoint : nullptr)),
          scaler(c.loss_scale, state.loss_scale),
          log(is_first() ? std::make_optional<RunLog>(c.run.dir, state.step) : std::nullopt),
          progress(is_first() ? stdout : nullptr, comm.size, c.train.max_steps, c.log.every_steps),
          writer(c.run.dir, comm),
          token_flops(flops_of_token(gpt.options())),
          peak_flops_per_s(comm.size * ::peak_flops_per_s(device_info().name, c.train.precision, c.device.tf32)) {}

    bool is_first() const { return comm.rank == 0; }

    LoaderOptions loader_options(SampleOrder order) const {
        const int micros = order == SampleOrder::shuffled ? micro_steps(config, comm.size) : 1;
        const Config::Train& t = config.train;
        const uint64_t most = uint64_t(config.eval.batches) * uint64_t(t.batch_size);
        return {t.seq_len, t.batch_size,       config.run.seed, order, comm.rank,
                comm.size, config.eval.stride, micros,          most};
    }
};

// One optimizer step: forward and backward over the micro-batches, then the update. Returns whether some rank has been
// asked to stop, which all ranks learn at the same step.
bool train_step(Run& run) {
    const Config& config = run.config;
    const double start = now_ms();
    const CommTotals before = comm_totals(run.comm);
    const int step = run.state.step + 1, micros = micro_steps(config, run.comm.size);
    const double rate = learning_rate(config, step), t = double(run.state.updates + 1);
    const float scale = run.scaler.scale();

    run.gpt.begin_step({.loss_scale = scale,
                        .learning_rate = float(rate),
                        .bias_correction1 = float(1.0 - std::pow(config.optim.beta1, t)),
                        .bias_correction2 = float(1.0 - std::pow(config.optim.beta2, t))});
    double data_ms = 0;
    for (int micro = 0; micro < micros; micro++) {
        run.control.note_step(step);
        const double asked = now_ms();
        const Batch batch = run.train_loader.next();
        data_ms += now_ms() - asked;
        run.gpt.micro_step(batch.inputs, batch.targets, 1.0f / float(config.train.total_batch_tokens));
    }
    const StepResult result = run.gpt.end_step(update_settings(config.optim), {stop_signal() ? 1.0 : 0.0});
    const CommTotals talked = comm_totals(run.comm) - before;
    const double tokens = double(config.train.total_batch_tokens), step_ms = now_ms() - start;
    const double tokens_per_s = tokens / step_ms * 1000.0;
    const TrainRecord record{.step = step,
                             .loss = result.loss_sum / tokens,
                             .learning_rate = rate,
                             .grad_norm = result.grad_norm,
                             .loss_scale = scale,
                             .tokens = int64_t(step) * config.train.total_batch_tokens,
                             .step_ms = step_ms,
                             .tokens_per_s = tokens_per_s,
                             .mfu = model_flops_utilisation(run.token_flops, tokens_per_s, run.peak_flops_per_s),
                             .data_ms = data_ms,
                             .comm_ms = talked.waited_ms,
                             .optimizer_ms = result.update_ms,
                             .comm_bytes = talked.bytes_sent,
                             .skipped = result.non_finite_tensor};
    if (run.log) run.log->write(record);
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
    return result.votes[0] > 0 || (run.comm.size == 1 && stop_signal());
}

void validate(Run& run) {
    run.control.note_phase(Phase::evaluation, run.state.step);
    const Validation result = evaluate_pass(run.gpt, *run.val_loader, run.dataset.tokenizer);
    if (run.log) run.log->write(ValRecord{run.state.step, result.loss, result.bits_per_byte});
    std::string line = format("step %d | validation loss %.4f", run.state.step, result.loss);
    if (result.bits_per_byte) line += format(" | %.4f bits per byte", *result.bits_per_byte);
    run.progress.say(line);
}

// Commits a checkpoint. A failure (a full disk, say) is told and survived twice in a row: the older ones are intact.
void save(Run& run, bool may_fail) {
    constexpr int kMostFailures = 3;
    run.control.note_phase(Phase::save, run.state.step);
    const CheckpointInfo info = checkpoint_info(run.state, run.config, run.dataset_digest);
    try {
        if (run.log) run.log->sync();
        const SaveStats stats = run.writer.save(info, run.gpt.saved_tensors());
        run.progress.say(format("step %d | checkpoint %s, %.1f MiB in %.1f s", run.state.step, stats.directory.c_str(),
                                double(stats.bytes) / 0x1p20, stats.seconds));
        run.state.saved_step = run.state.step;
        run.failed_saves = 0;
        if (run.is_first()) apply_retention(run.config.run.dir, run.state.run_id, run.config.checkpoint.keep);
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
        const bool must_stop = train_step(run);
        const int step = run.state.step;
        const bool is_last = step == config.train.max_steps;
        if (run.val_loader && (is_due(step, config.eval.every_steps) || (is_last && config.eval.every_steps > 0)))
            validate(run);
        if (run.dataset.tokenizer && is_due(step, config.sample.every_steps))
            run.progress.say(
                sample_text(run.gpt, *run.dataset.tokenizer, config.sample, config.run.seed + uint64_t(step)));
        if (is_last || must_stop || is_due(step, config.checkpoint.every_steps)) save(run, !is_last && !must_stop);
        if (must_stop && !is_last) {
            run.progress.say(format("step %d | stopped by signal %d; --resume continues", step, stop_signal()));
            return Exit::again;
        }
    }
    return Exit::ok;
}

void introduce(const Run& run) {
    const Config& c = run.config;
    const DeviceInfo device = device_info();
    const size_t bytes = planned_bytes(run.gpt.options());
    print_line(format("device   %s; %s", device.name.c_str(), device.matmul_path.c_str()));
    if (run.comm.size > 1) print_line(format("ranks    %d by %s", run.comm.size, comm_library().c_str()));
    print_line(format("model    %d layers, %d heads, %d channels, vocabulary %d: %.2f M parameters, %s, %.1f MiB",
                      c.model.n_layer, c.model.n_head, c.model.n_embd, c.model.vocab_size,
                      double(run.gpt.layout().parameters) * 1e-6, name_of(c.train.precision), double(bytes) / 0x1p20));
    print_line("data     " + run.dataset.train.description() + ": " + std::to_string(run.dataset.train.token_count()) +
               " tokens, " + std::to_string(run.train_loader.windows()) + format(" windows of %d", c.train.seq_len));
    print_line(format("run      %s: steps %d to %d of ", c.run.dir.c_str(), run.state.step + 1, c.train.max_steps) +
               std::to_string(c.train.total_batch_tokens) + " tokens");
    std::fflush(stdout);
}

void leave_notes(const Run& run) {
    const std::string& dir = run.config.run.dir;
    check_space(dir, run.gpt.layout().parameters * sizeof(float) * 3);
    write_file_atomically(dir + "/config.json", config_json(run.config));
    write_file_atomically(dir + "/revision.txt", GIT_REVISION "\n");
    if (run.dataset.tokenizer) run.dataset.tokenizer->save(dir + "/tokenizer.json");
    introduce(run);
}

// The recipe of a run. Everything that can be wrong with the input is found before run.dir is touched.
Exit train(const CommandLine& line) {
    const Place place = find_place();
    const Config config = load_config(line.config, line.overrides, place.size);
    Ranks ranks(place, config, GIT_REVISION);
    return ranks.run([&] {
        Dataset dataset =
            open_dataset(config.data.train, config.data.val, config.data.tokenizer, config.model.vocab_size);
        if (const std::string& from = config.model.init_from; !from.empty() && !directory_exists(from))
            fail(Exit::no_input, "%s: model.init_from: %s is not a directory", line.config.c_str(), from.c_str());
        const std::string digest = dataset.train.digest();
        ranks.control().require_same(digest, "the digest of data.train");
        RunStart start = start_run(config, line.start, digest, line.accept_changes, ranks.comm());
        // Beside the program: the same machine and binary choose the same products, and so give the same bits.
        configure_device({.local_rank = place.local_rank,
                          .tf32 = config.device.tf32,
                          .debug_sync = config.device.debug_sync,
                          .matmul_choices = program_directory() + "/matmul_choices.json",
                          .known_choices = start.state.device_choices});
        Run run(config, ranks, std::move(dataset), start);
        start.checkpoint.reset();
        on_rank_0(run.comm, "write to run.dir", [&] { leave_notes(run); });
        install_signal_handlers();
        return train_to_the_end(run);
    });
}

// ---- the other commands ---------------------------------------------------------------------------------------------

// What the scaling model is told of this run.
ScalingInputs scaling_inputs(const CommandLine::Scaling& machine, const GptOptions& run, double flops_per_token) {
    ScalingInputs inputs = inputs_of(machine);
    inputs.flops_per_token = flops_per_token;
    inputs.tokens_per_micro_step = double(run.batch) * run.seq_len;
    inputs.micro_steps = run.micro_steps;
    inputs.param_wire_bytes = run.precision == Dtype::fp32 ? 4 : 2;
    for (const Bucket& bucket : lay_out_tensors(run.shape).buckets)
        inputs.bucket_elements.push_back(double(bucket.piece));
    GptOptions staged = run;
    for (staged.zero_stage = 0; staged.zero_stage <= 3; staged.zero_stage++)
        inputs.memory_bytes_per_rank[size_t(staged.zero_stage)] = double(planned_bytes(staged));
    return inputs;
}

void plan(const CommandLine& line) {
    const int ranks = std::max(1, line.scaling.gpus);
    const Config config = load_config(line.config, line.overrides, ranks);
    const GptOptions options = gpt_options(config, 0, ranks);
    const double flops = flops_of_token(options);

    const size_t beside = resident_bytes() + device_info().working_bytes + CheckpointWriter::kStagingBytes;
    std::printf("%s", plan_table(options).c_str());
    std::printf("%-22s %16zu bytes %10.1f MiB\n", "program and buffers", beside, double(beside) / 0x1p20);
    std::printf("micro-steps        %14d per step of %.0f tokens\n", options.micro_steps,
                double(config.train.total_batch_tokens));
    std::printf("FLOPs per token    %14.4e, per step %.4e\n", flops, flops * double(config.train.total_batch_tokens));
    if (line.scaling.gpus > 0) std::printf("\n%s", scaling_table(scaling_inputs(line.scaling, options, flops)).c_str());
}

void prepare_data(const CommandLine::Prepare& p) {
    prepare({p.tokenizer, p.vocab_size, p.inputs, p.out_dir, p.val_fraction, p.shard_tokens, p.copies, p.bpe_dropout},
            print_line);
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
    const std::vector<NamedTensor> tensors = hf_tensors(model.gpt);
    write_safetensors(directory + "/model.safetensors", tensors);
    write_file_atomically(directory + "/config.json", hf_config(model.gpt.options().shape, eot).dump(2) + "\n");
    std::printf("wrote %s: config.json, model.safetensors (%zu tensors)\n", directory.c_str(), tensors.size());
}

void evaluate_checkpoint(const CommandLine& line) {
    LoadedModel model = load_model(line.checkpoint, 0);
    const Config& config = model.config;
    const std::string glob = line.data.empty() ? config.data.val : line.data;
    const int stride = line.stride >= 0 ? line.stride : config.eval.stride;
    if (stride > config.train.seq_len)
        fail(Exit::usage, "--stride %d must be at most the run's train.seq_len, %d", stride, config.train.seq_len);
    const TokenStream stream(expand_glob(glob, line.data.empty() ? "data.val" : "--data"), config.model.vocab_size);
    Loader loader(stream, {.seq_len = config.train.seq_len,
                           .batch = config.train.batch_size,
                           .order = SampleOrder::once,
                           .stride = stride,
                           .max_windows = uint64_t(line.batches) * uint64_t(config.train.batch_size)});
    std::optional<Tokenizer> tokenizer;
    if (file_exists(model.tokenizer_path)) tokenizer = Tokenizer::load(model.tokenizer_path);
    const Validation result = evaluate_pass(model.gpt, loader, tokenizer);
    std::printf("%s: loss %.6f", glob.c_str(), result.loss);
    if (result.bits_per_byte) std::printf(", %.4f bits per byte", *result.bits_per_byte);
    std::printf("\n");
}

void sample_checkpoint(const std::string& path, const Config::Sample& options, uint64_t seed) {
    LoadedModel model = load_model(path, 1);
    print_line(sample_text(model.gpt, Tokenizer::load(model.tokenizer_path), options, seed));
}

Exit run_command(const CommandLine& line) {
    switch (line.command) {
        case Command::train: break;  // main's
        case Command::plan: plan(line); break;
        case Command::prepare: prepare_data(line.prepare); break;
        case Command::sample: sample_checkpoint(line.checkpoint, line.sample, line.seed); break;
        case Command::eval: evaluate_checkpoint(line); break;
        case Command::inspect: inspect(line.path); break;
        case Command::export_hf: export_huggingface(line.checkpoint, line.path); break;
        case Command::help_config: std::fputs(config_help().c_str(), stdout); break;
        case Command::markdown_config: std::fputs(config_markdown().c_str(), stdout); break;
    }
    return Exit::ok;
}

std::string version() {
    const DeviceInfo device = device_info();
    return format("train_gpt %s\nbuilt for: %s\ndevice: %s\nmatrix products: %s\nbetween ranks: %s", GIT_REVISION,
                  device.build.c_str(), device.name.c_str(), device.matmul_path.c_str(), comm_library().c_str());
}

}  // namespace

int main(int argc, char** argv) {
    return exit_status("train_gpt", [&] {
        const CommandLine line = parse_command_line(argc, argv, version);
        if (line.nproc > 0) return start_ranks(line.nproc, line.node, arguments_of_rank({argv, argv + argc}));
        return line.command == Command::train ? train(line) : run_command(line);
    });
}
