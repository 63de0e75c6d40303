// Event files, which TensorBoard reads: a sequence of records (TFRecord), each an Event in the protobuf format.
//
//     record  = length (8 bytes), masked CRC32C of it (4), the event, masked CRC32C of that (4); little-endian
//     Event   = wall_time 1 (double), step 2, file_version 3 | summary 5 | session_log 7
//     Summary = value 1, repeated: tag 1, simple_value 2 (float) or tensor 8, metadata 9
//
// (tensorflow/core/util/event.proto, tensorflow/core/framework/summary.proto, tensorboard's plugins.)
#pragma once

#include "runtime/logging/log_file.h"

// What one event holds: values by tag.
class EventSummary {
public:
    void add_scalar(const std::string& tag, double value);
    void add_text(const std::string& tag, const std::string& markdown);
    // The distribution of the values that are finite, in equal buckets from the smallest to the largest.
    void add_histogram(const std::string& tag, const std::vector<double>& values);
    const std::string& bytes() const { return bytes_; }

private:
    void add_tensor(const std::string& tag, const char* plugin, const std::string& tensor);
    std::string bytes_;
};

class EventFile {
public:
    // Begins a new file in the directory, which is created if absent, for the steps after `committed_step`. What older
    // files have of these steps is cut off, and a TensorBoard that has read it is told to forget it.
    EventFile(const std::string& directory, int committed_step);

    // Returns whether the file has everything, as LogFile::append().
    bool write(int step, double unix_time, const EventSummary& summary);
    LogFile& file() { return file_; }

private:
    LogFile file_;
};
