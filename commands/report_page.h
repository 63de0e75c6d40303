// The HTML page of `report`: one file that needs no other and no network.
#pragma once

#include <optional>

#include "commands/run_records.h"

// What a run has come to, from all its records. Absent: the records do not say.
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

// The whole page. Records of long runs are thinned: of `kMostPoints` steps or more, groups of neighbours are kept as
// mean, minimum and maximum. With `refresh_s` the page loads itself again after so many seconds.
inline constexpr size_t kMostPoints = 4000;
std::string report_page(const std::vector<RunRecords>& runs, std::optional<int> refresh_s);
