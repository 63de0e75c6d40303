// This process's rank in the run, from the environment variables of the launcher that started it. No other file reads
// environment variables: they describe the process, and results depend on the configuration alone.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

struct RankEnvironment {
    int rank = 0;                    // [0, size)
    int size = 1;                    // ranks of the run
    int local_rank = 0;              // [0, local_size), among the ranks of this host; selects the GPU
    int local_size = 1;              // ranks on this host; 0 if unknown
    std::string launcher = "alone";  // or "torchrun", "Open MPI", "MPICH", "Slurm"
    std::string master_host;         // rank 0's host name or address; empty if unknown (mpirun)
    int master_port = 0;             // where rank 0 listens; 0 if unknown
    std::string run_id;      // distinguishes this run from others on the same machines; not secret; empty if unknown
    std::string token;       // 32 hexadecimal digits that only ranks of this run know; empty if there is none
    std::string token_file;  // where rank 0 writes a token if the launcher provides none; empty: nowhere
    bool has_pmi = true;     // false: srun without PMI, where MPI_Init finds a single process or aborts
    std::string supervisor;  // the address to report to (rank_reports.h); empty if there is no supervisor
    int listen_fd = -1;      // rank 0: a socket that listens at master_port, from launch_local_ranks(); else -1
};

// Returns the value of an environment variable, or null if it is not set.
using Lookup = std::function<const char*(const char* name)>;

// Detects the launcher: the first in this list whose variables are set. So for nested launchers (torchrun under srun,
// mpirun in a Slurm allocation) the inner one is used.
//   1. torchrun     RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. launch_local_ranks() and
//                   Kubernetes jobs set the same; without LOCAL_*, a rank is alone on its host (in its pod).
//   2. Open MPI     OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
//   3. MPICH        PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS (Intel MPI sets the same), unless srun itself
//                   set PMI_*, in which case MPI_LOCALRANKID is missing
//   4. Slurm        SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_NODELIST; only in a step that srun
//                   created: a batch script's process and a shell of salloc are alone, whatever the size of the
//                   allocation
//   5. alone
// Variables of 1 may be set by a user or a pod, without TORCHELASTIC_RUN_ID and TRAIN_GPT_TOKEN. If these contradict
// the variables of 2 or 3, the inner launcher is unknown, which is an error. MASTER_ADDR and MASTER_PORT apply with
// every launcher. If torchrun's agent itself listens at MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE), the next port is
// used. Slurm's port is computed from the job and step numbers.
//
// Fails with Exit::usage, naming the variable, its value and what was expected, if a value is missing, malformed or
// contradictory.
RankEnvironment find_rank_environment(const Lookup& lookup);

// Reads this process's environment.
RankEnvironment find_rank_environment();

// Returns the first host of a list in Slurm's notation: "node[003-010,12],login" gives "node003". Fails with
// Exit::usage, naming `variable`, if the list is malformed.
std::string first_host(const std::string& list, const char* variable);
