#include "data/text/input_paths.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "runtime/io/files.h"

namespace fs = std::filesystem;

static bool is_text_name(fs::path name) {
    static constexpr const char* kSuffixes[] = {".txt", ".text", ".md", ".jsonl", ".ndjson", ".json", ".parquet"};
    if (name.extension() == ".gz" || name.extension() == ".zst") name = name.stem();
    return std::ranges::find(kSuffixes, name.extension()) != std::end(kSuffixes);
}

static void expand_directory(const std::string& path, const std::string& out, InputPaths& found) {
    std::vector<std::string> files, others;
    std::error_code error;
    fs::recursive_directory_iterator entry(path, error), end;
    for (; !error && entry != end; entry.increment(error)) {
        const bool is_directory = entry->is_directory(error);
        std::error_code ignored;
        if (entry->path().filename().string().starts_with('.') ||
            (is_directory && fs::equivalent(entry->path(), out, ignored))) {
            entry.disable_recursion_pending();
        } else if (!is_directory) {
            (is_text_name(entry->path()) ? files : others).push_back(entry->path());
        }
        error.clear();
    }
    if (error)
        fail(exit_code_of(error.value(), Exit::no_input), "cannot list the directory %s: %s", path, error.message());
    if (files.empty())
        fail(Exit::no_input, "%s has no text files (.txt, .md, .jsonl, .json, .parquet; also with .gz or .zst)", path);
    std::ranges::sort(files);
    std::ranges::sort(others);
    if (!others.empty())
        found.warnings.push_back(format("%s: reading %zu files; skipping %zu files of other types, for example %s",
                                        path.c_str(), files.size(), others.size(), others.front().c_str()));
    found.files.insert(found.files.end(), files.begin(), files.end());
}

InputPaths expand_inputs(const std::vector<std::string>& paths, const std::string& out) {
    InputPaths found;
    for (const std::string& path : paths) {
        if (directory_exists(path))
            expand_directory(path, out, found);
        else
            found.files.push_back(path);
    }
    if (std::ranges::count(paths, "-") > 1) fail(Exit::usage, "prepare: standard input (-) can be read only once");
    return found;
}

void copy_stdin(const std::string& path, const std::function<void(uint64_t bytes)>& advance) {
    if (::isatty(STDIN_FILENO)) fail(Exit::no_input, "prepare: standard input (-) is a terminal");
    OutputFile file(path);
    std::string buffer(size_t(1) << 20, '\0');
    for (;;) {
        const ssize_t count = ::read(STDIN_FILENO, buffer.data(), buffer.size());
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) fail(Exit::io, "cannot read standard input: %s", std::strerror(errno));
        if (count == 0) break;
        file.append(buffer.data(), size_t(count));
        advance(uint64_t(count));
    }
    file.close();
}
