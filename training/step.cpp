#include "training/step.h"

#include <cmath>

#include "runtime/config/schedule.h"
#include "runtime/io/json.h"
#include "runtime/io/lock.h"
#include "training/evaluation.h"
#include "training/models/model_io.h"
#include "training/models/votes.h"
#include "training/saving.h"

// Returns the result of `wait`, whose time counts as waiting for tokens.
template <class Wait> static auto waited(StepTimer& timer, const Wait& wait) {
    const HostSpan span(timer.trace, "data");
    const double before_ms = now_ms();
    auto result = wait();
    timer.data_ms += now_ms() - before_ms;
    return result;
}

Batch StepTimer::next_batch(Loader& loader) {
    return waited(*this, [&] { return loader.next(); });
}

std::exception_ptr StepTimer::wait_for_step(Loader& loader) {
    return waited(*this, [&] { return loader.wait_for_step(); });
}

namespace {

// The last step by the clock, if train.max_minutes decides it now; else 0.
double vote_on_end(const TrainingRun& run) {
    if (run.comm.rank != 0 || run.state.progress.course_by_time.end_step > 0) return 0;
    const auto length = course_by_time(run.config, run.length, run.state.step + 1, run.elapsed_s());
    return length ? length->end_step : 0;
}

// Warns once per combination of reasons.
void warn_of_slow_gpus(TrainingRun& run, const GpuReading& gpu, double ranks) {
    const std::string reasons = gpu.throttle.empty() ? "" : "; reason on rank 0: " + gpu.throttle;
    if (ranks == 0 || !run.throttled.insert(reasons).second) return;
    run.progress.print(format("step %d | warning: %.0f of %d GPUs are throttled%s", run.state.step + 1, ranks,
                              run.comm.size, reasons.c_str()));
}

// Compares the ranks' times of the step before this one, which are among the votes.
void note_stragglers(TrainingRun& run, const StepResult& result) {
    const std::span compute_ms = std::span(result.votes).subspan(kVotes);
    if (!run.log || compute_ms.empty()) return;
    const int step = run.state.step + 1;
    for (const std::string& news : run.stragglers.add_step(step - 1, compute_ms))
        run.progress.print(format("step %d | %s", step, news.c_str()));
    if (!run.stragglers.has_new_window()) return;
    const StragglerWindow window = run.stragglers.window();
    const auto slowest = std::ranges::max_element(window.ranks, {}, &Slowness::multiple);
    RanksRecord record{.step = step,
                       .slowest_rank = int(slowest - window.ranks.begin()),
                       .slowest_multiple = slowest->multiple,
                       .stages = {},
                       .time = unix_time()};
    for (const double ms : window.stage_ms) record.stages.push_back({ms, 0});
    const std::vector<LayerRange> parts = layer_ranges(run.gpt.options());
    for (size_t part = 0; part < parts.size(); part++)
        record.stages[part % record.stages.size()].layers += parts[part].count;
    run.log->write(record);
}

// Called once: GEMM algorithms are chosen in the first step, after print_summary().
void note_products(TrainingRun& run) {
    const std::string printed = std::exchange(run.matmul_path, "");
    if (printed.empty()) return;
    if (const std::string path = device_info().matmul_path; path != printed)
        run.progress.print(format("step %d | GEMM by %s", run.state.step + 1, path.c_str()));
}

NormRecord norms_of(const TensorLayout& layout, const StepResult& result, int step, double time) {
    NormRecord record{.step = step, .time = time};
    for (size_t i = 0; i < layout.names.size(); i++)
        record.gradients.push_back({layout.names[i], result.tensor_norms[i]});
    const std::vector<double>& rms = result.residual_rms;
    for (size_t i = 0; i + 1 < rms.size(); i++)
        record.activations.push_back({format("h.%zu.residual%s", i / 2, i % 2 == 0 ? "" : "_mid"), rms[i]});
    record.activations.push_back({"residual_f", rms.back()});
    return record;
}

// Returns the noise scale, in tokens, with the measurement of this step. The small batch is one rank's first
// micro-batch, averaged over ranks, or, if the gradients are sharded, the first micro-batches of all ranks. Its
// micro-step computed a part of the whole batch's mean gradient.
std::optional<double> add_noise(TrainingRun& run, const StepResult& result, double tokens) {
    if (!noise_scale_is_due(run) || !std::isfinite(result.grad_norm)) return std::nullopt;
    const GptOptions& options = run.gpt.options();
    const double batches = options.keeps_whole_gradients() ? options.ranks : 1;
    const double parts = batches * micro_steps(run.config, options.ranks, run.state.step + 1);
    const double norm = double(result.grad_norm);
    NoiseScale& noise = run.state.progress.noise;
    noise.add(result.votes[kNoise] / batches * parts * parts, tokens / parts, norm * norm, tokens);
    return noise.tokens();
}

}  // namespace

StepVotes votes_of(TrainingRun& run, StepTimer& timer) {
    const bool is_last = run.state.step + 1 == run.length.end_step;
    if (!is_last) run.error = timer.wait_for_step(run.train_loader);
    if (run.log && run.log->error()) run.error = run.log->error();
    StepVotes votes{run.sensors.read(), std::vector<double>(size_t(vote_count(run.grid)))};
    votes.values[kFailed] = run.error ? 1 : 0;
    votes.values[kStop] = stop_signal() ? 1 : 0;
    votes.values[kEnd] = vote_on_end(run);
    votes.values[kPower] = votes.gpu.power_w.value_or(0);
    votes.values[kThrottled] = votes.gpu.throttle.empty() ? 0 : 1;
    votes.values[kLost] = run.comm.rank == 0 && !run.lock.is_in_place() ? 1 : 0;
    const BackgroundSave::Progress save = run.background_save.progress();
    votes.values[kSaveUnfinished] = save.unfinished;
    votes.values[kSaveFailed] = save.failed;
    votes.values[kSaveCommitted] = save.committed;
    votes.values[kNoise] = run.gpt.first_norm_squared();
    if (run.comm.size > 1) votes.values[size_t(kVotes + run.comm.rank)] = run.compute_ms;
    return votes;
}

static std::optional<double> offloaded_bytes(const TrainingRun& run, const StepResult& result) {
    if (!run.config.offload.is_on()) return std::nullopt;
    return double(result.offload.to_device + result.offload.to_host);
}

static std::optional<double> fp8_saturated(const TrainingRun& run, const StepResult& result) {
    return run.gpt.options().fp8 ? std::optional(result.fp8_saturated) : std::nullopt;
}

StepEnd finish_step(TrainingRun& run, const StepTimer& timer, const GpuReading& gpu, const StepResult& result) {
    const Config& config = run.config;
    if (result.votes[kLost] > 0) end_if(run, std::make_exception_ptr(moved_away(config.run.dir)));
    const CommTotals comm = comm_totals(run.grid_comm) - timer.comm_before;
    const int step = run.state.step + 1;
    const double tokens = double(batch_tokens(config, step)), step_ms = now_ms() - timer.start_ms;
    const double tokens_per_s = tokens / step_ms * 1000.0;
    const int seq_len = sequence_length(config, step);
    if (run.token_flops.first != seq_len) run.token_flops = {seq_len, flops_of_token(run.gpt.options(), seq_len)};
    const double power_w = result.votes[kPower];
    const TrainRecord record{.step = step,
                             .loss = result.loss_sum / tokens,
                             .learning_rate = learning_rate(config, run.length, step),
                             .grad_norm = result.grad_norm,
                             .loss_scale = run.state.progress.loss_scale.scale,
                             .tokens = tokens_of_steps(config, step),
                             .epoch = double(run.train_loader.cursor()) / double(run.train_loader.windows()),
                             .step_ms = step_ms,
                             .tokens_per_s = tokens_per_s,
                             .mfu = model_flops_utilization(run.token_flops.second, tokens_per_s, run.peak_flops_per_s),
                             .data_ms = timer.data_ms,
                             .comm_ms = comm.waited_ms,
                             .optimizer_ms = result.update_ms,
                             .comm_bytes = comm.bytes_sent,
                             .offload_bytes = offloaded_bytes(run, result),
                             .fp8_saturated = fp8_saturated(run, result),
                             .resident_bytes = resident_bytes(),
                             .noise_scale = add_noise(run, result, tokens),
                             .skipped = result.non_finite_tensor,
                             .time = unix_time(),
                             .power_w = power_w > 0 ? std::optional(power_w) : std::nullopt,
                             .gpu_temperature_c = gpu.temperature_c,
                             .sm_clock_mhz = gpu.sm_clock_mhz,
                             .throttle = gpu.throttle};
    TrainState::Progress& progress = run.state.progress;
    // The decision must be in a checkpoint, or a resumed run would make a different one.
    run.must_keep = result.votes[kEnd] > 0;
    if (run.must_keep) run.length = progress.course_by_time = {int(result.votes[kEnd]), step};
    if (run.log) run.log->write(record);
    if (run.log && norms_are_due(run)) run.log->write(norms_of(run.gpt.layout(), result, step, record.time));
    if (run.log)
        if (const std::string news = run.log->end_step(); !news.empty())
            run.progress.print(format("step %d | %s", step, news.c_str()));
    if (result.votes[kFailed] > 0) run.error = shared_error(run.control, run.error);
    const int end = expected_end(config, run.length, step, run.elapsed_s());
    run.progress.end_at(end, tokens_of_steps(config, end));
    warn_of_slow_gpus(run, gpu, result.votes[kThrottled]);
    note_stragglers(run, result);
    run.compute_ms = result.votes[kSaveUnfinished] > 0 ? 0 : record.compute_ms();
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
    std::optional<Divergence> divergence = check_divergence(run, record, diagnosis);
    const std::exception_ptr failure =
        follow_save(run, {result.votes[kSaveUnfinished], result.votes[kSaveFailed], result.votes[kSaveCommitted]});
    if (run.trace) {
        run.trace->add({.lane = Lane::host, .name = "step", .begin_ms = timer.start_ms, .end_ms = now_ms()});
        run.gpt.trace(run.trace, 0);
    }
    end_if(run, failure);
    return {record, std::move(divergence)};
}

bool norms_are_due(const TrainingRun& run) { return is_due(run.state.step + 1, run.config.log.norms_every_steps); }
bool noise_scale_is_due(const TrainingRun& run) {
    return is_due(run.state.step + 1, run.config.log.noise_scale_every_steps);
}

void recover(TrainingRun& run, Divergence divergence) {
    end_if(run, finish_save(run));  // the save in progress may be the checkpoint to roll back to
    if (divergence.rolls_back && roll_back(run, divergence)) {
        if (!run.error) check_first_tokens(run);
        finish_evaluation(run);
        return;
    }
    if (divergence.is_spike) end_if(run, save(run, true));  // the state is finite: the user may continue from it
    end_if(run, divergence_error(run, divergence));
}
