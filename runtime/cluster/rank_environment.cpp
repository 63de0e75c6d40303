#include "runtime/cluster/rank_environment.h"

#include <charconv>
#include <climits>
#include <cstdlib>
#include <regex>

#include "kernels/check.h"

namespace {

// The variables of one launcher.
struct LauncherVariables {
    const char *launcher, *rank, *size, *local_rank, *local_size;
};
constexpr LauncherVariables kTorchrun{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr LauncherVariables kOpenMpi{"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr LauncherVariables kMpich{"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};

// Job steps that srun did not create (the batch script, salloc's shell, and others) have numbers from here on.
constexpr int64_t kFirstSpecialStep = 0xfffffff0;

class Reader {
public:
    explicit Reader(const Lookup& lookup) : lookup_(lookup) {}

    RankEnvironment read() const {
        RankEnvironment found = read_launcher();
        if (found.size == 1) return found;
        if (has("MASTER_ADDR")) {
            found.master_host = text("MASTER_ADDR");
            if (found.master_host.empty())
                fail(Exit::usage, "MASTER_ADDR is \"\", expected rank 0's host name or address");
        }
        if (has("MASTER_PORT")) {
            const std::string agent = text("TORCHELASTIC_USE_AGENT_STORE");
            const bool agent_listens = found.launcher == "torchrun" && (agent == "True" || agent == "1");
            found.master_port = number("MASTER_PORT", 1, agent_listens ? 65534 : 65535, found.launcher) + agent_listens;
        }
        found.token = text("TRAIN_GPT_TOKEN");
        // The token is not printed because it is a secret.
        if (has("TRAIN_GPT_TOKEN") &&
            (found.token.size() != 32 || found.token.find_first_not_of("0123456789abcdef") != std::string::npos))
            fail(Exit::usage, "TRAIN_GPT_TOKEN has %zu characters, expected 32 lower-case hexadecimal digits",
                 found.token.size());
        if (has("TRAIN_GPT_LISTEN_FD") && found.rank == 0)
            found.listen_fd = number("TRAIN_GPT_LISTEN_FD", 3, INT_MAX, "train_gpt");
        return found;
    }

private:
    bool has(const char* name) const { return lookup_(name) != nullptr; }
    bool has(const LauncherVariables& names) const { return has(names.rank) || has(names.size); }

    std::string text(const char* name) const { return has(name) ? lookup_(name) : ""; }

    // The first of several names for one variable that is set, else the last.
    const char* either(const char* name, const char* other) const { return has(name) ? name : other; }

    // The value of a required variable, in [low, high].
    template <class Number = int>
    Number number(const char* name, int64_t low, int64_t high, const std::string& launcher) const {
        if (!has(name))
            fail(Exit::usage,
                 "%s is not set although other variables say that %s started this process, expected a whole number",
                 name, launcher);
        const std::optional<int64_t> value = whole_number(text(name));
        if (!value || *value < low || *value > high)
            fail(Exit::usage, "%s is \"%s\", expected a whole number from %lld to %lld", name, lookup_(name),
                 (long long)low, (long long)high);
        return Number(*value);
    }

    RankEnvironment read_launcher() const {
        if (has(kTorchrun)) return read_torchrun();
        if (has(kOpenMpi)) return read_variables(kOpenMpi);
        const char* step = either("SLURM_STEP_ID", "SLURM_STEPID");
        const bool is_step =
            has("SLURM_PROCID") && has(step) && number<int64_t>(step, 0, UINT32_MAX, "Slurm") < kFirstSpecialStep;
        if (has(kMpich) && (!is_step || has(kMpich.local_rank))) {
            // Some relatives (Cray's PALS) have other names for the local rank.
            LauncherVariables names = kMpich;
            if (!has(names.local_rank)) names.local_rank = "PMI_LOCAL_RANK", names.local_size = "PMI_LOCAL_SIZE";
            if (!has(names.local_rank) && number(names.size, 1, INT_MAX, names.launcher) > 1)
                fail(Exit::usage,
                     "MPI_LOCALRANKID is not set although PMI_SIZE is %s, expected this rank's number on its host",
                     lookup_(names.size));
            return read_variables(names);
        }
        if (is_step) return read_slurm(step);
        RankEnvironment alone;
        alone.launcher = "alone";
        return alone;
    }

    RankEnvironment read_variables(const LauncherVariables& names) const {
        RankEnvironment found;
        found.launcher = names.launcher;
        found.size = number(names.size, 1, INT_MAX, found.launcher);
        found.rank = number(names.rank, 0, found.size - 1, found.launcher);
        if (has(names.local_size))
            found.local_size = number(names.local_size, 1, found.size, found.launcher);
        else
            found.local_size = has(names.local_rank) && found.size > 1 ? 0 : 1;
        if (has(names.local_rank))
            found.local_rank = read_local_rank(names.local_rank, found);
        else if (found.local_size > 1)
            fail(Exit::usage, "%s is not set although %s is %d, expected a whole number from 0 to %d", names.local_rank,
                 names.local_size, found.local_size, found.local_size - 1);
        return found;
    }

    int read_local_rank(const char* name, const RankEnvironment& found) const {
        return number(name, 0, (found.local_size == 0 ? found.size : found.local_size) - 1, found.launcher);
    }

    RankEnvironment read_torchrun() const {
        RankEnvironment found = read_variables(kTorchrun);
        if (has("TORCHELASTIC_RUN_ID"))
            found.run_id = "torchrun " + text("TORCHELASTIC_RUN_ID") + " restart " + text("TORCHELASTIC_RESTART_COUNT");
        else if (!has("TRAIN_GPT_TOKEN"))
            for (const LauncherVariables& other : {kOpenMpi, kMpich}) check_same(found, other);
        if (found.size == 1) return found;
        const std::pair<const char*, const char*> required[] = {{"MASTER_ADDR", "host name or address"},
                                                                {"MASTER_PORT", "port"}};
        for (const auto& [name, meaning] : required)
            if (!has(name))
                fail(Exit::usage, "%s is not set although WORLD_SIZE is %d, expected rank 0's %s", name, found.size,
                     meaning);
        return found;
    }

    // A user's RANK and mpirun's: if they differ, one of them belongs to an outer launcher, and nothing says which.
    void check_same(const RankEnvironment& found, const LauncherVariables& names) const {
        if (!has(names.rank) || !has(names.local_rank)) return;
        const RankEnvironment other = read_variables(names);
        if (other.rank != found.rank || other.size != found.size)
            fail(Exit::usage,
                 "RANK is %d of WORLD_SIZE %d, but %s is %d of %s %d: unset the two that belong to the outer launcher",
                 found.rank, found.size, names.rank, other.rank, names.size, other.size);
    }

    RankEnvironment read_slurm(const char* step) const {
        RankEnvironment found;
        found.launcher = "Slurm";
        const char* size = either("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS");
        found.size = number(size, 1, INT_MAX, found.launcher);
        found.rank = number("SLURM_PROCID", 0, found.size - 1, found.launcher);
        found.local_size = read_tasks_of_node(found.size);
        if (found.local_size > found.size)
            fail(Exit::usage, "%s is %d, expected at least the %d tasks that Slurm gives for this node", size,
                 found.size, found.local_size);
        found.local_rank = read_local_rank("SLURM_LOCALID", found);
        const auto job_id = number<int64_t>(either("SLURM_JOB_ID", "SLURM_JOBID"), 0, UINT32_MAX, found.launcher);
        const auto step_id = number<int64_t>(step, 0, UINT32_MAX, found.launcher);
        found.run_id = format("slurm %lld.%lld", (long long)job_id, (long long)step_id);
        // Below the ports that Linux gives to outgoing connections. Jobs that share a host have numbers near each
        // other and few steps, which the factor 31 keeps apart.
        found.master_port = int(15000 + (31 * job_id + step_id) % 15000);
        const char* nodes = either("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST");
        found.has_pmi = has("PMIX_RANK") || has("PMI_RANK");
        if (found.size > 1) found.master_host = first_host(text(nodes), nodes);
        return found;
    }

    // The tasks of this node, 0 if unknown. "2(x3),1" stands for 2, 2, 2, 1: the tasks of each node of the step.
    int read_tasks_of_node(int size) const {
        const char* name = either("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE");
        const char* per_node = "SLURM_NTASKS_PER_NODE";
        if (!has(name) && has(per_node)) return std::min(size, number(per_node, 1, INT_MAX, "Slurm"));
        if (!has(name)) return size == 1 ? 1 : 0;
        const int64_t node = has("SLURM_NODEID") ? number("SLURM_NODEID", 0, INT_MAX, "Slurm") : 0;
        const std::string tasks = text(name);
        const std::regex part(R"(([1-9]\d{0,8})(\(x([1-9]\d{0,8})\))?(,|$))");
        int64_t begin = 0;
        for (std::sregex_iterator at(tasks.begin(), tasks.end(), part, std::regex_constants::match_continuous), end;
             at != end; ++at) {
            begin += (*at)[3].matched ? std::stoi((*at)[3]) : 1;
            if (node < begin) return std::stoi((*at)[1]);
        }
        fail(Exit::usage, "%s is \"%s\", expected the tasks of each node, as in \"4(x2),1\", including node %d", name,
             tasks, int(node));
    }

    const Lookup& lookup_;
};

}  // namespace

RankEnvironment find_rank_environment(const Lookup& lookup) { return Reader(lookup).read(); }

RankEnvironment find_rank_environment() {
    return find_rank_environment([](const char* name) { return std::getenv(name); });
}

std::optional<int64_t> whole_number(std::string_view text) {
    int64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
    return number;
}

std::string first_host(const std::string& list, const char* variable) {
    std::smatch host;
    if (!std::regex_search(list, host, std::regex(R"(^([^\[\],\s]|\[\d[\d,-]*\])+(?=,|$))")))
        fail(Exit::usage, "%s is \"%s\", expected Slurm's list of hosts, as in \"node[003-010,12]\"", variable, list);
    return std::regex_replace(host.str(), std::regex(R"(\[(\d+)[\d,-]*\])"), "$1");
}
