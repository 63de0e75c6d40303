// Files and directories.
//
// File operations fail with an Error that names the operation, the path and the system's error text: Exit::no_input for
// a missing input, Exit::permission, Exit::cannot_create, or Exit::io for everything else (including a full disk).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/base/check.h"  // IWYU pragma: export

// Owns a descriptor of a file or socket; -1: none. The destructor closes it and preserves errno.
class FileDescriptor {
public:
    FileDescriptor() = default;
    explicit FileDescriptor(int number) : number_(number) {}
    FileDescriptor(FileDescriptor&& other) noexcept : number_(other.release()) {}
    FileDescriptor& operator=(FileDescriptor other) noexcept {
        std::swap(number_, other.number_);
        return *this;
    }
    ~FileDescriptor();
    operator int() const { return number_; }
    explicit operator bool() const { return number_ != -1; }
    int release() { return std::exchange(number_, -1); }

private:
    int number_ = -1;
};

// Returns the exit code for an errno: Exit::permission, Exit::os if memory ran out, Exit::io for disk errors, else
// `otherwise`. However, Exit::no_input is returned only for missing files; other errors are then Exit::io.
Exit exit_code_of(int error, Exit otherwise);

// A regular file, read by position; copies share the descriptor. For files that may change, or whose disk may fail,
// during the run: a failed read throws an Error, while a mapped page would raise SIGBUS. Refuses FIFOs, directories and
// devices without blocking. Thread-safe for reading.
class InputFile {
public:
    InputFile() = default;
    explicit InputFile(const std::string& path);
    const std::string& path() const { return path_; }
    size_t size() const { return size_; }  // when it was opened
    // Copies bytes [offset, offset + count), which must lie within size(). Fails with Exit::io, naming the offset, if
    // the system cannot read them; with Exit::data if the file has been truncated.
    void read_at(size_t offset, void* bytes, size_t count) const;
    // Like read_at(), for bytes whose CRC32C should be `expected`. On a mismatch, reads them again from the disk, and
    // warns on stderr if the second read matches. Returns the CRC32C of the final content of `bytes`.
    uint32_t read_checked(size_t offset, void* bytes, size_t count, uint32_t expected) const;
    // Asks the system to drop the file from the page cache, so that the next read comes from the disk. Pages that have
    // not been synced stay in the cache.
    void forget_cached() const;
    // Fails with Exit::data if the path no longer refers to the opened file (device and inode) or if its size or
    // modification time has changed; with Exit::io or Exit::no_input if that cannot be determined.
    void check_unchanged() const;

private:
    friend class MappedFile;
    std::string path_;
    std::shared_ptr<const FileDescriptor> descriptor_;
    size_t size_ = 0;
    int64_t modified_ns_ = 0;
};

// A regular file, memory-mapped read-only; copies share the mapping. Refuses FIFOs, directories and devices without
// blocking. For commands that read a file once and can be repeated: an unreadable page (a failing disk, a truncated
// file) exits the process with Exit::io and a message that names the file and the offset.
class MappedFile {
public:
    MappedFile() = default;
    explicit MappedFile(const std::string& path);
    const std::string& path() const { return path_; }
    const std::byte* data() const { return data_.get(); }
    size_t size() const { return size_; }
    std::string_view text() const { return {reinterpret_cast<const char*>(data()), size_}; }

private:
    std::string path_;
    std::shared_ptr<const std::byte> data_;
    size_t size_ = 0;
};

// A file being written by position. Reserves space first if the file system supports it. Handles short writes and
// EINTR. A failed sync() closes the file, whose content is then undefined. The destructor only closes the file.
class OutputFile {
public:
    OutputFile() = default;
    // Creates the file. Fails if it exists (O_EXCL); does not follow links. `reserve_bytes` 0: does not reserve space.
    explicit OutputFile(const std::string& path, size_t reserve_bytes = 0);
    // Opens an existing file, truncates it to `size` bytes and continues there. Fails with Exit::data if it is shorter.
    static OutputFile open_to_continue(const std::string& path, size_t size);
    void write_at(size_t offset, const void* bytes, size_t count);
    void append(const void* bytes, size_t count) { write_at(end_, bytes, count); }
    void append(std::string_view text) { append(text.data(), text.size()); }
    void sync();
    void close();
    size_t size() const { return end_; }

private:
    std::string path_;
    FileDescriptor descriptor_;
    size_t end_ = 0;
};

std::string read_file(const std::string& path, size_t max_bytes = size_t(1) << 30);

// Replaces the file atomically: writes a temporary file in the same directory, syncs it, renames it and syncs the
// directory. `write` fills the temporary file, for which `bytes` are reserved.
void write_file_atomically(const std::string& path, size_t bytes, const std::function<void(OutputFile&)>& write);
void write_file_atomically(const std::string& path, std::string_view content);

// Removes the temporary files (PATH.tmp.16 hexadecimal digits) that write_file_atomically() left in a directory when
// its process was killed. Requires that no other process writes there.
void remove_temporary_files(const std::string& directory);

// Syncs a directory, so that names created or renamed in it survive a power cut.
void sync_directory(const std::string& path);

void make_directories(const std::string& path);
void make_directory(const std::string& path);  // in an existing directory
// Whether the path is a regular file or a directory, or a link to one. Fails with Exit::io or Exit::permission if that
// cannot be determined: a system error does not count as absence.
bool file_exists(const std::string& path);
bool directory_exists(const std::string& path);
std::vector<std::string> list_directory(const std::string& path);  // names, sorted, without . and ..
std::string directory_of(const std::string& path);                 // the parent directory; "." for a plain name
void rename_path(const std::string& from, const std::string& to);
void remove_tree(const std::string& path);

uint64_t free_bytes(const std::string& path);  // available to the calling user on the path's file system

// Returns the matching paths, sorted by name. Fails with Exit::no_input, naming `key` and the pattern, if none matches;
// with Exit::permission or Exit::io if a directory cannot be listed.
std::vector<std::string> expand_glob(const std::string& pattern, const std::string& key);

// Describes a file, for error messages, by its first bytes and its size: "an HTML page", "a Git LFS pointer", "a zip
// archive", "a gzip file", "text", "an empty file" ...
std::string describe_content(std::string_view first_bytes, size_t size);
