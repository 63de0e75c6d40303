// Benchmark of a whole training step, and of every op in it at the same shapes: shows where the time goes.
//
//     build/bench_cpu or build/bench_cuda [fp32|bf16|fp16 ...] [--workload KEY ...] [--json FILE]
//     build/bench_cuda --roofs                                only the machine's peak rates
//     build/bench_cuda --ops-only [--roofs-from FILE] ...     only ops, with peak rates measured before
//     build/bench_cuda --steps-only ...                       only whole steps
//
// Per op: calls per step, median and range of repeated calls, share of the step, and the rate computed from the shapes.
// On a GPU also the share of the roofline, which is the time that the op's FLOPs or, if longer, its bytes (every
// operand once) would take at the rates of the fastest large GEMM and of a device-to-device copy, divided by the
// measured time; and the milliseconds of the step above the roofline. Variants listed below an op are not part of the
// step.
//
// FILE is rewritten after every figure: {"device", "matmul_path", "roofs": {"copy_gb_per_s", "bf16_tflops"},
// "results": [{"workload", "name", "precision", "batch", "seq_len", "head_rows", "planned_bytes", "step_ms",
// "step_ms_min", "step_ms_max", "steps", "tokens_per_s", "tflops", "mfu", "ops": [{"name", "calls", "ms", "ms_min",
// "ms_max", "total_ms", "share", "flops", "bytes", "roof_share", "ms_above_roof"}], "variants": [the same and "of"]}]}.
// Keys of values that were not measured are absent, and "mfu" if the GPU is unknown.
//
// On a shared machine, compare figures only within one run.
#include <CLI/CLI.hpp>
#include <random>

#include "dev/bench_cases.h"
#include "dev/bench_report.h"
#include "dev/bench_roofs.h"
#include "dev/bench_timing.h"
#include "kernels/base/check.h"
#include "model/plan.h"
#include "runtime/cluster/kernel_check.h"
#include "runtime/performance/performance.h"

namespace {

using Json = Report::Json;

struct Settings {
    std::vector<std::string> precisions, workloads;
    std::string json, roofs_from, offload;
    bool roofs_only = false, ops_only = false, steps_only = false, tf32 = false, graphs = true, tune = false,
         portable = false;
    std::optional<double> seconds;
    int head_rows = 0, batch = 0;
};

Dtype precision_named(const std::string& name) {
    return name == "bf16" ? Dtype::bf16 : name == "fp16" ? Dtype::fp16 : Dtype::fp32;
}

// A measured op.
struct TimedCase {
    Case one;
    Times ms;
    double total_ms() const { return one.calls * ms.median; }
};

class Bench {
public:
    explicit Bench(const Settings& settings)
        : settings_(settings), device_(device_info()), on_gpu_(device_.threads == 0), report_(settings.json) {
        // On a GPU, queued work hides the cost of a launch; the CPU runs each call alone.
        ops_ = on_gpu_ ? Timing{2, 5, 100, 3} : Timing{1, 0, 300, 5};
        if (settings.seconds) ops_.total_ms = std::min(ops_.total_ms, 1000 * *settings.seconds);
        std::printf("%s; %s\n", device_.name.c_str(), device_.matmul_path.c_str());
        report_.json()["device"] = device_.name;
        report_.json()["matmul_path"] = device_.matmul_path;
    }

    void run() {
        if (!settings_.roofs_from.empty()) take_roofs();
        std::vector<std::string> precisions = settings_.precisions;
        if (precisions.empty())
            precisions = on_gpu_ ? std::vector<std::string>{"bf16"} : std::vector<std::string>{"fp32", "bf16"};
        if (settings_.roofs_only) {
            for (const std::string& precision : precisions) need_roofs(precision_named(precision));
            return;
        }
        report_.json()["results"] = Json::array();
        for (Workload work : chosen())
            for (const std::string& precision : precisions) {
                work.fp8 = precision == "fp8";
                if (precision == "fp32") measure<float>(work);
                if (precision == "bf16" || work.fp8) measure<bf16>(work);
                if (precision == "fp16") measure<fp16>(work);
            }
    }

private:
    std::vector<Workload> chosen() const {
        std::vector<Workload> picked;
        for (const std::string& key : settings_.workloads) picked.push_back(find_workload(key, on_gpu_));
        if (picked.empty()) picked = default_workloads(on_gpu_);
        for (Workload& work : picked) {
            work.head_rows = settings_.head_rows;
            work.offload = settings_.offload;
            if (settings_.batch > 0) work.batch = settings_.batch;
        }
        return picked;
    }

    // If the file cannot be used, measure the roofs again, so that a failure to write it does not prevent this run.
    void take_roofs() {
        try {
            roofs_ = read_roofs(settings_.roofs_from);
            report_.json()["roofs"] = json_of(roofs_);
        } catch (const Error& error) {
            std::printf("measuring the roofs again: %s\n", error.what());
        }
    }

    void need_roofs(Dtype precision) {
        if (roofs_.has(precision)) return;
        measure_roofs(roofs_, precision, settings_.seconds.value_or(1.5), [&] {
            report_.json()["roofs"] = json_of(roofs_);
            report_.write();
            std::fflush(stdout);
        });
    }

    // The largest batch, up to the workload's, that fits in memory; 0 if not even one sequence fits.
    int batch_that_fits(Workload work, Dtype precision) const {
        while (work.batch && double(planned_bytes(options_of(work, precision))) > 0.95 * double(device_.free_bytes))
            work.batch /= 2;
        return work.batch;
    }

    template <class T> void measure(Workload work) {
        const Dtype precision = dtype_of<T>;
        const char* const name = work.fp8 ? "fp8" : name_of(precision);
        const int wanted = work.batch;
        work.batch = batch_that_fits(work, precision);
        if (work.batch < wanted)
            std::printf("\n%s, %s: memory for %d of %d sequences\n", work.name.c_str(), name, work.batch, wanted);
        if (work.batch == 0) return;

        if (on_gpu_ && !settings_.steps_only) need_roofs(precision);
        const size_t planned = planned_bytes(options_of(work, precision));
        std::printf("\n%s, %s, %d rows of logits at a time, %.1f MiB planned\n", work.title().c_str(), name,
                    work.rows_of_head(), double(planned) / 0x1p20);
        report_.json()["results"].push_back({{"workload", work.key},
                                             {"name", work.title()},
                                             {"precision", name},
                                             {"batch", work.batch},
                                             {"seq_len", work.seq_len},
                                             {"head_rows", work.rows_of_head()},
                                             {"planned_bytes", planned}});
        Json& result = report_.json()["results"].back();
        Times step;
        if (!settings_.ops_only || !work.has_op_cases()) step = measure_steps(result, work, precision);
        if (!settings_.steps_only && work.has_op_cases()) measure_ops<T>(result, work, step.median);
    }

    Times measure_steps(Json& result, const Workload& work, Dtype precision) {
        const double total_ms = 1000 * settings_.seconds.value_or(on_gpu_ ? 3 : 0.3);
        const size_t least = on_gpu_ ? 3 : 5, most = 1000;
        Gpt gpt(options_of(work, precision), comm_single());
        gpt.initialize(1);
        std::mt19937 random(1);
        std::vector<int> tokens(size_t(work.tokens()) + 1);
        for (int& token : tokens) token = int(random() % unsigned(work.shape.vocab_size));
        auto step = [&] {
            gpt.begin_step({.learning_rate = 1e-4});
            gpt.forward(tokens.data());
            gpt.backward(tokens.data() + 1, 1.0f / float(work.tokens()));
            gpt.end_step();
        };
        for (int i = 0; i < (on_gpu_ ? 3 : 1); i++) step();
        synchronize(Stream{});
        std::vector<double> times;
        Stopwatch watch;
        for (const double begin = host_ms();
             times.size() < least || (host_ms() - begin < total_ms && times.size() < most);) {
            watch.start(Stream{});
            step();
            watch.stop(Stream{});
            synchronize(Stream{});
            times.push_back(watch.take_ms());
            put_step(result, work, precision, times_of(times));
            times.size() == 1 ? report_.write() : report_.write_now_and_then();
        }
        report_.write();
        const Times ms = times_of(times);
        std::printf("  a step %.1f ms (%.1f to %.1f in %d), %.0f tokens/s, %.4g TFLOP/s of the model's arithmetic",
                    ms.median, ms.min, ms.max, ms.count, result["tokens_per_s"].get<double>(),
                    result["tflops"].get<double>());
        if (result.contains("mfu")) std::printf(", MFU %.1f %%", 100 * result["mfu"].get<double>());
        std::printf("\n");
        std::fflush(stdout);
        return ms;
    }

    void put_step(Json& result, const Workload& work, Dtype precision, const Times& ms) const {
        const double tokens_per_s = work.tokens() / ms.median * 1000;
        const TokenWork token = token_work(work.shape, work.seq_len);
        const double flops = flops_per_token({token.parameters, token.attended});
        const auto mfu =
            model_flops_utilization(flops, tokens_per_s, peak_flops_per_s(device_.name, precision, settings_.tf32));
        result["step_ms"] = ms.median, result["step_ms_min"] = ms.min, result["step_ms_max"] = ms.max;
        result["steps"] = ms.count;
        result["tokens_per_s"] = tokens_per_s;
        result["tflops"] = flops * tokens_per_s * 1e-12;
        if (mfu) result["mfu"] = *mfu;
    }

    // `step_ms`: time of the whole step; 0 if it was not measured.
    template <class T> void measure_ops(Json& result, const Workload& work, double step_ms) {
        std::vector<TimedCase> timed;
        for (const MakeGroup& make : op_groups<T>(work)) {
            const CaseGroup group = make();
            for (const Case& one : group.cases) {
                timed.push_back({one, time_calls(one.call, ops_)});
                timed.back().one.call = {};  // holds pointers into the group's arrays
                print_op(timed.back(), step_ms, dtype_of<T>);
                put_ops(result, timed, step_ms, dtype_of<T>);
                report_.write();
            }
        }
        std::printf("  %-40s                    %8.2f ms", "sum of the ops", sum_of(timed));
        if (step_ms > 0) std::printf("  %5.1f %%", 100 * sum_of(timed) / step_ms);
        std::printf("\n");
    }

    static double sum_of(const std::vector<TimedCase>& timed) {
        double sum = 0;
        for (const TimedCase& op : timed) sum += op.one.variant_of.empty() ? op.total_ms() : 0;
        return sum;
    }

    // Shares are relative to the step or, if it was not measured, to the ops so far.
    void put_ops(Json& result, const std::vector<TimedCase>& timed, double step_ms, Dtype precision) const {
        const double whole = step_ms > 0 ? step_ms : sum_of(timed);
        result["ops"] = Json::array(), result["variants"] = Json::array();
        for (const TimedCase& op : timed) {
            const Case& one = op.one;
            Json row{{"name", one.name},
                     {"calls", one.calls},
                     {"ms", op.ms.median},
                     {"ms_min", op.ms.min},
                     {"ms_max", op.ms.max},
                     {"total_ms", op.total_ms()},
                     {"share", op.total_ms() / whole},
                     {"flops", one.flops},
                     {"bytes", one.bytes}};
            if (roofs_.has(precision)) {
                const double roof_ms = roofs_.ms(one.flops, one.bytes, precision);
                row["roof_share"] = roof_ms / op.ms.median;
                row["ms_above_roof"] = one.calls * (op.ms.median - roof_ms);
            }
            if (!one.variant_of.empty()) row["of"] = one.variant_of;
            result[one.variant_of.empty() ? "ops" : "variants"].push_back(row);
        }
    }

    void print_op(const TimedCase& op, double step_ms, Dtype precision) const {
        const Case& one = op.one;
        const bool is_product = one.flops > 0;
        const double rate = (is_product ? one.flops : one.bytes) / op.ms.median * 1e-6;
        const std::string name = (one.variant_of.empty() ? "" : "  ") + one.name;
        std::printf("  %-40s %4.0f x %9.4f ms = %8.2f ms", name.c_str(), one.calls, op.ms.median, op.total_ms());
        if (step_ms > 0) std::printf("  %5.1f %%", 100 * op.total_ms() / step_ms);
        std::printf("  %7.1f %s", on_gpu_ && is_product ? rate * 1e-3 : rate,
                    !is_product ? "GB/s   "
                    : on_gpu_   ? "TFLOP/s"
                                : "GFLOP/s");
        if (roofs_.has(precision)) {
            const double roof_ms = roofs_.ms(one.flops, one.bytes, precision);
            std::printf("  %5.1f %% of the roof, %7.2f ms above", 100 * roof_ms / op.ms.median,
                        one.calls * (op.ms.median - roof_ms));
        }
        std::printf("  (%.4f to %.4f)\n", op.ms.min, op.ms.max);
        std::fflush(stdout);
    }

    Settings settings_;
    DeviceInfo device_;
    bool on_gpu_;
    Timing ops_;
    Roofs roofs_;
    Report report_;
};

}  // namespace

// Returns the kernels for this GPU that pass the check of the trainer next to this program: train_gpt for bench_cuda,
// train_gpt_simt for bench_simt.
static std::vector<std::string> checked_kernels() {
    constexpr double kLimit_s = 60;
    std::string program = program_path();
    const std::string device = program.substr(program.rfind('_'));
    program = program_directory() + "/train_gpt" + (device == "_cuda" ? "" : device);
    const KernelChoice choice = choice_of({text_of(KernelCheck(0, kLimit_s, program).results())});
    for (const std::string& line : choice.lines) std::printf("kernels  %s\n", line.c_str());
    return choice.used;
}

int main(int argc, char** argv) {
    Settings settings;
    CLI::App app("Times the ops of a training step, and the whole step.");
    app.add_option("PRECISION", settings.precisions, "fp32, bf16, fp16, fp8 (default on CPU: fp32 bf16; on GPU: bf16)")
        ->check(CLI::IsMember({"fp32", "bf16", "fp16", "fp8"}));
    app.add_option("--workload", settings.workloads, "124M, 350M, 774M, 1558M (GPU), small-4, small-8 (CPU), tiny")
        ->allow_extra_args(false);
    app.add_option("--json", settings.json, "JSON file for the figures, rewritten after each");
    app.add_option("--seconds", settings.seconds,
                   "measuring time per step (default: CPU 0.3, GPU 3) and roof (1.5), and maximum per op");
    app.add_option("--head-rows", settings.head_rows, "rows of logits at a time; 0: the trainer's default");
    app.add_option("--batch", settings.batch, "sequences per micro-step; 0: the workload's");
    auto* roofs = app.add_flag("--roofs", settings.roofs_only, "measure only this machine's copy and GEMM rates");
    auto* ops = app.add_flag("--ops-only", settings.ops_only, "measure only ops");
    auto* steps = app.add_flag("--steps-only", settings.steps_only, "measure only whole steps");
    roofs->excludes(ops)->excludes(steps);
    ops->excludes(steps);
    app.add_option("--roofs-from", settings.roofs_from, "file of --roofs --json; missing roofs are measured");
    app.add_flag("!--no-graphs", settings.graphs, "GPU: queue the kernels of a step instead of replaying graphs");
    auto* offload = app.add_option("--offload", settings.offload,
                                   "measure steps with the optimizer's state and activations in host memory, or all: "
                                   "weights and gradients, too");
    offload->check(CLI::IsMember({"optimizer", "all"}))->excludes(ops)->excludes(roofs);
    app.add_flag("--portable", settings.portable, "GPU: no kernels for its compute capability");
    app.add_flag("--tune", settings.tune, "GPU: time each GEMM at its first use and use the fastest algorithm");
    app.add_flag("--tf32", settings.tf32, "GPU: fp32 products may round their operands to TF32");
    CLI11_PARSE(app, argc, argv);
    try {
        configure_device({.kernels = settings.portable ? std::vector<std::string>() : checked_kernels(),
                          .tf32 = settings.tf32,
                          .time_gemms = settings.tune,
                          .graphs = settings.graphs});
        Bench(settings).run();
    } catch (const Error& error) {
        std::fprintf(stderr, "bench: %s\n", error.what());
        return int(error.code);
    }
    return 0;
}
