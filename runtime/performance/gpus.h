// The table of GPUs: what NVIDIA's data sheets promise. Predictions and utilisation are derived from it.
#pragma once

#include <string>
#include <vector>

#include "kernels/numeric.h"

struct GpuModel {
    const char* name;                       // on the command line: what find_gpu() looks for
    const char* product;                    // for people
    std::vector<const char*> device_names;  // the driver's names of it, as nvidia-smi prints them
    double flops_per_s;                     // bf16 and fp16 tensor cores, fp32 accumulation, without sparsity
    double fp32_flops_per_s;                // without tensor cores
    double memory_bytes_per_s;              // read or write
    double memory_bytes;                    // the data sheet's GB as GiB; driver and ECC keep up to 6 % of it
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
