// The memory plan of a rank, made without allocating anything.
#pragma once

#include <array>

#include "model/arena.h"
#include "model/gpt.h"
#include "model/schedule.h"

// Returns the size of Gpt's single device allocation, and of its single allocation in host memory.
size_t planned_bytes(const GptOptions& options);
size_t planned_host_bytes(const GptOptions& options);
// Returns planned_bytes() of each stage of the rank's pipeline.
std::vector<size_t> planned_bytes_of_stages(const GptOptions& options);

// Returns what a step with all its micro-steps copies between device and host memory, if it follows a step, changes the
// weights and measures nothing. The first: only the update, the second: its passes.
OffloadTraffic planned_traffic_of_update(const GptOptions& options);
OffloadTraffic planned_traffic_of_passes(const GptOptions& options);
inline OffloadTraffic planned_traffic(const GptOptions& options) {
    return planned_traffic_of_update(options) + planned_traffic_of_passes(options);
}

// Returns the size of Gpt::saved_tensors(), this rank's part of a checkpoint.
size_t saved_bytes(const GptOptions& options);

// Fails with Exit::os if the device has less free memory than the plan needs. The message has the plan's table and the
// configuration keys that reduce it.
void check_fits(const GptOptions& options);

// The quantities from which a token's arithmetic is computed. `parameters` counts those that take part in GEMMs, plus
// the learned positions and the vocabulary's padding, but not an embedding that is only looked up. `attended` is the
// sum of GptShape::attended() over layers.
struct TokenWork {
    int64_t parameters;
    double attended;
};
TokenWork token_work(const GptShape& shape, int seq_len);

// Returns the work of the rank's parts of the layers in passes of each kind, by Pass::Kind. Counts the FLOPs of
// token_work() without biases, norms and positions, and recomputed layers.
std::vector<std::array<PassWork, 3>> work_of_parts(const GptOptions& options);

// Returns a table for the terminal: bytes by category and by buffer, the total, the number of parameters.
std::string plan_table(const GptOptions& options);

// Returns a region's category in the table.
std::string category_of(const MemoryRegion& region);

// Returns a further row of the table.
std::string plan_row(const std::string& name, size_t bytes);
