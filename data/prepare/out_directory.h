// The output directory of prepare: locked, written to a temporary folder, then moved into place.
#pragma once

#include <nlohmann/json.hpp>

#include "runtime/io/lock.h"

// OUT/prepare.unfinished/ holds plan.json (options and state of the inputs), progress.json, tokenizer.json and the
// shards until all files are complete. If prepare is killed, the folder remains, and the next prepare with the same
// plan resumes. After an error, the destructor removes the folder, and also OUT if the constructor created it.
class OutDirectory {
public:
    using Json = nlohmann::ordered_json;

    // Creates and locks OUT. Fails with Exit::cannot_create, without changes, if another process uses OUT, if OUT holds
    // a data set and `force` is not set, or if it holds other files.
    OutDirectory(const std::string& path, bool force);
    OutDirectory(const OutDirectory&) = delete;
    ~OutDirectory();

    const std::string& unfinished() const { return unfinished_; }
    std::string unfinished(const std::string& name) const { return unfinished_ + "/" + name; }

    // Resumes the unfinished folder if its plan equals `plan`; otherwise creates a new folder. A null plan is never
    // resumed. Fails with Exit::cannot_create if the folder has another plan and `force` is not set.
    void begin(const Json& plan);

    // Returns the last saved progress, possibly from an earlier process; an empty object if there is none.
    Json progress() const { return progress_; }
    void save_progress(const Json& progress);
    void keep_unfinished() { keeps_ = true; }  // keeps the folder after an error, to resume later

    // Moves the data set into place. `dataset` is the content of dataset.json, `shards` the names that it lists.
    // dataset.json is removed first and written last: a data set without it is incomplete. Can be repeated after an
    // interruption.
    void move_into_place(const std::string& dataset, const std::vector<std::string>& shards);

    // Removes the shards in the unfinished folder that are not in `kept`.
    void remove_other_shards(const std::vector<std::string>& kept) const;

private:
    void check_content(bool force) const;

    std::string path_, unfinished_;
    bool is_new_, force_, keeps_ = false;
    DirectoryLock lock_;
    Json progress_ = Json::object();
};
