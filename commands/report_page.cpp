#include "commands/report_page.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <ctime>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

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
report_page_js: .incbin "commands/report/page.js"
                    .byte 0
report_uplot_js:    .incbin "commands/report/uplot/uPlot.iife.min.js"
                    .byte 0
report_uplot_css:   .incbin "commands/report/uplot/uPlot.min.css"
                    .byte 0
report_uplot_license: .incbin "commands/report/uplot/LICENSE"
                    .byte 0
    .popsection
)");
extern const char report_html[], report_css[], report_page_js[];
extern const char report_uplot_js[], report_uplot_css[], report_uplot_license[];

namespace {

using Json = nlohmann::ordered_json;
using Values = std::vector<double>;

constexpr size_t kMaxSamples = 100, kMaxSampleBytes = 8000, kMaxSkipped = 1000;

// Returns the finite values, or a single NaN if there are none.
Values known(const Values* values) {
    Values result;
    if (values) std::ranges::copy_if(*values, std::back_inserter(result), [](double v) { return std::isfinite(v); });
    return result.empty() ? Values{NAN} : result;
}

double last(const Values* values) { return known(values).back(); }

double median(const Values* values) {
    Values all = known(values);
    const auto middle = all.begin() + ptrdiff_t(all.size() / 2);
    std::ranges::nth_element(all, middle);
    return *middle;
}

double sum(const Values* values) {
    const Values all = known(values);
    return std::accumulate(all.begin(), all.end(), 0.0);
}

std::optional<size_t> index_of_lowest(const Values* values) {
    std::optional<size_t> lowest;
    for (size_t i = 0; values && i < values->size(); i++)
        if (std::isfinite((*values)[i]) && (!lowest || (*values)[i] < (*values)[*lowest])) lowest = i;
    return lowest;
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
    const size_t group = count <= kMaxPoints ? 1 : (count + kMaxPoints / 2 - 1) / (kMaxPoints / 2);
    Json steps = Json::array(), columns = Json::object();
    for (size_t begin = 0; begin < count; begin += group)
        steps.push_back(rounded(table.steps[(begin + std::min(begin + group, count) - 1) / 2]));
    for (const auto& [name, values] : table.columns) columns[name] = column_json(values, group);
    return {{"count", count}, {"group", group}, {"steps", steps}, {"columns", columns}};
}

// Samples spread evenly over the run, including the first and the last.
Json samples_json(const std::vector<Sample>& samples) {
    Json chosen = Json::array();
    const size_t count = std::min(samples.size(), kMaxSamples);
    for (size_t i = 0; i < count; i++) {
        const Sample& sample = samples[count == 1 ? 0 : i * (samples.size() - 1) / (count - 1)];
        chosen.push_back({{"step", sample.step}, {"text", sample.text.substr(0, kMaxSampleBytes)}});
    }
    return chosen;
}

// A JSON file of the run directory. Returns {} if it is missing or damaged; adds a note if it is damaged.
Json file_json(const std::string& path, Json& notes) {
    constexpr size_t kMaxFile = 1 << 22;
    if (!file_exists(path)) return Json::object();
    const Json json = parse_json_or_null(read_file(path, kMaxFile));
    if (json.is_object()) return json;
    notes.push_back(path + " is damaged");
    return Json::object();
}

Json run_json(const RunRecords& run) {
    Json tables = Json::object(), skipped = Json::array(), notes = run.notes;
    for (const auto& [kind, table] : run.tables) tables[kind] = table_json(table);
    for (size_t i = 0; i < std::min(run.skipped.size(), kMaxSkipped); i++)
        skipped.push_back({run.skipped[i].step, run.skipped[i].tensor});
    const Json config = file_json(run.dir + "/config.json", notes), file = file_json(run.dir + "/run.json", notes);
    return {{"dir", run.dir},
            {"summary", summary_of(run)},
            {"tables", tables},
            {"skipped", skipped},
            {"samples", samples_json(run.samples)},
            {"config", config},
            {"starts", file.value("starts", Json())},
            {"notes", notes}};
}

// JSON for use inside <script>, which "</script" would end: escapes "<", which occurs only in strings.
std::string script_safe(const std::string& json) {
    std::string safe;
    for (const char c : json) c == '<' ? safe += "\\u003c" : safe += c;
    return safe;
}

}  // namespace

std::map<std::string, double> summary_of(const RunRecords& run) {
    const RecordTable &train = run.table("train"), &val = run.table("val");
    std::map<std::string, double> summary = {{"step", train.steps.empty() ? 0 : train.steps.back()},
                                             {"loss", last(train.column("loss"))},
                                             {"val_loss", last(val.column("loss"))},
                                             {"tokens", last(train.column("tokens"))},
                                             {"tokens_per_s", median(train.column("tokens_per_s"))},
                                             {"mfu", median(train.column("mfu"))},
                                             {"step_s", sum(train.column("step_ms")) / 1000},
                                             {"skipped", run.skipped.size()}};
    if (const auto best = index_of_lowest(val.column("loss"))) {
        summary["best_val_loss"] = (*val.column("loss"))[*best];
        summary["best_val_step"] = val.steps[*best];
    }
    if (const auto best = index_of_lowest(val.column("bits_per_byte")))
        summary["best_bits_per_byte"] = (*val.column("bits_per_byte"))[*best];
    std::erase_if(summary, [](const auto& item) { return !std::isfinite(item.second); });
    return summary;
}

std::string report_page(const std::vector<RunRecords>& runs) {
    Json data = {{"generated", int64_t(std::time(nullptr))},
                 {"defaults", Json::parse(config_json(Config()))},
                 {"runs", Json::array()}};
    for (const RunRecords& run : runs) data["runs"].push_back(run_json(run));
    const std::string json = script_safe(data.dump(-1, ' ', false, Json::error_handler_t::replace));

    // The data, which may contain placeholders, comes last.
    const std::pair<std::string_view, std::string_view> parts[] = {
        {"{{uplot.css}}", report_uplot_css},         {"{{report.css}}", report_css},  {"{{uplot.js}}", report_uplot_js},
        {"{{uplot.license}}", report_uplot_license}, {"{{page.js}}", report_page_js}, {"{{data}}", json}};
    std::string page = report_html;
    for (const auto& [placeholder, text] : parts) page.replace(page.find(placeholder), placeholder.size(), text);
    return page;
}
