#include "training/summary.h"

#include <cmath>

#include "runtime/io/files.h"
#include "runtime/io/installation.h"
#include "runtime/io/json.h"

namespace {

struct Validation {
    double step, loss;
};

// The contents of metrics.jsonl, which has the steps of all starts of the run.
struct History {
    double tokens = 0, ms = 0;   // of all steps
    std::optional<double> loss;  // of the last step
    std::optional<Validation> last, lowest;

    void add_step(const JsonRecord& read) {
        loss = read.number("loss");
        tokens += read.number("tokens_per_s") * read.number("step_ms") / 1000;
        ms += read.number("step_ms");
    }
    void add_validation(const JsonRecord& read) {
        last = {.step = read.number("step"), .loss = read.number("loss")};
        if (std::isfinite(last->loss) && (!lowest || last->loss < lowest->loss)) lowest = last;
    }
};

History read_history(const std::string& path) {
    History history;
    for_each_line(InputFile(path), [&](std::string_view line, size_t) {
        if (line.starts_with("{\"kind\":\"train\",")) history.add_step(parse_record(line));
        if (line.starts_with("{\"kind\":\"val\",")) history.add_validation(parse_record(line));
    });
    return history;
}

// "validation 2.4186 at step 2000, lowest 2.4102 at step 1250"
std::string validations_text(const Validation& last, const std::optional<Validation>& lowest) {
    const std::string text = format("validation %.4f at step %.0f", last.loss, last.step);
    if (!lowest) return text;
    if (lowest->step == last.step) return text + ", the lowest";
    return text + format(", lowest %.4f at step %.0f", lowest->loss, lowest->step);
}

}  // namespace

void print_summary(const TrainingRun& run) {
    if (!run.log) return;
    const Config& config = run.config;
    History history;
    try {
        history = read_history(config.run.dir + "/metrics.jsonl");
    } catch (const Error&) {  // the checkpoint is committed: the run is complete without these numbers
    }
    std::string trained = format("trained  %d steps, %s tokens", run.state.step,
                                 with_commas(double(tokens_of_steps(config, run.state.step))).c_str());
    if (history.ms > 0)
        trained += format(" in %s, %s tokens/s", duration(history.ms / 1000).c_str(),
                          with_commas(history.tokens / history.ms * 1000).c_str());
    run.progress.begin("");
    run.progress.print(trained);
    if (history.last)
        run.progress.print("loss     " + validations_text(*history.last, history.lowest));
    else if (history.loss)
        run.progress.print(format("loss     training %.4f at step %d", *history.loss, run.state.step));
    // sample needs a tokenizer.
    run.progress.print(format("next: %s %s %s", command_path(program_path()).c_str(),
                              run.dataset.tokenizer ? "sample" : "report", config.run.dir.c_str()));
}
