// What a training run holds from its first step to its last, and the work around its steps: records, validation,
// samples, checkpoints. The steps themselves are in main() (train_gpt.cu).
#pragma once

#include <set>
#include <utility>

#include "kernels/trace.h"
#include "runtime/cluster/cluster.h"
#include "runtime/performance/performance.h"
#include "training/models/questions.h"

// A step after which a run does not simply go on.
struct Divergence {
    bool is_spike;   // else gradients stayed non-finite
    bool goes_back;  // else the run ends
    std::string sentence;
    double loss, limit;  // of the step; above which it is a spike
};

struct TrainingRun {
    const Config& config;
    DirectoryLock lock;  // rank 0's, of run.dir
    Dataset dataset;
    std::vector<QuestionSet> questions;  // eval.questions
    TrainState state;                    // after the steps done so far
    Comm comm;
    ControlChannel& control;
    Loader train_loader;
    std::unique_ptr<Loader> val_loader;  // null: no data.val
    Gpt gpt;
    std::shared_ptr<RunLog> log;  // rank 0's; a save's thread may still sync it when the run ends
    TrainingProgress& progress;
    double token_flops;       // of forward and backward, per token
    double peak_flops_per_s;  // of all ranks' GPUs; 0: not known
    Course course;
    double start_ms;         // when training began, as if without interruptions
    bool must_keep = false;  // a checkpoint is due, whatever its interval: it holds a decision, or the best weights
    int failed_saves = 0;    // in a row
    int64_t slow_save = -1;  // the last save, by its step, that was said to take long
    BackgroundSave background_save;
    std::optional<Divergence> divergence;  // the last step's
    EnergyMeter energy;
    std::set<std::string> throttled;  // what has been said about slow GPUs
    std::string matmul_path;          // as printed by rank 0; empty from the first step on
    Trace* trace = nullptr;           // of the steps now; null: none
    // Why the run cannot go on, on all ranks alike: the tokens of one, or the log, could not be read or written. Null:
    // it can. The steps done so far are sound and are saved first.
    std::exception_ptr error;

    // The model is at the start's checkpoint if there is one, else at model.init_from or freshly initialised. Takes all
    // the memory of the run, and the lock from `start`. Fails as Loader, Gpt and load_initial_weights() do, before
    // anything in run.dir is written. `config` and `progress` must outlive the run.
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

// Fails with Exit::no_input, naming the configuration's file, if model.init_from is neither a file nor a directory,
// and as check_source_tokenizer() does.
void check_init_from(const Config& config, const std::string& config_path, const std::string& tokenizer_digest);

// Rank 0 prints the run in a few lines and leaves the effective configuration, the program's revision and the tokenizer
// in run.dir. If that fails, all ranks fail.
void write_run_files(TrainingRun& run, const char* revision);

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
    std::exception_ptr wait_for_step(Loader& loader);  // Loader's
};

// What ranks tell each other in end_step(): kStop > 0, one was asked to stop; kEnd, with train.max_minutes, the step
// that will be the last, by the clock of rank 0, or 0 as long as that is open; kJoules since the last step, of which
// rank 0's sum counts; kThrottled, ranks whose GPUs are slow because of heat or power; kLost > 0, run.dir was moved or
// removed; how far the save under way is; kFailed, ranks that cannot go on after this step.
enum Vote { kStop, kEnd, kJoules, kThrottled, kLost, kSaveUnfinished, kSaveFailed, kSaveCommitted, kFailed };
struct StepVotes {
    EnergyReading energy;  // this rank's
    std::array<double, StepResult::kVotes> values;
};
// Waits for the tokens of the next step. Sets run.error if they could not be read, on this rank alone.
StepVotes votes_of(TrainingRun& run, StepTimer& timer);

// Fails on all ranks if one cannot read the tokens of the next step, at the run's start or where it has gone back. A
// collective.
void check_first_tokens(TrainingRun& run);

// After end_step(): writes, shows and returns the step's record, and moves run.state past the step. Sets run.error on
// all ranks if one cannot go on, and run.divergence if the run cannot simply go on. Fails with Exit::io on all ranks if
// run.dir was moved or removed.
TrainRecord finish_step(TrainingRun& run, const StepTimer& timer, const EnergyReading& energy,
                        const StepResult& result);

// Whether the configuration asks for the norms of the next step.
bool norms_are_due(const TrainingRun& run);

// If the configuration asks for them after the step that was just done: the validation loss, answers to questions and a
// sample of text, for the log and the terminal; all ranks together. Returns false if the run must stop before they are
// complete: `must_stop`, or a rank has received a signal meanwhile, or, which sets run.error on all ranks, cannot read
// its tokens. Then the checkpoint has to say so, and finish_evaluation() of the run that continues from it makes up for
// all of it. So does that return false.
bool evaluate_if_due(TrainingRun& run, bool must_stop);
bool finish_evaluation(TrainingRun& run);

// Throws an error that all ranks have, when all of them have come here: thus each ends with its exit code, and none
// with Exit::peer_lost because of another that was faster.
[[noreturn]] void end_together(TrainingRun& run, const std::exception_ptr& error);
void end_on_error(TrainingRun& run);  // run.error, if it is set

// The logs of a run that continues from this state, in run.dir, whose lock this is.
std::shared_ptr<RunLog> run_log(const Config& config, const TrainState& state, DirectoryLock& lock);
