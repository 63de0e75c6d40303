#include "commands/report_page.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <ctime>
#include <nlohmann/json.hpp>

#include "runtime/config/config.h"
#include "runtime/io/files.h"
#include "runtime/io/json.h"

// The files of commands/report/, embedded at compile time; the Makefile lists them as prerequisites.
asm(R"(
    .pushsection .rodata
report_html:        .incbin "commands/report/report.html"
                    .byte 0
report_css:         .incbin "commands/report/report.css"
                    .byte 0
report_charts_js:   .incbin "commands/report/charts.js"
                    .byte 0
report_page_js:     .incbin "commands/report/page.js"
                    .byte 0
report_sections_js: .incbin "commands/report/sections.js"
                    .byte 0
report_theme_js:    .incbin "commands/report/theme.js"
                    .byte 0
report_uplot_js:    .incbin "commands/report/uplot/uPlot.iife.min.js"
                    .byte 0
report_uplot_css:   .incbin "commands/report/uplot/uPlot.min.css"
                    .byte 0
report_uplot_license: .incbin "commands/report/uplot/LICENSE"
                    .byte 0
    .popsection
)");
extern const char report_html[], report_css[], report_theme_js[];
extern const char report_charts_js[], report_page_js[], report_sections_js[];
extern const char report_uplot_js[], report_uplot_css[], report_uplot_license[];

namespace {

using Json = nlohmann::ordered_json;
using Values = std::vector<double>;

constexpr size_t kMostSamples = 100, kMostSampleBytes = 8000, kMostSkipped = 1000;

std::optional<double> last_finite(const Values* values) {
    if (!values) return std::nullopt;
    for (size_t i = values->size(); i-- > 0;)
        if (std::isfinite((*values)[i])) return (*values)[i];
    return std::nullopt;
}

std::optional<size_t> index_of_lowest(const Values* values) {
    std::optional<size_t> lowest;
    for (size_t i = 0; values && i < values->size(); i++)
        if (std::isfinite((*values)[i]) && (!lowest || (*values)[i] < (*values)[*lowest])) lowest = i;
    return lowest;
}

std::optional<double> median(const Values* values) {
    Values finite;
    if (values) std::ranges::copy_if(*values, std::back_inserter(finite), [](double v) { return std::isfinite(v); });
    if (finite.empty()) return std::nullopt;
    const auto middle = finite.begin() + ptrdiff_t(finite.size() / 2);
    std::ranges::nth_element(finite, middle);
    return *middle;
}

double sum_of_finite(const Values* values) {
    double sum = 0;
    if (values)
        for (const double value : *values) sum += std::isfinite(value) ? value : 0;
    return sum;
}

// JSON number with at most 7 significant digits, enough for a chart; null if not finite.
Json rounded(double value) {
    if (!std::isfinite(value)) return nullptr;
    if (value == std::floor(value) && std::abs(value) < 0x1p53) return int64_t(value);
    char digits[32];
    const char* const end = std::to_chars(digits, std::end(digits), value, std::chars_format::general, 7).ptr;
    std::from_chars(digits, end, value);
    return value;
}

Json number_or_null(const std::optional<double>& value) {
    return value && std::isfinite(*value) ? Json(*value) : Json();
}

// A column as JSON: one number if it is constant, else an array of values, or the mean, minimum and maximum per group.
Json column_json(const Values& values, size_t group) {
    if (std::isfinite(values[0]) && std::ranges::count(values, values[0]) == ptrdiff_t(values.size())) return values[0];
    Json mean = Json::array(), low = Json::array(), high = Json::array();
    for (size_t begin = 0; begin < values.size(); begin += group) {
        double sum = 0, smallest = INFINITY, largest = -INFINITY;
        int count = 0;
        for (size_t i = begin; i < std::min(begin + group, values.size()); i++) {
            if (!std::isfinite(values[i])) continue;
            sum += values[i];
            count++;
            smallest = std::min(smallest, values[i]);
            largest = std::max(largest, values[i]);
        }
        mean.push_back(rounded(sum / count));  // an empty group gives NaN, which becomes null
        low.push_back(rounded(smallest));
        high.push_back(rounded(largest));
    }
    return group == 1 ? mean : Json{{"mean", mean}, {"min", low}, {"max", high}};
}

Json table_json(const RecordTable& table) {
    const size_t count = table.steps.size();
    const size_t group = count <= kMostPoints ? 1 : (count + kMostPoints / 2 - 1) / (kMostPoints / 2);
    Json steps = Json::array(), columns = Json::object();
    for (size_t begin = 0; begin < count; begin += group)
        steps.push_back(rounded(table.steps[(begin + std::min(begin + group, count) - 1) / 2]));
    for (const auto& [name, values] : table.columns) columns[name] = column_json(values, group);
    return {{"count", count}, {"group", group}, {"steps", steps}, {"columns", columns}};
}

Json summary_json(const RunRecords& run) {
    const RunSummary summary = summary_of(run);
    const RecordTable& train = run.table("train");
    Json phases = Json::object();
    for (const char* phase : {"compute_ms", "comm_ms", "data_ms", "optimizer_ms"})
        if (train.column(phase)) phases[phase] = sum_of_finite(train.column(phase));
    return {{"step", summary.step},
            {"steps", summary.steps},
            {"loss", number_or_null(summary.loss)},
            {"val_loss", number_or_null(summary.val_loss)},
            {"best_val_loss", number_or_null(summary.best_val_loss)},
            {"best_val_step", number_or_null(summary.best_val_step)},
            {"best_bits_per_byte", number_or_null(summary.best_bits_per_byte)},
            {"tokens", number_or_null(summary.tokens)},
            {"tokens_per_s", number_or_null(summary.tokens_per_s)},
            {"mfu", number_or_null(summary.mfu)},
            {"first_time", number_or_null(summary.first_time)},
            {"last_time", number_or_null(summary.last_time)},
            {"step_s", summary.step_s},
            {"skipped", summary.skipped},
            {"phases", phases}};
}

// Samples spread evenly over the run, including the first and the last.
Json samples_json(const std::vector<Sample>& samples) {
    Json chosen = Json::array();
    const size_t count = std::min(samples.size(), kMostSamples);
    for (size_t i = 0; i < count; i++) {
        const Sample& sample = samples[count == 1 ? 0 : i * (samples.size() - 1) / (count - 1)];
        chosen.push_back({{"step", sample.step},
                          {"time", number_or_null(sample.time)},
                          {"prompt", sample.prompt.substr(0, kMostSampleBytes)},
                          {"text", sample.text.substr(0, kMostSampleBytes)}});
    }
    return chosen;
}

// A JSON file of the run directory. Returns null if it is missing or damaged; adds a note if it is damaged.
Json file_json(const std::string& path, Json& notes) {
    constexpr size_t kLargestFile = 1 << 22;
    if (!file_exists(path)) return nullptr;
    const Json json = parse_json_or_null(read_file(path, kLargestFile));
    if (json.is_object()) return json;
    notes.push_back(path + " is damaged");
    return nullptr;
}

// The starts in run.json; for a run of an earlier version without that file, its revision.
Json starts_json(const std::string& dir, Json& notes) {
    const Json file = file_json(dir + "/run.json", notes);
    if (file.is_object()) return file.contains("starts") ? file["starts"] : Json();
    const std::string path = dir + "/revision.txt";
    const std::string text = file_exists(path) ? read_file(path, 1000) : "";
    return text.empty() ? Json() : Json::array({{{"revision", text.substr(0, text.find('\n'))}}});
}

Json run_json(const RunRecords& run) {
    const std::string& dir = run.dir();
    Json tables = Json::object(), skipped = Json::array(), checkpoints = Json::array(), notes = run.notes();
    for (const auto& [kind, table] : run.tables()) tables[kind] = table_json(table);
    for (const SkippedStep& step : run.skipped())
        if (skipped.size() < kMostSkipped) skipped.push_back({step.step, step.tensor});
    if (directory_exists(dir + "/checkpoints"))
        for (const std::string& name : list_directory(dir + "/checkpoints"))
            if (int step; std::sscanf(name.c_str(), "step_%d", &step) == 1) checkpoints.push_back(step);
    const Json config = file_json(dir + "/config.json", notes), starts = starts_json(dir, notes);
    return {{"dir", dir},
            {"summary", summary_json(run)},
            {"tables", tables},
            {"skipped", skipped},
            {"sample_count", run.samples().size()},
            {"samples", samples_json(run.samples())},
            {"config", config},
            {"starts", starts},
            {"checkpoints", checkpoints},
            {"notes", notes}};
}

// JSON for use inside <script>, which "</script" would end: escapes "<", which occurs only in strings.
std::string script_safe(const std::string& json) {
    std::string safe;
    for (const char c : json) c == '<' ? safe += "\\u003c" : safe += c;
    return safe;
}

}  // namespace

RunSummary summary_of(const RunRecords& run) {
    const RecordTable &train = run.table("train"), &val = run.table("val");
    RunSummary summary;
    summary.step = train.steps.empty() ? 0 : train.steps.back();
    summary.steps = train.steps.size();
    summary.loss = last_finite(train.column("loss"));
    summary.val_loss = last_finite(val.column("loss"));
    if (const auto best = index_of_lowest(val.column("loss"))) {
        summary.best_val_loss = (*val.column("loss"))[*best];
        summary.best_val_step = val.steps[*best];
    }
    if (const auto best = index_of_lowest(val.column("bits_per_byte")))
        summary.best_bits_per_byte = (*val.column("bits_per_byte"))[*best];
    summary.tokens = last_finite(train.column("tokens"));
    summary.tokens_per_s = median(train.column("tokens_per_s"));
    summary.mfu = median(train.column("mfu"));
    if (const auto first = train.column("time"); first && std::isfinite(first->front()))
        summary.first_time = first->front();
    summary.last_time = last_finite(train.column("time"));
    summary.step_s = sum_of_finite(train.column("step_ms")) / 1000;
    summary.skipped = run.skipped().size();
    return summary;
}

std::string report_page(const std::vector<RunRecords>& runs, std::optional<int> refresh_s) {
    static const Json defaults = Json::parse(config_json(Config()));
    Json data = {{"generated", int64_t(std::time(nullptr))},
                 {"refresh_s", refresh_s ? Json(*refresh_s) : Json()},
                 {"defaults", defaults},
                 {"runs", Json::array()}};
    for (const RunRecords& run : runs) data["runs"].push_back(run_json(run));
    const std::string json = script_safe(data.dump(-1, ' ', false, Json::error_handler_t::replace));
    const std::pair<std::string_view, std::string_view> parts[] = {{"{{uplot.css}}", report_uplot_css},
                                                                   {"{{report.css}}", report_css},
                                                                   {"{{uplot.js}}", report_uplot_js},
                                                                   {"{{charts.js}}", report_charts_js},
                                                                   {"{{page.js}}", report_page_js},
                                                                   {"{{sections.js}}", report_sections_js},
                                                                   {"{{theme.js}}", report_theme_js},
                                                                   {"{{data}}", json},
                                                                   {"{{uplot.license}}", report_uplot_license}};

    // A single pass, so that placeholders in inserted text are not replaced.
    std::string page;
    std::string_view rest = report_html;
    for (size_t open; (open = rest.find("{{")) != std::string_view::npos;) {
        const size_t close = rest.find("}}", open) + 2;
        page += rest.substr(0, open);
        page +=
            std::ranges::find(parts, rest.substr(open, close - open), [](auto& part) { return part.first; })->second;
        rest = rest.substr(close);
    }
    return page += rest;
}
