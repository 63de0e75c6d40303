#include "runtime/io/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <glob.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>
#include <utility>

#include "kernels/check.h"

namespace {

using namespace std::string_view_literals;

constexpr mode_t kFileMode = 0600;
constexpr mode_t kDirectoryMode = 0700;

Exit exit_code_of(int error, Exit otherwise) {
    if (error == EACCES || error == EPERM) return Exit::permission;
    if (error == ENOSPC || error == EDQUOT || error == EIO) return Exit::io;
    return otherwise;
}

Exit input_exit_code_of(int error) {
    return error == ENOENT || error == ENOTDIR ? Exit::no_input : exit_code_of(error, Exit::io);
}

[[noreturn]] void fail_to(const char* action, const std::string& path, int error, Exit code) {
    fail(code, "cannot %s %s: %s", action, path.c_str(), std::strerror(error));
}

// Repeats a system call that a signal interrupted.
template <class Call> auto uninterrupted(Call call) {
    auto result = call();
    while (result == -1 && errno == EINTR) result = call();
    return result;
}

// Closes on every way out.
class Descriptor {
public:
    explicit Descriptor(int number) : number_(number) {}
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() { ::close(number_); }
    operator int() const { return number_; }

private:
    int number_;
};

const char* kind_of(mode_t mode) {
    if (S_ISDIR(mode)) return "a directory";
    if (S_ISFIFO(mode)) return "a FIFO";
    if (S_ISSOCK(mode)) return "a socket";
    return "a device";
}

size_t size_of_regular_file(int descriptor, const std::string& path, Exit code_otherwise) {
    struct stat status;
    if (fstat(descriptor, &status) != 0) fail_to("read the size of", path, errno, Exit::io);
    if (!S_ISREG(status.st_mode)) fail(code_otherwise, "%s is %s, not a file", path.c_str(), kind_of(status.st_mode));
    return size_t(status.st_size);
}

// O_NONBLOCK keeps the open() of a FIFO from waiting for a writer; it means nothing for the regular files that are let
// in.
int open_for_reading(const std::string& path) {
    int descriptor = uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); });
    if (descriptor == -1) fail_to("open", path, errno, input_exit_code_of(errno));
    return descriptor;
}

int open_for_writing(const std::string& path, int flags) {
    int all_flags = O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | flags;
    int descriptor = uninterrupted([&] { return ::open(path.c_str(), all_flags, kFileMode); });
    if (descriptor == -1) fail_to("create", path, errno, exit_code_of(errno, Exit::cannot_create));
    return descriptor;
}

// The blocks only, not the size, so that a file is never longer than what was written.
int reserve(int descriptor, size_t bytes) {
    if (uninterrupted([&] { return ::fallocate(descriptor, FALLOC_FL_KEEP_SIZE, 0, off_t(bytes)); }) == 0) return 0;
    bool is_not_offered = errno == EOPNOTSUPP || errno == ENOSYS;
    return is_not_offered ? 0 : errno;
}

std::string directory_of(const std::string& path) {
    std::string parent = std::filesystem::path(path).parent_path();
    return parent.empty() ? "." : parent;
}

// A name beside `path` that nobody else takes, since a predictable one could be waiting there as a trap.
std::string temporary_name(const std::string& path) {
    std::random_device random;
    return format("%s.tmp.%08x%08x", path.c_str(), random(), random());
}

std::string describe_text(std::string_view bytes) {
    bool is_text = std::all_of(bytes.begin(), bytes.end(), [](unsigned char c) { return c >= ' ' || isspace(c); });
    if (!is_text) return "binary data of an unknown kind";
    size_t begin = std::min(bytes.find_first_not_of(" \t\r\n\xef\xbb\xbf"), bytes.size());
    std::string start(bytes.substr(begin, 16));
    std::transform(start.begin(), start.end(), start.begin(), [](unsigned char c) { return char(tolower(c)); });
    if (start.starts_with("<!doctype html") || start.starts_with("<html")) return "an HTML page";
    if (start.starts_with("<?xml")) return "an XML document";
    if (start.starts_with('{') || start.starts_with('[')) return "a JSON text";
    return "plain text";
}

}  // namespace

MappedFile::MappedFile(const std::string& path) : path_(path) {
    Descriptor descriptor(open_for_reading(path));
    size_ = size_of_regular_file(descriptor, path, Exit::no_input);
    if (size_ == 0) return;  // nothing to map, and mmap refuses
    void* memory = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (memory == MAP_FAILED) fail_to("map", path, errno, errno == ENOMEM ? Exit::os : Exit::io);
    data_ = static_cast<const std::byte*>(memory);
}

MappedFile::MappedFile(MappedFile&& other) noexcept { *this = std::move(other); }

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
    std::swap(path_, other.path_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

MappedFile::~MappedFile() {
    if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

OutputFile::OutputFile(const std::string& path, size_t reserve_bytes)
    : path_(path), descriptor_(open_for_writing(path, O_EXCL)) {
    int error = reserve_bytes ? reserve(descriptor_, reserve_bytes) : 0;
    if (error == 0) return;
    ::close(descriptor_);
    ::unlink(path.c_str());
    fail(exit_code_of(error, Exit::io), "cannot reserve %zu bytes for %s: %s", reserve_bytes, path.c_str(),
         std::strerror(error));
}

OutputFile OutputFile::open_to_append(const std::string& path) {
    OutputFile file;
    file.path_ = path;
    file.descriptor_ = open_for_writing(path, O_APPEND);
    file.end_ = size_of_regular_file(file.descriptor_, path, Exit::cannot_create);
    return file;
}

OutputFile::OutputFile(OutputFile&& other) noexcept { *this = std::move(other); }

OutputFile& OutputFile::operator=(OutputFile&& other) noexcept {
    std::swap(path_, other.path_);
    std::swap(descriptor_, other.descriptor_);
    std::swap(end_, other.end_);
    return *this;
}

OutputFile::~OutputFile() {
    if (descriptor_ != -1) ::close(descriptor_);
}

void OutputFile::write_at(size_t offset, const void* bytes, size_t count) {
    require(descriptor_ != -1, "%s is written to after it was closed", path_.c_str());
    const char* rest = static_cast<const char*>(bytes);
    size_t end = offset + count;
    while (offset < end) {
        ssize_t written = uninterrupted([&] { return ::pwrite(descriptor_, rest, end - offset, off_t(offset)); });
        if (written <= 0) {
            int error = written == 0 ? ENOSPC : errno;
            fail(exit_code_of(error, Exit::io), "cannot write %zu bytes at offset %zu of %s: %s", end - offset, offset,
                 path_.c_str(), std::strerror(error));
        }
        rest += written;
        offset += size_t(written);
    }
    end_ = std::max(end_, end);
}

void OutputFile::append(const void* bytes, size_t count) { write_at(end_, bytes, count); }

// After a failed fsync the system may drop the dirty pages and let a second fsync succeed, so there is no second one.
void OutputFile::sync() {
    require(descriptor_ != -1, "%s is synced after it was closed", path_.c_str());
    if (::fsync(descriptor_) == 0) return;
    int error = errno;
    ::close(std::exchange(descriptor_, -1));
    fail_to("bring to the disk", path_, error, exit_code_of(error, Exit::io));
}

void OutputFile::close() {
    if (descriptor_ == -1) return;
    // On Linux the descriptor is gone even after EINTR, and a second close() could hit somebody else's.
    if (::close(std::exchange(descriptor_, -1)) != 0 && errno != EINTR)
        fail_to("close", path_, errno, exit_code_of(errno, Exit::io));
}

std::string read_file(const std::string& path, size_t max_bytes) {
    Descriptor descriptor(open_for_reading(path));
    size_t size = size_of_regular_file(descriptor, path, Exit::no_input);
    if (size > max_bytes)
        fail(Exit::data, "%s has %zu bytes, at most %zu are allowed here", path.c_str(), size, max_bytes);
    std::string content(size, '\0');
    size_t got = 0;
    while (got < size) {
        ssize_t count = uninterrupted([&] { return ::read(descriptor, content.data() + got, size - got); });
        if (count < 0) fail_to("read", path, errno, exit_code_of(errno, Exit::io));
        if (count == 0)
            fail(Exit::io, "%s became shorter while it was read: %zu of %zu bytes", path.c_str(), got, size);
        got += size_t(count);
    }
    return content;
}

void write_file_atomically(const std::string& path, std::string_view content) {
    std::string temporary = temporary_name(path);
    try {
        OutputFile file(temporary, content.size());
        file.append(content);
        file.sync();
        file.close();
        rename_path(temporary, path);
    } catch (const Error&) {
        ::unlink(temporary.c_str());
        throw;
    }
    sync_directory(directory_of(path));
}

void sync_directory(const std::string& path) {
    int number = uninterrupted([&] { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
    if (number == -1) fail_to("open the directory", path, errno, input_exit_code_of(errno));
    Descriptor descriptor(number);
    // Some network file systems do not offer it for directories and say so with EINVAL.
    if (::fsync(descriptor) != 0 && errno != EINVAL)
        fail_to("bring to the disk the directory", path, errno, exit_code_of(errno, Exit::io));
}

void make_directories(const std::string& path) {
    for (size_t end = 0; end != std::string::npos;) {
        end = path.find('/', end + 1);
        std::string prefix = path.substr(0, end);
        if (::mkdir(prefix.c_str(), kDirectoryMode) == 0) continue;
        int error = errno;
        if (!directory_exists(prefix))
            fail_to("create the directory", prefix, error, exit_code_of(error, Exit::cannot_create));
    }
}

bool file_exists(const std::string& path) {
    struct stat status;
    return ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
}

bool directory_exists(const std::string& path) {
    struct stat status;
    return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

std::vector<std::string> list_directory(const std::string& path) {
    std::error_code error;
    std::vector<std::string> names;
    std::filesystem::directory_iterator entry(path, error), end;
    for (; !error && entry != end; entry.increment(error)) names.push_back(entry->path().filename());
    if (error) fail_to("list the directory", path, error.value(), input_exit_code_of(error.value()));
    std::sort(names.begin(), names.end());
    return names;
}

void rename_path(const std::string& from, const std::string& to) {
    if (::rename(from.c_str(), to.c_str()) == 0) return;
    int error = errno;
    fail(exit_code_of(error, Exit::cannot_create), "cannot rename %s to %s: %s", from.c_str(), to.c_str(),
         std::strerror(error));
}

void remove_tree(const std::string& path) {
    std::error_code error;
    std::filesystem::remove_all(path, error);
    if (error) fail_to("remove", path, error.value(), exit_code_of(error.value(), Exit::io));
}

uint64_t free_bytes(const std::string& path) {
    struct statvfs status;
    if (::statvfs(path.c_str(), &status) != 0)
        fail_to("ask for the free space at", path, errno, input_exit_code_of(errno));
    return uint64_t(status.f_bavail) * status.f_frsize;
}

std::vector<std::string> expand_glob(const std::string& pattern, const std::string& key) {
    glob_t found{};
    int result = ::glob(pattern.c_str(), GLOB_NOSORT, nullptr, &found);
    std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    ::globfree(&found);
    if (result == GLOB_NOSPACE) fail(Exit::os, "%s: no memory to expand %s", key.c_str(), pattern.c_str());
    if (paths.empty()) fail(Exit::no_input, "%s: no file matches \"%s\"", key.c_str(), pattern.c_str());
    std::sort(paths.begin(), paths.end());
    return paths;
}

std::string describe_content(std::string_view first_bytes, size_t size) {
    struct Signature {
        std::string_view bytes;
        const char* meaning;
    };
    static constexpr Signature kSignatures[] = {
        {"version https://git-lfs.github.com/spec"sv, "a Git LFS pointer, not the file it points to"},
        {"PK\3\4"sv, "a zip archive (PyTorch's .pt files are zip archives too)"},
        {"\x1f\x8b"sv, "a gzip file"},
        {"\3757zXZ\0"sv, "an xz file"},
        {"\x28\xb5\x2f\xfd"sv, "a zstd file"},
        {"BZh"sv, "a bzip2 file"},
        {"\x93NUMPY"sv, "a NumPy array"},
        {"\211HDF\r\n"sv, "an HDF5 file"},
        {"PAR1"sv, "a Parquet file"},
        {"%PDF"sv, "a PDF document"},
        {"\177ELF"sv, "a program"},
        {"\x80\2"sv, "a Python pickle"},
        {"\x80\4"sv, "a Python pickle"},
        {"BIN.TOK\n"sv, "an LLMQ token file"},
    };
    struct Magic {
        uint32_t number;  // the first word of llm.c's files
        const char* meaning;
    };
    static constexpr Magic kMagics[] = {
        {20240520, "an llm.c token shard (GPT-2)"}, {20240801, "an llm.c token shard (Llama 3)"},
        {20240522, "an llm.c evaluation file"},     {20240326, "an llm.c model"},
        {20240327, "an llm.c debug state"},         {20240328, "an llm.c tokenizer"},
        {20240527, "an llm.c optimizer state"},     {20240803, "an llm.c model (Llama 3)"},
        {278895051, "a NeMo token shard"},
    };
    if (size == 0) return "an empty file";
    for (const Signature& signature : kSignatures)
        if (first_bytes.starts_with(signature.bytes)) return signature.meaning;
    for (const Magic& magic : kMagics)
        if (first_bytes.size() >= 4 && std::memcmp(first_bytes.data(), &magic.number, 4) == 0) return magic.meaning;
    if (first_bytes.size() >= 10 && first_bytes[7] == '\0' && first_bytes.substr(8).starts_with("{\""))
        return "a safetensors file";
    if (first_bytes.find_first_not_of('\0') == std::string_view::npos) return "zero bytes";
    return describe_text(first_bytes);
}
