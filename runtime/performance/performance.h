// Speed and sensors: FLOPs per token, the table of GPUs, a model of scaling to many GPUs, and the sensors of a GPU.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/numeric.h"
#include "model/schedule.h"

// ---- arithmetic per token -------------------------------------------------------------------------------------------

struct FlopsPerToken {
    int64_t parameters;  // all stored ones except an embedding that is only looked up; includes the position embedding
                         // and the vocabulary's padding rows
    double attended;     // summed over layers: heads * head size * average number of keys per query
};

// Returns the floating-point operations of forward and backward per token: 6 parameters + 12 attended. Each weight
// takes part in three multiply-adds (Kaplan et al., arXiv 2001.08361, section 2.1). Attention's two products take 2 * 2
// attended forward and three times that with backward. For GPT-2 this is llm.c's convention (gpt2_estimate_mfu). PaLM's
// convention (arXiv 2204.02311, appendix B) also counts the keys that the causal mask hides, which doubles the second
// term.
double flops_per_token(const FlopsPerToken& model);

// Returns the share of the machine's peak that the model's arithmetic uses; nullopt if the peak is unknown (0), as on a
// CPU.
std::optional<double> model_flops_utilization(double flops_per_token, double tokens_per_s, double peak_flops_per_s);

// ---- the table of GPUs: NVIDIA's data sheets ------------------------------------------------------------------------

struct GpuModel {
    const char* name;                       // on the command line, for find_gpu()
    const char* product;                    // the name in output
    std::vector<const char*> device_names;  // the driver's names, as nvidia-smi prints them
    double flops_per_s;                     // bf16 and fp16 tensor cores, fp32 accumulation, without sparsity
    double fp32_flops_per_s;                // without tensor cores
    double memory_bytes_per_s;              // read or write
    double memory_gib;                      // the data sheet's GB as GiB; driver and ECC take up to 6 %
    double link_bytes_per_s;      // to the other GPUs of the node, per direction: half of the data sheet's total
    bool has_nvlink;              // false: the link is PCIe
    double pcie_bytes_per_s = 0;  // to the host, per direction, if it has NVLink
    double host_bytes_per_s() const { return has_nvlink ? pcie_bytes_per_s : link_bytes_per_s; }
};

// Returns the table, most common GPUs first.
const std::vector<GpuModel>& known_gpus();

// Returns the GPU with this name, ignoring case, spaces and hyphens. Fails with Exit::usage, naming the nearest match.
const GpuModel& find_gpu(const std::string& name);

// Returns the GPU that the driver calls `device_name` (DeviceInfo::name); null for a CPU, a MIG slice, or a GPU that is
// not in the table.
const GpuModel* gpu_of_device(const std::string& device_name);

// Returns the peak rate of matrix products in this precision, in FLOP/s; 0 if gpu_of_device() returns null. FP32
// products in TF32 run at half the rate of 16-bit ones on every GPU in the table.
double peak_flops_per_s(const std::string& device_name, Dtype precision, bool tf32);

// ---- scaling to many GPUs -------------------------------------------------------------------------------------------
//
// The predicted speed of many GPUs: a small model with published constants, not measured with this program.
//
// Notation: W ranks, g of them per node on m = W / g nodes. A collective moves S bytes (before a reduce-scatter, after
// an all-gather). Psi is the number of elements of all buckets. A step has k micro-steps.

// Parses a rate in bytes per second: "450GB/s", "400Gb/s" (bits), "50e9". Fails with Exit::usage, naming `option`,
// unless the rate is positive and finite.
double parse_rate(const std::string& text, const std::string& option);

// Fails with Exit::usage unless `gpus` is at most one node or a whole number of nodes.
void check_nodes(int gpus, int gpus_per_node);

// The work of a pipeline stage's ranks on one of its parts of the layers.
struct PartWork {
    std::array<PassWork, 3> passes{};     // by Pass::Kind
    std::vector<double> bucket_elements;  // the outer bucket (embeddings, last norm; 0: none), then the others
};

struct ScalingInputs {
    GpuModel gpu{};
    int gpus = 1;
    int gpus_per_node = 8;
    double nvlink_bytes_per_s = 0;  // inside the node, per GPU and direction, as in data sheets
    double net_bytes_per_s = 50e9;  // between nodes, likewise: NDR InfiniBand, 400 Gb/s
    int tensor = 1, context = 1, pipeline = 1, zero_stage = 0;  // data parallelism over gpus / their product
    std::vector<std::vector<PartWork>> stages = {{{}}};         // the parts of each pipeline stage
    std::vector<std::vector<Pass>> passes = {};                 // of each stage, if there are several
    double tokens_per_micro_step = 0;                           // of the ranks that compute the same samples
    double row_bytes = 0;         // per token: what tensor parallelism gathers, and a stage sends
    int micro_steps = 1;          // k
    double grad_wire_bytes = 4;   // per gradient element: fp32
    double param_wire_bytes = 2;  // per parameter element: bf16
    // That a step copies from or to the host, the larger number; on the same link share. Passes hide their copies.
    double update_host_bytes = 0, passes_host_bytes = 0;

    // Share of gpu.flops_per_s that a step on one GPU reaches, optimizer included: the mean of 46, 47 and 51 % on an
    // H200 with GPT-2 124M, Llama 1.1B and GPT-2 1558M (dev/results/2026-11-29-h200.md). Other GPUs were not measured;
    // LLMQ's RTX 4090 reaches 70-81 %, llm.c's A100 56-61 %.
    double peak_share = 0.48;

    // Slowdown of matrix products while an NCCL collective occupies SMs: "30-40 %", pytorch PR #179937.
    double overlap_slowdown = 0.35;

    // Bus bandwidth of long messages as a share of the link. nccl-tests on 8 H200 (Stas Bekman, ml-engineering,
    // network/README.md) at 16 GiB: all-gather 361.4, reduce-scatter 362.9 of 450 GB/s. nccl-tests issue #290: 46-48 of
    // 50 GB/s per NIC; the model assumes 45. For PCIe no comparable measurement was found, so it uses NVLink's share.
    double nvlink_share = 363.0 / 450;
    double net_share = 45.0 / 50;

    // Latencies: NCCL's own model (src/graph/tuning.cc, protocol Simple) has 8.4 us per collective and, per GPU of a
    // node, 3.4 us on NVLink and 5.7 us on PCIe. Its 14 us per level of the tree over nodes ignore that a deep pipeline
    // has to fill. 44.5 us is the least-squares fit, in logarithms, to all-reduce on 512 H100 at six sizes from 64 MiB
    // to 16 GiB: arXiv 2411.13055 and NVIDIA's NVLSTree (GTC 2024), both read from figures in ml-engineering. Fewer
    // nodes can be slower: four B200 nodes were reported at 12, 44 and 70 % of their NICs with 16 MiB, 256 MiB and 1
    // GiB.
    double start_s = 8.4e-6;
    double nvlink_hop_s = 3.4e-6;
    double pcie_hop_s = 5.7e-6;
    double net_level_s = 44.5e-6;

    // Time of an update per element, unless peak_share includes it. Ranks that share processors, as CPU ranks do:
    // `cores` of a node; 0: each rank has its own. A rank computes 1 + contention times as long if all cores are busy.
    double update_s_per_element = 0;
    double cores = 0, contention = 0;

    int replicas() const { return gpus / (tensor * pipeline); }  // ranks with the same part of the model
    int data() const { return replicas() / context; }
};

// Returns a machine of this GPU; of "cpu", CPU ranks with a core each; or of a file NAME.json, which has other
// constants, e.g. measured ones: {"flops_per_s": of a rank's training, "link_bytes_per_s": inside a node, ...}, see
// machine_constants() in scaling.cpp. Fails with Exit::usage as find_gpu() does, and as read_file() and parse_json()
// do.
ScalingInputs machine_named(const std::string& name);

// Returns the machine of the GPU that the driver calls `gpu_name`; empty: of CPU ranks. Fails with Exit::config if it
// is not in the table of GPUs.
ScalingInputs machine_of_device(const std::string& gpu_name);

// One collective, or several in sequence, as seen by one rank.
struct CommTime {
    double nvlink_bytes = 0, net_bytes = 0;  // sent; the same number is received
    double nvlink_s = 0, net_s = 0;          // time that each link is busy, latencies included
    double seconds = 0;                      // from start to end
};

// Ranks with consecutive numbers have a stride of 1. W is the number of ranks of the group.
struct RankGroup {
    int ranks, stride = 1;
};

// Returns the time of one reduce-scatter or all-gather of S bytes over the ranks of a group. An all-reduce takes two
// (Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005; Patarasuk, Yuan,
// "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
//   NVLink   (g - 1) / g S bytes           (g - 1) hops of latency        a ring (Thakur et al.)
//   net      (m - 1) / m S / g bytes       log2(m) levels of latency      each rank sends its share over its own NIC
// The bytes sum to (W - 1) / W S, as in a flat ring. NCCL splits a message into chunks that use both links at the same
// time: seconds = start + latencies + the longer of the links' bytes / bandwidth. Not modeled: all-reduce by NVSwitch
// (NVLS), which reaches 480 instead of 363 GB/s inside a node and helps stage 0 only.
CommTime collective_time(double bytes, const RankGroup& group, const ScalingInputs& in);

// A step of the busiest pipeline stage.
struct StepPrediction {
    double compute_s = 0;    // flops_per_token tokens / (peak_share flops_per_s), divided by the ranks
    CommTime communication;  // per step and rank, hidden or not
    double exposed_s = 0;    // communication while the rank computes nothing
    double slowdown_s = 0;   // extra compute time while it hides the rest
    double bubble_s = 0;     // time when it waits for other stages or, with shared processors, for a core
    double update_s = 0;     // unless peak_share includes it
    double step_s = 0;       // the sum of all but `communication`
    double tokens_per_s = 0;
    double efficiency = 0;  // tokens_per_s / (W times one GPU's with the same micro-steps): all compute / (W step_s)
};

// Predicts a step of a grid of ranks. The ZeRO stages among the ranks with the same part of the model (Rajbhandari et
// al., arXiv 1910.02054, section 7: 2 Psi for stages 0 to 2, 3 Psi for stage 3):
//   0  all-reduce of the gradients                              once per step
//   1  reduce-scatter of the gradients, all-gather of the parameters   once per step
//   2  reduce-scatter                                           every micro-step; all-gather once per step
//   3  all-gather before forward and again before backward, reduce-scatter     every micro-step
// Reductions overlap with the backward pass of their micro-step, or of the last; with passes of weights, with those.
// All-gathers overlap with the first forward pass or, at stage 3, with the passes of their micro-step. Two collectives
// never overlap: the outer bucket's gradients are complete only when backward ends, and the next step begins with its
// parameters. A pass with c seconds of compute and t seconds of overlapping collectives takes max(t, c +
// overlap_slowdown t), because it computes more slowly while they run.
//
// The gathers and sums of tensor parallelism, PassWork::collectives, count as exposed, although the backward passes of
// qkv and fc overlap theirs with GEMMs; the ring of context parallelism overlaps with attention. A stage of a pipeline
// begins a pass when its input has arrived; the bubble follows from the times of all passes of all stages in the order
// of the schedule. The step ends when the last stage has reduced its gradients and, at the end, updated its parameters.
// Not modeled: the time that a sharded optimizer saves (up to 1 %), the sum of a tied embedding's gradients over two
// stages, the exchange of a key/value head that ranks share, stragglers, data loading, checkpoints.
StepPrediction predict_step(const ScalingInputs& in);

// ---- GPU sensors ----------------------------------------------------------------------------------------------------

// Values that the GPU or its driver does not provide are absent.
struct GpuReading {
    std::optional<double> power_w = {}, temperature_c = {}, sm_clock_mhz = {};
    std::string throttle = {};  // what limits the clocks: "sw_power_cap", "hw_thermal, hw_slowdown"; empty: nothing
};

// Reads a GPU's sensors with NVML, the library of NVIDIA's driver. It is loaded when an object is created and declared
// in nvml.cpp, so neither its header nor the driver is needed to build, or to train without it.
class GpuSensors {
public:
    // `pci_bus_id` identifies the GPU: "0000:65:00.0"; empty: there is none. `library` is the file's name or path.
    explicit GpuSensors(const std::string& pci_bus_id, const std::string& library = "libnvidia-ml.so.1")
        : problem_(open(pci_bus_id, library)) {}

    // Returns why the GPU's sensors cannot be read, as part of a sentence; empty if they can or there is no GPU.
    const std::string& problem() const { return problem_; }

    // Returns values that are at most a second old. Never fails.
    const GpuReading& read();

private:
    struct Functions;
    std::string open(const std::string& pci_bus_id, const std::string& library);  // returns the problem
    std::string throttle() const;

    std::shared_ptr<const Functions> nvml_;  // null: the library cannot be used
    void* gpu_ = nullptr;                    // null: its sensors cannot be read
    std::string problem_;
    GpuReading reading_;
    double read_ms_ = -1e9;  // when reading_ was read
};
