#include "runtime/cluster/rank_environment.h"

#include <climits>
#include <cstdlib>
#include <cstring>

#include "kernels/base/check.h"
#include "runtime/io/number_of.h"

namespace {

// The variables of one launcher.
struct LauncherVariables {
    const char *launcher, *rank, *size, *local_rank, *local_size;
};
constexpr LauncherVariables kTorchrun{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr LauncherVariables kOpenMpi{"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr LauncherVariables kMpich{"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};
constexpr LauncherVariables kPals{"MPICH", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"};  // Cray's

// Job steps that srun did not create (the batch script, salloc's shell and others) have this number or higher.
constexpr int64_t kFirstSpecialStep = 0xfffffff0;

struct Reader {
    const Lookup& lookup;
    RankEnvironment found = {};

    RankEnvironment read() {
        read_launcher();
        found.supervisor = text("TRAIN_GPT_SUPERVISOR");
        if (found.size == 1) return found;
        const bool is_torchrun = found.launcher == kTorchrun.launcher;
        if (is_torchrun || has("MASTER_ADDR")) {
            found.master_host = text("MASTER_ADDR");
            if (found.master_host.empty())
                fail(Exit::usage,
                     "MASTER_ADDR is %s although the run has %d ranks, expected rank 0's host name or address",
                     has("MASTER_ADDR") ? "\"\"" : "not set", found.size);
        }
        if (is_torchrun || has("MASTER_PORT")) {
            const std::string agent = text("TORCHELASTIC_USE_AGENT_STORE");
            const bool agent_listens = is_torchrun && (agent == "True" || agent == "1");
            found.master_port = number("MASTER_PORT", 1, agent_listens ? 65534 : 65535) + agent_listens;
        }
        found.token = text("TRAIN_GPT_TOKEN");
        // The token is not printed because it is a secret.
        if (has("TRAIN_GPT_TOKEN") &&
            (found.token.size() != 32 || found.token.find_first_not_of("0123456789abcdef") != std::string::npos))
            fail(Exit::usage, "TRAIN_GPT_TOKEN has %zu characters, expected 32 lower-case hexadecimal digits",
                 found.token.size());
        if (has("TRAIN_GPT_LISTEN_FD") && found.rank == 0) found.listen_fd = number("TRAIN_GPT_LISTEN_FD", 3, INT_MAX);
        return found;
    }

    bool has(const char* name) const { return lookup(name) != nullptr; }
    bool has(const LauncherVariables& names) const { return has(names.rank) || has(names.size); }

    std::string text(const char* name) const { return has(name) ? lookup(name) : ""; }

    // Returns the value of a required variable, in [low, high].
    template <class Number = int> Number number(const char* name, int64_t low, int64_t high) const {
        if (!has(name))
            fail(Exit::usage, "%s is not set although %s started this process, expected a whole number", name,
                 found.launcher);
        const std::optional<int64_t> value = number_of<int64_t>(text(name));
        if (!value || *value < low || *value > high)
            fail(Exit::usage, "%s is \"%s\", expected a whole number from %ld to %ld", name, lookup(name), low, high);
        return Number(*value);
    }

    void read_launcher() {
        if (has(kTorchrun)) return read_torchrun();
        if (has(kOpenMpi)) return read_variables(kOpenMpi);
        const bool is_step =
            has("SLURM_PROCID") && has("SLURM_STEP_ID") && slurm_number("SLURM_STEP_ID") < kFirstSpecialStep;
        if (has(kMpich) && (!is_step || has(kMpich.local_rank)))
            read_variables(has(kPals.local_rank) && !has(kMpich.local_rank) ? kPals : kMpich);
        else if (is_step)
            read_slurm();
    }

    void read_variables(const LauncherVariables& names) {
        found.launcher = names.launcher;
        found.size = number(names.size, 1, INT_MAX);
        found.rank = number(names.rank, 0, found.size - 1);
        // A Kubernetes pod counts as one host: it sets torchrun's variables except LOCAL_*.
        const bool is_alone = found.size == 1 || (found.launcher == kTorchrun.launcher && !has(names.local_rank));
        found.local_size = has(names.local_size) ? number(names.local_size, 1, found.size) : is_alone ? 1 : 0;
        if (has(names.local_rank))
            read_local_rank(names.local_rank);
        else if (found.local_size != 1)
            fail(Exit::usage, "%s is not set although %s is %d, expected this rank's number on its host",
                 names.local_rank, names.size, found.size);
    }

    void read_local_rank(const char* name) {
        found.local_rank = number(name, 0, (found.local_size == 0 ? found.size : found.local_size) - 1);
    }

    void read_torchrun() {
        read_variables(kTorchrun);
        if (has("TORCHELASTIC_RUN_ID"))
            found.run_id = "torchrun " + text("TORCHELASTIC_RUN_ID") + " restart " + text("TORCHELASTIC_RESTART_COUNT");
        else if (!has("TRAIN_GPT_TOKEN"))
            for (const LauncherVariables& other : {kOpenMpi, kMpich}) check_same(other);
    }

    // If a user's RANK and mpirun's differ, one of them belongs to an outer launcher, and it is unknown which.
    void check_same(const LauncherVariables& names) const {
        if (!has(names.rank) || !has(names.local_rank)) return;
        Reader other{lookup};
        other.read_variables(names);
        if (other.found.rank != found.rank || other.found.size != found.size)
            fail(Exit::usage,
                 "RANK is %d of WORLD_SIZE %d, but %s is %d of %s %d: unset the two that belong to the outer launcher",
                 found.rank, found.size, names.rank, other.found.rank, names.size, other.found.size);
    }

    int64_t slurm_number(const char* name) const { return number<int64_t>(name, 0, UINT32_MAX); }

    void read_slurm() {
        found.launcher = "Slurm";
        found.size = number("SLURM_STEP_NUM_TASKS", 1, INT_MAX);
        found.rank = number("SLURM_PROCID", 0, found.size - 1);
        const std::string nodes = text("SLURM_STEP_NODELIST");
        if (found.size > 1) found.master_host = first_host(nodes, "SLURM_STEP_NODELIST");
        const bool is_single_host = found.size == 1 || found.master_host == nodes;
        found.local_size = is_single_host ? found.size : 0;
        read_local_rank("SLURM_LOCALID");
        const int64_t job_id = slurm_number("SLURM_JOB_ID"), step_id = slurm_number("SLURM_STEP_ID");
        found.run_id = "slurm " + std::to_string(job_id) + "." + std::to_string(step_id);
        // Below the ports that Linux assigns to outgoing connections. Jobs that share a host have adjacent numbers and
        // few steps; the factor 31 keeps their ports apart.
        found.master_port = int(15000 + (31 * job_id + step_id) % 15000);
        found.has_pmi = has("PMIX_RANK") || has("PMI_RANK");
    }
};

}  // namespace

RankEnvironment find_rank_environment(const Lookup& lookup) { return Reader{lookup}.read(); }

RankEnvironment find_rank_environment() { return find_rank_environment(&::getenv); }

std::string first_host(const std::string& list, const char* variable) {
    std::string host;
    for (size_t at = 0; at < list.size() && list[at] != ','; at++) {
        const size_t number_end = list.find_first_not_of("0123456789", at + 1);
        const size_t range_end = std::min(list.find_first_not_of("0123456789,-", at + 1), list.size());
        if (!std::strchr("[] \t\n\v\f\r", list[at])) {
            host += list[at];
        } else if (list[at] == '[' && number_end > at + 1 && list.substr(range_end, 1) == "]") {
            host += list.substr(at + 1, number_end - at - 1);  // the first number of "[003-010,12]"
            at = range_end;
        } else {
            host.clear();
            break;
        }
    }
    if (host.empty())
        fail(Exit::usage, "%s is \"%s\", expected Slurm's list of hosts, as in \"node[003-010,12]\"", variable, list);
    return host;
}
