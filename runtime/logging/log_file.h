// An append-only file of records that tolerates disk errors during the run.
#pragma once

#include <mutex>

#include "runtime/io/files.h"

// Records appended since the last successful sync() stay in memory until the next one. If the disk rejects a record, it
// is written later, whole and in order. After a failed fsync the system may have dropped pages that it had accepted,
// and the next fsync writes only pages that are dirty again. So the file is reopened and truncated to its synced
// length, and all records kept in memory are written again. A sync every 4 MiB bounds the memory as long as the disk
// works. One thread may append while another syncs.
class LogFile {
public:
    // Continues an existing file after its first `bytes` bytes and cuts the rest.
    LogFile(const std::string& path, size_t bytes);
    ~LogFile() { write_missing(); }  // records appended during the last sync

    // Both return whether the file is complete; if not, error() returns the reason. append() tries to write the record
    // at once, after any that are still missing; write_missing() tries to write the missing ones. Neither waits for a
    // sync() in another thread: records appended during it are written by the next call.
    bool append(std::string_view record);
    bool write_missing() { return append({}); }
    const std::string& error() const { return error_; }

    // Writes everything appended so far to disk. Fails with Exit::io, naming the file, if this is impossible.
    void sync();

private:
    void write();
    void sync_locked();

    std::mutex arriving_mutex_;
    std::string arriving_;  // records passed to append() since the last write()

    std::mutex mutex_;  // guards the members below except error_, which only the appending thread uses
    std::string path_;
    OutputFile file_;
    size_t synced_;         // bytes that are on disk
    std::string unsynced_;  // the records after them, without arriving_
    bool must_reopen_ = false;
    std::string error_;
};

// Calls `visit` with each line that ends in a newline, newline included, and its offset. To bound the memory, skips
// lines longer than 64 MiB, which no log has.
void for_each_line(const InputFile& file, const std::function<void(std::string_view line, size_t offset)>& visit);
