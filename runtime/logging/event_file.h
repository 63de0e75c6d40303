// Event files for TensorBoard: a sequence of records (TFRecord), each an Event in the protobuf format.
//
//     record  = length (8 bytes), masked CRC32C of the length (4), event, masked CRC32C of the event (4); little-endian
//     Event   = wall_time 1 (double), step 2, file_version 3 | summary 5 | session_log 7
//     Summary = value 1, repeated: tag 1, simple_value 2 (float) or tensor 8, metadata 9
//
// (tensorflow/core/util/event.proto, tensorflow/core/framework/summary.proto, tensorboard's plugins.)
#pragma once

#include "runtime/io/process.h"
#include "runtime/logging/log_file.h"

// The content of one event: values by tag.
class EventSummary {
public:
    void add_scalar(const std::string& tag, double value);
    void add_text(const std::string& tag, const std::string& markdown);
    // Adds the distribution of the finite values, in buckets of equal width from the smallest value to the largest.
    void add_histogram(const std::string& tag, const std::vector<double>& values);
    const std::string& bytes() const { return bytes_; }

private:
    void add_tensor(const std::string& tag, const char* plugin, const std::string& tensor);
    std::string bytes_;
};

class EventFile {
public:
    // Begins a new file in the directory, which is created if absent, for the steps after `committed_step`. Cuts events
    // of these steps from older files, and tells a TensorBoard that has already read them to discard them.
    EventFile(const std::string& directory, int committed_step);

    // Returns whether the file is complete, as LogFile::append() does.
    bool write(int step, double unix_time, const EventSummary& summary);
    LogFile& file() { return file_; }

private:
    LogFile file_;
};
