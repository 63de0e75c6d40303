// Reads the records of a run, metrics.jsonl and samples.jsonl, which may still be growing.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>


// Reads the lines of a growing file: each read() returns the lines that were appended since the last one.
class GrowingFile {
public:
    explicit GrowingFile(std::string path) : path_(std::move(path)) {}

    // Calls on_line(line, its number from 1) for each new line. Calls on_restart() first if the file has been replaced
    // since the last read, as a resume does. A missing file counts as empty. A line without a newline is left for the
    // next read. Returns whether anything was called.
    bool read(const std::function<void(std::string_view, size_t)>& on_line, const std::function<void()>& on_restart);

    const std::string& path() const { return path_; }
    size_t unfinished_bytes() const { return unfinished_bytes_; }  // after the last newline

private:
    std::string path_;
    std::string last_line_;  // ends at end_
    size_t end_ = 0, lines_ = 0, unfinished_bytes_ = 0;
};

// The records of one kind, in ascending order of steps. A value that is absent, null or "nan" is NaN.
struct RecordTable {
    using Column = std::pair<std::string, std::vector<double>>;
    std::vector<double> steps;
    std::vector<Column> columns;  // all numbers of the records except "step", one value per step

    const std::vector<double>* column(const std::string& name) const;  // null if there is no such column
};

struct SkippedStep {
    double step;
    std::string tensor;  // the first whose gradient was not finite
};

struct Sample {
    double step, time;  // Unix seconds; NaN where absent
    std::string prompt, text;
};

// If a step appears again, as after a crash, the new record replaces the old one and the records of all later steps.
class RunRecords {
public:
    // Fails with Exit::no_input if `dir` is not a directory.
    explicit RunRecords(std::string dir);

    // Reads new records; returns whether there are any. Skips invalid lines, see notes().
    bool update();

    const std::string& dir() const { return dir_; }
    // The records of a kind ("train", "val"), empty if there are none.
    const RecordTable& table(const std::string& kind) const;
    const std::map<std::string, RecordTable>& tables() const { return tables_; }
    const std::vector<SkippedStep>& skipped() const { return skipped_; }
    const std::vector<Sample>& samples() const { return samples_; }
    std::vector<std::string> notes() const;  // sentences about lines that could not be read

private:
    struct Damage {
        size_t first_line = 0, lines = 0;
    };
    bool add_record(std::string_view line);
    bool add_sample(std::string_view line);

    std::string dir_;
    GrowingFile metrics_, sample_file_;
    Damage damaged_metrics_, damaged_samples_;
    std::map<std::string, RecordTable> tables_;
    std::vector<SkippedStep> skipped_;
    std::vector<Sample> samples_;
};
