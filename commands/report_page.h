// The HTML page of `report`: a single self-contained file that needs no network.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "commands/run_records.h"

// Summary of all records of a run. Values that the records do not contain are absent.
struct RunSummary {
    double step = 0;                                                                         // the last
    size_t steps = 0;                                                                        // records
    std::optional<double> loss, val_loss, best_val_loss, best_val_step, best_bits_per_byte;  // last, last, lowest ...
    std::optional<double> tokens, tokens_per_s, mfu;                                         // last, median, median
    std::optional<double> first_time, last_time;                                             // Unix seconds
    double step_s = 0;                                                                       // of all steps
    size_t skipped = 0;                                                                      // updates
};
RunSummary summary_of(const RunRecords& run);

// Returns the page. Runs of `kMostPoints` steps or more are downsampled: groups of neighboring steps are stored as
// mean, minimum and maximum. With `refresh_s` the page reloads itself after that many seconds.
inline constexpr size_t kMostPoints = 4000;
std::string report_page(const std::vector<RunRecords>& runs, std::optional<int> refresh_s);
