// Event files for TensorBoard: a sequence of records (TFRecord), each an Event in the protobuf format.
//
//     record  = length (8 bytes), masked CRC32C of the length (4), event, masked CRC32C of the event (4); little-endian
//     Event   = wall_time 1 (double), step 2, file_version 3 | summary 5 | session_log 7
//     Summary = value 1, repeated: tag 1, simple_value 2 (float)
//
// (tensorflow/core/util/event.proto, tensorflow/core/framework/summary.proto.)
#pragma once

#include <memory>

#include "runtime/logging/log_file.h"

using Scalars = std::vector<std::pair<std::string, double>>;  // values by tag

// Begins a new file in the directory, which is created if absent, for the steps after `committed_step`. Does not create
// the directory's parent, which may have been moved away. The first events tell TensorBoard to discard these steps of
// older files.
std::unique_ptr<LogFile> begin_event_file(const std::string& directory, int committed_step);

// Returns the record of a step's values.
std::string event_record(int step, double unix_time, const Scalars& scalars);
