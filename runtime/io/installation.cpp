// Locates the program's data and cache files, relative to the program.
#include "runtime/io/installation.h"

#include <pwd.h>
#include <unistd.h>

#include "runtime/io/files.h"

namespace {

// From the passwd entry, since environment variables must not change a run's result.
std::string home_directory() {
    passwd entry{}, *found = nullptr;
    std::vector<char> text(1 << 14);
    const int error = ::getpwuid_r(::getuid(), &entry, text.data(), text.size(), &found);
    return error == 0 && found && found->pw_dir ? found->pw_dir : "";
}

std::string installed_directory() {
    const std::string shared = program_directory() + "/../share/train_gpt";
    return directory_exists(shared) ? shared : "";
}

}  // namespace

std::string data_directory(const std::string& name) {
    const std::string installed = installed_directory();
    return (installed.empty() ? program_directory() + "/../data" : installed) + "/" + name;
}

std::string cache_file(const std::string& name) {
    const std::string home = home_directory();
    if (installed_directory().empty() || home.empty()) return program_directory() + "/" + name;
    const std::string directory = home + "/.cache/train_gpt";
    try {
        make_directories(directory);
    } catch (const Error&) {  // then the file cannot be written, as in a read-only directory
    }
    return directory + "/" + name;
}
