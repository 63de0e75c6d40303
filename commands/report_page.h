// The HTML page of `report`: a single self-contained file that needs no network.
#pragma once

#include "commands/run_records.h"

// Summarizes all records of a run. Does not contain values that are not known.
//   step, loss, val_loss, tokens        the last
//   best_val_loss, best_val_step        the lowest validation loss and its step
//   best_bits_per_byte                  the lowest
//   tokens_per_s, mfu                   the median
//   step_s                              the sum over all steps
//   skipped                             the number of skipped updates
std::map<std::string, double> summary_of(const RunRecords& run);

// Returns the page. Runs of `kMaxPoints` steps or more are downsampled: groups of neighboring steps are stored as
// mean, minimum and maximum.
inline constexpr size_t kMaxPoints = 4000;
std::string report_page(const std::vector<RunRecords>& runs);
