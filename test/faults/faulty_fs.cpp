// A file system that forwards all operations to a directory, except for injected faults.
//
//   faulty_fs BACKING MOUNT_POINT
//
// Runs in the foreground, unmounts on SIGTERM or SIGINT, and exits when the process that started it does. Writing to
// MOUNT_POINT/.faults replaces the rules (rules.h); reading it returns a line per rule with the number of operations
// that it matched and of faults that it caused. The operations have the names in rules.h: open, read, write, fsync and
// so on; paths begin at the mount point. Nothing is cached, so every read and write of a program arrives here.
#include <dirent.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "test/faults/rules.h"

namespace {

constexpr const char* kControl = "/.faults";

struct FileSystem {
    std::string backing;
    FaultRules rules;

    std::string at(const char* path) const { return backing + path; }
};

FileSystem& file_system() { return *static_cast<FileSystem*>(fuse_get_context()->private_data); }

struct OpenFile {
    int number;  // -1: the control file
    std::string path;
};

OpenFile& opened(fuse_file_info* info) { return *reinterpret_cast<OpenFile*>(info->fh); }

int result_of(int result) { return result == -1 ? -errno : result; }

// Performs the operation `run`, which returns 0 or more, or a negative errno; or the fault of a rule instead.
template <class Run> int faulty(const char* call, const std::string& path, Run run) {
    const Fault fault = file_system().rules.next(call, path);
    if (fault.kind == Fault::hang) sleep_for(fault.seconds);
    return fault.kind == Fault::fail ? -fault.error : run();
}

int get_attributes(const char* path, struct stat* status, fuse_file_info* info) {
    if (path && std::strcmp(path, kControl) == 0) {
        *status = {};
        status->st_mode = S_IFREG | 0600;
        status->st_nlink = 1;
        return 0;
    }
    return faulty("stat", info ? opened(info).path : path, [&] {
        return result_of(info ? ::fstat(opened(info).number, status) : ::lstat(file_system().at(path).c_str(), status));
    });
}

int open_file(const char* path, int flags, mode_t mode, fuse_file_info* info) {
    info->direct_io = 1;
    if (std::strcmp(path, kControl) == 0) {
        info->fh = reinterpret_cast<uint64_t>(new OpenFile{-1, path});
        return 0;
    }
    return faulty("open", path, [&] {
        const int number = ::open(file_system().at(path).c_str(), flags & ~O_NOFOLLOW, mode);
        if (number == -1) return -errno;
        info->fh = reinterpret_cast<uint64_t>(new OpenFile{number, path});
        return 0;
    });
}

int read_file(const char*, char* bytes, size_t count, off_t offset, fuse_file_info* info) {
    const OpenFile& file = opened(info);
    if (file.number == -1) {
        const std::string report = file_system().rules.report();
        if (size_t(offset) >= report.size()) return 0;
        return int(report.copy(bytes, count, size_t(offset)));
    }
    const Fault fault = file_system().rules.next("read", file.path);
    if (fault.kind == Fault::hang) sleep_for(fault.seconds);
    if (fault.kind == Fault::fail) return -fault.error;
    if (fault.kind == Fault::shorten) count = (count + 1) / 2;
    const ssize_t got = ::pread(file.number, bytes, count, offset);
    if (fault.kind == Fault::flip && got > 0) bytes[got / 2] = char(bytes[got / 2] ^ 1);
    return got == -1 ? -errno : int(got);
}

int write_file(const char*, const char* bytes, size_t count, off_t offset, fuse_file_info* info) {
    const OpenFile& file = opened(info);
    if (file.number == -1) {
        try {
            file_system().rules.replace({bytes, count});
        } catch (const std::exception& error) {
            std::fprintf(stderr, "faulty_fs: %s\n", error.what());
            return -EINVAL;
        }
        return int(count);
    }
    const Fault fault = file_system().rules.next("write", file.path);
    if (fault.kind == Fault::hang) sleep_for(fault.seconds);
    if (fault.kind == Fault::fail) return -fault.error;
    if (fault.kind == Fault::shorten) count = (count + 1) / 2;
    const std::string written = fault.kind == Fault::flip ? with_flip(bytes, count) : std::string(bytes, count);
    const ssize_t done = ::pwrite(file.number, written.data(), count, offset);
    return done == -1 ? -errno : int(done);
}

int release_file(const char*, fuse_file_info* info) {
    const std::unique_ptr<OpenFile> file(&opened(info));
    if (file->number != -1) ::close(file->number);
    return 0;
}

int truncate_file(const char* path, off_t size, fuse_file_info* info) {
    if (path && std::strcmp(path, kControl) == 0) return 0;
    return faulty("ftruncate", info ? opened(info).path : path, [&] {
        return result_of(info ? ::ftruncate(opened(info).number, size)
                              : ::truncate(file_system().at(path).c_str(), size));
    });
}

int open_directory(const char* path, fuse_file_info* info) {
    return faulty("opendir", path, [&] {
        const int number = ::open(file_system().at(path).c_str(), O_RDONLY | O_DIRECTORY);
        if (number == -1) return -errno;
        info->fh = reinterpret_cast<uint64_t>(new OpenFile{number, path});
        return 0;
    });
}

int list_directory(const char*, void* buffer, fuse_fill_dir_t fill, off_t, fuse_file_info* info, fuse_readdir_flags) {
    const OpenFile& opened_directory = opened(info);
    return faulty("readdir", opened_directory.path, [&] {
        const int number = ::openat(opened_directory.number, ".", O_RDONLY | O_DIRECTORY);
        const std::unique_ptr<DIR, int (*)(DIR*)> directory(::fdopendir(number), ::closedir);
        if (!directory) return -errno;
        while (const dirent* entry = ::readdir(directory.get()))
            fill(buffer, entry->d_name, nullptr, 0, fuse_fill_dir_flags(0));
        return 0;
    });
}

int sync_file(const char*, int, fuse_file_info* info) {
    return faulty("fsync", opened(info).path, [&] { return result_of(::fsync(opened(info).number)); });
}

int rename_file(const char* from, const char* to, unsigned flags) {
    return faulty("rename", from, [&] {
        const FileSystem& system = file_system();
        return result_of(::renameat2(AT_FDCWD, system.at(from).c_str(), AT_FDCWD, system.at(to).c_str(), flags));
    });
}

fuse_operations operations() {
    fuse_operations calls{};
    calls.init = [](fuse_conn_info*, fuse_config* config) -> void* {
        config->use_ino = 1;      // a lock compares inodes
        config->hard_remove = 1;  // open files can be removed
        config->nullpath_ok = 1;  // and then have no path
        config->entry_timeout = config->attr_timeout = config->negative_timeout = 0;
        return fuse_get_context()->private_data;
    };
    calls.getattr = get_attributes;
    calls.open = [](const char* path, fuse_file_info* info) { return open_file(path, info->flags, 0, info); };
    calls.create = [](const char* path, mode_t mode, fuse_file_info* info) {
        return open_file(path, info->flags, mode, info);
    };
    calls.read = read_file;
    calls.write = write_file;
    calls.release = release_file;
    calls.truncate = truncate_file;
    calls.readdir = list_directory;
    calls.opendir = open_directory;
    calls.releasedir = release_file;
    calls.fsync = calls.fsyncdir = sync_file;
    calls.rename = rename_file;
    calls.flush = [](const char*, fuse_file_info* info) {
        return faulty("close", opened(info).path, [] { return 0; });
    };
    calls.fallocate = [](const char*, int mode, off_t offset, off_t size, fuse_file_info* info) {
        return faulty("fallocate", opened(info).path,
                      [&] { return result_of(::fallocate(opened(info).number, mode, offset, size)); });
    };
    calls.mkdir = [](const char* path, mode_t mode) {
        return faulty("mkdir", path, [&] { return result_of(::mkdir(file_system().at(path).c_str(), mode)); });
    };
    calls.rmdir = [](const char* path) {
        return faulty("rmdir", path, [&] { return result_of(::rmdir(file_system().at(path).c_str())); });
    };
    calls.unlink = [](const char* path) {
        return faulty("unlink", path, [&] { return result_of(::unlink(file_system().at(path).c_str())); });
    };
    calls.statfs = [](const char* path, struct statvfs* status) {
        return faulty("statvfs", path, [&] { return result_of(::statvfs(file_system().at(path).c_str(), status)); });
    };
    calls.symlink = [](const char* target, const char* path) {
        return result_of(::symlink(target, file_system().at(path).c_str()));
    };
    calls.readlink = [](const char* path, char* target, size_t size) {
        const ssize_t length = ::readlink(file_system().at(path).c_str(), target, size - 1);
        if (length == -1) return -errno;
        target[length] = '\0';
        return 0;
    };
    calls.chmod = [](const char* path, mode_t mode, fuse_file_info*) {
        return result_of(::chmod(file_system().at(path).c_str(), mode));
    };
    calls.utimens = [](const char* path, const timespec* times, fuse_file_info*) {
        return result_of(::utimensat(AT_FDCWD, file_system().at(path).c_str(), times, AT_SYMLINK_NOFOLLOW));
    };
    return calls;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        std::fprintf(stderr, "usage: faulty_fs BACKING MOUNT_POINT\n");
        return 64;
    }
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    ::umask(0);
    FileSystem system{argv[1], FaultRules()};
    const fuse_operations calls = operations();
    char foreground[] = "-f";
    char* arguments[] = {argv[0], argv[2], foreground, nullptr};
    return fuse_main(3, arguments, &calls, &system);
}
