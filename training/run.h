// The state of a training run, and the work around its steps: records, validation, samples, checkpoints. The steps
// themselves are in main() (train_gpt.cu).
#pragma once

#include <set>
#include <utility>

#include "kernels/trace.h"
#include "runtime/cluster/cluster.h"
#include "runtime/performance/performance.h"
#include "training/models/questions.h"

// Why a run rolls back or ends after a step.
struct Divergence {
    bool is_spike;   // false: gradients stayed non-finite
    bool goes_back;  // false: the run ends
    std::string sentence;
    double loss, limit;  // loss of the step; a loss above the limit is a spike
};

struct TrainingRun {
    const Config& config;
    DirectoryLock lock;  // on run.dir, held by rank 0
    Dataset dataset;
    std::vector<QuestionSet> questions;  // eval.questions
    TrainState state;                    // after the last completed step
    Comm comm;
    ControlChannel& control;
    Loader train_loader;
    std::unique_ptr<Loader> val_loader;  // null: no data.val
    Gpt gpt;
    std::shared_ptr<RunLog> log;  // on rank 0; the thread of a save may still sync it when the run ends
    TrainingProgress& progress;
    double token_flops;       // forward and backward FLOPs per token
    double peak_flops_per_s;  // of all ranks' GPUs; 0: unknown
    Course course;
    double start_ms;         // time when an uninterrupted run would have started
    bool must_keep = false;  // a checkpoint is due regardless of the interval: for a decision or the best weights
    int failed_saves = 0;    // in a row
    int64_t slow_save = -1;  // step of the last save that was reported as slow
    BackgroundSave background_save;
    std::optional<Divergence> divergence;  // of the last step
    EnergyMeter energy;
    std::set<std::string> throttled;  // warnings about throttled GPUs that have been printed
    std::string matmul_path;          // as printed by rank 0; empty after the first step
    Trace* trace = nullptr;           // of the current steps; null: none
    // Why the run cannot continue (tokens or log cannot be read or written), the same on all ranks; null: it can. The
    // completed steps are valid and are saved first.
    std::exception_ptr error;

    // Loads the checkpoint of `start` if there is one, else model.init_from, else initializes the weights. Allocates
    // all the run's memory and takes the lock from `start`. Fails as Loader, Gpt and load_initial_weights() do, before
    // anything is written to run.dir. `config` and `progress` must outlive the run.
    TrainingRun(const Config& config, Ranks& ranks, Dataset data, std::vector<QuestionSet> questions, RunStart& start,
                TrainingProgress& progress);

    double elapsed_s() const { return (now_ms() - start_ms) / 1000; }
    bool has_ended_early() const {
        return config.eval.patience > 0 && state.progress.best.worse_since >= config.eval.patience;
    }
    bool is_complete() const {
        const bool is_over = (course.end_step > 0 && state.step == course.end_step) || has_ended_early();
        return is_over && !state.progress.evaluation_is_due;
    }
};

// Fails with Exit::no_input, naming the configuration file, if model.init_from does not exist, and as
// check_source_tokenizer() does.
void check_init_from(const Config& config, const std::string& config_path, const std::string& tokenizer_digest);

// Collective. Rank 0 prints a summary of the run and writes the effective configuration, the program's revision and the
// tokenizer to run.dir. All ranks fail if that fails.
void write_run_files(TrainingRun& run, const char* revision);

// Collective. Returns whether the run must stop before its first step; rank 0 prints why.
bool must_stop_early(const Comm& comm, TrainingProgress& progress);

// Measures where the time of a step goes.
struct StepTimer {
    double start_ms = now_ms();
    double data_ms = 0;  // time spent waiting for tokens
    Trace* trace;
    CommTotals comm_before;

    explicit StepTimer(const TrainingRun& run) : trace(run.trace), comm_before(comm_totals(run.comm)) {}
    Batch next_batch(Loader& loader);
    std::exception_ptr wait_for_step(Loader& loader);  // see Loader
};

// Values that end_step() sums over the ranks. kStop > 0: a rank was asked to stop. kEnd: the last step according to
// train.max_minutes and rank 0's clock, 0 while undecided. kJoules: energy since the last step; rank 0's sum counts.
// kThrottled: ranks with GPUs throttled by heat or power. kLost > 0: run.dir was moved or removed. kSave...: the state
// of the save in progress. kFailed: ranks that cannot continue after this step.
enum Vote { kStop, kEnd, kJoules, kThrottled, kLost, kSaveUnfinished, kSaveFailed, kSaveCommitted, kFailed };
struct StepVotes {
    EnergyReading energy;  // of this rank
    std::array<double, StepResult::kVotes> values;
};
// Waits for the tokens of the next step. If they cannot be read, sets run.error on this rank only.
StepVotes votes_of(TrainingRun& run, StepTimer& timer);

// Collective, called at the start of the run and after a rollback. Fails on all ranks if one cannot read the tokens of
// the next step.
void check_first_tokens(TrainingRun& run);

// Call after end_step(). Writes, prints and returns the record of the step, and advances run.state. Sets run.error on
// all ranks if one cannot continue, and run.divergence if the run must roll back or end. Fails with Exit::io on all
// ranks if run.dir was moved or removed.
TrainRecord finish_step(TrainingRun& run, const StepTimer& timer, const EnergyReading& energy,
                        const StepResult& result);

// Whether the norms of the next step are to be recorded.
bool norms_are_due(const TrainingRun& run);

// Collective. Runs the evaluations that are due after the last step (validation loss, questions, a text sample), logs
// and prints them. Returns false if the run must stop before they are complete: because of `must_stop`, a signal on any
// rank, or tokens that cannot be read (which sets run.error on all ranks). The next checkpoint then records that they
// are due, and finish_evaluation() in the resumed run repeats them; it returns false in the same cases.
bool evaluate_if_due(TrainingRun& run, bool must_stop);
bool finish_evaluation(TrainingRun& run);

// Collective. Throws an error that all ranks have, once all have arrived: each exits with the error's code, and none
// with Exit::peer_lost because a faster rank has already exited.
[[noreturn]] void end_together(TrainingRun& run, const std::exception_ptr& error);
void end_on_error(TrainingRun& run);  // run.error, if it is set

// Opens the logs in run.dir for a run that continues from `state`; `lock` is the lock on run.dir.
std::shared_ptr<RunLog> run_log(const Config& config, const TrainState& state, DirectoryLock& lock);
