#include "test/fuzz/inputs.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "runtime/io/files.h"

static void write_whole(int file, std::string_view content) {
    const bool is_written = ::ftruncate(file, off_t(content.size())) == 0 &&
                            ::pwrite(file, content.data(), content.size(), 0) == ssize_t(content.size());
    require(is_written, "fuzz: %zu bytes could not be written", content.size());
}

std::string path_of(std::string_view content) {
    static const FileDescriptor file(::memfd_create("input", MFD_CLOEXEC));
    write_whole(file, content);
    return format("/proc/self/fd/%d", int(file));
}

const TemporaryDirectory& scratch_directory() {
    static const TemporaryDirectory directory;
    return directory;
}

std::string scratch_file(const std::string& name, std::string_view content) {
    const std::string path = scratch_directory() / name;
    const FileDescriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    write_whole(file, content);
    return path;
}

std::vector<std::string_view> parts_of(std::string_view input, size_t count) {
    std::vector<std::string_view> parts(count);
    for (std::string_view& part : parts) {
        const bool is_last = &part == &parts.back();
        part = input.substr(0, is_last ? input.size() : input.find('\0'));
        input.remove_prefix(std::min(input.size(), part.size() + 1));
    }
    return parts;
}
