// The records of a run, read while the run may still write them: metrics.jsonl and samples.jsonl.
#pragma once

#include <map>

#include "runtime/io/io.h"

// The lines of a file that grows: each read sees those that were appended since the last.
class GrowingFile {
public:
    explicit GrowingFile(std::string path) : path_(std::move(path)) {}

    // Calls on_line(line, its number from 1) for each new line, and on_restart() first if the file is not the one that
    // was read before, as after a resume, which replaces it. An absent file is an empty one. Returns whether anything
    // was called. A line without its newline waits for the next read.
    bool read(const std::function<void(std::string_view, size_t)>& on_line, const std::function<void()>& on_restart);

    const std::string& path() const { return path_; }
    size_t unfinished_bytes() const { return unfinished_bytes_; }  // after the last newline

private:
    std::string path_;
    std::string last_line_;  // ends at end_
    size_t end_ = 0, lines_ = 0, unfinished_bytes_ = 0;
};

// The records of one kind, by step, ascending. A value that is absent, null or "nan" is NaN.
struct RecordTable {
    using Column = std::pair<std::string, std::vector<double>>;
    std::vector<double> steps;
    std::vector<Column> columns;  // every number of the records but "step"; as many values as there are steps

    const std::vector<double>* column(const std::string& name) const;  // null: there is none
};

struct SkippedStep {
    double step;
    std::string tensor;  // the first whose gradient was not finite
};

struct Sample {
    double step, time;  // Unix seconds; NaN where absent
    std::string prompt, text;
};

// If a step appears again, as after a crash, the later record counts and those of later steps are dropped.
class RunRecords {
public:
    // Fails with Exit::no_input if `dir` is no directory.
    explicit RunRecords(std::string dir);

    // Reads what is new; returns whether anything is. Lines that are no records are skipped, see notes().
    bool update();

    const std::string& dir() const { return dir_; }
    // The records of a kind ("train", "val"), empty if there are none.
    const RecordTable& table(const std::string& kind) const;
    const std::map<std::string, RecordTable>& tables() const { return tables_; }
    const std::vector<SkippedStep>& skipped() const { return skipped_; }
    const std::vector<Sample>& samples() const { return samples_; }
    std::vector<std::string> notes() const;  // sentences about what could not be read

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
