#include "runtime/cluster/place.h"

#include <charconv>
#include <climits>
#include <cstdlib>
#include <vector>

#include "kernels/check.h"

namespace {

bool is_set(const Lookup& lookup, const char* name) { return lookup(name) != nullptr; }

std::string text_or_empty(const Lookup& lookup, const char* name) {
    const char* text = lookup(name);
    return text ? text : "";
}

// The value of a variable that has to be there, in [low, high].
int64_t read_number(const Lookup& lookup, const char* name, int64_t low, int64_t high, const std::string& launcher) {
    const char* text = lookup(name);
    if (!text)
        fail(Exit::usage,
             "%s is not set although other variables say that %s started this process, expected a whole number", name,
             launcher.c_str());
    const std::optional<int64_t> number = whole_number(text);
    if (!number || *number < low || *number > high)
        fail(Exit::usage, "%s is \"%s\", expected a whole number from %lld to %lld", name, text, (long long)low,
             (long long)high);
    return *number;
}

// The variables of one launcher.
struct Names {
    const char *launcher, *rank, *size, *local_rank, *local_size;
};
constexpr Names kTorchrun{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
constexpr Names kOpenMpi{"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                         "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Names kMpich{"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};

bool is_there(const Lookup& lookup, const Names& names) {
    return is_set(lookup, names.rank) || is_set(lookup, names.size);
}

Place place_of(const Lookup& lookup, const Names& names) {
    Place place;
    place.launcher = names.launcher;
    place.size = int(read_number(lookup, names.size, 1, INT_MAX, place.launcher));
    place.rank = int(read_number(lookup, names.rank, 0, place.size - 1, place.launcher));
    if (is_set(lookup, names.local_size))
        place.local_size = int(read_number(lookup, names.local_size, 1, place.size, place.launcher));
    else
        place.local_size = is_set(lookup, names.local_rank) && place.size > 1 ? 0 : 1;
    const int most = place.local_size == 0 ? place.size : place.local_size;
    if (is_set(lookup, names.local_rank))
        place.local_rank = int(read_number(lookup, names.local_rank, 0, most - 1, place.launcher));
    else if (place.local_size > 1)
        fail(Exit::usage, "%s is not set although %s is %d, expected a whole number from 0 to %d", names.local_rank,
             names.local_size, place.local_size, place.local_size - 1);
    return place;
}

// ---- Slurm ----------------------------------------------------------------------------------------------------------

// Steps that srun did not make have numbers from here on: the batch script, salloc's shell, and others.
constexpr int64_t kFirstSpecialStep = 0xfffffff0;

bool is_in_slurm_step(const Lookup& lookup) {
    const char* name = is_set(lookup, "SLURM_STEP_ID") ? "SLURM_STEP_ID" : "SLURM_STEPID";
    return is_set(lookup, "SLURM_PROCID") && is_set(lookup, name) &&
           read_number(lookup, name, 0, UINT32_MAX, "Slurm") < kFirstSpecialStep;
}

// "2(x3),1" is 2, 2, 2, 1: the tasks of each node of the step.
int tasks_of_node(const std::string& text, int node, const char* variable) {
    int begins = 0;
    for (size_t at = 0; at <= text.size();) {
        const size_t end = std::min(text.find(',', at), text.size());
        std::string_view part = std::string_view(text).substr(at, end - at);
        std::optional<int64_t> repeats = 1;
        if (const size_t open = part.find("(x"); open != part.npos && part.ends_with(")")) {
            repeats = whole_number(part.substr(open + 2, part.size() - open - 3));
            part = part.substr(0, open);
        }
        const std::optional<int64_t> tasks = whole_number(part);
        if (!tasks || !repeats || *tasks < 1 || *tasks > INT_MAX || *repeats < 1 || *repeats > INT_MAX) break;
        if (node < begins + *repeats) return int(*tasks);
        begins += int(*repeats);
        at = end + 1;
    }
    fail(Exit::usage, "%s is \"%s\", expected the tasks of each node, as in \"4(x2),1\", of node %d too", variable,
         text.c_str(), node);
}

int slurm_local_size(const Lookup& lookup, int size) {
    for (const char* name : {"SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"})
        if (const char* text = lookup(name)) {
            const int node =
                is_set(lookup, "SLURM_NODEID") ? int(read_number(lookup, "SLURM_NODEID", 0, INT_MAX, "Slurm")) : 0;
            return tasks_of_node(text, node, name);
        }
    const char* const per_node = "SLURM_NTASKS_PER_NODE";
    if (is_set(lookup, per_node)) return std::min(size, int(read_number(lookup, per_node, 1, INT_MAX, "Slurm")));
    return size == 1 ? 1 : 0;
}

Place slurm_place(const Lookup& lookup) {
    Place place;
    place.launcher = "Slurm";
    const char* size = is_set(lookup, "SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
    place.size = int(read_number(lookup, size, 1, INT_MAX, place.launcher));
    place.rank = int(read_number(lookup, "SLURM_PROCID", 0, place.size - 1, place.launcher));
    place.local_size = slurm_local_size(lookup, place.size);
    if (place.local_size > place.size)
        fail(Exit::usage, "%s is %d, expected at least the %d tasks that Slurm names for this node", size, place.size,
             place.local_size);
    const int most = place.local_size == 0 ? place.size : place.local_size;
    place.local_rank = int(read_number(lookup, "SLURM_LOCALID", 0, most - 1, place.launcher));

    const char* job = is_set(lookup, "SLURM_JOB_ID") ? "SLURM_JOB_ID" : "SLURM_JOBID";
    const char* step = is_set(lookup, "SLURM_STEP_ID") ? "SLURM_STEP_ID" : "SLURM_STEPID";
    const int64_t job_id = read_number(lookup, job, 0, UINT32_MAX, place.launcher);
    const int64_t step_id = read_number(lookup, step, 0, UINT32_MAX, place.launcher);
    place.run_id = format("slurm %lld.%lld", (long long)job_id, (long long)step_id);
    // Below the ports that Linux gives to outgoing connections. Jobs that share a host have numbers near each other,
    // and few steps: 31 keeps those apart.
    place.master_port = int(15000 + (31 * job_id + step_id) % 15000);
    const char* nodes = is_set(lookup, "SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST";
    place.has_pmi = is_set(lookup, "PMIX_RANK") || is_set(lookup, "PMI_RANK");
    if (place.size > 1) place.master_host = first_host(text_or_empty(lookup, nodes), nodes);
    return place;
}

// ---- torchrun and those that speak as it does -----------------------------------------------------------------------

// A person's RANK and mpirun's: one of them is left over from outside, and nothing says which.
void check_same(const Lookup& lookup, const Place& place, const Names& other) {
    if (!is_set(lookup, other.rank) || !is_set(lookup, other.local_rank)) return;
    const Place theirs = place_of(lookup, other);
    if (theirs.rank != place.rank || theirs.size != place.size)
        fail(Exit::usage,
             "RANK is %d of WORLD_SIZE %d, but %s is %d of %s %d: unset the two that belong to the outer launcher",
             place.rank, place.size, other.rank, theirs.rank, other.size, theirs.size);
}

Place torchrun_place(const Lookup& lookup) {
    Place place = place_of(lookup, kTorchrun);
    if (!is_set(lookup, "TORCHELASTIC_RUN_ID") && !is_set(lookup, "TRAIN_GPT_TOKEN"))
        for (const Names& other : {kOpenMpi, kMpich}) check_same(lookup, place, other);
    if (is_set(lookup, "TORCHELASTIC_RUN_ID"))
        place.run_id = "torchrun " + text_or_empty(lookup, "TORCHELASTIC_RUN_ID") + " restart " +
                       text_or_empty(lookup, "TORCHELASTIC_RESTART_COUNT");
    if (place.size > 1)
        for (const char* name : {"MASTER_ADDR", "MASTER_PORT"})
            if (!is_set(lookup, name))
                fail(Exit::usage, "%s is not set although WORLD_SIZE is %d, expected rank 0's %s", name, place.size,
                     name[7] == 'A' ? "host name or address" : "port");
    return place;
}

Place launchers_place(const Lookup& lookup) {
    if (is_there(lookup, kTorchrun)) return torchrun_place(lookup);
    if (is_there(lookup, kOpenMpi)) return place_of(lookup, kOpenMpi);
    const bool is_step = is_in_slurm_step(lookup);
    if (is_there(lookup, kMpich) && (!is_step || is_set(lookup, kMpich.local_rank))) {
        // Some relatives (Cray's PALS) name the local rank otherwise.
        Names names = kMpich;
        if (!is_set(lookup, names.local_rank)) names.local_rank = "PMI_LOCAL_RANK", names.local_size = "PMI_LOCAL_SIZE";
        if (!is_set(lookup, names.local_rank) && read_number(lookup, names.size, 1, INT_MAX, names.launcher) > 1)
            fail(Exit::usage,
                 "MPI_LOCALRANKID is not set although PMI_SIZE is %s, expected this rank's number on its host",
                 lookup(names.size));
        return place_of(lookup, names);
    }
    if (is_step) return slurm_place(lookup);
    Place alone;
    alone.launcher = "alone";
    return alone;
}

void read_token(const Lookup& lookup, Place& place) {
    if (is_set(lookup, "TRAIN_GPT_TOKEN")) {
        place.token = lookup("TRAIN_GPT_TOKEN");
        // Not printed: it is a secret.
        if (place.token.size() != 32 || place.token.find_first_not_of("0123456789abcdef") != std::string::npos)
            fail(Exit::usage, "TRAIN_GPT_TOKEN has %zu characters, expected 32 lower-case hexadecimal digits",
                 place.token.size());
    }
    if (is_set(lookup, "TRAIN_GPT_LISTEN_FD") && place.rank == 0)
        place.listen_fd = int(read_number(lookup, "TRAIN_GPT_LISTEN_FD", 3, INT_MAX, "train_gpt"));
}

}  // namespace

Place find_place(const Lookup& lookup) {
    Place place = launchers_place(lookup);
    if (place.size == 1) return place;
    if (is_set(lookup, "MASTER_ADDR")) {
        place.master_host = lookup("MASTER_ADDR");
        if (place.master_host.empty()) fail(Exit::usage, "MASTER_ADDR is \"\", expected rank 0's host name or address");
    }
    if (is_set(lookup, "MASTER_PORT")) {
        const std::string agent = text_or_empty(lookup, "TORCHELASTIC_USE_AGENT_STORE");
        const bool agent_listens = place.launcher == "torchrun" && (agent == "True" || agent == "1");
        place.master_port = int(read_number(lookup, "MASTER_PORT", 1, agent_listens ? 65534 : 65535, place.launcher));
        place.master_port += agent_listens;
    }
    read_token(lookup, place);
    return place;
}

Place find_place() {
    return find_place([](const char* name) { return std::getenv(name); });
}

std::optional<int64_t> whole_number(std::string_view text) {
    int64_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
    return number;
}

std::string first_host(const std::string& list, const char* variable) {
    std::string host;
    for (size_t at = 0; at < list.size() && list[at] != ','; ++at) {
        if (list[at] != '[') {
            host += list[at];
            if (list[at] == ']') host.clear(), at = list.size() - 1;
            continue;
        }
        const size_t close = list.find(']', at), stop = std::min(list.find_first_of(",-]", at), list.size());
        const std::string first = list.substr(at + 1, stop - at - 1);
        const bool sound = close != list.npos && !first.empty() &&
                           list.substr(at + 1, close - at - 1).find_first_not_of("0123456789-,") == list.npos;
        if (!sound) {
            host.clear();
            break;
        }
        host += first;
        at = close;
    }
    if (host.empty() || host.find_first_of(" \t") != host.npos)
        fail(Exit::usage, "%s is \"%s\", expected Slurm's list of hosts, as in \"node[003-010,12]\"", variable,
             list.c_str());
    return host;
}
