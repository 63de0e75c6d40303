#include "runtime/logging/log_file.h"

#include <algorithm>
#include <utility>

LogFile::LogFile(const std::string& path, size_t bytes)
    : path_(path), file_(OutputFile::open_to_continue(path, bytes)), synced_(bytes) {
    file_.sync();  // so that a power cut cannot bring back the part that was cut
}

// A write that failed halfway has not moved the file's end, so the next one begins with the same record.
void LogFile::write() {
    if (must_reopen_) file_ = OutputFile::open_to_continue(path_, synced_);
    must_reopen_ = false;
    {
        const std::lock_guard lock(arriving_mutex_);
        unsynced_ += std::exchange(arriving_, {});
    }
    file_.append(std::string_view(unsynced_).substr(file_.size() - synced_));
}

bool LogFile::append(std::string_view record) {
    constexpr size_t kMaxUnsynced = size_t(4) << 20;
    {
        const std::lock_guard lock(arriving_mutex_);
        arriving_ += record;
    }
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return error_.empty();
    try {
        write();
        error_.clear();
        if (unsynced_.size() >= kMaxUnsynced) sync_locked();
    } catch (const Error& error) {
        error_ = error.what();
    }
    return error_.empty();
}

void LogFile::sync() {
    const std::lock_guard lock(mutex_);
    sync_locked();
}

void LogFile::sync_locked() {
    try {
        write();
        must_reopen_ = true;  // unless it succeeds
        file_.sync();
    } catch (const Error& error) {
        fail(Exit::io, "%s", error.what());
    }
    must_reopen_ = false;
    synced_ = file_.size();
    unsynced_.clear();
}

void for_each_line(const InputFile& file, const std::function<void(std::string_view, size_t)>& visit) {
    constexpr size_t kPieceBytes = size_t(1) << 20, kMaxLineBytes = size_t(64) << 20;
    std::string piece, line;
    size_t line_bytes = 0;  // of the line so far; `line` has fewer if it is too long
    for (size_t offset = 0; offset < file.size(); offset += piece.size()) {
        piece.resize(std::min(kPieceBytes, file.size() - offset));
        file.read_at(offset, piece.data(), piece.size());
        for (size_t begin = 0; begin < piece.size();) {
            const size_t end = std::min(piece.find('\n', begin), piece.size() - 1) + 1;
            line_bytes += end - begin;
            if (line_bytes <= kMaxLineBytes) line.append(piece, begin, end - begin);
            begin = end;
            if (piece[end - 1] != '\n') continue;
            if (line.size() == line_bytes) visit(line, offset + end - line_bytes);
            line.clear();
            line_bytes = 0;
        }
    }
}
