// What a training run holds from its first step to its last, and the work around its steps: records, validation,
// samples, checkpoints. The steps themselves are in main() (train_gpt.cu).
#pragma once

#include <set>
#include <utility>

#include "commands/questions.h"
#include "kernels/trace.h"
#include "runtime/cluster/cluster.h"
#include "runtime/performance/performance.h"

struct TrainingRun {
    const Config& config;
    Dataset dataset;
    std::vector<QuestionSet> questions;  // eval.questions
    TrainState state;                    // after the steps done so far
    Comm comm;
    ControlChannel& control;
    Loader train_loader;
    std::unique_ptr<Loader> val_loader;  // null: no data.val
    Gpt gpt;
    std::optional<RunLog> log;  // rank 0's
    TrainingProgress& progress;
    double token_flops;       // of forward and backward, per token
    double peak_flops_per_s;  // of all ranks' GPUs; 0: not known
    Course course;
    double start_ms;         // when training began, as if without interruptions
    bool must_keep = false;  // a checkpoint is due, whatever its interval: it holds a decision, or the best weights
    int failed_saves = 0;    // in a row
    EnergyMeter energy;
    std::set<std::string> throttled;  // what has been said about slow GPUs
    Trace* trace = nullptr;           // of the steps now; null: none

    // The model is at the start's checkpoint if there is one, else at model.init_from or freshly initialised. Takes all
    // the memory of the run. Fails as Loader, Gpt and load_initial_weights() do, before anything in run.dir is written.
    // `config` and `progress` must outlive the run.
    TrainingRun(const Config& config, Ranks& ranks, Dataset data, std::vector<QuestionSet> questions,
                const RunStart& start, TrainingProgress& progress);

    double elapsed_s() const { return (now_ms() - start_ms) / 1000; }
    bool has_ended_early() const {
        return config.eval.patience > 0 && state.progress.best.worse_since >= config.eval.patience;
    }
    bool is_complete() const {
        const bool is_over = (course.end_step > 0 && state.step == course.end_step) || has_ended_early();
        return is_over && !state.progress.evaluation_is_due;
    }
};

// Fails with Exit::no_input, naming the configuration's file, if model.init_from is neither a file nor a directory,
// and as check_source_tokenizer() does.
void check_init_from(const Config& config, const std::string& config_path, const std::string& tokenizer_digest);

// Rank 0 prints the run in a few lines and leaves the effective configuration, the program's revision and the tokenizer
// in run.dir. If that fails, all ranks fail.
void write_run_files(const TrainingRun& run, const char* revision);

// Whether the run must stop before its first step; rank 0 says so. All ranks together.
bool must_stop_early(const Comm& comm, TrainingProgress& progress);

// Where the time of one step goes.
struct StepTimer {
    double start_ms = now_ms();
    double data_ms = 0;  // waiting for tokens
    Trace* trace;
    CommTotals comm_before;

    explicit StepTimer(const TrainingRun& run) : trace(run.trace), comm_before(comm_totals(run.comm)) {}
    Batch next_batch(Loader& loader);
};

// What ranks tell each other in end_step(): kStop > 0, one was asked to stop; kEnd, with train.max_minutes, the step
// that will be the last, by the clock of rank 0, or 0 as long as that is open; kJoules since the last step, of which
// rank 0's sum counts; kThrottled, ranks whose GPUs are slow because of heat or power.
enum Vote { kStop, kEnd, kJoules, kThrottled };
struct StepVotes {
    EnergyReading energy;  // this rank's
    std::array<double, StepResult::kVotes> values;
};
StepVotes votes_of(TrainingRun& run);

// After end_step(): writes, shows and returns the step's record, and moves run.state past the step.
TrainRecord finish_step(TrainingRun& run, const StepTimer& timer, const EnergyReading& energy,
                        const StepResult& result);

// Whether the configuration asks for the norms of the next step.
bool norms_are_due(const TrainingRun& run);

// Whether the configuration asks for a checkpoint after the step that was just done.
bool checkpoint_is_due(const TrainingRun& run);

// Likewise the validation loss, answers to questions and a sample of text, for the log and the terminal; all ranks
// together. Returns false if the run must stop before they are complete: `must_stop`, or a rank has received a signal
// meanwhile. Then the checkpoint has to say so, and finish_evaluation() of the run that continues from it makes up for
// all of it. So does that return false.
bool evaluate_if_due(TrainingRun& run, bool must_stop);
bool finish_evaluation(TrainingRun& run);

// Commits a checkpoint, all ranks together. The older ones are intact if it fails (the disk is full, say): unless
// `must_succeed`, the first two failures in a row are only shown; the third is thrown.
void save(TrainingRun& run, bool must_succeed);
