// The logs of a run: metrics.jsonl and samples.jsonl for programs, main.log for llm.c's plotting tools, event files for
// TensorBoard, and what a person sees on stdout while it goes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <thread>

#include "runtime/config/config.h"
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
    std::optional<double> mfu = {};  // absent: the machine's peak is not known
    double data_ms = 0;              // of step_ms, waiting for tokens
    double comm_ms = 0;              // of step_ms, waiting for other ranks: what work did not hide
    double optimizer_ms = 0;         // of step_ms: norm, clipping and update
    uint64_t comm_bytes = 0;         // of tensors, sent by this rank
    uint64_t resident_bytes = 0;     // host memory of this rank's process
    std::string skipped = {};        // the first tensor whose gradient was not finite, if the update was not applied
    double time = 0;                 // Unix seconds at the step's end
    std::optional<double> energy_j = {}, power_w = {};                // of all ranks since the last step, if known
    std::optional<double> gpu_temperature_c = {}, sm_clock_mhz = {};  // of rank 0's GPU, if known
    std::string throttle = {};                                        // what slows that GPU down
    double compute_ms() const { return step_ms - data_ms - comm_ms - optimizer_ms; }  // the rest: forward, backward
};

struct ValRecord {
    int step = 0;
    double loss = 0;                           // nats per token
    std::optional<double> bits_per_byte = {};  // absent: the tokens' bytes are not known
    double time = 0;                           // Unix seconds
};

// Answers to the multiple-choice questions of some files. A question is answered with the completion that has the
// highest log-probability, as a whole (acc), per character (acc_norm; both are lm-evaluation-harness's) or per token
// (acc_per_token, llm.c's).
struct QuestionsRecord {
    struct File {
        std::string name;  // letters, digits, "_" and "-"
        size_t questions = 0;
        double acc = 0, acc_per_token = 0;          // the right ones' share
        std::optional<double> acc_norm = {};        // absent: the completions' text is not known
        double standard_error(double share) const;  // of such a share; NaN for a single question
    };
    int step = 0;
    std::vector<File> files = {};
    double time = 0;  // Unix seconds
};

// A text that the model has written.
struct SampleRecord {
    int step = 0;
    std::string prompt;
    std::string text;  // the prompt and what follows it
    double time = 0;   // Unix seconds
};

// What one step found of each tensor and each layer. Names of a layer begin with "h.LAYER.".
struct NormRecord {
    struct Value {
        std::string name;
        double value;
    };
    int step = 0;
    std::vector<Value> gradients = {};    // Euclidean norm by tensor, of which TrainRecord::grad_norm is the whole
    std::vector<Value> activations = {};  // root mean square of an element
    double time = 0;                      // Unix seconds
};

// The run has gone back to a checkpoint.
struct RollbackRecord {
    int step = 0;  // the first that is done again
    Rollback rollback = {};
    double time = 0;  // Unix seconds
};

// The records as one line of JSON, without the newline. Numbers have the digits that restore their bits; "nan", "inf"
// and "-inf" stand for those, and null for what is absent.
std::string json_line(const TrainRecord& record);
std::string json_line(const ValRecord& record);
std::string json_line(const QuestionsRecord& record);
std::string json_line(const SampleRecord& record);  // of samples.jsonl; bytes that are not UTF-8 become U+FFFD
std::string json_line(const NormRecord& record);
std::string json_line(const RollbackRecord& record);

// Text for a terminal: no control characters but newline and tab, and U+FFFD for bytes that are not UTF-8.
std::string printable(const std::string& text);

// DIR/metrics.jsonl, DIR/samples.jsonl, DIR/main.log (`s:N trl:%.4f lr:%.6f norm:%.2f`, `s:N tel:%.4f` and
// `s:N eval:%.4f`) and, if asked for, event files in DIR/tensorboard. A line is one write().
class RunLog {
public:
    // Continues the files of a run whose steps 1 .. committed_step are committed: lines of later steps are removed, and
    // so are lines without a step, as a crash may leave them. A file is cut, replaced as a whole, or created if it
    // certainly is absent; event files are cut, and a new one is begun with `configuration` as a text. Empty: no event
    // files. Without `has_evaluation` the validation, the answers and the sample of the last step are removed too: they
    // come again. If a file cannot be read, the error is InputFile's, and it stays as it was.
    RunLog(const std::string& dir, int committed_step, const std::string& configuration = "",
           bool has_evaluation = true);
    ~RunLog();

    // What cannot be written is kept and written later, in order: these do not fail.
    void write(const TrainRecord& record);
    void write(const ValRecord& record);
    void write(const QuestionsRecord& record);
    void write(const SampleRecord& record);
    void write(const NormRecord& record);
    void write(const RollbackRecord& record);

    // Once per step: tries again to write what is missing. Returns a sentence for the user when writing begins to fail
    // and when it works again, else "".
    std::string end_step();
    // Exit::io after kMostFailedSteps steps in a row with something missing at their end, until then null.
    std::exception_ptr error() const { return error_; }
    static constexpr int kMostFailedSteps = 100;

    // Everything written is on disk when this returns: call it before a checkpoint is committed, so that no crash
    // leaves a committed step without its lines. Fails with Exit::io if that cannot be done. Once error() is set it
    // does nothing: the weights are worth more than the lines. May be called from another thread than the rest, which
    // does not wait for it.
    void sync();

private:
    void append(LogFile& file, const std::string& lines);
    void add_event(int step, double time, const class EventSummary& summary);
    void note(bool is_written, const LogFile& file);
    std::vector<LogFile*> files();

    LogFile metrics_;
    LogFile main_log_;
    LogFile samples_;
    std::unique_ptr<class EventFile> events_;  // null: none are written
    bool is_failing_ = false;                  // something is missing since some record
    int failed_steps_ = 0;                     // in a row
    std::string news_;
    std::exception_ptr error_;
    std::atomic<bool> has_given_up_ = false;  // error_ is set
};

// When signs of life appear while no step ends.
struct Patience {
    double tick_s = 1;       // between looks at the clock and at the terminal's size
    double terminal_s = 2;   // on a terminal
    double plain_s = 30;     // else; and between any two
    double redraw_s = 0.05;  // least time between two pictures of the view
};

// What a run shows on stdout. On a terminal with space for it, a block that is rewritten: a loss curve and the numbers
// of the last step (view); on a smaller one a single line that is rewritten (line); elsewhere one plain line every
// `every_steps` steps, at the first and at the last. While a step or another activity takes long, all three say how far
// it is. With several `ranks` "auto" means plain: mpirun gives its processes a terminal even where its own output is a
// file. Prints nothing if `out` is null, on ranks other than 0. Every function may be called from any thread.
class TrainingProgress {
public:
    TrainingProgress(std::FILE* out, TerminalMode mode, int ranks, int total_steps, int every_steps,
                     const Patience& patience = {});
    ~TrainingProgress();  // leaves the last line or block standing

    // What the process does until the next call of a function other than say(): "loading the checkpoint".
    void begin(const std::string& activity);
    // Micro-step `index` of `count`, from 1, of a step begins.
    void begin_micro_step(int step, int index, int count);
    // From now on the run is expected to end with this step; 0: it is not known.
    void end_at(int total_steps);
    void show(const TrainRecord& record);
    // Says the validation loss.
    void show(const ValRecord& record);
    void show(const QuestionsRecord& record);
    void show(const SampleRecord& record);
    // Prints lines of their own: a checkpoint, a sample, a warning.
    void say(const std::string& line);

private:
    bool is_view() const;
    bool is_long() const;
    void watch(const std::stop_token& stop);
    void look();
    std::string activity() const;
    std::string progress_text() const;
    void draw();
    void erase();
    void leave_if_moved();
    void print_lines(const std::string& text);

    std::FILE* const out_;
    const TerminalMode mode_;  // automatic: depends on the terminal's size
    int total_steps_;          // 0: not known
    const int every_steps_;
    const Patience patience_;
    const bool is_unicode_;  // braille dots can be printed
    const std::unique_ptr<struct ViewState> state_;
    std::string activity_;   // now
    double since_ms_;        // when the activity or the step began
    double plain_ms_;        // when the last plain line was printed
    double drawn_ms_ = 0;    // when draw() was last called
    bool is_drawn_ = false;  // a line or a block stands above the cursor or where it is
    bool is_stale_ = false;  // there is news that it does not show
    int rows_ = 0;           // of it: 1 is a line
    int width_ = 0;          // of the terminal
    int continued_ = 0, stop_signal_ = 0;
    std::mutex mutex_;  // guards all of the above
    std::condition_variable_any wake_;
    std::jthread watcher_;
};

// "step 12/500 | loss 3.1416 | lr 6.00e-04 | norm 1.23 | 12,345 tokens/s | 166 ms | 1 min 21 s left"
std::string progress_line(const TrainRecord& record, int total_steps, double remaining_s);
