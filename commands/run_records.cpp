#include "commands/run_records.h"

#include <cmath>

#include "runtime/io/files.h"
#include "runtime/io/json.h"

namespace {

// Limits above what any version writes; a file with more is not metrics.jsonl.
constexpr size_t kMaxKinds = 32, kMaxColumns = 128;

void add_row(RecordTable& table, double step, const std::map<std::string, double>& numbers) {
    while (!table.steps.empty() && table.steps.back() >= step) table.steps.pop_back();
    for (auto& [name, values] : table.columns) values.resize(table.steps.size());
    for (const auto& [name, value] : numbers) {
        if (name == "step") continue;
        if (!table.columns.contains(name) && table.columns.size() == kMaxColumns) continue;
        std::vector<double>& values = table.columns[name];
        values.resize(table.steps.size(), NAN);
        values.push_back(value);
    }
    table.steps.push_back(step);
    for (auto& [name, values] : table.columns) values.resize(table.steps.size(), NAN);
}

}  // namespace

const std::vector<double>* RecordTable::column(const std::string& name) const {
    return columns.contains(name) ? &columns.at(name) : nullptr;
}

RunRecords::RunRecords(std::string run_dir) : dir(std::move(run_dir)) {
    if (!directory_exists(dir)) fail(Exit::no_input, "%s is not a run directory", dir);
    read_lines(dir + "/metrics.jsonl", &RunRecords::add_record);
    read_lines(dir + "/samples.jsonl", &RunRecords::add_sample);
}

const RecordTable& RunRecords::table(const std::string& kind) const {
    static const RecordTable none;
    return tables.contains(kind) ? tables.at(kind) : none;
}

void RunRecords::read_lines(const std::string& path, bool (RunRecords::*add)(std::string_view)) {
    const MappedFile file = file_exists(path) ? MappedFile(path) : MappedFile();
    std::string_view rest = file.text();
    size_t number = 0, damaged = 0, first_damaged = 0;
    for (size_t end; (end = rest.find('\n')) != std::string_view::npos; rest.remove_prefix(end + 1)) {
        number++;
        if (!(this->*add)(rest.substr(0, end)) && damaged++ == 0) first_damaged = number;
    }
    if (damaged == 1) notes.push_back(format("line %zu of %s is damaged and was skipped", first_damaged, path.c_str()));
    if (damaged > 1)
        notes.push_back(format("%zu lines of %s are damaged and were skipped, beginning with line %zu", damaged,
                               path.c_str(), first_damaged));
    if (!rest.empty()) notes.push_back(format("the last line of %s is incomplete and was skipped", path.c_str()));
}

bool RunRecords::add_record(std::string_view line) {
    const JsonRecord record = parse_record(line);
    const double step = record.number("step");
    if (!(step >= 0) || step != std::floor(step)) return false;
    const std::string kind = record.text("kind"), tensor = record.text("skipped");
    if (kind.empty() || (!tables.contains(kind) && tables.size() == kMaxKinds)) return false;
    add_row(tables[kind], step, record.numbers);
    if (kind != "train") return true;
    while (!skipped.empty() && skipped.back().step >= step) skipped.pop_back();
    if (!tensor.empty()) skipped.push_back({step, tensor});
    return true;
}

bool RunRecords::add_sample(std::string_view line) {
    const JsonRecord sample = parse_record(line);
    const double step = sample.number("step");
    if (!(step >= 0) || sample.text("text").empty()) return false;
    while (!samples.empty() && samples.back().step > step) samples.pop_back();
    samples.push_back({step, sample.text("text")});
    return true;
}
