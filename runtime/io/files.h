// Files: whole reads, memory maps, writes that either happen completely or not at all, and globs.
//
// Every failure is an Error that names the path, what was tried and what the system said: Exit::no_input where an input
// is missing, Exit::permission, Exit::cannot_create, Exit::io for the rest (disk full included).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

// A regular file, read-only in memory. FIFOs, directories and devices are refused without blocking.
class MappedFile {
public:
    MappedFile() = default;
    explicit MappedFile(const std::string& path);
    MappedFile(MappedFile&& other) noexcept;
    MappedFile& operator=(MappedFile&& other) noexcept;
    ~MappedFile();
    const std::string& path() const { return path_; }
    const std::byte* data() const { return data_; }
    size_t size() const { return size_; }
    std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }

private:
    std::string path_;
    const std::byte* data_ = nullptr;
    size_t size_ = 0;
};

// A file being written by position; space is reserved first where the file system can. Short writes and EINTR are
// completed. sync() reports what the disk says; a file whose sync failed is never taken for written.
class OutputFile {
public:
    OutputFile() = default;
    // Creates the file and fails if it exists (O_EXCL, never through a link). `reserve_bytes` 0 reserves nothing.
    explicit OutputFile(const std::string& path, size_t reserve_bytes = 0);
    // Opens the file to go on behind its end, or creates it; never through a link.
    static OutputFile open_to_append(const std::string& path);
    OutputFile(OutputFile&& other) noexcept;
    OutputFile& operator=(OutputFile&& other) noexcept;
    ~OutputFile();  // closes; removes nothing
    void write_at(size_t offset, const void* bytes, size_t count);
    void append(const void* bytes, size_t count);  // at the end of what append() wrote before
    void append(std::string_view text) { append(text.data(), text.size()); }
    void sync();
    void close();
    size_t size() const { return end_; }
    const std::string& path() const { return path_; }

private:
    std::string path_;
    int descriptor_ = -1;
    size_t end_ = 0;
};

std::string read_file(const std::string& path, size_t max_bytes = size_t(1) << 30);

// Replaces the file as a whole: temporary file in the same directory, fsync, rename, fsync of the directory.
void write_file_atomically(const std::string& path, std::string_view content);

// fsync of a directory, so that names created or renamed in it survive a power cut.
void sync_directory(const std::string& path);

void make_directories(const std::string& path);
bool file_exists(const std::string& path);
bool directory_exists(const std::string& path);
std::vector<std::string> list_directory(const std::string& path);  // names, sorted, without . and ..
void rename_path(const std::string& from, const std::string& to);
void remove_tree(const std::string& path);
uint64_t free_bytes(const std::string& path);  // that the calling user may fill, on the path's file system

// Paths that match, sorted by name. Exit::no_input, naming `key` and the pattern, if nothing matches.
std::vector<std::string> expand_glob(const std::string& pattern, const std::string& key);

// What a file that is not what it should be looks like, from its first bytes and size: "an HTML page", "a Git LFS
// pointer", "a zip archive", "a gzip file", "text", "an empty file" ... For error sentences.
std::string describe_content(std::string_view first_bytes, size_t size);
