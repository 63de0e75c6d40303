#include "dev/bench_roofs.h"

#include <nlohmann/json.hpp>

#include "dev/bench_arrays.h"
#include "dev/bench_timing.h"
#include "runtime/io/files.h"
#include "runtime/io/json.h"
#include "runtime/performance/performance.h"

namespace {

constexpr Dtype kPrecisions[] = {Dtype::fp32, Dtype::bf16, Dtype::fp16};

// Long enough for clocks and power to settle before most batches of the median.
Timing steady(double seconds) { return {.warm_up = 2, .batch_ms = 10, .total_ms = 1000 * seconds, .least = 3}; }

std::string tflops_key(Dtype precision) { return std::string(name_of(precision)) + "_tflops"; }

// Much larger than the L2 cache, if there is enough memory.
double copy_bytes_per_s(double seconds) {
    const size_t bytes = std::min(size_t(2) << 30, device_info().free_bytes / 64 / 4096 * 4096);
    Arrays arrays;
    float *from = arrays.make<float>(bytes / sizeof(float)), *to = arrays.make<float>(bytes / sizeof(float));
    const Times times = time_calls([=] { copy_on_device(to, from, bytes, Stream{}); }, steady(seconds));
    return 2.0 * double(bytes) / times.median * 1000;
}

// Uses squares of growing size, until a GEMM takes some milliseconds by the host's clock; skips those so small that the
// launch time matters.
template <class T> double best_product_flops_per_s(double seconds) {
    constexpr double kMinMs = 0.1, kMaxMs = 5;
    constexpr int kMin = 128, kMax = 16384;
    double best = 0, once = 0;
    for (int size = kMin; size <= kMax && once < kMaxMs; size *= 2) {
        const size_t count = size_t(size) * size_t(size);
        Arrays arrays;
        T *out = arrays.make<T>(count), *inp = arrays.make<T>(count), *weight = arrays.make<T>(count);
        const ops::MatmulForward product{out, nullptr, inp, weight, nullptr, size, size, size};
        auto multiply = [=] { ops::matmul_forward(product, Stream{}); };
        multiply();  // on a GPU this chooses the algorithm
        synchronize(Stream{});
        const double start = host_ms();
        multiply();
        synchronize(Stream{});
        once = host_ms() - start;
        if (once < kMinMs) continue;
        best = std::max(best, 2.0 * double(count) * size / time_calls(multiply, steady(seconds)).median * 1000);
    }
    return best;
}

}  // namespace

double Roofs::ms(double flops, double bytes, Dtype precision) const {
    return 1000 * std::max(flops / flops_per_s.at(precision), bytes / copy_bytes_per_s);
}

void measure_roofs(Roofs& roofs, Dtype precision, double seconds, const std::function<void()>& measured) {
    const std::string device = device_info().name;
    const GpuModel* gpu = gpu_of_device(device);
    auto promised = [](double rate, double sheet) { return format(", %.0f %% of the data sheet", 100 * rate / sheet); };
    if (roofs.copy_bytes_per_s == 0) {
        roofs.copy_bytes_per_s = copy_bytes_per_s(seconds);
        std::printf("copy on the device: %.0f GB/s read and written%s\n", roofs.copy_bytes_per_s * 1e-9,
                    gpu ? promised(roofs.copy_bytes_per_s, gpu->memory_bytes_per_s).c_str() : "");
        measured();
    }
    double& flops_per_s = roofs.flops_per_s[precision];
    flops_per_s = precision == Dtype::bf16   ? best_product_flops_per_s<bf16>(seconds)
                  : precision == Dtype::fp16 ? best_product_flops_per_s<fp16>(seconds)
                                             : best_product_flops_per_s<float>(seconds);
    const double sheet = peak_flops_per_s(device, precision, false);
    std::printf("square GEMM, %s: %.4g TFLOP/s%s\n", name_of(precision), flops_per_s * 1e-12,
                sheet > 0 ? promised(flops_per_s, sheet).c_str() : "");
    measured();
}

nlohmann::ordered_json json_of(const Roofs& roofs) {
    nlohmann::ordered_json json = nlohmann::ordered_json::object();
    if (roofs.copy_bytes_per_s > 0) json["copy_gb_per_s"] = roofs.copy_bytes_per_s * 1e-9;
    for (const auto& [precision, rate] : roofs.flops_per_s) json[tflops_key(precision)] = rate * 1e-12;
    return json;
}

Roofs read_roofs(const std::string& path) {
    const auto json = parse_json(read_file(path), path, Exit::data);
    const auto rate = [&](const std::string& key) {
        const auto found = json.find("roofs");
        if (found == json.end() || !found->contains(key) || !(*found)[key].is_number()) return 0.0;
        return (*found)[key].get<double>();
    };
    Roofs roofs;
    roofs.copy_bytes_per_s = rate("copy_gb_per_s") * 1e9;
    for (const Dtype precision : kPrecisions)
        if (const double tflops = rate(tflops_key(precision)); tflops > 0) roofs.flops_per_s[precision] = tflops * 1e12;
    if (roofs.copy_bytes_per_s <= 0 && roofs.flops_per_s.empty())
        fail(Exit::data, "%s has no roofs: expected a file of --roofs --json", path.c_str());
    return roofs;
}
