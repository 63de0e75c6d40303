#include <map>

#include "runtime/cluster/rank_environment.h"
#include "test/support/expect_error.h"

namespace {

using Variables = std::map<std::string, std::string>;

RankEnvironment environment_of(const Variables& variables) {
    return find_rank_environment([&](const char* name) {
        const auto found = variables.find(name);
        return found == variables.end() ? nullptr : found->second.c_str();
    });
}

Variables with(Variables variables, const Variables& more) {
    for (const auto& [name, value] : more) variables[name] = value;
    return variables;
}

Variables without(Variables variables, const std::string& name) {
    variables.erase(name);
    return variables;
}

// launcher rank/size local_rank/local_size host:port
std::string summary(const RankEnvironment& environment) {
    return environment.launcher + " " + std::to_string(environment.rank) + "/" + std::to_string(environment.size) +
           " " + std::to_string(environment.local_rank) + "/" + std::to_string(environment.local_size) + " " +
           environment.master_host + ":" + std::to_string(environment.master_port);
}

const Variables kTorchrun{{"RANK", "5"},        {"WORLD_SIZE", "8"},     {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"},
                          {"MASTER_ADDR", "a"}, {"MASTER_PORT", "29500"}};
const Variables kOpenMpi{{"OMPI_COMM_WORLD_RANK", "3"},
                         {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
const Variables kMpich{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
// The variables of every process in an allocation, however it was started.
const Variables kAllocation{{"SLURM_JOB_ID", "1000"},
                            {"SLURM_NTASKS", "16"},
                            {"SLURM_JOB_NODELIST", "big[1-4]"},
                            {"SLURM_TASKS_PER_NODE", "4(x4)"}};
const Variables kBatchScript =
    with(kAllocation, {{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_NODEID", "0"}});
const Variables kStep = with(kAllocation, {{"SLURM_STEP_ID", "2"},
                                           {"SLURM_PROCID", "6"},
                                           {"SLURM_NTASKS", "7"},
                                           {"SLURM_STEP_NUM_TASKS", "7"},
                                           {"SLURM_LOCALID", "0"},
                                           {"SLURM_NODEID", "2"},
                                           {"SLURM_STEP_TASKS_PER_NODE", "3(x2),1"},
                                           {"SLURM_STEP_NODELIST", "big[2-4]"}});

}  // namespace

TEST_CASE("rank environment: each launcher's variables give rank, size and rank 0's address", "[rank_environment]") {
    CHECK(summary(environment_of({})) == "alone 0/1 0/1 :0");
    CHECK(summary(environment_of(kTorchrun)) == "torchrun 5/8 1/4 a:29500");
    CHECK(summary(environment_of(kOpenMpi)) == "Open MPI 3/4 1/2 :0");
    CHECK(summary(environment_of(kMpich)) == "MPICH 1/2 1/2 :0");
    // 15000 + (31 * 1000 + 2) % 15000
    CHECK(summary(environment_of(kStep)) == "Slurm 6/7 0/0 big2:16002");
    CHECK(summary(environment_of(with(kStep, {{"SLURM_STEP_NODELIST", "big2"}}))) == "Slurm 6/7 0/7 big2:16002");
    CHECK(environment_of(kStep).run_id == "slurm 1000.2");
    CHECK(
        summary(environment_of(with(kStep, {{"SLURM_PROCID", "4"}, {"SLURM_LOCALID", "1"}, {"SLURM_NODEID", "1"}}))) ==
        "Slurm 4/7 1/0 big2:16002");
    CHECK(summary(environment_of(with(kStep, {{"MASTER_PORT", "4242"}}))) == "Slurm 6/7 0/0 big2:4242");
    CHECK(summary(environment_of(with(kOpenMpi, {{"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}}))) ==
          "Open MPI 3/4 1/2 h:1");
}

TEST_CASE("rank environment: Kubernetes sets no local ranks, Cray's launcher has other names", "[rank_environment]") {
    const Variables pod = without(without(kTorchrun, "LOCAL_RANK"), "LOCAL_WORLD_SIZE");
    CHECK(summary(environment_of(pod)) == "torchrun 5/8 0/1 a:29500");
    CHECK(summary(environment_of(with(pod, {{"LOCAL_RANK", "5"}}))) == "torchrun 5/8 5/0 a:29500");
    const Variables cray{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"PMI_LOCAL_RANK", "1"}, {"PMI_LOCAL_SIZE", "2"}};
    CHECK(summary(environment_of(cray)) == "MPICH 1/2 1/2 :0");
    CHECK(summary(environment_of({{"RANK", "0"}, {"WORLD_SIZE", "1"}})) == "torchrun 0/1 0/1 :0");
}

TEST_CASE("rank environment: in an allocation without srun a process is a single rank", "[rank_environment]") {
    CHECK(summary(environment_of(kAllocation)) == "alone 0/1 0/1 :0");
    CHECK(summary(environment_of(kBatchScript)) == "alone 0/1 0/1 :0");
    CHECK(summary(environment_of(with(kBatchScript, {{"SLURM_STEP_ID", "4294967291"}}))) == "alone 0/1 0/1 :0");
    CHECK(summary(environment_of(with(kBatchScript, {{"SLURM_STEP_ID", "4294967290"}}))) == "alone 0/1 0/1 :0");
}

TEST_CASE("rank environment: the inner one of nested launchers counts", "[rank_environment]") {
    // mpirun in a batch script; mpirun whose daemons are a Slurm step with one task per node
    CHECK(summary(environment_of(with(kBatchScript, kOpenMpi))) == "Open MPI 3/4 1/2 :0");
    CHECK(summary(environment_of(with(kStep, kOpenMpi))) == "Open MPI 3/4 1/2 :0");
    CHECK(summary(environment_of(with(kStep, kMpich))) == "MPICH 1/2 1/2 :0");
    // srun --mpi=pmi2 sets PMI_* itself
    CHECK(summary(environment_of(with(kStep, {{"PMI_RANK", "6"}, {"PMI_SIZE", "7"}}))) == "Slurm 6/7 0/0 big2:16002");
    CHECK(environment_of(with(kStep, {{"PMI_RANK", "6"}, {"PMI_SIZE", "7"}})).has_pmi);
    CHECK(environment_of(with(kStep, {{"PMIX_RANK", "6"}})).has_pmi);
    CHECK(!environment_of(kStep).has_pmi);
    // torchrun under srun and under mpirun, and the program's own local ranks
    CHECK(summary(environment_of(with(kStep, kTorchrun))) == "torchrun 5/8 1/4 a:29500");
    CHECK(summary(environment_of(with(with(kOpenMpi, kTorchrun), {{"TORCHELASTIC_RUN_ID", "x"}}))) ==
          "torchrun 5/8 1/4 a:29500");
    const std::string token = "0123456789abcdef0123456789abcdef";
    const RankEnvironment own = environment_of(with(with(kMpich, kTorchrun), {{"TRAIN_GPT_TOKEN", token}}));
    CHECK(summary(own) == "torchrun 5/8 1/4 a:29500");
    CHECK(own.token == token);
    // A wrapper that repeats mpirun's values, and one with different values
    CHECK(environment_of(with(with(kOpenMpi, kTorchrun), {{"RANK", "3"}, {"WORLD_SIZE", "4"}})).launcher == "torchrun");
    expect_error(Exit::usage, {"RANK is 5", "OMPI_COMM_WORLD_RANK is 3"},
                 [] { environment_of(with(kOpenMpi, kTorchrun)); });
    expect_error(Exit::usage, {"RANK is 5", "PMI_RANK is 1"}, [] { environment_of(with(kMpich, kTorchrun)); });
}

TEST_CASE("rank environment: torchrun's agent, restarts and an inherited socket", "[rank_environment]") {
    CHECK(environment_of(with(kTorchrun, {{"TORCHELASTIC_USE_AGENT_STORE", "True"}})).master_port == 29501);
    const Variables first = with(kTorchrun, {{"TORCHELASTIC_RUN_ID", "job"}, {"TORCHELASTIC_RESTART_COUNT", "0"}});
    CHECK(environment_of(first).run_id != environment_of(with(first, {{"TORCHELASTIC_RESTART_COUNT", "1"}})).run_id);
    const Variables inherited = with(kTorchrun, {{"TRAIN_GPT_LISTEN_FD", "7"}});
    CHECK(environment_of(inherited).listen_fd == -1);
    CHECK(environment_of(with(inherited, {{"RANK", "0"}, {"LOCAL_RANK", "0"}})).listen_fd == 7);
}

TEST_CASE("rank environment: missing, unreadable and contradictory variables are reported with their values",
          "[rank_environment]") {
    const auto fails = [](const Variables& variables, std::initializer_list<std::string> words) {
        expect_error(Exit::usage, words, [&] { environment_of(variables); });
    };
    for (const char* bad : {"", "x", "3x", " 3", "+3", "3.0", "-1", "8", "99999999999999999999"}) {
        INFO(bad);
        fails(with(kTorchrun, {{"RANK", bad}}), {"RANK", "\"" + std::string(bad) + "\"", "from 0 to 7"});
    }
    for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"})
        fails(without(kTorchrun, name), {name, "not set", "expected"});
    fails(with(kTorchrun, {{"WORLD_SIZE", "0"}}), {"WORLD_SIZE is \"0\"", "from 1"});
    fails(with(kTorchrun, {{"LOCAL_RANK", "4"}}), {"LOCAL_RANK is \"4\"", "from 0 to 3"});
    fails(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "9"}}), {"LOCAL_WORLD_SIZE is \"9\"", "from 1 to 8"});
    fails(with(kTorchrun, {{"MASTER_ADDR", ""}}), {"MASTER_ADDR", "expected"});
    for (const char* bad : {"0", "65536", "http"})
        fails(with(kTorchrun, {{"MASTER_PORT", bad}}), {"MASTER_PORT is", bad, "from 1 to 65535"});
    fails(with(kTorchrun, {{"TRAIN_GPT_TOKEN", "abc"}}), {"TRAIN_GPT_TOKEN has 3 characters", "32"});
    fails(with(kTorchrun, {{"TRAIN_GPT_TOKEN", std::string(32, 'G')}}), {"TRAIN_GPT_TOKEN", "hexadecimal"});
    fails(without(kOpenMpi, "OMPI_COMM_WORLD_SIZE"), {"OMPI_COMM_WORLD_SIZE", "Open MPI"});
    fails(without(kOpenMpi, "OMPI_COMM_WORLD_LOCAL_RANK"), {"OMPI_COMM_WORLD_LOCAL_RANK"});
    fails(without(kMpich, "MPI_LOCALRANKID"), {"MPI_LOCALRANKID", "PMI_SIZE is 2"});
    fails(with(kStep, {{"SLURM_PROCID", "7"}}), {"SLURM_PROCID is \"7\"", "from 0 to 6"});
    fails(with(kStep, {{"SLURM_STEP_ID", "batch"}}), {"SLURM_STEP_ID is \"batch\""});
    fails(with(kStep, {{"SLURM_LOCALID", "7"}}), {"SLURM_LOCALID is \"7\"", "from 0 to 6"});
    fails(with(kStep, {{"SLURM_STEP_NODELIST", "big[2-"}}), {"SLURM_STEP_NODELIST is \"big[2-\""});
    fails(without(kStep, "SLURM_LOCALID"), {"SLURM_LOCALID", "not set"});
}

TEST_CASE("rank environment: the first host of Slurm's list", "[rank_environment]") {
    const std::pair<const char*, const char*> cases[] = {{"node[003-010,12]", "node003"},
                                                         {"login", "login"},
                                                         {"a,b", "a"},
                                                         {"gpu[12],cpu[1-2]", "gpu12"},
                                                         {"rack[2-3]node[07-09]", "rack2node07"},
                                                         {"n[5,7-9]-ib0.cluster,x[1-2]", "n5-ib0.cluster"}};
    for (const auto& [list, host] : cases) CHECK(first_host(list, "V") == host);
    for (const char* broken : {"", ",a", "node[", "node[]", "node[a-b]", "node]1", "node[-3]", "a b"})
        expect_error(Exit::usage, {"V is", broken, "expected"}, [&] { first_host(broken, "V"); });
}
