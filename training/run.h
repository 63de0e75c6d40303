// The state of a training run. main() (train_gpt.cu) has its loop; the other files of training/ are the work around the
// steps: step.h, evaluation.h, saving.h, divergence.h and profiler.h. They change the state and return decisions;
// main() acts on them.
#pragma once

#include <set>
#include <utility>

#include "data/evaluation/questions.h"
#include "data/shards/dataset.h"  // IWYU pragma: export
#include "data/shards/loader.h"
#include "kernels/trace.h"
#include "model/gpt.h"                      // IWYU pragma: export
#include "runtime/checkpoint/checkpoint.h"  // IWYU pragma: export
#include "runtime/cluster/cluster.h"        // IWYU pragma: export
#include "runtime/config/schedule.h"
#include "runtime/io/lock.h"
#include "runtime/io/process.h"
#include "runtime/logging/logging.h"  // IWYU pragma: export
#include "runtime/performance/performance.h"

// Collective. Returns the settings of config.device for this rank. Fails with Exit::config if the ranks read different
// files of GEMM choices, and as read_file() does.
DeviceSettings device_settings(const Config& config, Ranks& ranks);

struct TrainingRun {
    const Config& config;
    DirectoryLock lock;  // on run.dir, held by rank 0
    Dataset dataset;
    std::vector<QuestionSet> questions;  // eval.questions
    TrainState state;                    // after the last completed step
    Comm comm;                           // all ranks
    GridComm grid_comm;
    Grid grid;
    ControlChannel& control;
    Loader train_loader;
    std::unique_ptr<Loader> val_loader;  // null: no data.val
    Gpt gpt;
    std::shared_ptr<RunLog> log;  // on rank 0; the thread of a save may still sync it when the run ends
    TrainingProgress& progress;
    std::pair<int, double> token_flops = {};  // sequence length and FLOPs per token of the last step
    double peak_flops_per_s;                  // of all ranks' GPUs; 0: unknown
    RunLength length;
    double start_ms;         // time when an uninterrupted run would have started
    bool must_keep = false;  // a checkpoint is due regardless of the interval: for a decision or the best weights
    int failed_saves = 0;    // in a row
    int64_t slow_save = -1;  // step of the last save that was reported as slow
    BackgroundSave background_save;
    GpuSensors sensors;
    std::set<std::string> throttled;              // warnings about throttled GPUs that have been printed
    std::string matmul_path;                      // as printed by rank 0; empty after the first step
    const std::vector<std::string> kernel_lines;  // about the device's kernels, for the log
    Trace* trace = nullptr;                       // of the current steps; null: none
    double compute_ms = 0;        // of the last step, for stragglers; 0: it does not count, as during a save
    StragglerMonitor stragglers;  // used by rank 0
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
        const bool is_over = (length.end_step > 0 && state.step == length.end_step) || has_ended_early();
        return is_over && !state.progress.evaluation_is_due;
    }
};

// Whether an action is due after a step that happens every `every_steps` steps; 0: never.
inline bool is_due(int step, int every_steps) { return every_steps > 0 && step % every_steps == 0; }

// Fails with Exit::no_input, naming the configuration file, if model.init_from does not exist, and as
// check_source_tokenizer() does.
void check_init_from(const Config& config, const std::string& config_path, const std::string& tokenizer_digest);

// Collective. Returns whether the run must stop before its first step; rank 0 prints why.
bool must_stop_early(const Comm& comm, TrainingProgress& progress);

// Collective, called at the start of the run and after a rollback. Fails on all ranks if one cannot read the tokens of
// the next step.
void check_first_tokens(TrainingRun& run);

// Collective. Without an error, does nothing. Otherwise throws the error, which all ranks have, once all have arrived:
// each exits with the error's code, and none with Exit::peer_lost because a faster rank has already exited.
void end_if(TrainingRun& run, const std::exception_ptr& error);

// Which checkpoints are kept.
Retention retention_of(const Config& config);

// Opens the logs in run.dir for a run that continues from `state`; `lock` is the lock on run.dir.
std::shared_ptr<RunLog> run_log(const Config& config, const TrainState& state, DirectoryLock& lock);
