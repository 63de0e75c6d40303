#include "data/prepare/out_directory.h"

#include <algorithm>
#include <filesystem>

#include "runtime/io/files.h"
#include "runtime/io/json.h"

static const char* const kUnfinished = "/prepare.unfinished";
static const char* const kDatasetFile = "/dataset.json";

static bool is_shard(const std::string& name) {
    const size_t begin = name.starts_with("train_") ? 6 : name.starts_with("val_") ? 4 : 0;  // of 6 digits
    return begin > 0 && name.size() == begin + 10 && name.ends_with(".bin") &&
           name.find_first_not_of("0123456789", begin) == begin + 6;
}

static void remove_shards(const std::string& directory, const std::vector<std::string>& kept) {
    for (const std::string& name : list_directory(directory))
        if (is_shard(name) && std::ranges::count(kept, name) == 0) remove_tree(directory + "/" + name);
}

OutDirectory::OutDirectory(const std::string& path, bool force)
    : path_(path), unfinished_(path + kUnfinished), is_new_(!directory_exists(path)), force_(force) {
    check_content(force);
    make_directories(path);
    lock_ = DirectoryLock(path);
    check_content(force);  // again: another process may have held the lock until now
    remove_temporary_files(path);
}

void OutDirectory::check_content(bool force) const {
    if (!directory_exists(path_)) return;
    if (file_exists(path_ + kDatasetFile)) {
        if (force) return;
        fail(Exit::cannot_create, "%s holds a data set already; --force replaces it", path_);
    }
    std::vector<std::string> names = list_directory(path_);
    std::erase(names, kLockName);
    if (names.empty() || directory_exists(unfinished_)) return;
    fail(Exit::cannot_create,
         "%s is not the output of an earlier prepare: it has %zu files (for example %s), but no dataset.json; choose "
         "another directory",
         path_, names.size(), names.front());
}

OutDirectory::~OutDirectory() {
    std::error_code ignored;
    if (!keeps_) std::filesystem::remove_all(unfinished_, ignored);
    std::filesystem::remove(path_ + "/" + kLockName, ignored);
    if (is_new_) std::filesystem::remove(path_, ignored);  // fails unless it is empty
}

void OutDirectory::begin(const Json& plan) {
    auto read = [&](const std::string& name) {
        const std::string path = unfinished(name);
        return file_exists(path) ? parse_json(read_file(path), path, Exit::data) : Json();
    };
    const Json before = read("plan.json");
    // Paths may not be valid UTF-8, so the serialized plans are compared.
    const auto written = [](const Json& json) { return json.dump(2, ' ', true, Json::error_handler_t::replace); };
    if (!before.is_null() && written(before) == written(plan)) {
        if (const Json saved = read("progress.json"); !saved.is_null()) progress_ = saved;
        // A complete folder without dataset.json has already been moved into place.
        const bool is_over = progress_.value("complete", false) && !file_exists(unfinished_ + kDatasetFile);
        if (!is_over) return;
    } else if (!before.is_null() && !force_) {
        keeps_ = true;
        fail(
            Exit::cannot_create,
            "%s holds the unfinished work of another prepare (other options or changed inputs); repeat that command to "
            "resume it, or pass --force to discard it",
            path_);
    }
    progress_ = Json::object();
    remove_tree(unfinished_);
    make_directories(unfinished_);
    if (!plan.is_null()) write_file_atomically(unfinished("plan.json"), written(plan));
}

void OutDirectory::save_progress(const Json& progress) {
    if (&progress != &progress_) progress_ = progress;
    write_file_atomically(unfinished("progress.json"), progress.dump(2, ' ', true));
}

void OutDirectory::remove_other_shards(const std::vector<std::string>& kept) const { remove_shards(unfinished_, kept); }

void OutDirectory::move_into_place(const std::string& dataset, const std::vector<std::string>& shards) {
    write_file_atomically(unfinished_ + kDatasetFile, dataset);
    if (!progress_.empty()) {
        progress_["complete"] = true;
        save_progress(progress_);
    }
    remove_tree(path_ + kDatasetFile);
    sync_directory(path_);
    remove_shards(path_, shards);
    for (const std::string& name : list_directory(unfinished_))
        if (is_shard(name) || name == "tokenizer.json" || name == "tokenizer_config.json")
            rename_path(unfinished(name), path_ + "/" + name);
    sync_directory(path_);
    rename_path(unfinished_ + kDatasetFile, path_ + kDatasetFile);
    sync_directory(path_);
    remove_tree(unfinished_);
}
