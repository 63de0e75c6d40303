#include "training/run.h"

#include "runtime/io/files.h"
#include "training/models/model_io.h"

DeviceSettings device_settings(const Config& config, Ranks& ranks) {
    const Config::Device& device = config.device;
    const std::string choices = device.gemm_choices.empty() ? "" : read_file(device.gemm_choices);
    if (!device.gemm_choices.empty()) ranks.control().require_same(choices, "device.gemm_choices");
    return {.local_rank = ranks.local_rank(),
            .kernels = ranks.kernels().used,
            .tf32 = device.tf32,
            .gelu_epilogue = device.gelu_epilogue,
            .fp8 = config.train.precision == Precision::fp8,
            .gemm_choices = choices,
            .graphs = device.graphs,
            .debug_sync = device.debug_sync};
}

static Gpt initial_model(const Config& config, const Ranks& ranks, const std::optional<Checkpoint>& checkpoint) {
    Gpt gpt(gpt_options(config, ranks.grid(), ranks.comm().rank), ranks.grid_comm());
    if (checkpoint)
        checkpoint->load(gpt.state_tensors(), OtherTensors::refuse);
    else if (!config.model.init_from.empty())
        load_initial_weights(gpt, config.model, config.model.init_from);
    else
        gpt.initialize(config.run.seed);
    gpt.masters_changed();
    return gpt;
}

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
      grid_comm(ranks.grid_comm()),
      grid(ranks.grid()),
      control(ranks.control()),
      train_loader(dataset.train, loader_options(c, grid, comm.rank, SampleOrder::shuffled), state.progress.cursor,
                   state.step + 1),
      val_loader(dataset.val
                     ? std::make_unique<Loader>(*dataset.val, loader_options(c, grid, comm.rank, SampleOrder::once))
                     : nullptr),
      gpt(initial_model(c, ranks, start.checkpoint)),
      log(comm.rank == 0 ? run_log(c, state, lock) : nullptr),
      progress(shown_progress),
      peak_flops_per_s(comm.size *
                       ::peak_flops_per_s(device_info().name, compute_type(c.train.precision), c.device.tf32)),
      length(planned_length(c, train_loader.windows())),
      start_ms(now_ms() - 1000 * state.progress.trained_s),
      background_save(c.run.dir, comm, retention_of(c)),
      sensors(device_info().pci_bus_id),
      kernel_lines(ranks.kernels().lines),
      stragglers(grid, control.member_texts()) {
    if (state.progress.course_by_time.end_step > 0) length = state.progress.course_by_time;
    if (c.checkpoint.asynchronous) background_save.reserve(gpt.saved_tensors());
}

Retention retention_of(const Config& config) {
    return {.keep = config.checkpoint.keep,
            .keep_best = config.checkpoint.keep_best,
            .rollback_every = config.train.may_roll_back() ? config.checkpoint.every_steps : 0};
}

std::shared_ptr<RunLog> run_log(const Config& config, const TrainState& state, DirectoryLock& lock) {
    std::shared_ptr<RunLog> log;
    lock.guard([&] {
        log = std::make_shared<RunLog>(config.run.dir, state.step, config.log.tensorboard,
                                       !state.progress.evaluation_is_due);
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

bool must_stop_early(const Comm& comm, TrainingProgress& progress) {
    if (!is_stop_requested(comm)) return false;
    progress.print(format("stopped by signal %d before the first step", stop_signal()));
    return true;
}

void check_first_tokens(TrainingRun& run) {
    if (run.is_complete()) return;
    run.error = shared_error(run.control, run.train_loader.wait_for_step());
    end_if(run, run.error);
}

void end_if(TrainingRun& run, const std::exception_ptr& error) {
    if (!error) return;
    run.control.leave();
    std::rethrow_exception(error);
}
