// For each GEMM of a training step: times the chosen algorithm, which is the library's first proposal as in training,
// the fastest one and the fastest excluded one, and counts the runs with different bits. "fastest" against "chosen"
// shows what autotuning would gain. Algorithms are excluded because their bits may differ between runs or their
// workspace is too large.
//
//     build/bench_matmul_cuda [--workload KEY] [--json FILE] [--seconds S] [--repeats N]
//
// FILE is rewritten after every product: {"device", "library", "products": [{"workload", "name", "m", "n", "k",
// "epilogue", "in", "out", "accumulate", "calls", "candidates", "excluded_candidates", "chosen": null or {"algorithm",
// "ms", "tflops", "repeats", "mismatches"}, "fastest" and "excluded": the same, "plain_ms", "column_sums_ms",
// "gelu_ms", "gelu_pass_ms"}]}. With the bias gradient as epilogue: plain_ms is the GEMM without it,
// column_sums_ms our kernel for it. If GELU follows: gelu_ms is the GEMM with the library's GELU, gelu_pass_ms our pass
// after the chosen one. The GEMMs with the most arithmetic come first; none is started after S seconds.
#include "dev/bench_matmul.h"

#include <CLI/CLI.hpp>

#include "dev/bench_report.h"
#include "dev/bench_timing.h"
#include "kernels/base/check.h"
#include "kernels/device.h"

namespace {

using Json = Report::Json;

struct Settings {
    std::vector<std::string> workloads;
    std::string json;
    double seconds = 1e9;
    int repeats = 100;
};

Json json_of(const std::optional<AlgorithmResult>& result) {
    if (!result) return nullptr;
    return {{"algorithm", result->algorithm},
            {"ms", result->ms},
            {"tflops", result->tflops},
            {"repeats", result->repeats},
            {"mismatches", result->mismatches}};
}

Json json_of(const std::string& workload, const ProductResult& result) {
    Json json{{"workload", workload},
              {"name", result.name},
              {"m", result.m},
              {"n", result.n},
              {"k", result.k},
              {"epilogue", result.epilogue},
              {"in", result.in},
              {"out", result.out},
              {"accumulate", result.accumulate},
              {"calls", result.calls},
              {"candidates", result.candidates},
              {"excluded_candidates", result.excluded_candidates},
              {"chosen", json_of(result.chosen)},
              {"fastest", json_of(result.fastest)},
              {"excluded", json_of(result.excluded)}};
    if (result.plain_ms) json["plain_ms"] = *result.plain_ms;
    if (result.column_sums_ms) json["column_sums_ms"] = *result.column_sums_ms;
    if (result.gelu_ms) json["gelu_ms"] = *result.gelu_ms;
    if (result.gelu_pass_ms) json["gelu_pass_ms"] = *result.gelu_pass_ms;
    return json;
}

void print(const char* kind, int candidates, const std::optional<AlgorithmResult>& result) {
    if (!result)
        std::printf("    %-8s none of %d\n", kind, candidates);
    else
        std::printf("    %-8s %9.4f ms  %6.1f TFLOP/s  %d of %d runs differ  %s (of %d)\n", kind, result->ms,
                    result->tflops, result->mismatches, result->repeats, result->algorithm.c_str(), candidates);
}

void print(const ProductResult& result) {
    std::printf("  %s: m %d n %d k %d, %s to %s%s, epilogue %s, %.0f calls\n", result.name.c_str(), result.m, result.n,
                result.k, result.in.c_str(), result.out.c_str(), result.accumulate ? ", adding" : "",
                result.epilogue.c_str(), result.calls);
    print("chosen", result.candidates, result.chosen);
    print("fastest", result.candidates, result.fastest);
    print("excluded", result.excluded_candidates, result.excluded);
    if (result.plain_ms && result.column_sums_ms)
        std::printf("    apart    %9.4f ms: plain %.4f and sums of columns %.4f\n",
                    *result.plain_ms + *result.column_sums_ms, *result.plain_ms, *result.column_sums_ms);
    if (result.gelu_ms) std::printf("    gelu     %9.4f ms, with the library's GELU\n", *result.gelu_ms);
    if (result.gelu_pass_ms) std::printf("    pass     %9.4f ms, our GELU after the GEMM\n", *result.gelu_pass_ms);
    std::fflush(stdout);
}

void run(const Settings& settings) {
    const double begin_ms = host_ms();
    Report report(settings.json);
    report.json() = {{"device", device_info().name}, {"library", library_name()}, {"products", Json::array()}};
    std::printf("%s; %s\n", device_info().name.c_str(), library_name().c_str());
    for (const std::string& key : settings.workloads) {
        const Workload work = find_workload(key, true);
        std::printf("%s, bf16\n", work.title().c_str());
        size_t done = 0;
        const std::vector<ProductCase> cases = product_cases(work);
        for (const ProductCase& one : cases) {
            if (host_ms() - begin_ms > 1000 * settings.seconds) break;
            const ProductResult result = one.measure(settings.repeats);
            print(result);
            report.json()["products"].push_back(json_of(key, result));
            report.write();
            done++;
        }
        if (done < cases.size()) std::printf("  no time left for %zu more GEMMs\n", cases.size() - done);
    }
}

}  // namespace

int main(int argc, char** argv) {
    Settings settings;
    CLI::App app("Times the algorithms of the GEMMs of a training step on a GPU.");
    app.add_option("--workload", settings.workloads, "124M (the default), 350M, 774M, 1558M, tiny")
        ->allow_extra_args(false);
    app.add_option("--json", settings.json, "JSON file for the figures, rewritten after each GEMM");
    app.add_option("--seconds", settings.seconds, "start no GEMM after this time");
    app.add_option("--repeats", settings.repeats, "runs of each algorithm to compare bit by bit (100)")
        ->check(CLI::Range(2, 100000));
    CLI11_PARSE(app, argc, argv);
    if (settings.workloads.empty()) settings.workloads = {"124M"};
    try {
        configure_device({});
        run(settings);
    } catch (const Error& error) {
        std::fprintf(stderr, "bench_matmul: %s\n", error.what());
        return int(error.code);
    }
    return 0;
}
