// Reads the records of a run, metrics.jsonl and samples.jsonl, which may still be growing.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

// The records of one kind, in ascending order of steps. A value that is not a finite number is NaN.
struct RecordTable {
    std::vector<double> steps;
    std::map<std::string, std::vector<double>> columns;  // all numbers except "step", one value per step

    const std::vector<double>* column(const std::string& name) const;  // null if there is no such column
};

struct SkippedStep {
    double step;
    std::string tensor;  // the first whose gradient was not finite
};

struct Sample {
    double step;
    std::string text;
};

// If a step appears again, as after a crash, the new record replaces the old one and the records of all later steps.
struct RunRecords {
    // Fails with Exit::no_input if `dir` is not a directory. Skips invalid lines, see notes. Missing files count as
    // empty.
    explicit RunRecords(std::string dir);

    // The records of a kind ("train", "val"), empty if there are none.
    const RecordTable& table(const std::string& kind) const;

    std::string dir;
    std::map<std::string, RecordTable> tables;
    std::vector<SkippedStep> skipped;
    std::vector<Sample> samples;
    std::vector<std::string> notes;  // sentences about lines that could not be read

private:
    bool add_record(std::string_view line);
    bool add_sample(std::string_view line);
    void read_lines(const std::string& file, bool (RunRecords::*add)(std::string_view));
};
