// A file that records are appended to while a run goes on, whatever becomes of the disk meanwhile.
#pragma once

#include <mutex>
#include <optional>

#include "runtime/io/io.h"

// What has been appended since the last successful sync() stays in memory until the next one. So a record that the disk
// refuses is written later, in order and whole; and after an fsync that failed, when the system may have dropped pages
// that it had taken, the file is opened anew and cut back to what was on disk, and all of these records are written
// again: only pages that are dirty once more are written by the next fsync. Every 4 MiB are synced, which bounds the
// memory as long as the disk works. One thread may append while another syncs.
class LogFile {
public:
    // Continues a file that exists behind its first `bytes` bytes; the rest is cut off.
    LogFile(const std::string& path, size_t bytes);
    ~LogFile() { write_missing(); }  // what was appended during the last sync

    // Both return whether the file has everything; why not says error(). append() tries to write the record at once,
    // behind those that are missing; write_missing() tries to write these. Neither waits for a sync() of another
    // thread: what is appended meanwhile is written by the next call.
    bool append(std::string_view record);
    bool write_missing() { return append({}); }
    const std::string& error() const { return error_; }

    // Everything that was appended before is on disk when this returns. Exit::io, naming the file, if that cannot be
    // done.
    void sync();

private:
    void write();
    void sync_locked();

    std::mutex arriving_mutex_;
    std::string arriving_;  // what append() has been given since the last write()

    std::mutex mutex_;  // guards what follows but error_, which belongs to the thread that appends
    std::string path_;
    OutputFile file_;
    size_t synced_;         // bytes that are on disk
    std::string unsynced_;  // what follows them, without what is arriving
    bool must_reopen_ = false;
    std::string error_;
};

// The file; nullopt if there certainly is none. Other errors are those of InputFile.
std::optional<InputFile> find_input_file(const std::string& path);

// Calls `visit` with each line that ends in a newline, newline included, and its offset. Lines of more than 64 MiB,
// which no log has, are left out, so the memory is bounded.
void for_each_line(const InputFile& file, const std::function<void(std::string_view line, size_t offset)>& visit);
