
#include "commands/command_line.h"
#include "commands/report_page.h"
#include "commands/run_records.h"
#include "runtime/io/files.h"
#include "runtime/io/process.h"

namespace {

struct Options {
    std::vector<std::string> runs;
    std::string out = "report.html";
    bool text_only = false;
};

void print_table(const std::vector<RunRecords>& runs) {
    std::printf("%-32s %8s %10s %10s %10s %8s %12s %8s\n", "run", "step", "training", "validation", "best", "at step",
                "tokens/s", "skipped");
    for (const RunRecords& run : runs) {
        const std::map<std::string, double> summary = summary_of(run);
        auto text = [&](const char* pattern, const char* key) {
            return summary.contains(key) ? format(pattern, summary.at(key)) : "-";
        };
        std::printf("%-32s %8s %10s %10s %10s %8s %12s %8s\n", run.dir.c_str(), text("%.0f", "step").c_str(),
                    text("%.4f", "loss").c_str(), text("%.4f", "val_loss").c_str(),
                    text("%.4f", "best_val_loss").c_str(), text("%.0f", "best_val_step").c_str(),
                    text("%.0f", "tokens_per_s").c_str(), text("%.0f", "skipped").c_str());
    }
}

void report(const Options& options) {
    if (!options.out.ends_with(".html")) fail(Exit::usage, "--out must end in .html, but is %s", options.out);
    std::vector<RunRecords> runs;
    for (const std::string& dir : options.runs) {
        const size_t last = dir.find_last_not_of('/');
        const RunRecords& run = runs.emplace_back(last == std::string::npos ? dir : dir.substr(0, last + 1));
        const std::string metrics = run.dir + "/metrics.jsonl";
        if (!file_exists(metrics)) fail(Exit::no_input, "%s is missing", metrics);
        if (run.table("train").steps.empty()) fail(Exit::data, "%s has no training steps", metrics);
    }
    for (const RunRecords& run : runs)
        for (const std::string& note : run.notes) std::fprintf(stderr, "train_gpt: %s\n", printable_text(note).c_str());
    print_table(runs);
    if (options.text_only) return;
    const std::string page = report_page(runs);
    write_file_atomically(options.out, page);
    std::printf("wrote %s, %.1f MB\n", options.out.c_str(), double(page.size()) / 1e6);
}

}  // namespace

void add_report(CLI::App& app) {
    auto options = std::make_shared<Options>();
    const Command command(app, "report", "write an HTML page with curves and tables of one or more runs");
    command.add("RUN", &options->runs, "one or more run directories").required();
    const Argument out = command.add("--out", &options->out, "HTML file to write").show_default();
    command.add("--text", &options->text_only, "print the table only").excludes(out);
    command.on_parsed([options] { report(*options); });
}
