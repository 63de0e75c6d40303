// Files, JSON texts, signals and this process: everything that runtime/ and data/ need from the operating system.
//
// Every failure of a file is an Error that names the path, what was tried and the system's error text: Exit::no_input
// where an input is missing, Exit::permission, Exit::cannot_create, Exit::io for the rest (disk full included).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/base/check.h"

// ---- files ----------------------------------------------------------------------------------------------------------

// Owns a descriptor of the system, of a file or a socket; -1 is none. Its end closes the file and keeps errno.
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

// The exit code for an errno: Exit::permission, Exit::io for a fault of the disk, else `otherwise`. If that is
// Exit::no_input, it is for missing files only, and other errors are Exit::io.
Exit exit_code_of(int error, Exit otherwise);

// A regular file, read by position; copies share the descriptor. For files that another program may change, or that lie
// on a disk that may fail, while the run goes on: a read that fails is an Error, where a mapped page would be SIGBUS.
// FIFOs, directories and devices are refused without blocking. Threads may read at the same time.
class InputFile {
public:
    InputFile() = default;
    explicit InputFile(const std::string& path);
    const std::string& path() const { return path_; }
    size_t size() const { return size_; }  // when it was opened
    // Copies bytes [offset, offset + count), which lie within size(). Exit::io, with the offset, if the system cannot
    // read them; Exit::data if the file has become shorter.
    void read_at(size_t offset, void* bytes, size_t count) const;
    // As read_at(), of bytes whose CRC32C must be `expected`. If it is not, they are read once more, from the disk
    // itself; what was read wrongly only once is warned of on stderr. Returns the CRC32C of what is now in `bytes`.
    uint32_t read_checked(size_t offset, void* bytes, size_t count, uint32_t expected) const;
    // Asks the system to drop what it holds of the file in memory, so that the next read comes from disk: of a file
    // that was written, only what has been synced.
    void forget_cached() const;
    // Exit::data unless the path still leads to the file that was opened (device and inode), and its size and the time
    // of its last modification are those of then. Exit::io or Exit::no_input if that cannot be found out.
    void check_unchanged() const;

private:
    friend class MappedFile;
    std::string path_;
    std::shared_ptr<const FileDescriptor> descriptor_;
    size_t size_ = 0;
    int64_t modified_ns_ = 0;
};

// A regular file, read-only in memory; copies share the mapping. FIFOs, directories and devices are refused without
// blocking. For commands that read a file once and can be repeated: a page that cannot be read (a failing disk, a file
// that is cut) ends the process with Exit::io and a sentence that names the file and the offset.
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

// A file being written by position; space is reserved first where the file system can. Short writes and EINTR are
// completed. After a failed sync() the file is closed and must not be relied on. The destructor closes the file and
// does not remove it.
class OutputFile {
public:
    OutputFile() = default;
    // Creates the file and fails if it exists (O_EXCL, never through a link). `reserve_bytes` 0 reserves nothing.
    explicit OutputFile(const std::string& path, size_t reserve_bytes = 0);
    // Opens the file to append to it, or creates it; never through a link.
    static OutputFile open_to_append(const std::string& path);
    // Opens a file that exists, cut to its first `size` bytes, to write on. Exit::data if it is shorter.
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

// Replaces the file as a whole: temporary file in the same directory, fsync, rename, fsync of the directory. `write`
// fills the temporary file, for which `bytes` are reserved.
void write_file_atomically(const std::string& path, size_t bytes, const std::function<void(OutputFile&)>& write);
void write_file_atomically(const std::string& path, std::string_view content);

// Removes what write_file_atomically() left in a directory when its process was killed: PATH.tmp.16 hexadecimal digits.
// Requires that no other process writes there.
void remove_temporary_files(const std::string& directory);

// fsync of a directory, so that names created or renamed in it survive a power cut.
void sync_directory(const std::string& path);

void make_directories(const std::string& path);
void make_directory(const std::string& path);  // in one that is there
// Whether a regular file or a directory is there, or a link to one. Exit::io or Exit::permission if that cannot be
// found out: an error of the system does not count as absence.
bool file_exists(const std::string& path);
bool directory_exists(const std::string& path);
std::vector<std::string> list_directory(const std::string& path);  // names, sorted, without . and ..
std::string directory_of(const std::string& path);                 // the parent directory; "." for a plain name
void rename_path(const std::string& from, const std::string& to);
void remove_tree(const std::string& path);

inline constexpr const char* kLockName = "lock";

// The lock of a directory, DIRECTORY/lock (flock), held as long as the object lives. The lock of a process that dies is
// free at once, so a leftover lock file blocks nothing. The file identifies the holder: pid, host, boot id. Where the
// file system has no locks, the holder counts as alive while its process is on this host or, on another one, while it
// has called is_in_place() in the last minute. The holder may remove the file.
class DirectoryLock {
public:
    DirectoryLock() = default;  // holds nothing
    // The directory exists. Exit::cannot_create, naming the holder, if another process has the lock; never waits.
    explicit DirectoryLock(const std::string& directory);
    explicit operator bool() const { return bool(file_); }
    // Whether the path still leads to the lock, or the system cannot say; false once somebody has moved or removed the
    // directory or the lock.
    bool is_in_place();
    // Runs `action`, which uses the directory. Fails with moved_away() if the lock is then not in place: whatever
    // `action` has or has not found, it may have looked elsewhere. Without a lock it runs `action` and nothing else.
    void guard(const std::function<void()>& action);

private:
    std::string path_;
    FileDescriptor file_;
    bool has_locks_ = true;    // the file system
    double refreshed_ms_ = 0;  // without locks: the last sign of life
};

// Why a run ends whose directory's lock is not in place.
Error moved_away(const std::string& directory);

uint64_t free_bytes(const std::string& path);  // that the calling user may fill, on the path's file system

// Paths that match, sorted by name. Exit::no_input, naming `key` and the pattern, if nothing matches; Exit::permission
// or Exit::io if a directory cannot be listed.
std::vector<std::string> expand_glob(const std::string& pattern, const std::string& key);

// CRC-32C (Castagnoli, reflected polynomial 0x82f63b78, RFC 3720 appendix B.4): crc32c("123456789") is 0xe3069283.
// `count` is below 2^31. With `before`, that of bytes in front of these: of all of them.
uint32_t crc32c(const void* bytes, size_t count, uint32_t before = 0);

// What a file appears to be, from its first bytes and its size: "an HTML page", "a Git LFS pointer", "a zip archive",
// "a gzip file", "text", "an empty file" ... For error messages.
std::string describe_content(std::string_view first_bytes, size_t size);

// ---- JSON -----------------------------------------------------------------------------------------------------------

struct JsonLimits {
    size_t max_depth = 64;
    size_t max_values = 50'000'000;
};

// Parses one JSON text strictly. Errors name `origin` (a file's path, say) with line and column and exit with `code`:
// syntax, a duplicate key, invalid UTF-8, a number outside double's range (1e400), nesting beyond the limit.
nlohmann::ordered_json parse_json(std::string_view text, const std::string& origin, Exit code, JsonLimits limits = {});

// The same, or null if the text is refused. The library's own parser has no limit of depth, and copying or printing
// what it returns can use up the stack.
nlohmann::ordered_json parse_json_or_null(std::string_view text);

// A value for error messages: JSON in plain ASCII, cut where it is long.
std::string printed(const nlohmann::ordered_json& value);

// ---- this process ---------------------------------------------------------------------------------------------------

// A message for a terminal: names of files, arguments and keys may hold control characters, which would move the cursor
// or colour what follows. They are written like \x1b; line ends and tabs stay.
std::string printable_text(std::string_view message);

// What main() returns: the result of `body`, or the exit code of what it threw, printed on stderr after the program's
// name.
int exit_status(const char* program, const std::function<Exit()>& body);

// Exit::io with the reason unless everything that was printed on standard output has been written.
void flush_output();

// From now on SIGINT, SIGTERM, SIGUSR1 and SIGUSR2 only set a flag, which the trainer reads between steps to save and
// exit with Exit::again. (mpirun forwards SIGUSR1 and SIGUSR2 to the ranks, while SIGTERM makes it kill them soon.) A
// SIGINT or SIGTERM after that ends the process at once with 128 + its number, as the shell reports it: nothing was
// committed, and nothing that is committed is open for writing. SIGHUP, SIGPIPE and SIGXFSZ are ignored, so that a
// closed terminal, a closed pipe and a file size limit are errors of a write and do not kill the process. With `notice`
// the first signal says at once on stderr that the run stops after this step, and how it stops now.
void install_signal_handlers(bool notice = false);

// The first signal received that requests a stop, or 0.
int stop_signal();

// How often this process has been continued after a suspension (Ctrl-Z, fg) since install_signal_handlers().
int times_continued();

// Raises this process' limit of open files, as far as the system permits, so that `count` more can be open; never
// lowers it.
void allow_open_files(size_t count);

// Seconds since 1970 (UTC), with their fraction.
double unix_time();

// Milliseconds of a monotonic clock with an arbitrary origin: for differences.
double now_ms();

// Resident bytes of this process, the program and its libraries included; 0 if unknown.
size_t resident_bytes();

// The running program's file, or "" if unknown, and the directory that holds it, or ".".
std::string program_path();
std::string program_directory();

// The path as a user would type it: relative to the current directory where it lies below that, else absolute.
std::string path_to_type(const std::string& path);

// A directory of files that come with the program: PREFIX/share/train_gpt/NAME for a program in PREFIX/bin that
// `make install` put there, else data/NAME of the checkout whose build directory it is in.
std::string data_directory(const std::string& name);

// A file that the program keeps for later runs: ~/.cache/train_gpt/NAME of the user (of the password database, HOME is
// not read) for an installed program, else beside the program. The directory is made if it can be.
std::string cache_file(const std::string& name);

// Random bytes from the system's cryptographic generator, as 2 * `bytes` lower-case hexadecimal digits. Fails with
// Exit::os if the system has none.
std::string random_hex(size_t bytes);
