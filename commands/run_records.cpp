#include "commands/run_records.h"
#include "runtime/io/files.h"

#include <cmath>
#include <nlohmann/json.hpp>

namespace {

// Limits above what any version writes; a file with more is not metrics.jsonl.
constexpr size_t kMostKinds = 32, kMostColumns = 128;

// Receives the parser's events for one record, a flat object. Ignores nested values and values of other types.
struct RecordReader {
    std::string kind, skipped;
    double step = NAN;
    std::vector<std::pair<std::string, double>> numbers;

    bool null() { return true; }
    bool boolean(bool) { return true; }
    bool number_integer(int64_t value) { return number(double(value)); }
    bool number_unsigned(uint64_t value) {
        if (depth_ == 1 && key_ == "step") step = double(value);
        return number(double(value));
    }
    bool number_float(double value, const std::string&) { return number(value); }
    bool string(std::string& value) {
        if (depth_ != 1) return true;
        if (key_ == "kind")
            kind = std::move(value);
        else if (key_ == "skipped")
            skipped = std::move(value);
        else if (value == "nan")
            number(NAN);
        else if (value == "inf" || value == "-inf")
            number(value[0] == '-' ? -INFINITY : INFINITY);
        return true;
    }
    bool binary(nlohmann::json::binary_t&) { return false; }
    bool start_object(size_t) {
        has_object_ |= depth_ == 0;
        depth_++;
        return true;
    }
    bool end_object() { return depth_--, true; }
    bool start_array(size_t) { return depth_++, true; }
    bool end_array() { return depth_--, true; }
    bool key(std::string& name) {
        if (depth_ == 1) key_ = std::move(name);
        return true;
    }
    bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) { return false; }

    bool is_record() const { return has_object_ && !kind.empty() && !std::isnan(step); }

private:
    bool number(double value) {
        if (depth_ == 1 && key_ != "step") numbers.emplace_back(key_, value);
        return true;
    }

    int depth_ = 0;
    bool has_object_ = false;
    std::string key_;
};

void drop_from_step(RecordTable& table, double step) {
    while (!table.steps.empty() && table.steps.back() >= step) table.steps.pop_back();
    for (auto& [name, values] : table.columns) values.resize(table.steps.size());
}

void add_row(RecordTable& table, const RecordReader& record) {
    if (!table.steps.empty() && table.steps.back() >= record.step) drop_from_step(table, record.step);
    table.steps.push_back(record.step);
    size_t next = 0;  // records of a kind have the same keys in the same order
    for (const auto& [name, value] : record.numbers) {
        if (next >= table.columns.size() || table.columns[next].first != name) {
            const auto found = std::ranges::find(table.columns, name, &RecordTable::Column::first);
            next = size_t(found - table.columns.begin());
            if (found == table.columns.end()) {
                if (table.columns.size() == kMostColumns) continue;
                table.columns.push_back({name, {}});
            }
        }
        std::vector<double>& values = table.columns[next++].second;
        values.resize(table.steps.size() - 1, NAN);
        values.push_back(value);
    }
    for (auto& [name, values] : table.columns) values.resize(table.steps.size(), NAN);
}

double number_of(const nlohmann::json& object, const char* key) {
    const auto value = object.find(key);
    return value != object.end() && value->is_number() ? value->get<double>() : NAN;
}

std::string text_of(const nlohmann::json& object, const char* key) {
    const auto value = object.find(key);
    return value != object.end() && value->is_string() ? value->get<std::string>() : "";
}

}  // namespace

bool GrowingFile::read(const std::function<void(std::string_view, size_t)>& on_line,
                       const std::function<void()>& on_restart) {
    const MappedFile file = file_exists(path_) ? MappedFile(path_) : MappedFile();
    const std::string_view text = file.text();
    bool is_new = false;
    if (end_ > text.size() || text.substr(end_ - last_line_.size(), last_line_.size()) != last_line_) {
        end_ = lines_ = 0;
        last_line_.clear();
        on_restart();
        is_new = true;
    }
    std::string_view last;
    for (size_t newline; (newline = text.find('\n', end_)) != std::string_view::npos; end_ = newline + 1) {
        on_line(text.substr(end_, newline - end_), ++lines_);
        last = text.substr(end_, newline + 1 - end_);
    }
    if (!last.empty()) last_line_ = last;
    unfinished_bytes_ = text.size() - end_;
    return is_new || !last.empty();
}

const std::vector<double>* RecordTable::column(const std::string& name) const {
    const auto found = std::ranges::find(columns, name, &Column::first);
    return found == columns.end() ? nullptr : &found->second;
}

RunRecords::RunRecords(std::string dir)
    : dir_(std::move(dir)), metrics_(dir_ + "/metrics.jsonl"), sample_file_(dir_ + "/samples.jsonl") {
    if (!directory_exists(dir_)) fail(Exit::no_input, "%s is not a run directory", dir_);
}

bool RunRecords::update() {
    auto read = [](GrowingFile& file, Damage& damage, auto add, auto clear) {
        return file.read(
            [&](std::string_view line, size_t number) {
                if (!add(line) && damage.lines++ == 0) damage.first_line = number;
            },
            [&] {
                damage = {};
                clear();
            });
    };
    const bool has_records = read(
        metrics_, damaged_metrics_, [&](std::string_view line) { return add_record(line); },
        [&] {
            tables_.clear();
            skipped_.clear();
        });
    const bool has_samples = read(
        sample_file_, damaged_samples_, [&](std::string_view line) { return add_sample(line); },
        [&] { samples_.clear(); });
    return has_records || has_samples;
}

const RecordTable& RunRecords::table(const std::string& kind) const {
    static const RecordTable none;
    const auto found = tables_.find(kind);
    return found == tables_.end() ? none : found->second;
}

std::vector<std::string> RunRecords::notes() const {
    std::vector<std::string> sentences;
    auto note = [&](const GrowingFile& file, const Damage& damage) {
        if (damage.lines == 1)
            sentences.push_back(
                format("line %zu of %s is damaged and was skipped", damage.first_line, file.path().c_str()));
        if (damage.lines > 1)
            sentences.push_back(format("%zu lines of %s are damaged and were skipped, beginning with line %zu",
                                       damage.lines, file.path().c_str(), damage.first_line));
        if (file.unfinished_bytes() > 0)
            sentences.push_back(format("the last line of %s is incomplete and was skipped", file.path().c_str()));
    };
    note(metrics_, damaged_metrics_);
    note(sample_file_, damaged_samples_);
    return sentences;
}

bool RunRecords::add_record(std::string_view line) {
    RecordReader record;
    if (!nlohmann::json::sax_parse(line.begin(), line.end(), &record) || !record.is_record()) return false;
    if (!tables_.contains(record.kind) && tables_.size() == kMostKinds) return false;
    add_row(tables_[record.kind], record);
    if (record.kind != "train") return true;
    while (!skipped_.empty() && skipped_.back().step >= record.step) skipped_.pop_back();
    if (!record.skipped.empty()) skipped_.push_back({record.step, record.skipped});
    return true;
}

bool RunRecords::add_sample(std::string_view line) {
    const auto sample = nlohmann::json::parse(line, nullptr, false);
    if (!sample.is_object() || !(number_of(sample, "step") >= 0) || text_of(sample, "text").empty()) return false;
    const double step = number_of(sample, "step");
    while (!samples_.empty() && samples_.back().step > step) samples_.pop_back();
    samples_.push_back({step, number_of(sample, "time"), text_of(sample, "prompt"), text_of(sample, "text")});
    return true;
}
