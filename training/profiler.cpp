#include "training/profiler.h"

#include <cmath>
#include <map>

#include "runtime/io/files.h"
#include "runtime/io/json.h"
#include "runtime/io/process.h"
#include "runtime/performance/performance.h"
#include "training/models/model_io.h"

namespace {

// The roofline time of an op in milliseconds; 0 if the device's rates are unknown.
double roof_ms(const Span& span, const DeviceRates& rates) {
    if (rates.bytes_per_s == 0) return 0;
    return 1000 * std::max(span.flops / rates.flops_per_s, span.bytes / rates.bytes_per_s);
}

std::string title_of(const Span& span) { return span.of.empty() ? span.name : span.name + " " + span.of; }

// Converts nanoseconds to microseconds exactly: rounding could make spans overlap.
std::string microseconds(int64_t ns) { return format("%lld.%03d", static_cast<long long>(ns / 1000), int(ns % 1000)); }

std::string rate(const char* key, double per_span, double ms) {
    return per_span > 0 && ms > 0 ? format(",\"%s\":%.4g", key, per_span / ms * 1e-6) : "";
}

// The arguments that the viewer shows for a span.
std::string arguments_of(const Span& span, const DeviceRates& rates) {
    const double ms = span.end_ms - span.begin_ms;
    std::string text = format("\"step\":%d", span.step);
    if (span.layer >= 0) text += format(",\"layer\":%d", span.layer);
    if (!span.of.empty()) text += ",\"parameter\":\"" + span.of + "\"";
    if (!span.shape.empty()) text += ",\"shape\":\"" + span.shape + "\"";
    if (span.lane == Lane::communication)
        return text + format(",\"bytes_sent\":%.0f", span.bytes) + rate("bus_GB_per_s", span.bytes, ms);
    if (span.lane == Lane::host || span.shape.empty()) return text;
    text += format(",\"flops\":%.0f,\"bytes\":%.0f", span.flops, span.bytes);
    text += rate("GFLOP_per_s", span.flops, ms) + rate("GB_per_s", span.bytes, ms);
    if (ms > 0) text += format(",\"roofline_share\":%.4g", roof_ms(span, rates) / ms);
    const bool computes = span.flops / rates.flops_per_s > span.bytes / rates.bytes_per_s;
    return text + ",\"bound\":\"" + (computes ? "compute" : "memory") + "\"";
}

// Names a process of the viewer, or a lane in it.
std::string metadata(int rank, const char* what, const std::string& name, int lane = 0) {
    return format("{\"name\":\"%s\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":%s}%s}", what, rank,
                  quoted(name).c_str(), lane > 0 ? format(",\"tid\":%d", lane).c_str() : "");
}

}  // namespace

void check_profile(const StepRange& steps, const Config& config) {
    if (config.train.max_steps > 0 && steps.first > config.train.max_steps)
        fail(Exit::usage, "--profile %d:%d begins after the last step of the run, %d (train.max_steps)", steps.first,
             steps.last, config.train.max_steps);
}

Profiler::Profiler(const StepRange& steps, TrainingRun& run) : steps_(steps), run_(run) {
    const int next = run.state.step + 1;
    if (steps.last == 0 || steps.first >= next) return;
    if (steps.last < next) {
        run.progress.print(format("profile  no trace: steps %d to %d are already done, the run continues at step %d",
                                  steps.first, steps.last, next));
        steps_ = {};
    } else {
        run.progress.print(format("profile  begins with step %d: the earlier steps are already done", next));
        steps_.first = next;
    }
}

// Also runs after an error, while collectives may still be in progress.
Profiler::~Profiler() {
    if (run_.trace) run_.gpt.trace(nullptr, 0);
}

void Profiler::begin_step() {
    const int step = run_.state.step + 1;
    if (steps_.last == 0 || step < steps_.first) return;
    if (!run_.trace) {
        const Config& config = run_.config;
        const Dtype type = compute_type(config.train.precision);
        const std::string device = device_info().name;
        run_.progress.begin("measuring the device's bandwidth and FLOP rate");
        if (const GpuModel* gpu = gpu_of_device(device)) {
            rates_ = {::peak_flops_per_s(device, type, config.device.tf32), gpu->memory_bytes_per_s};
            rates_origin_ = format("from the data sheet of %s", gpu->product);
        } else {
            try {
                rates_ = measure_device_rates(type);
                rates_origin_ = "measured before the first step with square GEMMs and copies of 64 MiB";
            } catch (const Error& error) {
                rates_origin_ = std::string("unknown: ") + error.what();
            }
        }
        all_reduce_max(0, run_.comm);  // the measurement does not synchronize the ranks
        begin_unix_s_ = std::stod(run_.control.all_gather(format("%.6f", unix_time()), "the profile's start")[0]);
        for (int reading = 0; reading < 10; reading++) {  // a pause within a reading makes it smaller
            const double unix_s = unix_time();
            unix_minus_steady_s_ = std::max(unix_minus_steady_s_, unix_s - now_ms() / 1000);
        }
        run_.trace = &trace_;
    }
    run_.gpt.trace(&trace_, step);
}

void Profiler::end_step(const TrainRecord& record, bool is_last) {
    if (!run_.trace) return;
    records_.push_back(record);
    if (record.step < steps_.last && !is_last) return;
    for (const Comm& comm : run_.grid_comm.distinct()) drain(comm);
    run_.trace = nullptr;
    run_.gpt.trace(nullptr, 0);
    steps_ = {steps_.first, record.step};
    const std::vector<Span> spans = trace_.take();
    std::string problem;
    try {
        write_file(spans);
    } catch (const Error& error) {
        problem = error.what();
    }
    const int failed = all_reduce_max(problem.empty() ? 0 : run_.comm.rank + 1, run_.comm);
    if (failed)
        run_.progress.print(format("profile  rank %d could not write its trace%s%s", failed - 1,
                                   problem.empty() ? "" : ": ", problem.c_str()));
    run_.progress.print(table(spans));
    steps_ = {};
}

void Profiler::write_file(const std::vector<Span>& spans) const {
    const int rank = run_.comm.rank;
    const Config& config = run_.config;
    const int step = steps_.last;
    const double token_flops = flops_of_token(run_.gpt.options(), sequence_length(config, step));
    const std::string other = json_object({{"program", "train_gpt"},
                                           {"device", device_info().name},
                                           {"first_step", steps_.first},
                                           {"last_step", steps_.last},
                                           {"rank", rank},
                                           {"ranks", run_.comm.size},
                                           {"micro_steps", micro_steps(config, run_.grid.data, step)},
                                           {"tokens_per_step", batch_tokens(config, step)},
                                           {"model_flops_per_token", token_flops},
                                           {"roofline_flops_per_s", rates_.flops_per_s},
                                           {"roofline_bytes_per_s", rates_.bytes_per_s},
                                           {"roofline_is", rates_origin_},
                                           {"begin_unix_s", begin_unix_s_}});
    std::vector<std::string> heads = {metadata(rank, "process_name", format("rank %d on ", rank) + host_name())};
    const std::pair<Lane, const char*> lanes[] = {{Lane::host, "host"},
                                                  {Lane::device, "ops and waits for communication"},
                                                  {Lane::communication, "communication"}};
    for (const auto& [lane, name] : lanes) heads.push_back(metadata(rank, "thread_name", name, int(lane) + 1));

    std::string text = "{\"displayTimeUnit\":\"ms\",\"otherData\":" + other + ",\"traceEvents\":[";
    for (size_t i = 0; i < heads.size(); i++) text += (i ? ",\n" : "\n") + heads[i];
    const double origin_ms = 1000 * (begin_unix_s_ - unix_minus_steady_s_);  // by this rank's steady clock
    auto ns_of = [&](double steady_ms) { return int64_t(std::max(0.0, std::round((steady_ms - origin_ms) * 1e6))); };
    for (const Span& span : spans) {
        const int64_t begin = ns_of(span.begin_ms), end = std::max(begin, ns_of(span.end_ms));
        text += format(",\n{\"name\":\"%s\",\"ph\":\"X\",\"ts\":%s,\"dur\":%s,\"pid\":%d,\"tid\":%d,\"args\":{%s}}",
                       title_of(span).c_str(), microseconds(begin).c_str(), microseconds(end - begin).c_str(), rank,
                       int(span.lane) + 1, arguments_of(span, rates_).c_str());
    }
    const std::string dir = config.run.dir + "/profile";
    make_directory(dir);
    write_file_atomically(dir + format("/rank_%d.steps_%d-%d.json", rank, steps_.first, steps_.last), text + "\n]}\n");
}

std::string Profiler::table(const std::vector<Span>& spans) const {
    struct Row {
        int calls = 0;
        double ms = 0, roof_ms = 0;
    };
    std::map<std::string, Row> rows;
    double step_ms = 0, ops_ms = 0, wait_ms = 0, data_ms = 0;
    for (const TrainRecord& record : records_) step_ms += record.step_ms, data_ms += record.data_ms;
    for (const Span& span : spans) {
        if (span.step == 0 || span.lane != Lane::device) continue;
        const double ms = span.end_ms - span.begin_ms;
        if (span.shape.empty()) {
            wait_ms += ms;
            continue;
        }
        Row& row = rows[title_of(span)];
        row.calls++, row.ms += ms, row.roof_ms += roof_ms(span, rates_);
        ops_ms += ms;
    }
    std::vector<std::pair<std::string, Row>> sorted(rows.begin(), rows.end());
    std::ranges::sort(sorted, std::ranges::greater(), [](const auto& row) { return row.second.ms; });
    const double steps = double(records_.size());
    auto line = [&](const std::string& name, const std::string& calls, double ms) {
        return format("\n%-42s %8s %10.3f %8.1f", name.c_str(), calls.c_str(), ms / steps, 100 * ms / step_ms);
    };
    std::string text = format("profile  steps %d to %d: %s/profile/rank_*.json, to open at https://ui.perfetto.dev\n",
                              steps_.first, steps_.last, run_.config.run.dir.c_str());
    text += format("rates    %.4g GFLOP/s, %.4g GB/s, %s\n", rates_.flops_per_s * 1e-9, rates_.bytes_per_s * 1e-9,
                   rates_origin_.c_str());
    text += format("%-42s %8s %10s %8s %9s", "rank 0, per step", "calls", "ms", "% step", "% roof");
    for (const auto& [name, row] : sorted)
        text += line(name, format("%.6g", row.calls / steps), row.ms) + format(" %9.1f", 100 * row.roof_ms / row.ms);
    text += line("exposed communication", "", wait_ms);
    text += line("device idle: host work or waiting for data", "", std::max(0.0, step_ms - ops_ms - wait_ms));
    text += line("  host waiting for data", "", data_ms);
    return text + line("step", "", step_ms);
}
