#include "runtime/io/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "runtime/io/crc32c.h"
#include "runtime/io/process.h"

namespace {

namespace fs = std::filesystem;

// The user's umask restricts these modes.
constexpr mode_t kFileMode = 0666;
constexpr mode_t kDirectoryMode = 0777;

[[noreturn]] void fail_to(const std::string& action, const std::string& path, Exit otherwise, int error = errno) {
    fail(exit_code_of(error, otherwise), "cannot %s %s: %s", action, path, std::strerror(error));
}

// Repeats a system call that a signal interrupted.
template <class Call> auto uninterrupted(Call call) {
    auto result = call();
    while (result == -1 && errno == EINTR) result = call();
    return result;
}

// The type of a file or of the link itself. Returns `not_found` only if the path certainly does not exist.
fs::file_type type_of(const std::string& path, bool follows_links = true) {
    std::error_code error;
    const fs::file_type type = (follows_links ? fs::status(path, error) : fs::symlink_status(path, error)).type();
    if (error == std::errc::filename_too_long) return fs::file_type::not_found;
    if (error && type != fs::file_type::not_found) fail_to("examine", path, Exit::io, error.value());
    return type;
}

const char* kind_of(mode_t mode) {
    if (S_ISDIR(mode)) return "a directory";
    if (S_ISFIFO(mode)) return "a FIFO";
    if (S_ISSOCK(mode)) return "a socket";
    return "a device";
}

struct stat status_of(int descriptor, const std::string& path) {
    struct stat status;
    if (::fstat(descriptor, &status) != 0) fail_to("read the size of", path, Exit::io);
    return status;
}

int64_t modified_ns(const struct stat& status) {
    return int64_t(status.st_mtim.tv_sec) * 1'000'000'000 + status.st_mtim.tv_nsec;
}

size_t size_of_regular_file(int descriptor, const std::string& path, Exit otherwise) {
    const struct stat status = status_of(descriptor, path);
    if (!S_ISREG(status.st_mode)) fail(otherwise, "%s is %s, not a file", path, kind_of(status.st_mode));
    return size_t(status.st_size);
}

// O_NONBLOCK prevents open() from blocking on a FIFO; it has no effect on regular files.
FileDescriptor open_file(const std::string& path, int flags) {
    const int all_flags = flags | O_CLOEXEC | O_NONBLOCK;
    FileDescriptor file(uninterrupted([&] { return ::open(path.c_str(), all_flags, kFileMode); }));
    if (!file && (flags & O_CREAT)) fail_to("create", path, Exit::cannot_create);
    if (!file) fail_to("open", path, Exit::no_input);
    return file;
}

std::string describe_text(std::string_view bytes) {
    if (!std::ranges::all_of(bytes, [](unsigned char c) { return c >= ' ' || isspace(c); }))
        return "unknown binary data";
    size_t begin = std::min(bytes.find_first_not_of(" \t\r\n\xef\xbb\xbf"), bytes.size());
    std::string start(bytes.substr(begin, 16));
    std::ranges::transform(start, start.begin(), [](unsigned char c) { return char(tolower(c)); });
    if (start.starts_with("<!doctype html") || start.starts_with("<html")) return "an HTML page";
    if (start.starts_with("<?xml")) return "an XML document";
    if (start.starts_with('{') || start.starts_with('[')) return "a JSON text";
    return "plain text";
}

}  // namespace

Exit exit_code_of(int error, Exit otherwise) {
    const bool is_missing = error == ENOENT || error == ENOTDIR;
    const bool is_disk = error == ENOSPC || error == EDQUOT || error == EIO || error == EROFS || error == ESTALE;
    if (error == EACCES || error == EPERM) return Exit::permission;
    if (error == ENOMEM) return Exit::os;
    return is_disk || (otherwise == Exit::no_input && !is_missing) ? Exit::io : otherwise;
}

FileDescriptor::~FileDescriptor() {
    const int error = errno;
    if (number_ != -1) ::close(number_);
    errno = error;
}

InputFile::InputFile(const std::string& path)
    : path_(path), descriptor_(std::make_shared<const FileDescriptor>(open_file(path, O_RDONLY))) {
    size_ = size_of_regular_file(*descriptor_, path, Exit::no_input);
    modified_ns_ = modified_ns(status_of(*descriptor_, path));
}

void InputFile::read_at(size_t offset, void* bytes, size_t count) const {
    require(offset <= size_ && count <= size_ - offset, "%s: no bytes [%zu, %zu) of %zu", path_, offset, offset + count,
            size_);
    char* rest = static_cast<char*>(bytes);
    for (const size_t end = offset + count; offset < end;) {
        const ssize_t got = uninterrupted([&] { return ::pread(*descriptor_, rest, end - offset, off_t(offset)); });
        if (got < 0) fail_to(format("read %zu bytes at offset %zu of", end - offset, offset), path_, Exit::io);
        if (got == 0)
            fail(Exit::data, "%s ends at offset %zu, but it had %zu bytes when it was opened", path_, offset, size_);
        rest += got;
        offset += size_t(got);
    }
}

void InputFile::forget_cached() const { ::posix_fadvise(*descriptor_, 0, 0, POSIX_FADV_DONTNEED); }

uint32_t InputFile::read_checked(size_t offset, void* bytes, size_t count, uint32_t expected) const {
    read_at(offset, bytes, count);
    const uint32_t first = crc32c(bytes, count);
    if (first == expected) return first;
    forget_cached();
    read_at(offset, bytes, count);
    const uint32_t second = crc32c(bytes, count);
    if (second == expected)
        std::fprintf(stderr,
                     "train_gpt: warning: %s: the %zu bytes at offset %zu failed their CRC32C (%08x) and passed when "
                     "read again (%08x): check this machine's memory and disk\n",
                     printable_text(path_).c_str(), count, offset, first, second);
    return second;
}

void InputFile::check_unchanged() const {
    const struct stat now = status_of(*descriptor_, path_);
    if (size_t(now.st_size) != size_)
        fail(Exit::data, "%s has changed while it was in use: it has %zu bytes, it had %zu", path_, size_t(now.st_size),
             size_);
    if (modified_ns(now) != modified_ns_) fail(Exit::data, "%s has been written to while it was in use", path_);
    struct stat named;
    if (::stat(path_.c_str(), &named) != 0) fail_to("find", path_, Exit::no_input);
    if (named.st_dev != now.st_dev || named.st_ino != now.st_ino)
        fail(Exit::data, "%s has been replaced by another file while it was in use", path_);
}

OutputFile::OutputFile(const std::string& path, size_t reserve_bytes)
    : path_(path), descriptor_(open_file(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW)) {
    if (reserve_bytes == 0) return;
    // Reserve blocks without changing the size, so that the file is never longer than the data written.
    auto reserve = [&] { return ::fallocate(descriptor_, FALLOC_FL_KEEP_SIZE, 0, off_t(reserve_bytes)); };
    if (uninterrupted(reserve) == 0 || errno == EOPNOTSUPP || errno == ENOSYS) return;
    const int error = errno;
    ::unlink(path.c_str());
    fail_to(format("reserve %zu bytes for", reserve_bytes), path, Exit::io, error);
}

OutputFile OutputFile::open_to_continue(const std::string& path, size_t size) {
    OutputFile file;
    file.path_ = path;
    file.descriptor_ = open_file(path, O_WRONLY | O_NOFOLLOW);
    const size_t found = size_of_regular_file(file.descriptor_, path, Exit::data);
    if (found < size) fail(Exit::data, "%s has %zu bytes, but %zu were written", path, found, size);
    if (::ftruncate(file.descriptor_, off_t(size)) != 0) fail_to(format("truncate to %zu bytes", size), path, Exit::io);
    file.end_ = size;
    return file;
}

void OutputFile::write_at(size_t offset, const void* bytes, size_t count) {
    require(bool(descriptor_), "write to %s after it was closed", path_);
    const char* rest = static_cast<const char*>(bytes);
    const size_t end = offset + count;
    while (offset < end) {
        ssize_t written = uninterrupted([&] { return ::pwrite(descriptor_, rest, end - offset, off_t(offset)); });
        if (written <= 0)
            fail_to(format("write %zu bytes at offset %zu of", end - offset, offset), path_, Exit::io,
                    written == 0 ? ENOSPC : errno);
        rest += written;
        offset += size_t(written);
    }
    end_ = std::max(end_, end);
}

// Never retries: after a failed fsync the system may drop the dirty pages, and a second fsync would succeed.
void OutputFile::sync() {
    if (::fsync(descriptor_) == 0) return;
    descriptor_ = {};
    fail_to("sync", path_, Exit::io);
}

void OutputFile::close() {
    if (!descriptor_) return;
    // On Linux the descriptor is closed even after EINTR; a second close() could close another file.
    if (::close(descriptor_.release()) != 0 && errno != EINTR) fail_to("close", path_, Exit::io);
}

std::string read_file(const std::string& path, size_t max_bytes) {
    const FileDescriptor file = open_file(path, O_RDONLY);
    const size_t size = size_of_regular_file(file, path, Exit::no_input);
    if (size > max_bytes) fail(Exit::data, "%s has %zu bytes, at most %zu are allowed", path, size, max_bytes);
    std::string content(size, '\0');
    for (size_t got = 0; got < size;) {
        ssize_t count = uninterrupted([&] { return ::read(file, content.data() + got, size - got); });
        if (count < 0) fail_to("read", path, Exit::io);
        if (count == 0) fail(Exit::io, "%s was truncated while it was read: %zu of %zu bytes", path, got, size);
        got += size_t(count);
    }
    return content;
}

void write_file_atomically(const std::string& path, size_t bytes, const std::function<void(OutputFile&)>& write) {
    // The name is random, since an attacker could create a file with a predictable name.
    const std::string temporary = path + ".tmp." + random_hex(8);
    try {
        OutputFile file(temporary, bytes);
        write(file);
        file.sync();
        file.close();
        rename_path(temporary, path);
    } catch (...) {
        ::unlink(temporary.c_str());
        throw;
    }
    sync_directory(directory_of(path));
}

void write_file_atomically(const std::string& path, std::string_view content) {
    write_file_atomically(path, content.size(), [&](OutputFile& file) { file.append(content); });
}

void remove_temporary_files(const std::string& directory) {
    constexpr std::string_view kMark = ".tmp.";
    for (const std::string& name : list_directory(directory)) {
        const size_t mark = name.rfind(kMark);
        if (mark == std::string::npos || mark == 0) continue;
        const std::string random = name.substr(mark + kMark.size());
        if (random.size() == 16 && random.find_first_not_of("0123456789abcdef") == std::string::npos)
            remove_tree(directory + "/" + name);
    }
}

void sync_directory(const std::string& path) {
    const FileDescriptor directory = open_file(path, O_RDONLY | O_DIRECTORY);
    // Some network file systems do not support this for directories and return EINVAL.
    if (::fsync(directory) != 0 && errno != EINVAL) fail_to("sync the directory", path, Exit::io);
}

// Unlike std::filesystem::create_directories(), names the directory that could not be created.
void make_directories(const std::string& path) {
    for (size_t end = 0; end != std::string::npos;) {
        end = path.find('/', end + 1);
        make_directory(path.substr(0, end));
    }
}

void make_directory(const std::string& path) {
    const int error = ::mkdir(path.c_str(), kDirectoryMode) == 0 ? 0 : errno;
    if (error != 0 && type_of(path) != fs::file_type::directory)
        fail_to("create the directory", path, Exit::cannot_create, error);
}

bool file_exists(const std::string& path) { return type_of(path) == fs::file_type::regular; }

bool directory_exists(const std::string& path) { return type_of(path) == fs::file_type::directory; }

std::vector<std::string> list_directory(const std::string& path) {
    // std::filesystem::directory_iterator ends the process if memory runs out.
    FileDescriptor file(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    const std::unique_ptr<DIR, void (*)(DIR*)> directory(file ? ::fdopendir(file) : nullptr,
                                                         [](DIR* open) { ::closedir(open); });
    if (!directory) fail_to("list the directory", path, Exit::no_input);
    file.release();  // `directory` closes it
    std::vector<std::string> names;
    errno = 0;
    while (const dirent* entry = ::readdir(directory.get())) {
        names.push_back(entry->d_name);
        errno = 0;
    }
    if (errno != 0) fail_to("list the directory", path, Exit::no_input);
    std::erase_if(names, [](const std::string& name) { return name == "." || name == ".."; });
    std::sort(names.begin(), names.end());
    return names;
}

std::string directory_of(const std::string& path) {
    const std::string parent = fs::path(path).parent_path();
    return parent.empty() ? "." : parent;
}

void rename_path(const std::string& from, const std::string& to) {
    std::error_code error;
    fs::rename(from, to, error);
    if (error) fail_to("rename", from + " to " + to, Exit::cannot_create, error.value());
}

void remove_tree(const std::string& path) {
    std::error_code error;
    fs::remove_all(path, error);
    if (error) fail_to("remove", path, Exit::io, error.value());
}

uint64_t free_bytes(const std::string& path) {
    std::error_code error;
    const fs::space_info space = fs::space(path, error);
    if (error) fail_to("determine the free space at", path, Exit::no_input, error.value());
    return space.available;
}

// Not glob(), which silently skips directories that it cannot list.
std::vector<std::string> expand_glob(const std::string& pattern, const std::string& key) {
    std::vector<std::string> paths{""};
    try {
        for (const fs::path& part : fs::path(pattern)) {
            const bool is_name = part.string().find_first_of("*?[\\") == std::string::npos;
            for (const fs::path parent : std::exchange(paths, {})) {
                const std::string directory = parent.empty() ? "." : parent;
                if (is_name) paths.push_back(parent / part);
                if (is_name || !directory_exists(directory)) continue;
                for (const fs::path name : list_directory(directory))
                    if (::fnmatch(part.c_str(), name.c_str(), FNM_PERIOD) == 0) paths.push_back(parent / name);
            }
        }
        std::erase_if(paths, [](const auto& path) { return type_of(path, false) == fs::file_type::not_found; });
    } catch (const Error& error) {
        fail(error.code, "%s: %s", key, error.what());
    }
    if (paths.empty()) fail(Exit::no_input, "%s: no file matches \"%s\"", key, pattern);
    std::ranges::sort(paths);
    return paths;
}

std::string describe_content(std::string_view first_bytes, size_t size) {
    static constexpr std::pair<std::string_view, const char*> kSignatures[] = {
        {"version https://git-lfs.github.com/spec", "a Git LFS pointer, not the file it points to"},
        {"PK\3\4", "a zip archive"},
        {"\x1f\x8b", "a gzip file"},
        {"\3757zXZ", "an xz file"},
        {"\x28\xb5\x2f\xfd", "a zstd file"},
        {"BZh", "a bzip2 file"},
        {"\x93NUMPY", "a NumPy array"},
        {"\211HDF\r\n", "an HDF5 file"},
        {"PAR1", "a Parquet file"},
        {"%PDF", "a PDF document"},
        {"\177ELF", "a program"},
        {"\x80\2", "a Python pickle"},
        {"\x80\4", "a Python pickle"},
        {"BIN.TOK\n", "an LLMQ token file"},
    };
    // The first 32-bit word of llm.c's files.
    static constexpr std::pair<uint32_t, const char*> kMagics[] = {
        {20240520, "an llm.c token shard (GPT-2)"}, {20240801, "an llm.c token shard (Llama 3)"},
        {20240522, "an llm.c evaluation file"},     {20240326, "an llm.c model"},
        {20240327, "an llm.c debug state"},         {20240328, "an llm.c tokenizer"},
        {20240527, "an llm.c optimizer state"},     {20240803, "an llm.c model (Llama 3)"},
        {278895051, "a NeMo token shard"},
    };
    if (size == 0) return "an empty file";
    if (first_bytes.starts_with("PK\3\4") && first_bytes.find("data.pkl") != std::string_view::npos)
        return "a PyTorch file";
    for (const auto& [bytes, meaning] : kSignatures)
        if (first_bytes.starts_with(bytes)) return meaning;
    for (const auto& [number, meaning] : kMagics)
        if (first_bytes.size() >= 4 && std::memcmp(first_bytes.data(), &number, 4) == 0) return meaning;
    if (first_bytes.size() >= 10 && first_bytes[7] == '\0' && first_bytes.substr(8).starts_with("{\""))
        return "a safetensors file";
    if (first_bytes.find_first_not_of('\0') == std::string_view::npos) return "zero bytes";
    return describe_text(first_bytes);
}
