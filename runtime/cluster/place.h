// Which rank of how many this process is, as the launcher that started it says.
//
// A launcher speaks by environment variables, and these are read here and nowhere else: where a process stands is no
// property of the run, whose results depend on the configuration alone.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

struct Place {
    int rank = 0;             // [0, size)
    int size = 1;             // ranks of the run
    int local_rank = 0;       // [0, local_size), among the ranks of this host: which GPU is whose
    int local_size = 1;       // ranks on this host; 0 where the launcher does not say
    std::string launcher;     // "alone", "torchrun", "Open MPI", "MPICH", "Slurm"
    std::string master_host;  // rank 0's host name or address; empty where the launcher does not say (mpirun)
    int master_port = 0;      // where rank 0 listens; 0 where the launcher does not say
    std::string run_id;       // tells this run from others on the same machines; no secret; empty if unknown
    std::string token;        // 32 hexadecimal digits that only ranks of this run know; empty if there is none
    bool has_pmi = true;      // false: srun without PMI, where MPI_Init would only find this process, or end it
    int listen_fd = -1;       // rank 0: a socket that listens at master_port already, from start_local_ranks(); else -1
};

// What the environment answers: null where a variable is not set.
using Lookup = std::function<const char*(const char* name)>;

// The first of these that is there decides, so that a launcher inside another (torchrun under srun, mpirun in a Slurm
// allocation) gives the inner one:
//   1. torchrun     RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. start_local_ranks() and
//                   jobs on Kubernetes set the same; without LOCAL_* a rank is alone on its host (in its pod).
//   2. Open MPI     OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
//   3. MPICH        PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS (Intel MPI sets the same); not where srun
//                   itself has set PMI_*, which shows in that MPI_LOCALRANKID is missing
//   4. Slurm        SLURM_PROCID, SLURM_STEP_NUM_TASKS or SLURM_NTASKS, SLURM_LOCALID, the tasks per node, the first
//                   host of SLURM_STEP_NODELIST; only in a step that srun has made: a batch script's own process and
//                   a shell of salloc are alone, whatever the allocation holds
//   5. alone
// Variables of 1 that only a person or a pod has set (neither TORCHELASTIC_RUN_ID nor TRAIN_GPT_TOKEN beside them) and
// that contradict those of 2 or 3 leave open which launcher is the inner one, which is an error. MASTER_ADDR and
// MASTER_PORT hold under every launcher. Where torchrun's agent listens at MASTER_PORT itself
// (TORCHELASTIC_USE_AGENT_STORE), the port above it is ours; Slurm's comes from the numbers of job and step.
//
// Values that are missing, unreadable or in contradiction fail with Exit::usage, the variable, its value and what was
// expected.
Place find_place(const Lookup& lookup);

// Of this process.
Place find_place();

// The number that the text is, and nothing else beside it.
std::optional<int64_t> whole_number(std::string_view text);

// The first host of Slurm's notation: "node[003-010,12],login" gives "node003". Fails with Exit::usage, naming
// `variable`, where the notation is broken.
std::string first_host(const std::string& list, const char* variable);
