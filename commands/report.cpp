#include <CLI/App.hpp>
#include <chrono>
#include <thread>

#include "commands/command_line.h"
#include "commands/report_page.h"
#include "runtime/io/files.h"
#include "runtime/io/process.h"

namespace {

struct Options {
    std::vector<std::string> runs;
    std::string out = "report.html";
    bool text_only = false;
    bool watch = false;
    int every_s = 5;
};

void print_table(const std::vector<RunRecords>& runs) {
    std::printf("%-32s %8s %10s %10s %10s %8s %12s %8s\n", "run", "step", "training", "validation", "best", "at step",
                "tokens/s", "skipped");
    for (const RunRecords& run : runs) {
        const RunSummary summary = summary_of(run);
        auto text = [](const char* pattern, const std::optional<double>& value) {
            return value ? format(pattern, *value) : std::string("-");
        };
        std::printf("%-32s %8.0f %10s %10s %10s %8s %12s %8zu\n", run.dir().c_str(), summary.step,
                    text("%.4f", summary.loss).c_str(), text("%.4f", summary.val_loss).c_str(),
                    text("%.4f", summary.best_val_loss).c_str(), text("%.0f", summary.best_val_step).c_str(),
                    text("%.0f", summary.tokens_per_s).c_str(), summary.skipped);
    }
}

void print_notes(const std::vector<RunRecords>& runs) {
    for (const RunRecords& run : runs)
        for (const std::string& note : run.notes())
            std::fprintf(stderr, "train_gpt: %s\n", printable_text(note).c_str());
}

// Reads the new records of all runs; returns whether there were any.
bool update(std::vector<RunRecords>& runs) {
    bool is_new = false;
    for (RunRecords& run : runs) is_new |= run.update();
    return is_new;
}

void write_page(const Options& options, const std::vector<RunRecords>& runs, std::optional<int> refresh_s) {
    const std::string page = report_page(runs, refresh_s);
    write_file_atomically(options.out, page);
    std::printf("wrote %s, %.1f MB\n", options.out.c_str(), double(page.size()) / 1e6);
    std::fflush(stdout);
}

// Updates the page until a stop signal arrives. The last version does not reload itself.
void watch(const Options& options, std::vector<RunRecords>& runs) {
    using namespace std::chrono_literals;
    install_signal_handlers();
    write_page(options, runs, options.every_s);
    std::printf("updating the page every %d s; press Ctrl-C to stop\n", options.every_s);
    std::fflush(stdout);
    for (double next_ms = now_ms() + options.every_s * 1000; !stop_signal(); std::this_thread::sleep_for(50ms)) {
        if (now_ms() < next_ms) continue;
        if (update(runs)) write_file_atomically(options.out, report_page(runs, options.every_s));
        next_ms = now_ms() + options.every_s * 1000;
    }
    update(runs);
    write_page(options, runs, std::nullopt);
}

void report(const Options& options) {
    if (!options.out.ends_with(".html")) fail(Exit::usage, "--out must end in .html, but is %s", options.out);
    std::vector<RunRecords> runs;
    for (const std::string& dir : options.runs) {
        RunRecords& run = runs.emplace_back(
            dir.find_last_not_of('/') == std::string::npos ? dir : dir.substr(0, dir.find_last_not_of('/') + 1));
        run.update();
        const std::string metrics = run.dir() + "/metrics.jsonl";
        if (options.watch) continue;  // the run may not have made its first step yet
        if (!file_exists(metrics)) fail(Exit::no_input, "%s is missing", metrics);
        if (run.table("train").steps.empty()) fail(Exit::data, "%s has no training steps", metrics);
    }
    print_notes(runs);
    print_table(runs);
    if (options.watch)
        watch(options, runs);
    else if (!options.text_only)
        write_page(options, runs, std::nullopt);
}

}  // namespace

void add_report(CLI::App& app) {
    auto options = std::make_shared<Options>();
    CLI::App* parser = app.add_subcommand("report", "write an HTML page with curves and tables of one or more runs");
    parser->add_option("RUN", options->runs, "one or more run directories")->required();
    auto* out = parser->add_option("--out", options->out, "HTML file to write")->capture_default_str();
    auto* watch = parser->add_flag("--watch", options->watch, "keep the page up to date until Ctrl-C");
    parser->add_option("--every", options->every_s, "seconds between updates")
        ->capture_default_str()
        ->check(CLI::Range(1, 3600))
        ->needs(watch);
    parser->add_flag("--text", options->text_only, "print the table only")->excludes(out)->excludes(watch);
    parser->callback([options] { report(*options); });
}
