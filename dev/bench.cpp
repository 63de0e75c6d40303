// Milliseconds of a whole training step, and of every op in it at the same shapes: where the time goes.
//
//     build/bench_cpu or build/bench_cuda [fp32|bf16|fp16 ...] [--workload KEY ...] [--json FILE] [--steps-only] ...
//
// Per op: calls in a step, median of repeated calls, its share of the step, and the rate counted from the shapes. On a
// GPU also the share of speed of light: the time that the FLOPs or, if longer, the bytes (every operand once) would
// take at the rates of the largest product and of a plain stream in the same run, over the time taken; then the same at
// the data sheet's rates, where the GPU is known. Figures of a shared machine are only worth comparing within one run.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "dev/bench_cases.h"
#include "kernels/check.h"
#include "model/gpt.h"
#include "model/plan.h"
#include "runtime/files.h"
#include "runtime/flops.h"

namespace {

using Json = nlohmann::ordered_json;

// A GPU's clocks settle in a second or so, and what is queued hides the cost of a launch; the CPU runs each call alone.
struct Timing {
    int warm_up;
    double batch_ms;  // so much work is queued between two waits; 0: one call
    double total_ms;
};

struct Roofs {
    double flops_per_s = 0, bytes_per_s = 0;  // 0: not known
};

struct Settings {
    std::vector<std::string> precisions, workloads;
    std::string json, choices = "build/bench_choices.json";
    bool steps_only = false, tf32 = false;
    double step_seconds = 0;
    int head_rows = 0;
};

constexpr GptShape kGpt2Small{12, 12, 12, 768, 1024, 50257}, kGpt2Medium{24, 16, 16, 1024, 1024, 50257},
    kGpt2Large{36, 20, 20, 1280, 1024, 50257}, kGpt2Xl{48, 25, 25, 1600, 1024, 50257};
constexpr int kWhole = 1 << 30;  // rows of logits: all at a time

const std::vector<Workload>& workloads(bool on_gpu) {
    static const std::vector<Workload> cpu = {
        {"124M", "GPT-2 124M", kGpt2Small, 4, 64, kWhole},
        {"small-4", "6 layers, 384 wide, vocabulary 4096", {6, 6, 6, 384, 256, 4096}, 4, 256, kWhole},
        {"small-8", "6 layers, 384 wide, vocabulary 4096", {6, 6, 6, 384, 256, 4096}, 8, 256, kWhole},
    };
    static const std::vector<Workload> gpu = {
        {"124M", "GPT-2 124M", kGpt2Small, 64, 1024, 8192},
        {"1558M", "GPT-2 1558M", kGpt2Xl, 16, 1024, 8192},
        {"350M", "GPT-2 350M", kGpt2Medium, 32, 1024, 8192},
        {"774M", "GPT-2 774M", kGpt2Large, 32, 1024, 8192},
    };
    return on_gpu ? gpu : cpu;
}
const Workload kTiny{"tiny", "2 layers, 64 wide, vocabulary 256", {2, 2, 2, 64, 32, 256}, 2, 32, 32};  // to try this

// Dense rates of data sheets: tensor cores for 16-bit types, plain units for fp32.
Roofs data_sheet(const std::string& device, Dtype precision) {
    struct Row {
        const char* name;
        double halves_tflops, fp32_tflops, tb_per_s;
    };
    for (const Row& row :
         {Row{"H200", 989, 67, 4.8}, Row{"H100 80GB HBM3", 989, 67, 3.35}, Row{"A100", 312, 19.5, 2.0}})
        if (device.find(row.name) != std::string::npos)
            return {(precision == Dtype::fp32 ? row.fp32_tflops : row.halves_tflops) * 1e12, row.tb_per_s * 1e12};
    return {};
}

double now_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double milliseconds(const std::function<void()>& call, int times) {
    const double start = now_ms();
    for (int i = 0; i < times; i++) call();
    synchronize(Stream{});
    return (now_ms() - start) / times;
}

// Median over at least 5 batches and the given time, after calls that are not counted.
double median_ms(const std::function<void()>& call, const Timing& timing) {
    double once = 0;
    for (int i = 0; i < timing.warm_up; i++) once = milliseconds(call, 1);
    const int batch = std::clamp(int(timing.batch_ms / std::max(once, 1e-3)), 1, 1000);
    std::vector<double> times;
    const double begin = now_ms();
    while (times.size() < 5 || (now_ms() - begin < timing.total_ms && times.size() < 200))
        times.push_back(milliseconds(call, batch));
    std::nth_element(times.begin(), times.begin() + long(times.size() / 2), times.end());
    return times[times.size() / 2];
}

GptOptions options_of(const Workload& work, Dtype precision) {
    GptOptions options;
    options.shape = work.shape;
    options.batch = work.batch, options.seq_len = work.seq_len;
    options.precision = precision;
    options.head_rows = work.head_rows == kWhole ? 1024 : work.head_rows;
    return options;
}

double step_ms(const Workload& work, Dtype precision, const Timing& timing) {
    Gpt gpt(options_of(work, precision), comm_single());
    gpt.initialize(1);
    std::mt19937 random(1);
    std::vector<int> tokens(size_t(work.batch * work.seq_len) + 1);
    for (int& token : tokens) token = int(random() % unsigned(work.shape.vocab_size));
    auto step = [&] {
        gpt.begin_step({.loss_scale = 1, .learning_rate = 1e-4f, .bias_correction1 = 0.1f, .bias_correction2 = 0.05f});
        gpt.micro_step(tokens.data(), tokens.data() + 1, 1.0f / float(tokens.size() - 1));
        gpt.end_step({});
    };
    return median_ms(step, timing);
}

class Bench {
public:
    explicit Bench(const Settings& settings)
        : settings_(settings), device_(device_info()), on_gpu_(device_.threads == 0) {
        ops_ = on_gpu_ ? Timing{2, 5, 100} : Timing{1, 0, 300};
        steps_ = on_gpu_ ? Timing{3, 0, 3000} : ops_;
        if (settings.step_seconds > 0) steps_.total_ms = settings.step_seconds * 1000;
        std::printf("%s; %s\n", device_.name.c_str(), device_.matmul_path.c_str());
        json_["device"] = device_.name;
        json_["matmul_path"] = device_.matmul_path;
        json_["results"] = Json::array();
    }

    void run() {
        std::vector<std::string> precisions = settings_.precisions;
        if (precisions.empty())
            precisions = on_gpu_ ? std::vector<std::string>{"bf16"} : std::vector<std::string>{"fp32", "bf16"};
        for (const Workload& work : chosen())
            for (const std::string& precision : precisions) {
                if (precision == "fp32") measure<float>(work);
                if (precision == "bf16") measure<bf16>(work);
                if (precision == "fp16") measure<fp16>(work);
            }
    }

private:
    std::vector<Workload> chosen() const {
        std::vector<Workload> all = workloads(on_gpu_), picked;
        if (settings_.workloads.empty()) picked = all;
        all.push_back(kTiny);
        for (const std::string& key : settings_.workloads) {
            auto found = std::find_if(all.begin(), all.end(), [&](const Workload& work) { return work.key == key; });
            if (found == all.end()) fail(Exit::usage, "--workload %s is not known", key.c_str());
            picked.push_back(*found);
        }
        if (settings_.head_rows)
            for (Workload& work : picked) work.head_rows = settings_.head_rows;
        return picked;
    }

    // The largest batch up to the workload's that the device has memory for; 0 if not even one sequence fits.
    int batch_that_fits(Workload work, Dtype precision) const {
        while (work.batch && double(planned_bytes(options_of(work, precision))) > 0.95 * double(device_.free_bytes))
            work.batch /= 2;
        return work.batch;
    }

    template <class T> void measure(Workload work) {
        const Dtype precision = dtype_of<T>;
        const int wanted = work.batch;
        work.batch = batch_that_fits(work, precision);
        if (work.batch < wanted)
            std::printf("\n%s, %s: memory for %d of %d sequences\n", work.name.c_str(), name_of(precision), work.batch,
                        wanted);
        if (work.batch == 0) return;

        if (on_gpu_ && !settings_.steps_only && !roofs_.count(precision)) measure_roofs<T>();
        const double whole = step_ms(work, precision, steps_), tokens = double(work.batch) * work.seq_len;
        const size_t planned = planned_bytes(options_of(work, precision));
        std::printf("\n%s, %s: %.1f ms a step, %.0f tokens/s, %.1f MiB planned\n", work.title().c_str(),
                    name_of(precision), whole, tokens / whole * 1000, double(planned) / 0x1p20);
        Json result{{"workload", work.key},     {"name", work.title()},    {"precision", name_of(precision)},
                    {"batch", work.batch},      {"seq_len", work.seq_len}, {"head_rows", work.head_rows},
                    {"planned_bytes", planned}, {"step_ms", whole},        {"tokens_per_s", tokens / whole * 1000}};
        if (on_gpu_) add_utilisation(result, work, precision, tokens / whole * 1000);
        if (!settings_.steps_only) measure_ops<T>(result, work, whole);
        json_["results"].push_back(result);
        if (!settings_.json.empty()) write_file_atomically(settings_.json, json_.dump(1) + "\n");
    }

    void add_utilisation(Json& result, const Workload& work, Dtype precision, double tokens_per_s) {
        const double flops = flops_per_token(
            {int64_t(lay_out_tensors(work.shape).parameters), work.shape.n_layer, work.shape.n_embd, work.seq_len});
        const auto mfu = model_flops_utilisation(flops, tokens_per_s, data_sheet(device_.name, precision).flops_per_s);
        result["tflops"] = flops * tokens_per_s * 1e-12;
        result["mfu"] = mfu ? Json(*mfu) : Json();
        std::printf("  %.1f TFLOP/s of the model's arithmetic", flops * tokens_per_s * 1e-12);
        if (mfu) std::printf(", %.1f %% of the data sheet's", 100 * *mfu);
        std::printf("\n");
    }

    template <class T> void measure_roofs() {
        auto time = [&](const Case& one) { return median_ms(one.call, {2, 5, 1000}); };
        Roofs& roofs = roofs_[dtype_of<T>];
        {
            const CaseGroup product = product_roof<T>(8192)();
            roofs.flops_per_s = product.cases[0].flops / time(product.cases[0]) * 1000;
        }
        const CaseGroup stream = stream_roof(size_t(1) << 28)();
        roofs.bytes_per_s = stream.cases[0].bytes / time(stream.cases[0]) * 1000;
        const Roofs sheet = data_sheet(device_.name, dtype_of<T>);
        std::printf("\n%s: a product of 8192 runs at %.1f TFLOP/s, a stream at %.0f GB/s", name_of(dtype_of<T>),
                    roofs.flops_per_s * 1e-12, roofs.bytes_per_s * 1e-9);
        if (sheet.flops_per_s > 0)
            std::printf(" (%.0f %% and %.0f %% of the data sheet)", 100 * roofs.flops_per_s / sheet.flops_per_s,
                        100 * roofs.bytes_per_s / sheet.bytes_per_s);
        std::printf("\n");
        json_["roofs"][name_of(dtype_of<T>)] = {{"tflops", roofs.flops_per_s * 1e-12},
                                                {"gb_per_s", roofs.bytes_per_s * 1e-9},
                                                {"data_sheet_tflops", sheet.flops_per_s * 1e-12},
                                                {"data_sheet_gb_per_s", sheet.bytes_per_s * 1e-9}};
    }

    template <class T> void measure_ops(Json& result, const Workload& work, double whole) {
        double sum = 0;
        result["ops"] = Json::array();
        for (const MakeGroup& make : op_groups<T>(work)) {
            const CaseGroup group = make();
            for (const Case& one : group.cases) {
                const double ms = median_ms(one.call, ops_);
                sum += ms * one.calls;
                print_op(result["ops"], one, ms, whole, dtype_of<T>);
            }
        }
        std::printf("  %-26s                  %8.1f ms  %5.1f %%\n", "sum of the ops", sum, 100 * sum / whole);
    }

    void print_op(Json& ops, const Case& one, double ms, double whole, Dtype precision) {
        const double rate = (one.flops > 0 ? one.flops : one.bytes) / ms * 1e-6;
        std::printf("  %-26s %3.0f x %8.3f ms = %8.1f ms  %5.1f %%  %7.1f %s", one.name.c_str(), one.calls, ms,
                    ms * one.calls, 100 * ms * one.calls / whole, on_gpu_ && one.flops > 0 ? rate * 1e-3 : rate,
                    one.flops == 0 ? "GB/s"
                    : on_gpu_      ? "TFLOP/s"
                                   : "GFLOP/s");
        Json row{{"name", one.name},   {"calls", one.calls}, {"ms", ms}, {"share", ms * one.calls / whole},
                 {"flops", one.flops}, {"bytes", one.bytes}};
        auto light = [&](const char* key, const Roofs& roofs, const char* of) {
            if (roofs.flops_per_s <= 0) return;
            const double best = std::max(one.flops / roofs.flops_per_s, one.bytes / roofs.bytes_per_s);
            row[key] = best * 1000 / ms;
            std::printf("  %5.1f %% of %s", 100 * best * 1000 / ms, of);
        };
        if (on_gpu_) {
            light("of_measured", roofs_[precision], "the roof");
            light("of_data_sheet", data_sheet(device_.name, precision), "the data sheet");
        }
        ops.push_back(row);
        std::printf("\n");
        std::fflush(stdout);
    }

    Settings settings_;
    DeviceInfo device_;
    bool on_gpu_;
    Timing ops_, steps_;
    std::map<Dtype, Roofs> roofs_;
    Json json_;
};

}  // namespace

int main(int argc, char** argv) {
    Settings settings;
    CLI::App app("Times the ops of a training step, and the whole step.");
    app.add_option("PRECISION", settings.precisions, "fp32, bf16, fp16 (CPU: fp32 bf16; GPU: bf16)")
        ->check(CLI::IsMember({"fp32", "bf16", "fp16"}));
    app.add_option("--workload", settings.workloads, "124M, 350M, 774M, 1558M (GPU), small-4, small-8 (CPU), tiny")
        ->allow_extra_args(false);
    app.add_option("--json", settings.json, "file that gets the figures, rewritten after each workload");
    app.add_option("--choices", settings.choices, "GPU: file that keeps the fastest algorithm of each product");
    app.add_option("--seconds", settings.step_seconds, "how long each step is measured (CPU 0.3, GPU 3)");
    app.add_option("--head-rows", settings.head_rows, "rows of logits at a time (step 1024, ops all; GPU 8192)");
    app.add_flag("--steps-only", settings.steps_only, "whole steps, no ops");
    app.add_flag("--tf32", settings.tf32, "GPU: fp32 products may round their operands to TF32");
    CLI11_PARSE(app, argc, argv);
    try {
        configure_device({.tf32 = settings.tf32, .matmul_choices = settings.choices});
        Bench(settings).run();
    } catch (const Error& error) {
        std::fprintf(stderr, "bench: %s\n", error.what());
        return int(error.code);
    }
    return 0;
}
