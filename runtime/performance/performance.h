// Speed and energy: the arithmetic of a token, the table of GPUs, a prediction of how fast many GPUs would be, and what
// the counters of this machine say about its energy.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/numeric.h"

// ---- arithmetic per token -------------------------------------------------------------------------------------------

struct FlopsPerToken {
    int64_t parameters;  // all that are stored, but for an embedding that is looked up only; position embedding and the
                         // vocabulary's padding rows included
    double attended;     // summed over layers: heads * head size * keys that a query sees on average
};

// Floating-point operations of forward and backward per token: 6 parameters + 12 attended. Each weight takes part in
// three multiply-adds (Kaplan et al., arXiv 2001.08361, section 2.1); attention's two products take 2 * 2 attended
// forward, three times that with backward. For GPT-2 this is llm.c's convention (gpt2_estimate_mfu). PaLM's (arXiv
// 2204.02311, appendix B) counts keys that causality hides, too: twice the second term.
double flops_per_token(const FlopsPerToken& model);

// The share of the machine's peak that the model's arithmetic uses; nothing where the peak is unknown (0), as on a CPU.
std::optional<double> model_flops_utilisation(double flops_per_token, double tokens_per_s, double peak_flops_per_s);

// ---- the table of GPUs: NVIDIA's data sheets ------------------------------------------------------------------------

struct GpuModel {
    const char* name;                       // on the command line: what find_gpu() looks for
    const char* product;                    // the name in output
    std::vector<const char*> device_names;  // the driver's names of it, as nvidia-smi prints them
    double flops_per_s;                     // bf16 and fp16 tensor cores, fp32 accumulation, without sparsity
    double fp32_flops_per_s;                // without tensor cores
    double memory_bytes_per_s;              // read or write
    double memory_gib;                      // the data sheet's GB as GiB; driver and ECC keep up to 6 % of it
    double link_bytes_per_s;  // to the other GPUs of the node, per direction: half of the data sheet's sum
    bool has_nvlink;          // else that link is PCIe
};

// Every GPU in the table, the commonest first.
const std::vector<GpuModel>& known_gpus();

// The GPU of this name; case, spaces and hyphens do not count. Fails with Exit::usage and the nearest name.
const GpuModel& find_gpu(const std::string& name);

// The GPU that the driver calls `device_name` (DeviceInfo::name); null for a CPU, a MIG slice, or a GPU that the table
// does not have.
const GpuModel* gpu_of_device(const std::string& device_name);

// The peak rate of matrix products in this precision, FLOP/s; fp32 products that round to TF32 run at half the rate of
// 16-bit ones on every GPU in the table. 0 where gpu_of_device() has none.
double peak_flops_per_s(const std::string& device_name, Dtype precision, bool tf32);

// ---- scaling to many GPUs -------------------------------------------------------------------------------------------
//
// How fast many GPUs would be: a small model with published constants, no measurement of this program.
//
// Notation: W ranks, g of them per node on m = W / g nodes; a collective moves S bytes (before a reduce-scatter, after
// an all-gather). Psi: the elements of all buckets. A step is k micro-steps.

// Bytes per second in "450GB/s", "400Gb/s" (bits), "50e9". `option` is what the error calls it. Exit::usage where it is
// no positive finite rate.
double parse_rate(const std::string& text, const std::string& option);

// Fails with Exit::usage unless `gpus` fill whole nodes or less than one.
void check_nodes(int gpus, int gpus_per_node);

struct ScalingInputs {
    GpuModel gpu{};
    int gpus = 1;
    int gpus_per_node = 8;
    double nvlink_bytes_per_s = 0;                  // inside the node, per GPU and direction, as data sheets state it
    double net_bytes_per_s = 50e9;                  // between nodes, the same: 50 GB/s is NDR InfiniBand, 400 Gb/s
    std::vector<double> bucket_elements;            // the outer bucket (embeddings, last norm), then one per layer
    double flops_per_token = 0;                     // forward and backward: flops_per_token()
    double tokens_per_micro_step = 0;               // per rank
    int micro_steps = 1;                            // k
    double grad_wire_bytes = 4;                     // per gradient element: fp32
    double param_wire_bytes = 2;                    // per parameter element: bf16
    std::array<double, 4> memory_bytes_per_rank{};  // by ZeRO stage, for the table; 0: unknown

    // Share of gpu.flops_per_s that a step on one GPU reaches, optimizer included. 57 % of H100s and H200s is what
    // GPT-2 sizes should reach (LLMQ's benchmarks/H100x1.md has 47-60 %); its RTX 4090 reaches 70-81 %, llm.c's A100
    // 56-61 %.
    double peak_share = 0.57;

    // By how much matrix products slow down while a collective of NCCL occupies SMs: "30-40 %", pytorch PR #179937.
    double overlap_slowdown = 0.35;

    // Bus bandwidth of long messages as a share of the link. nccl-tests on 8 H200 (Stas Bekman, ml-engineering,
    // network/README.md) at 16 GiB: all-gather 361.4, reduce-scatter 362.9 of 450 GB/s. nccl-tests issue #290: 46-48 of
    // 50 GB/s per NIC, of which 45 are counted on. For PCIe nothing was found that is as general; it is given NVLink's.
    double nvlink_share = 363.0 / 450;
    double net_share = 45.0 / 50;

    // Latencies: NCCL's own model (src/graph/tuning.cc, protocol Simple) has 8.4 us per collective and per GPU of a
    // node 3.4 us on NVLink, 5.7 us on PCIe. Its 14 us per level of the tree over nodes leave out that a deep pipeline
    // has to fill. 44.5 us is the least-squares fit, in logarithms, to all-reduce on 512 H100 at six sizes from 64 MiB
    // to 16 GiB: arXiv 2411.13055 and NVIDIA's NVLSTree (GTC 2024), both read off figures in ml-engineering. Fewer
    // nodes can be slower: four of B200 were reported at 12, 44 and 70 % of their NICs with 16 MiB, 256 MiB and 1 GiB.
    double start_s = 8.4e-6;
    double nvlink_hop_s = 3.4e-6;
    double pcie_hop_s = 5.7e-6;
    double net_level_s = 44.5e-6;
};

// One collective, or several after one another, seen from one rank.
struct CommTime {
    double nvlink_bytes = 0, net_bytes = 0;  // sent; as many are received
    double nvlink_s = 0, net_s = 0;          // how long each link is busy, latencies included
    double seconds = 0;                      // from begin to end
};

// One reduce-scatter or all-gather of S bytes over all ranks; an all-reduce is two (Thakur, Rabenseifner, Gropp,
// "Optimization of collective communication operations in MPICH", 2005; Patarasuk, Yuan,
// "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).
//   NVLink   (g - 1) / g S bytes           (g - 1) hops of latency        a ring (Thakur et al.)
//   net      (m - 1) / m S / g bytes       log2(m) levels of latency      each rank has a NIC, and carries its share
// The sum of the bytes is (W - 1) / W S, what a flat ring sends. NCCL cuts a message into chunks that are on both links
// at the same time: seconds = start + latencies + the longer of the links' bytes / bandwidth.
// Left out: all-reduce by NVSwitch (NVLS), 480 instead of 363 GB/s inside a node, which serves stage 0 only.
CommTime collective_time(double bytes, const ScalingInputs& in);

struct StagePrediction {
    double compute_s = 0;    // k flops_per_token tokens_per_micro_step / (peak_share flops_per_s): one GPU's step
    CommTime communication;  // per step and rank, hidden or not
    double exposed_s = 0;    // communication while nothing is computed
    double slowdown_s = 0;   // what the compute that hides the rest loses by it
    double step_s = 0;       // compute_s + exposed_s + slowdown_s
    double tokens_per_s = 0;
    double efficiency = 0;  // tokens_per_s / (W times one GPU's with the same micro-steps) = compute_s / step_s
};

// The four ZeRO stages (Rajbhandari et al., arXiv 1910.02054, section 7: 2 Psi for stages 0 to 2, 3 Psi for stage 3):
//   0  all-reduce of the gradients                              once per step
//   1  reduce-scatter of the gradients, all-gather of the parameters   once per step
//   2  reduce-scatter                                           every micro-step; all-gather once per step
//   3  all-gather before forward and again before backward, reduce-scatter     every micro-step
// Forward is 1/3 of the compute, backward 2/3 (two of the three products per weight: Kaplan et al., arXiv 2001.08361,
// section 2.1). Reductions hide behind the backward pass of their micro-step, or the last; all-gathers behind the first
// forward pass or that of their micro-step. Two are never hidden: the outer bucket's gradients are complete when
// backward ends, and its parameters are what the next step begins with. A pass that computes c seconds and hides
// collectives of t seconds takes max(t, c + overlap_slowdown t), since it computes more slowly while they run.
// Left out: what a sharded optimizer saves (up to 1 %), stragglers, data, checkpoints.
std::array<StagePrediction, 4> predict_scaling(const ScalingInputs& in);

// The inputs in a few lines and a row per stage, for the terminal.
std::string scaling_table(const ScalingInputs& in);

// ---- energy ---------------------------------------------------------------------------------------------------------

// Whose energy a rank counts: its GPU's, and on one rank of each machine the CPUs'.
struct EnergySources {
    std::string gpu;                           // its place on the PCI bus: DeviceInfo::pci_bus_id; empty: no GPU
    std::string rapl = "/sys/class/powercap";  // where Linux shows the CPUs' counters; empty: another rank reads them
    std::string nvml = "libnvidia-ml.so.1";    // the driver's library
};

struct EnergyReading {
    std::optional<double> joules = {};                                // of all sources since the last reading
    double seconds = 0;                                               // since then
    std::optional<double> gpu_temperature_c = {}, sm_clock_mhz = {};  // at most a second old
    std::string throttle = {};  // likewise, what slows the GPU down of heat and power: "hw_thermal"; empty: nothing
};

// Reads what can be read, and never fails: what cannot is absent. A machine's CPUs and GPUs are counted as a whole,
// whatever else runs on them.
class EnergyMeter {
public:
    explicit EnergyMeter(const EnergySources& sources);
    EnergyMeter(EnergyMeter&&) noexcept;
    ~EnergyMeter();

    // The first joules are those since the meter was made.
    EnergyReading read();

    // "GPU by NVML; CPU by RAPL (package-0, dram)", or what is missing and why.
    std::string description() const;

private:
    struct State;
    std::unique_ptr<State> state_;
};
