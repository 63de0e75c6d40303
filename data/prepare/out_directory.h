// The directory that prepare writes: locked, written in a folder of its own, moved into place as a whole.
#pragma once

#include <nlohmann/json.hpp>

#include "runtime/io/io.h"

// OUT/prepare.unfinished/ holds everything until it is complete: plan.json (what was asked for, and the state of the
// inputs), progress.json, tokenizer.json and shards. If prepare is killed, the folder stays, and the next one with the
// same plan continues. After an error it goes away with this object, and so does OUT if it was created here.
class OutDirectory {
public:
    using Json = nlohmann::ordered_json;

    // Creates and locks OUT. Fails with Exit::cannot_create, and leaves everything as it was, if another process is
    // writing it, if it holds a data set or the unfinished folder of another plan and `force` is not set, or if it
    // holds anything else.
    OutDirectory(const std::string& path, bool force);
    OutDirectory(const OutDirectory&) = delete;
    ~OutDirectory();

    const std::string& unfinished() const { return unfinished_; }
    std::string unfinished(const std::string& name) const { return unfinished_ + "/" + name; }

    // Takes up the unfinished folder if it has the same plan; otherwise begins a new one. Not called: there is none.
    // A plan that is null is never taken up again.
    void begin(const Json& plan);

    // As saved last, also by the process before; an empty object if there is none.
    Json progress() const { return progress_; }
    void save_progress(const Json& progress);
    void keep_unfinished() { keeps_ = true; }  // also after an error, to be continued

    // `dataset` is the content of dataset.json, and `shards` are the names it lists. dataset.json is removed first and
    // written last: a data set without it is incomplete. Can be repeated after it was interrupted.
    void move_into_place(const std::string& dataset, const std::vector<std::string>& shards);

    // Removes the shards in the unfinished folder that are not named.
    void remove_other_shards(const std::vector<std::string>& names) const;

private:
    void check_content(bool force) const;

    std::string path_, unfinished_;
    bool is_new_, force_, keeps_ = false;
    DirectoryLock lock_;
    Json progress_ = Json::object();
};
