#include <cctype>
#include <nlohmann/json.hpp>

#include "kernels/check.h"
#include "runtime/config/config.h"
#include "runtime/io/io.h"
#include "runtime/performance/performance.h"

namespace {

constexpr double kTera = 1e12, kGiga = 1e9, kGiB = 0x1p30;

std::string letters_and_digits(const std::string& name) {
    std::string plain;
    for (unsigned char c : name)
        if (std::isalnum(c)) plain += char(std::tolower(c));
    return plain;
}

GpuModel row(const char* name, const char* product, std::vector<const char*> device_names, double tflops,
             double fp32_tflops, double memory_tb_per_s, double memory_gib, double link_gb_per_s, bool has_nvlink) {
    return {.name = name,
            .product = product,
            .device_names = std::move(device_names),
            .flops_per_s = tflops * kTera,
            .fp32_flops_per_s = fp32_tflops * kTera,
            .memory_bytes_per_s = memory_tb_per_s * kTera,
            .memory_bytes = memory_gib * kGiB,
            .link_bytes_per_s = link_gb_per_s * kGiga,
            .has_nvlink = has_nvlink};
}

}  // namespace

const std::vector<GpuModel>& known_gpus() {
    // 16-bit peaks of a100, h100, h200, rtx3090, rtx4090 and rtxpro6000 are also the ones to which published shares of
    // peak refer; the rest is found in data sheets and white papers only. NVLink to neighbours in pairs does not count.
    static const std::vector<GpuModel> table = {
        row("h100", "H100 SXM", {"NVIDIA H100 80GB HBM3"}, 989.4, 66.9, 3.35, 80, 450, true),
        row("h200", "H200 SXM", {"NVIDIA H200"}, 989.4, 66.9, 4.8, 141, 450, true),
        row("a100", "A100 SXM 80 GB", {"NVIDIA A100-SXM4-80GB"}, 312, 19.5, 2.039, 80, 300, true),
        row("b200", "HGX B200", {"NVIDIA B200"}, 2250, 75, 8.0, 180, 900, true),
        row("a100-40gb", "A100 SXM 40 GB", {"NVIDIA A100-SXM4-40GB"}, 312, 19.5, 1.555, 40, 300, true),
        row("a100-pcie", "A100 PCIe 80 GB", {"NVIDIA A100 80GB PCIe"}, 312, 19.5, 1.935, 80, 32, false),
        row("h100-pcie", "H100 PCIe", {"NVIDIA H100 PCIe"}, 756, 51.2, 2.0, 80, 64, false),
        row("a10", "A10", {"NVIDIA A10"}, 125, 31.2, 0.6, 24, 32, false),
        row("l4", "L4", {"NVIDIA L4"}, 121, 30.3, 0.3, 24, 32, false),
        row("l40s", "L40S", {"NVIDIA L40S"}, 362, 91.6, 0.864, 48, 32, false),
        row("rtxa6000", "RTX A6000", {"NVIDIA RTX A6000"}, 154.8, 38.7, 0.768, 48, 32, false),
        row("rtx3090", "GeForce RTX 3090", {"NVIDIA GeForce RTX 3090"}, 71, 35.6, 0.936, 24, 32, false),
        row("rtx4090", "GeForce RTX 4090", {"NVIDIA GeForce RTX 4090"}, 165.2, 82.6, 1.008, 24, 32, false),
        row("rtx5090", "GeForce RTX 5090", {"NVIDIA GeForce RTX 5090"}, 209.5, 104.8, 1.792, 32, 64, false),
        row("rtxpro6000", "RTX PRO 6000 Blackwell",
            {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "NVIDIA RTX PRO 6000 Blackwell Server Edition"},
            503.8, 125, 1.792, 96, 64, false),
    };
    return table;
}

const GpuModel& find_gpu(const std::string& name) {
    const std::string plain = letters_and_digits(name);
    std::vector<std::string> names;
    std::string all;
    for (const GpuModel& model : known_gpus()) {
        if (letters_and_digits(model.name) == plain) return model;
        names.push_back(model.name);
        all += (all.empty() ? "" : ", ") + names.back();
    }
    const std::string nearest = nearest_name(plain, names);
    fail(Exit::usage, "--gpu: %s is not in the table; %s", printed(name),
         nearest.empty() ? "it has " + all : "did you mean " + nearest + "?");
}

const GpuModel* gpu_of_device(const std::string& device_name) {
    for (const GpuModel& model : known_gpus())
        for (const char* name : model.device_names)
            if (device_name == name) return &model;
    return nullptr;
}

double peak_flops_per_s(const std::string& device_name, Dtype precision, bool tf32) {
    const GpuModel* model = gpu_of_device(device_name);
    if (!model) return 0;
    switch (precision) {
        case Dtype::fp32: return tf32 ? model->flops_per_s / 2 : model->fp32_flops_per_s;
        case Dtype::bf16: return model->flops_per_s;
        case Dtype::fp16: return model->flops_per_s;
        case Dtype::fp64: break;
    }
    return 0;
}

double flops_per_token(const FlopsPerToken& model) {
    return 6.0 * double(model.parameters) + 6.0 * model.n_layer * double(model.n_embd) * model.seq_len;
}

std::optional<double> model_flops_utilisation(double flops_per_token, double tokens_per_s, double peak_flops_per_s) {
    if (peak_flops_per_s <= 0) return std::nullopt;
    return flops_per_token * tokens_per_s / peak_flops_per_s;
}
