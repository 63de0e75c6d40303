// The logs of a run: metrics.jsonl and samples.jsonl for programs, main.log for llm.c's plotting tools, event files for
// TensorBoard, and progress on stdout for users.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <thread>

#include "runtime/config/divergence.h"
#include "runtime/logging/log_file.h"

// Prints a line on stdout.
inline void print_line(const std::string& line) { std::printf("%s\n", line.c_str()); }

// One step. `step` counts from 1; loss and grad_norm belong to the weights before that step's update.
struct TrainRecord {
    int step = 0;
    double loss = 0;
    double learning_rate = 0;
    float grad_norm = 0;  // before clipping, without the loss scale
    float loss_scale = 1;
    int64_t tokens = 0;  // seen by all ranks, this step included
    double epoch = 0;    // passes over the training data, this step included
    double step_ms = 0;
    double tokens_per_s = 0;
    std::optional<double> mfu = {};            // absent: the machine's peak is unknown
    double data_ms = 0;                        // of step_ms, waiting for tokens
    double comm_ms = 0;                        // of step_ms, waiting for other ranks: exposed communication
    double optimizer_ms = 0;                   // of step_ms: norm, clipping and update
    uint64_t comm_bytes = 0;                   // tensor bytes sent by this rank
    std::optional<double> offload_bytes = {};  // copied between this rank's device and host; absent: no offload
    std::optional<double> fp8_saturated = {};  // casts to 8 bits that saturated, of all ranks; absent: no FP8
    uint64_t resident_bytes = 0;               // host memory of this rank's process
    std::optional<double> noise_scale = {};    // tokens; absent: not measured
    std::string skipped = {};                  // the first tensor with a non-finite gradient, if the update was skipped
    double time = 0;                           // Unix seconds at the step's end
    // If known: the power of all ranks' GPUs, the other sensors of rank 0's GPU, and what throttles it.
    std::optional<double> power_w = {}, gpu_temperature_c = {}, sm_clock_mhz = {};
    std::string throttle = {};
    double compute_ms() const { return step_ms - data_ms - comm_ms - optimizer_ms; }  // the rest: forward, backward
};

struct ValRecord {
    int step = 0;
    double loss = 0;                           // nats per token
    std::optional<double> bits_per_byte = {};  // absent: the tokens' bytes are unknown
    double time = 0;                           // Unix seconds
};

// Scores of the multiple-choice questions of some files. The model's answer is the completion with the highest
// log-probability, as a whole (acc) or per character (acc_norm), as in lm-evaluation-harness.
struct QuestionsRecord {
    struct File {
        std::string name;  // letters, digits, "_" and "-"
        size_t questions = 0;
        double acc = 0, acc_norm = 0;               // shares of correct answers
        double standard_error(double share) const;  // of such a share; NaN for one question
    };
    int step = 0;
    std::vector<File> files = {};
    double time = 0;  // Unix seconds
};

// A text that the model generated.
struct SampleRecord {
    int step = 0;
    std::string prompt;
    std::string text;  // the prompt and its continuation
    double time = 0;   // Unix seconds
};

// Norms of one step, by tensor and by layer. A layer's names begin with "h.LAYER.".
struct NormRecord {
    struct Value {
        std::string name;
        double value;
    };
    int step = 0;
    std::vector<Value> gradients = {};    // Euclidean norm by tensor; TrainRecord::grad_norm combines them
    std::vector<Value> activations = {};  // root mean square of an element
    double time = 0;                      // Unix seconds
};

// A rollback to a checkpoint.
struct RollbackRecord {
    int step = 0;  // the first step that is repeated
    Rollback rollback = {};
    double time = 0;  // Unix seconds
};

// The times in which the ranks computed in a window of steps.
struct RanksRecord {
    struct Stage {
        double compute_ms;  // per step, of the median rank
        int layers;
    };
    int step = 0;                 // the one after the window
    int slowest_rank = 0;         // compared with the other ranks of its stage
    double slowest_multiple = 1;  // its time as a multiple of their median
    std::vector<Stage> stages = {};
    double time = 0;  // Unix seconds
};

// Returns a record as one line of JSON, without the newline. Numbers have the digits that restore their bits. "nan",
// "inf" and "-inf" represent those values, and null an absent one.
std::string json_line(const TrainRecord& record);
std::string json_line(const ValRecord& record);
std::string json_line(const QuestionsRecord& record);
std::string json_line(const SampleRecord& record);  // of samples.jsonl; bytes that are not UTF-8 become U+FFFD
std::string json_line(const NormRecord& record);
std::string json_line(const RollbackRecord& record);
std::string json_line(const RanksRecord& record);

// Returns text that is safe for a terminal: printable_text() with U+FFFD for bytes that are not UTF-8.
std::string printable(const std::string& text);

// "12,345" and "1 min 21 s"
std::string with_commas(double value);
std::string duration(double seconds);

// The log files of a run: DIR/metrics.jsonl, DIR/samples.jsonl, DIR/main.log (`s:N trl:%.4f lr:%.6f norm:%.2f`, `s:N
// tel:%.4f` and `s:N eval:%.4f`) and, optionally, event files in DIR/tensorboard. Each line is written by one write().
class RunLog {
public:
    // Continues the files of a run whose steps 1 .. committed_step are committed. Removes lines of later steps and
    // lines without a step, which a crash can leave. Each file is cut, replaced as a whole, or created if it certainly
    // is absent. With `has_events`, begins a new event file. If `has_evaluation` is false, the last step's validation,
    // answers and sample will be repeated, so their lines are removed too. If a file cannot be read, fails with
    // InputFile's error and leaves the file unchanged.
    RunLog(const std::string& dir, int committed_step, bool has_events = false, bool has_evaluation = true);

    // These do not fail: a record that cannot be written is kept and written later, in order.
    void write(const TrainRecord& record);
    void write(const ValRecord& record);
    void write(const QuestionsRecord& record);
    void write(const SampleRecord& record);
    void write(const NormRecord& record);
    void write(const RollbackRecord& record);
    void write(const RanksRecord& record);

    // Call once per step: retries missing records. Returns a message for the user when writing begins to fail and when
    // it works again, else "".
    std::string end_step();
    // Returns an Exit::io error once kMaxFailedSteps steps in a row have ended with missing records; null before that.
    std::exception_ptr error() const { return error_; }
    static constexpr int kMaxFailedSteps = 100;

    // Writes all records to disk. Call it before a checkpoint is committed, so that no crash leaves a committed step
    // without its lines. Fails with Exit::io if this is impossible. Once error() is set it does nothing: the weights
    // are worth more than the lines. Another thread may call it, without blocking the thread that writes.
    void sync();

private:
    // Writes a record to metrics.jsonl and, as scalars, to the event file.
    template <class Record> void write_metrics(const char* kind, const Record& record);
    void append(LogFile& file, const std::string& lines);
    void note(bool is_written, const LogFile& file);
    std::vector<LogFile*> files();

    LogFile metrics_;
    LogFile main_log_;
    LogFile samples_;
    std::unique_ptr<LogFile> events_;  // null: no event files
    bool is_failing_ = false;          // some records are missing
    int failed_steps_ = 0;             // in a row
    std::string news_;
    std::exception_ptr error_;
    std::atomic<bool> has_given_up_ = false;  // error_ is set
};

// The progress of a run: a line every `every_steps` steps, and for the first and last step. While a step or another
// activity takes long, a line shows it every `patience_s` seconds. Prints nothing if `out` is null, as on ranks other
// than 0. Every function may be called from any thread.
class TrainingProgress {
public:
    TrainingProgress(std::FILE* out, int total_steps, int every_steps, double patience_s = 30);

    // Sets the current activity, "loading the checkpoint", until the next step or activity; "": none.
    void begin(const std::string& activity);
    // Marks the beginning of micro-step `index` of `count`, from 1, in a step.
    void begin_micro_step(int step, int index, int count);
    // Sets the step with which the run is expected to end, 0: unknown, and the tokens of all steps up to it.
    void end_at(int total_steps, int64_t total_tokens);
    void show(const TrainRecord& record);
    // Prints the validation loss. `part` follows it: the part of the split that was read.
    void show(const ValRecord& record, const std::string& part = "");
    void show(const QuestionsRecord& record);
    void show(const SampleRecord& record);
    // Prints separate lines: a checkpoint, a sample, a warning.
    void print(const std::string& line);

private:
    void watch(const std::stop_token& stop);
    void print_lines(const std::string& text);

    std::FILE* const out_;
    int total_steps_;  // 0: unknown
    int64_t total_tokens_ = 0;
    const int every_steps_;
    const double patience_s_;
    bool has_shown_step_ = false;
    int new_steps_ = 0;        // since the last step that was shown
    double new_steps_ms_ = 0;  // their time
    double new_tokens_ = 0;    // their tokens
    std::string activity_;     // now
    double since_ms_;          // when the activity or the step began
    double line_ms_;           // when the last line was printed
    std::mutex mutex_;         // guards all of the above
    std::condition_variable_any wake_;
    std::jthread watcher_;
};

// "step 12/500 | loss 3.1416 | lr 6.00e-04 | norm 1.23 | 12,345 tokens/s | 166 ms | 1 min 21 s left". `step_ms` is
// the time of a step. The time left is the remaining tokens' at `tokens_per_s`.
std::string progress_line(const TrainRecord& record, int total_steps, int64_t total_tokens, double step_ms,
                          double tokens_per_s);
