// The logs of a run: metrics.jsonl for programs, main.log for llm.c's plotting tools, a progress line for the terminal.
#pragma once

#include <cstdio>
#include <optional>

#include "runtime/io/io.h"

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
    double step_ms = 0;
    double tokens_per_s = 0;
    std::optional<double> mfu = {};  // absent: the machine's peak is not known
    double data_ms = 0;              // of step_ms, waiting for tokens
    double comm_ms = 0;              // of step_ms, waiting for other ranks: what work did not hide
    double optimizer_ms = 0;         // of step_ms: norm, clipping and update
    uint64_t comm_bytes = 0;         // of tensors, sent by this rank
    std::string skipped = {};        // the first tensor whose gradient was not finite, if the update was not applied
    double compute_ms() const { return step_ms - data_ms - comm_ms - optimizer_ms; }  // the rest: forward, backward
};

struct ValRecord {
    int step = 0;
    double loss = 0;                           // nats per token
    std::optional<double> bits_per_byte = {};  // absent: the tokens' bytes are not known
};

// The records as one line of JSON, without the newline. Numbers have the digits that restore their bits; "nan", "inf"
// and "-inf" stand for those, and null for what is absent.
std::string json_line(const TrainRecord& record);
std::string json_line(const ValRecord& record);

// DIR/metrics.jsonl and DIR/main.log (`s:N trl:%.4f lr:%.6f norm:%.2f` and `s:N tel:%.4f`). A line is one write().
class RunLog {
public:
    // Continues the files of a run whose steps 1 .. committed_step are committed: lines of later steps are removed, and
    // so are lines without a step, as a crash may leave them. Each file is replaced as a whole, or created if absent.
    RunLog(const std::string& dir, int committed_step);

    void write(const TrainRecord& record);
    void write(const ValRecord& record);

    // Everything written is on disk when this returns: call it before a checkpoint is committed, so that no crash
    // leaves a committed step without its lines.
    void sync();

private:
    OutputFile metrics_;
    OutputFile main_log_;
};

// One line on the terminal that is rewritten at each step, or, where `out` is not a terminal, one plain line every
// `every_steps` steps, at the first and at the last. With several `ranks` the lines are always plain: mpirun gives its
// processes a terminal even where its own output is a file. Prints nothing if `out` is null, on ranks other than 0.
class TrainingProgress {
public:
    TrainingProgress(std::FILE* out, int ranks, int total_steps, int every_steps);
    ~TrainingProgress();  // leaves the last line standing

    // From now on the run is expected to end with this step.
    void end_at(int total_steps) { total_steps_ = total_steps; }
    void show(const TrainRecord& record);
    // Prints a line of its own: a validation loss, a checkpoint, a warning.
    void say(const std::string& line);

private:
    void erase_line();

    std::FILE* out_;
    int total_steps_;
    int every_steps_;
    bool is_terminal_;
    bool line_is_open_ = false;
    double smoothed_ms_ = 0;
};

// "step 12/500 | loss 3.1416 | lr 6.00e-04 | norm 1.23 | 12,345 tokens/s | 166 ms | 1 min 21 s left"
std::string progress_line(const TrainRecord& record, int total_steps, double remaining_s);
