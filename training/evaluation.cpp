#include "training/evaluation.h"

#include "data/evaluation/questions.h"
#include "kernels/base/check.h"
#include "kernels/trace.h"
#include "model/evaluate.h"
#include "runtime/io/process.h"
#include "training/models/generation.h"
#include "training/models/model_io.h"
#include "training/models/questions.h"

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

// " (20 of 145 batches)" if eval.batches limits a validation to a part of the split; otherwise empty.
std::string part_of_split(const TrainingRun& run) {
    const uint64_t batches = uint64_t(run.config.eval.batches), all = run.val_loader->batches_of_stream();
    return batches == 0 || batches >= all ? "" : format(" (%zu of %zu batches)", batches, all);
}

void validate(TrainingRun& run) {
    const HostSpan span(run.trace, "validation");
    run.progress.begin(format("step %d | validation", run.state.step));
    Validation result;
    try {
        result = evaluate_pass(run.gpt, run.control, *run.val_loader, run.dataset.tokenizer, progress_or_stop(run));
    } catch (const SharedError&) {
        run.error = std::current_exception();
        throw Stopped();
    }
    const ValRecord record{run.state.step, result.loss, result.bits_per_byte, unix_time()};
    if (run.log) run.log->write(record);
    run.progress.show(record, part_of_split(run));
    if (run.config.eval.patience > 0 || run.config.checkpoint.keep_best)
        run.must_keep |= run.state.progress.best.note(result.loss, run.state.step) && run.config.checkpoint.keep_best;
    if (run.has_ended_early())
        run.progress.print(format("step %d | stopping early: no lower validation loss since step %d", run.state.step,
                                  run.state.progress.best.step));
}

void ask_questions(TrainingRun& run) {
    const HostSpan span(run.trace, "questions");
    QuestionsRecord record{.step = run.state.step};
    for (const QuestionSet& set : run.questions) {
        run.progress.begin(format("step %d | questions of %s", run.state.step, set.name.c_str()));
        record.files.push_back(answer_questions(run.gpt, set, progress_or_stop(run)));
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
    if (!asks && !samples) return true;
    progress.evaluation_is_due |= must_stop;
    if (must_stop) return false;
    const bool has_average = run.gpt.options().averages;
    if (has_average) run.gpt.use_average();
    bool is_complete = true;
    try {
        if (asks && run.val_loader) validate(run);
        if (asks && !run.questions.empty()) ask_questions(run);
        if (samples) show_sample(run);
    } catch (const Stopped&) {
        progress.best = best_before;
        progress.evaluation_is_due = true;
        is_complete = false;
    }
    if (has_average) run.gpt.restore_masters();
    return is_complete;
}

bool finish_evaluation(TrainingRun& run) {
    if (!std::exchange(run.state.progress.evaluation_is_due, false)) return true;
    return evaluate_if_due(run, false);
}
