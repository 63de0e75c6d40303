#include <cctype>

#include "kernels/numeric.h"
#include "runtime/config/config.h"
#include "runtime/io/joined.h"
#include "runtime/io/json.h"
#include "runtime/performance/performance.h"

static std::string letters_and_digits(const std::string& name) {
    std::string plain;
    for (unsigned char c : name)
        if (std::isalnum(c)) plain += char(std::tolower(c));
    return plain;
}

const std::vector<GpuModel>& known_gpus() {
    // Published shares of peak refer to the same 16-bit peaks for a100, h100, h200, rtx3090, rtx4090 and rtxpro6000.
    // The other values come from data sheets and white papers only. NVLink between pairs of neighbors does not count.
    static const std::vector<const char*> rtx_pro_6000 = {"NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
                                                          "NVIDIA RTX PRO 6000 Blackwell Server Edition"};
    static const std::vector<GpuModel> table = {
        {"h100", "H100 SXM", {"NVIDIA H100 80GB HBM3"}, 989.4e12, 66.9e12, 3.35e12, 80, 450e9, true, 64e9},
        {"h200", "H200 SXM", {"NVIDIA H200"}, 989.4e12, 66.9e12, 4.8e12, 141, 450e9, true, 64e9},
        {"a100", "A100 SXM 80 GB", {"NVIDIA A100-SXM4-80GB"}, 312e12, 19.5e12, 2.039e12, 80, 300e9, true, 32e9},
        {"b200", "HGX B200", {"NVIDIA B200"}, 2250e12, 75e12, 8.0e12, 180, 900e9, true, 64e9},
        {"a100-40gb", "A100 SXM 40 GB", {"NVIDIA A100-SXM4-40GB"}, 312e12, 19.5e12, 1.555e12, 40, 300e9, true, 32e9},
        {"a100-pcie", "A100 PCIe 80 GB", {"NVIDIA A100 80GB PCIe"}, 312e12, 19.5e12, 1.935e12, 80, 32e9, false},
        {"h100-pcie", "H100 PCIe", {"NVIDIA H100 PCIe"}, 756e12, 51.2e12, 2.0e12, 80, 64e9, false},
        {"a10", "A10", {"NVIDIA A10"}, 125e12, 31.2e12, 0.6e12, 24, 32e9, false},
        {"l4", "L4", {"NVIDIA L4"}, 121e12, 30.3e12, 0.3e12, 24, 32e9, false},
        {"l40s", "L40S", {"NVIDIA L40S"}, 362e12, 91.6e12, 0.864e12, 48, 32e9, false},
        {"rtxa6000", "RTX A6000", {"NVIDIA RTX A6000"}, 154.8e12, 38.7e12, 0.768e12, 48, 32e9, false},
        {"rtx3090", "GeForce RTX 3090", {"NVIDIA GeForce RTX 3090"}, 71e12, 35.6e12, 0.936e12, 24, 32e9, false},
        {"rtx4090", "GeForce RTX 4090", {"NVIDIA GeForce RTX 4090"}, 165.2e12, 82.6e12, 1.008e12, 24, 32e9, false},
        {"rtx5090", "GeForce RTX 5090", {"NVIDIA GeForce RTX 5090"}, 209.5e12, 104.8e12, 1.792e12, 32, 64e9, false},
        {"rtxpro6000", "RTX PRO 6000 Blackwell", rtx_pro_6000, 503.8e12, 125e12, 1.792e12, 96, 64e9, false},
    };
    return table;
}

const GpuModel& find_gpu(const std::string& name) {
    const std::string plain = letters_and_digits(name);
    std::vector<std::string> names;
    for (const GpuModel& model : known_gpus()) {
        if (letters_and_digits(model.name) == plain) return model;
        names.push_back(model.name);
    }
    const std::string nearest = nearest_name(plain, names);
    fail(Exit::usage, "--gpu: unknown GPU %s; %s", printed(name),
         nearest.empty() ? "known: " + joined(names) : "did you mean " + nearest + "?");
}

const GpuModel* gpu_of_device(const std::string& device_name) {
    for (const GpuModel& model : known_gpus())
        for (const char* name : model.device_names)
            if (device_name == name) return &model;
    return nullptr;
}

double peak_flops_per_s(const std::string& device_name, Dtype precision, bool tf32) {
    const GpuModel* model = gpu_of_device(device_name);
    if (!model || precision == Dtype::fp64) return 0;
    if (precision == Dtype::fp32) return tf32 ? model->flops_per_s / 2 : model->fp32_flops_per_s;
    return model->flops_per_s;
}

double flops_per_token(const FlopsPerToken& model) { return 6.0 * double(model.parameters) + 12.0 * model.attended; }

std::optional<double> model_flops_utilization(double flops_per_token, double tokens_per_s, double peak_flops_per_s) {
    if (peak_flops_per_s <= 0) return std::nullopt;
    return flops_per_token * tokens_per_s / peak_flops_per_s;
}
