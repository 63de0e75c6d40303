#include "model/plan.h"
#include "training/divergence.h"
#include "training/models/generation.h"
#include "training/run_file.h"
#include "training/saving.h"

namespace {

Gpt initial_model(const Config& config, const Comm& comm, const std::optional<Checkpoint>& checkpoint) {
    Gpt gpt(gpt_options(config, comm.rank, comm.size), comm);
    if (checkpoint)
        checkpoint->load(gpt.state_tensors(), OtherTensors::refuse);
    else if (!config.model.init_from.empty())
        load_initial_weights(gpt, config.model, config.model.init_from);
    else
        gpt.initialize(config.run.seed);
    gpt.masters_changed();
    return gpt;
}

// The settings that differ from the defaults, wrapped to the width of a terminal.
std::string settings_text(const Config& config) {
    constexpr size_t kWidth = 100;
    Config given = config;
    if (given.train.head_rows == default_head_rows(given.train.batch_size, given.train.seq_len))
        given.train.head_rows = 0;
    std::string text = "settings";
    size_t line_begin = 0;
    for (const std::string& setting : changed_settings(given)) {
        if (text.size() - line_begin + 1 + setting.size() > kWidth) {
            line_begin = text.size() + 1;
            text += "\n        ";
        }
        text += " " + setting;
    }
    return text;
}

// "steps 1 to 500", "steps from 1, for 3 minutes", or both limits.
std::string steps_text(const TrainingRun& run) {
    std::string text = format("steps %d to %d", run.state.step + 1, run.course.end_step);
    if (run.course.end_step == 0) text = format("steps from %d", run.state.step + 1);
    if (run.config.train.max_minutes > 0) text += format(", for %g minutes", run.config.train.max_minutes);
    if (run.config.train.max_minutes > 0 && run.state.progress.trained_s > 0)
        text += format(" (%.1f so far)", run.state.progress.trained_s / 60);
    return text;
}

void print_summary(TrainingRun& run) {
    const Config& c = run.config;
    const DeviceInfo device = device_info();
    run.matmul_path = device.matmul_path;
    const size_t bytes = planned_bytes(run.gpt.options());
    run.progress.say(format("device   %s; %s", device.name.c_str(), device.matmul_path.c_str()));
    if (run.comm.size > 1) run.progress.say(format("ranks    %d by %s", run.comm.size, comm_library().c_str()));
    run.progress.say(format("model    %d layers, %d heads, %d channels, vocabulary %d: %.2f M parameters, %s, %.1f MiB",
                            c.model.n_layer, c.model.n_head, c.model.n_embd, c.model.vocab_size,
                            double(run.gpt.layout().parameters) * 1e-6, name_of(c.train.precision),
                            double(bytes) / 0x1p20));
    run.progress.say(format("data     %s: %zu tokens, %zu windows of %d", run.dataset.train.description().c_str(),
                            run.dataset.train.token_count(), run.train_loader.windows(), c.train.seq_len));
    run.progress.say(format("run      %s: %s, %zu tokens each", c.run.dir.c_str(), steps_text(run).c_str(),
                            size_t(c.train.total_batch_tokens)));
    run.progress.say("energy   " + run.energy.description());
    run.progress.say(settings_text(c));
}

EnergySources energy_sources(int local_rank) {
    EnergySources sources{.gpu = device_info().pci_bus_id};
    if (local_rank > 0) sources.rapl.clear();
    return sources;
}

bool is_due(int step, int every_steps) { return every_steps > 0 && step % every_steps == 0; }

NormRecord norms_of(const TensorLayout& layout, const StepResult& result, int step, double time) {
    NormRecord record{.step = step, .time = time};
    for (size_t i = 0; i < layout.tensors.size(); i++)
        record.gradients.push_back({layout.tensors[i].name, result.tensor_norms[i]});
    const std::vector<double>& rms = result.residual_rms;
    for (size_t i = 0; i + 1 < rms.size(); i++)
        record.activations.push_back({format("h.%zu.residual%s", i / 2, i % 2 == 0 ? "" : "_mid"), rms[i]});
    record.activations.push_back({"residual_f", rms.back()});
    return record;
}

}  // namespace

// The order of the members matters: errors in the data are found before the model is allocated, and errors in the
// weights before the log changes run.dir.
TrainingRun::TrainingRun(const Config& c, Ranks& ranks, Dataset data, std::vector<QuestionSet> asked, RunStart& start,
                         TrainingProgress& shown_progress)
    : config(c),
      lock(std::move(start.lock)),
      dataset(std::move(data)),
      questions(std::move(asked)),
      state(start.state),
      comm(ranks.comm()),
      control(ranks.control()),
      train_loader(dataset.train, loader_options(c, comm, SampleOrder::shuffled), state.progress.cursor),
      val_loader(dataset.val ? std::make_unique<Loader>(*dataset.val, loader_options(c, comm, SampleOrder::once))
                             : nullptr),
      gpt(initial_model(c, comm, start.checkpoint)),
      log(comm.rank == 0 ? run_log(c, state, lock) : nullptr),
      progress(shown_progress),
      token_flops(flops_of_token(gpt.options())),
      peak_flops_per_s(comm.size * ::peak_flops_per_s(device_info().name, c.train.precision, c.device.tf32)),
      course(planned_course(c, train_loader.windows())),
      start_ms(now_ms() - 1000 * state.progress.trained_s),
      background_save(c.run.dir, comm, retention_of(c)),
      energy(energy_sources(ranks.local_rank())) {
    if (state.progress.course_by_time.end_step > 0) course = state.progress.course_by_time;
    if (c.checkpoint.asynchronous) background_save.reserve(gpt.saved_tensors());
}

std::shared_ptr<RunLog> run_log(const Config& config, const TrainState& state, DirectoryLock& lock) {
    const std::string configuration = config.log.tensorboard ? config_json(config) : "";
    std::shared_ptr<RunLog> log;
    lock.guard([&] {
        log = std::make_shared<RunLog>(config.run.dir, state.step, configuration, !state.progress.evaluation_is_due);
    });
    return log;
}

void check_init_from(const Config& config, const std::string& config_path, const std::string& tokenizer_digest) {
    const std::string& from = config.model.init_from;
    if (from.empty()) return;
    if (!directory_exists(from) && !file_exists(from))
        fail(Exit::no_input, "%s: model.init_from: %s does not exist", config_path, from);
    if (directory_exists(from)) check_source_tokenizer(config, tokenizer_digest);
}

static void write_descriptions(const TrainingRun& run, const char* revision) {
    const std::string& dir = run.config.run.dir;
    check_space(dir, run.gpt.layout().parameters * sizeof(float) * 3);
    write_file_atomically(dir + "/config.json", config_json(run.config));
    write_file_atomically(dir + "/revision.txt", std::string(revision) + "\n");
    add_start(run, revision);
    if (run.dataset.tokenizer) run.dataset.tokenizer->save(dir);
}

void write_run_files(TrainingRun& run, const char* revision) {
    run_on_rank_0(run.comm, "write to run.dir", [&] {
        run.lock.guard([&] { write_descriptions(run, revision); });
        print_summary(run);
    });
}

bool must_stop_early(const Comm& comm, TrainingProgress& progress) {
    if (!is_stop_requested(comm)) return false;
    progress.say(format("stopped by signal %d before the first step", stop_signal()));
    return true;
}

Batch StepTimer::next_batch(Loader& loader) {
    const HostSpan span(trace, "data");
    const double before_ms = now_ms();
    const Batch batch = loader.next();
    data_ms += now_ms() - before_ms;
    return batch;
}

std::exception_ptr StepTimer::wait_for_step(Loader& loader) {
    const HostSpan span(trace, "data");
    const double before_ms = now_ms();
    const std::exception_ptr error = loader.wait_for_step();
    data_ms += now_ms() - before_ms;
    return error;
}

void check_first_tokens(TrainingRun& run) {
    if (run.is_complete()) return;
    run.error = shared_error(run.gpt, run.train_loader.wait_for_step());
    end_on_error(run);
}

void end_together(TrainingRun& run, const std::exception_ptr& error) {
    run.control.leave();
    std::rethrow_exception(error);
}

void end_on_error(TrainingRun& run) {
    if (run.error) end_together(run, run.error);
}

namespace {

// The last step by the clock, if train.max_minutes decides it now; else 0.
double vote_on_end(const TrainingRun& run) {
    if (run.comm.rank != 0 || run.state.progress.course_by_time.end_step > 0) return 0;
    const auto course = course_by_time(run.config, run.course, run.state.step + 1, run.elapsed_s());
    return course ? course->end_step : 0;
}

// Warns once per combination of reasons.
void warn_of_slow_gpus(TrainingRun& run, const EnergyReading& energy, double ranks) {
    const std::string reasons = energy.throttle.empty() ? "" : "; reason on rank 0: " + energy.throttle;
    if (ranks == 0 || !run.throttled.insert(reasons).second) return;
    run.progress.say(format("step %d | warning: %.0f of %d GPUs are throttled%s", run.state.step + 1, ranks,
                            run.comm.size, reasons.c_str()));
}

// Called once: GEMM algorithms are chosen in the first step, after print_summary().
void note_products(TrainingRun& run) {
    const std::string printed = std::exchange(run.matmul_path, "");
    if (printed.empty()) return;
    if (const std::string path = device_info().matmul_path; path != printed)
        run.progress.say(format("step %d | GEMM by %s", run.state.step + 1, path.c_str()));
}

}  // namespace

StepVotes votes_of(TrainingRun& run, StepTimer& timer) {
    const bool is_last = run.state.step + 1 == run.course.end_step;
    if (!is_last) run.error = timer.wait_for_step(run.train_loader);
    if (run.log && run.log->error()) run.error = run.log->error();
    StepVotes votes{run.energy.read(), {}};
    votes.values[kFailed] = run.error ? 1 : 0;
    votes.values[kStop] = stop_signal() ? 1 : 0;
    votes.values[kEnd] = vote_on_end(run);
    votes.values[kJoules] = votes.energy.joules.value_or(0);
    votes.values[kThrottled] = votes.energy.throttle.empty() ? 0 : 1;
    votes.values[kLost] = run.comm.rank == 0 && !run.lock.is_in_place() ? 1 : 0;
    const BackgroundSave::Progress save = run.background_save.progress();
    votes.values[kSaveUnfinished] = save.unfinished;
    votes.values[kSaveFailed] = save.failed;
    votes.values[kSaveCommitted] = save.committed;
    return votes;
}

TrainRecord finish_step(TrainingRun& run, const StepTimer& timer, const EnergyReading& energy,
                        const StepResult& result) {
    const Config& config = run.config;
    if (result.votes[kLost] > 0) end_together(run, std::make_exception_ptr(moved_away(config.run.dir)));
    const CommTotals comm = comm_totals(run.comm) - timer.comm_before;
    const int step = run.state.step + 1;
    const double tokens = double(config.train.total_batch_tokens), step_ms = now_ms() - timer.start_ms;
    const double tokens_per_s = tokens / step_ms * 1000.0;
    const double joules = result.votes[kJoules];
    const bool has_energy = energy.joules || joules > 0;
    const TrainRecord record{.step = step,
                             .loss = result.loss_sum / tokens,
                             .learning_rate = learning_rate(config, run.course, step),
                             .grad_norm = result.grad_norm,
                             .loss_scale = run.state.progress.loss_scale.scale,
                             .tokens = int64_t(step) * config.train.total_batch_tokens,
                             .epoch = double(run.train_loader.cursor()) / double(run.train_loader.windows()),
                             .step_ms = step_ms,
                             .tokens_per_s = tokens_per_s,
                             .mfu = model_flops_utilisation(run.token_flops, tokens_per_s, run.peak_flops_per_s),
                             .data_ms = timer.data_ms,
                             .comm_ms = comm.waited_ms,
                             .optimizer_ms = result.update_ms,
                             .comm_bytes = comm.bytes_sent,
                             .resident_bytes = resident_bytes(),
                             .skipped = result.non_finite_tensor,
                             .time = unix_time(),
                             .energy_j = has_energy ? std::optional(joules) : std::nullopt,
                             .power_w = has_energy ? std::optional(joules / energy.seconds) : std::nullopt,
                             .gpu_temperature_c = energy.gpu_temperature_c,
                             .sm_clock_mhz = energy.sm_clock_mhz,
                             .throttle = energy.throttle};
    TrainState::Progress& progress = run.state.progress;
    // The decision must be in a checkpoint, or a resumed run would make a different one.
    run.must_keep = result.votes[kEnd] > 0;
    if (run.must_keep) run.course = progress.course_by_time = {int(result.votes[kEnd]), step};
    if (has_energy) progress.energy.add(joules, 1);
    if (run.log) run.log->write(record);
    if (run.log && norms_are_due(run)) run.log->write(norms_of(run.gpt.layout(), result, step, record.time));
    if (run.log)
        if (const std::string news = run.log->end_step(); !news.empty())
            run.progress.say(format("step %d | %s", step, news.c_str()));
    if (result.votes[kFailed] > 0) run.error = shared_error(run.gpt, run.error);
    run.progress.end_at(expected_end(config, run.course, step, run.elapsed_s()));
    warn_of_slow_gpus(run, energy, result.votes[kThrottled]);
    note_products(run);
    run.progress.show(record);

    run.state.step = step;
    progress.cursor = run.train_loader.cursor();
    std::string diagnosis;
    if (result.non_finite_tensor.empty()) {
        progress.updates++;
        progress.loss_scale.step_applied(config.loss_scale, step);
    } else {
        diagnosis = progress.loss_scale.step_skipped(config.loss_scale, step, result.non_finite_tensor);
    }
    judge_step(run, record, diagnosis);
    follow_save(run, {result.votes[kSaveUnfinished], result.votes[kSaveFailed], result.votes[kSaveCommitted]});
    if (run.trace) {
        run.trace->add({.lane = Lane::host, .name = "step", .begin_ms = timer.start_ms, .end_ms = now_ms()});
        run.gpt.trace(run.trace, 0);
    }
    return record;
}

namespace {

// Thrown on all ranks to end an evaluation early.
struct Stopped {};

// Called by all ranks between the parts of an evaluation.
std::function<void()> progress_or_stop(TrainingRun& run) {
    return [&run] {
        run.control.note_phase(Phase::evaluation, run.state.step);
        if (is_stop_requested(run.comm)) throw Stopped();
    };
}

void validate(TrainingRun& run) {
    const HostSpan span(run.trace, "validation");
    run.progress.begin(format("step %d | validation", run.state.step));
    Validation result;
    try {
        result = evaluate_pass(run.gpt, *run.val_loader, run.dataset.tokenizer, false, progress_or_stop(run));
    } catch (const SharedError&) {
        run.error = std::current_exception();
        throw Stopped();
    }
    const ValRecord record{run.state.step, result.loss, result.bits_per_byte, unix_time()};
    if (run.log) run.log->write(record);
    run.progress.show(record);
    if (run.config.eval.patience > 0 || run.config.checkpoint.keep_best)
        run.must_keep |= run.state.progress.best.note(result.loss, run.state.step) && run.config.checkpoint.keep_best;
    if (run.has_ended_early())
        run.progress.say(format("step %d | stopping early: no lower validation loss since step %d", run.state.step,
                                run.state.progress.best.step));
}

void ask_questions(TrainingRun& run) {
    const HostSpan span(run.trace, "questions");
    QuestionsRecord record{.step = run.state.step};
    for (const QuestionSet& set : run.questions) {
        run.progress.begin(format("step %d | questions of %s", run.state.step, set.name.c_str()));
        record.files.push_back(answer_questions(run.gpt, set, progress_or_stop(run)).accuracy);
    }
    record.time = unix_time();
    if (run.log) run.log->write(record);
    run.progress.show(record);
}

void show_sample(TrainingRun& run) {
    const HostSpan span(run.trace, "sample");
    const uint64_t seed = run.config.run.seed + uint64_t(run.state.step);
    run.progress.begin(format("step %d | sample", run.state.step));
    const std::string text =
        sample_text(run.gpt, *run.dataset.tokenizer, run.config.sample, seed, progress_or_stop(run));
    const SampleRecord record{run.state.step, run.config.sample.prompt, text, unix_time()};
    if (run.log) run.log->write(record);
    run.progress.show(record);
}

}  // namespace

bool evaluate_if_due(TrainingRun& run, bool must_stop) {
    TrainState::Progress& progress = run.state.progress;
    const int every_steps = run.config.eval.every_steps;
    const bool asks = is_due(run.state.step, every_steps) || (run.is_complete() && every_steps > 0);
    const bool samples = run.dataset.tokenizer && is_due(run.state.step, run.config.sample.every_steps);
    const BestValidation best_before = progress.best;
    try {
        if (must_stop && (asks || samples)) throw Stopped();
        if (asks && run.val_loader) validate(run);
        if (asks && !run.questions.empty()) ask_questions(run);
        if (samples) show_sample(run);
        return true;
    } catch (const Stopped&) {
        progress.best = best_before;
        progress.evaluation_is_due = true;
        return false;
    }
}

bool finish_evaluation(TrainingRun& run) {
    if (!std::exchange(run.state.progress.evaluation_is_due, false)) return true;
    return evaluate_if_due(run, false);
}

bool norms_are_due(const TrainingRun& run) { return is_due(run.state.step + 1, run.config.log.norms_every_steps); }
