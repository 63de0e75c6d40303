// Restores a run's directory as a power cut at any moment may leave it, and searches it for the newest checkpoint.
//
//   crash_states LOG SAID RUN SCRATCH MOST SEED
//
// LOG is inject.cpp's log of a whole run in RUN; SAID is the run's output; states are created in SCRATCH. The model
// is POSIX's, which is stricter than any common file system: data written to a file is durable once the file has been
// synced, a name in a directory once the directory has been synced. After a power cut each operation that was not
// durable may or may not have taken effect, independently of the others; a write may also have left zeros or its first
// half.
//
// In every state find_newest_valid() must find the newest step that the run had reported by then, or a newer one, and
// nothing damaged. Tries MOST different states, spread over all moments, and prints their number. Exits with code 1 at
// the first violation.
#include <fcntl.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <unordered_set>

#include "runtime/checkpoint/checkpoint.h"
#include "runtime/io/files.h"
#include "runtime/io/json.h"
#include "runtime/io/process.h"

namespace {

namespace fs = std::filesystem;
constexpr size_t kNever = SIZE_MAX;

struct Inode {
    bool is_directory = false;
};
using InodePtr = std::shared_ptr<Inode>;

// A change of names in a directory, or of a file's content.
struct Change {
    InodePtr inode;                         // the directory, or the file
    std::map<std::string, InodePtr> names;  // null: the name is gone
    size_t offset = 0;
    std::string bytes;
    size_t time = 0;               // the log line of the change
    size_t durable_from = kNever;  // the log line that makes it durable
    bool is_of_names() const { return inode->is_directory; }
};

struct Report {
    size_t time;
    int64_t step;  // the newest reported step
};

struct History {
    std::vector<Change> changes;
    std::vector<Report> reports;
    size_t end = 0;
    InodePtr root = std::make_shared<Inode>(Inode{true});
};

std::string bytes_of(const std::string& digits) {
    std::string bytes;
    for (size_t i = 0; i + 1 < digits.size(); i += 2) bytes += char(std::stoi(digits.substr(i, 2), nullptr, 16));
    return bytes;
}

// Replays the log of file operations, and records which later fsync makes each change durable.
class Recorder {
public:
    Recorder(std::string said, std::string run, History& history)
        : said_(std::move(said)), run_(std::move(run)), history_(history) {
        paths_[directory_of(run_)] = history.root;
    }

    void add(const std::string& line) {
        std::vector<std::string> field;
        std::istringstream stream(line);
        for (std::string part; std::getline(stream, part, '\t');) field.push_back(part);
        field.resize(5);
        history_.end++;
        if (field[0] == "fflush") return note_report(std::stoul(field[3]));
        std::string path = fs::path(field[1]).lexically_normal();
        if (path.ends_with('/')) path.pop_back();
        if (std::stol(field[2]) < 0 || !is_of_checkpoints(path)) return;
        if (field[0] == "mkdir") set_name(path, add_inode(path, true));
        if (field[0] == "open" && std::stoi(field[3]) & O_CREAT && !paths_.contains(path))
            set_name(path, add_inode(path, false));
        if (field[0] == "pwrite")
            history_.changes.push_back({paths_.at(path), {}, std::stoul(field[3]), bytes_of(field[4]), history_.end});
        if (field[0] == "rename") rename(path, field[3]);
        if (field[0] == "unlink" || field[0] == "rmdir") set_name(path, nullptr);
        if (field[0] == "fsync" || field[0] == "fdatasync") sync(paths_.at(path));
    }

private:
    // RUN, its parent, and RUN/checkpoints; every start truncates the logs.
    bool is_of_checkpoints(const std::string& path) const {
        return path == directory_of(run_) || path == run_ || path.starts_with(checkpoints_directory(run_));
    }

    InodePtr add_inode(const std::string& path, bool is_directory) {
        return paths_[path] = std::make_shared<Inode>(Inode{is_directory});
    }

    void set_name(const std::string& path, const InodePtr& inode) {
        const std::string name = fs::path(path).filename();
        history_.changes.push_back({paths_.at(directory_of(path)), {{name, inode}}, 0, "", history_.end});
        if (!inode) paths_.erase(path);
    }

    // Within one directory a rename is a single atomic change.
    void rename(const std::string& from, const std::string& to) {
        require(directory_of(from) == directory_of(to), "%s moves to another directory", from);
        const InodePtr inode = paths_.at(from);
        const std::string old_name = fs::path(from).filename(), new_name = fs::path(to).filename();
        history_.changes.push_back(
            {paths_.at(directory_of(from)), {{old_name, nullptr}, {new_name, inode}}, 0, "", history_.end});
        std::map<std::string, InodePtr> paths;
        for (const auto& [path, moved] : paths_) {
            const bool is_inside = path == from || path.starts_with(from + "/");
            paths[is_inside ? to + path.substr(from.size()) : path] = moved;
        }
        paths_ = paths;
    }

    void sync(const InodePtr& inode) {
        for (Change& change : history_.changes)
            if (change.inode == inode && change.durable_from == kNever) change.durable_from = history_.end;
    }

    void note_report(size_t printed) {
        const std::string text = said_.substr(0, printed), mark = "/step_";
        const size_t last = text.rfind("| checkpoint ");
        if (last == std::string::npos) return;
        history_.reports.push_back({history_.end, std::stol(text.substr(text.find(mark, last) + mark.size()))});
    }

    std::string said_, run_;
    History& history_;
    std::map<std::string, InodePtr> paths_;
};

enum class Choice { dropped, kept, zeros, half };
constexpr const char* kChoiceNames[] = {"dropped", "kept", "zeros", "half"};

struct State {
    std::map<InodePtr, std::map<std::string, InodePtr>> directories;
    std::map<InodePtr, std::vector<std::pair<const Change*, Choice>>> files;  // their writes
};

State state_of(const std::vector<const Change*>& happened, const std::map<const Change*, Choice>& choices) {
    State state;
    for (const Change* change : happened) {
        const auto chosen = choices.find(change);
        const Choice choice = chosen == choices.end() ? Choice::kept : chosen->second;
        if (choice == Choice::dropped) continue;
        if (change->is_of_names()) {
            for (const auto& [name, inode] : change->names)
                if (inode)
                    state.directories[change->inode][name] = inode;
                else
                    state.directories[change->inode].erase(name);
            continue;
        }
        state.files[change->inode].emplace_back(change, choice);
    }
    return state;
}

std::string content_of(const State& state, const InodePtr& file) {
    std::string content;
    const auto written = state.files.find(file);
    if (written == state.files.end()) return content;
    for (const auto& [change, choice] : written->second) {
        std::string bytes = change->bytes;
        if (choice == Choice::zeros) bytes.assign(bytes.size(), '\0');
        if (choice == Choice::half) bytes.resize(bytes.size() / 2);
        content.resize(std::max(content.size(), change->offset + bytes.size()));
        content.replace(change->offset, bytes.size(), bytes);
    }
    return content;
}

// Calls visit(path relative to the root, inode) for everything with a name; parents come first.
template <class Visit> void visit_names(State& state, const InodePtr& directory, const std::string& path, Visit visit) {
    for (const auto& [name, inode] : state.directories[directory]) {
        visit(path + "/" + name, inode);
        if (inode->is_directory) visit_names(state, inode, path + "/" + name, visit);
    }
}

size_t hash_of(State& state, const InodePtr& root) {
    size_t hash = 0;
    visit_names(state, root, "", [&](const std::string& path, const InodePtr& inode) {
        hash = hash * 1'000'003 + std::hash<std::string>()(path);
        for (const auto& [change, choice] : state.files[inode]) hash = hash * 31 + change->time * 4 + size_t(choice);
    });
    return hash;
}

void put_together(State& state, const InodePtr& root, const std::string& place) {
    fs::remove_all(place);
    fs::create_directory(place);
    visit_names(state, root, place, [&](const std::string& path, const InodePtr& inode) {
        if (inode->is_directory)
            fs::create_directory(path);
        else
            std::ofstream(path, std::ios::binary) << content_of(state, inode);
    });
}

// Describes what is wrong with the checkpoints found in `run`; empty if they are correct.
std::string violation(const std::string& run, int64_t reported) {
    std::string reports;
    try {
        const auto found = find_newest_valid(run, [&](const std::string& sentence) { reports += sentence + "\n"; });
        const int64_t step = found ? found->manifest().info.step : 0;
        if (step < reported)
            return format("step %ld was reported, but the newest valid step is %ld\n", reported, step) + reports;
    } catch (const Error& error) {
        return error.what();
    }
    return reports;
}

class Campaign {
public:
    Campaign(const History& history, std::string run_name, std::string scratch, size_t most, uint64_t seed)
        : history_(history), run_name_(std::move(run_name)), scratch_(std::move(scratch)), most_(most), random_(seed) {}

    // At each moment: all or none of the changes that are not durable, all but one, only one; then random choices, an
    // equal part of the remaining `most` at each moment.
    bool passes() {
        for (size_t time = 1; time <= history_.end; time++)
            if (changes_at(time) && !(try_all_and_none(time) && try_one_by_one(time))) return false;
        while (seen_.size() < most_) {
            const size_t before = seen_.size();
            for (size_t time = 1; time <= history_.end; time++)
                for (int i = 0; i < 4 && changes_at(time); i++)
                    if (!try_random(time)) return false;
            if (seen_.size() == before) break;  // no further states
        }
        return true;
    }

    size_t tried() const { return seen_.size(); }

private:
    bool changes_at(size_t time) {
        happened_.clear();
        open_.clear();
        bool is_new = false;
        for (const Change& change : history_.changes) {
            if (change.time > time) break;
            happened_.push_back(&change);
            if (change.durable_from > time) open_.push_back(&change);
            is_new |= change.time == time || change.durable_from == time;
        }
        for (const Report& report : history_.reports) is_new |= report.time == time;
        return is_new;
    }

    bool try_all_and_none(size_t time) {
        for (const Choice choice : {Choice::dropped, Choice::kept, Choice::zeros, Choice::half}) {
            std::map<const Change*, Choice> choices;
            for (const Change* change : open_) choices[change] = choice;
            if (!holds(time, choices)) return false;
        }
        return true;
    }

    bool try_one_by_one(size_t time) {
        for (const Change* one : open_)
            for (const auto& [its_choice, others] :
                 {std::pair(Choice::dropped, Choice::kept), std::pair(Choice::kept, Choice::dropped),
                  std::pair(Choice::zeros, Choice::kept), std::pair(Choice::half, Choice::kept)}) {
                std::map<const Change*, Choice> choices;
                for (const Change* change : open_) choices[change] = change == one ? its_choice : others;
                if (!holds(time, choices)) return false;
            }
        return true;
    }

    bool try_random(size_t time) {
        std::map<const Change*, Choice> choices;
        for (const Change* change : open_) choices[change] = Choice(random_() % (change->is_of_names() ? 2 : 4));
        return holds(time, choices);
    }

    bool holds(size_t time, const std::map<const Change*, Choice>& choices) {
        State state = state_of(happened_, choices);
        int64_t reported = 0;
        for (const Report& report : history_.reports)
            if (report.time <= time) reported = report.step;
        if (!seen_.insert(hash_of(state, history_.root) * 31 + size_t(reported)).second) return true;
        put_together(state, history_.root, scratch_);
        const std::string wrong = violation(scratch_ + "/" + run_name_, reported);
        if (wrong.empty()) return true;
        std::printf("a power cut after line %zu of the log: %s\n", time, wrong.c_str());
        for (const auto& [change, choice] : choices)
            std::printf("  line %zu %s: %s\n", change->time, describe(*change).c_str(), kChoiceNames[size_t(choice)]);
        return false;
    }

    static std::string describe(const Change& change) {
        std::string text = change.is_of_names() ? "names" : format("%zu bytes of a file", change.bytes.size());
        for (const auto& [name, inode] : change.names) text += (inode ? " +" : " -") + name;
        return text;
    }

    const History& history_;
    std::string run_name_, scratch_;
    size_t most_;
    std::mt19937_64 random_;
    std::vector<const Change*> happened_, open_;
    std::unordered_set<size_t> seen_;
};

Exit run(const std::vector<std::string>& arguments) {
    if (arguments.size() != 6) fail(Exit::usage, "usage: crash_states LOG SAID RUN SCRATCH MOST SEED");
    const std::string run_dir = fs::path(arguments[2]).lexically_normal();
    History history;
    Recorder recorder(read_file(arguments[1]), run_dir, history);
    std::ifstream log(arguments[0]);
    for (std::string line; std::getline(log, line);) recorder.add(line);
    if (history.reports.empty()) fail(Exit::data, "%s: no checkpoint was reported", arguments[1]);
    Campaign campaign(history, fs::path(run_dir).filename(), arguments[3], std::stoul(arguments[4]),
                      std::stoul(arguments[5]));
    const bool passes = campaign.passes();
    std::printf("%zu states of %zu operations, %ld the last step\n", campaign.tried(), history.changes.size(),
                history.reports.back().step);
    return passes ? Exit::ok : Exit(1);
}

}  // namespace

int main(int argc, char** argv) {
    return exit_status("crash_states", [&] { return run({argv + 1, argv + argc}); });
}
