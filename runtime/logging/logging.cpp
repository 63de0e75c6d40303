#include "runtime/logging/logging.h"

#include <charconv>
#include <cmath>
#include <filesystem>

#include "runtime/io/files.h"
#include "runtime/io/joined.h"
#include "runtime/io/json.h"
#include "runtime/logging/event_file.h"

namespace {

// Returns the shortest digits that restore the number.
template <class T> std::string number(T value) {
    if (std::isnan(double(value))) return "\"nan\"";
    if (std::isinf(double(value))) return value > 0 ? "\"inf\"" : "\"-inf\"";
    char digits[64];
    return {digits, std::to_chars(digits, std::end(digits), value).ptr};
}
std::string number(const std::optional<double>& value) { return value ? number(*value) : "null"; }

// Visits the numbers of a record with their keys, in the order of the files.
template <class Field> void describe(const TrainRecord& record, Field field) {
    field("loss", record.loss);
    field("lr", record.learning_rate);
    field("grad_norm", record.grad_norm);
    field("loss_scale", record.loss_scale);
    field("tokens", record.tokens);
    field("epoch", record.epoch);
    field("step_ms", record.step_ms);
    field("tokens_per_s", record.tokens_per_s);
    field("mfu", record.mfu);
    field("compute_ms", record.compute_ms());
    field("comm_ms", record.comm_ms);
    field("data_ms", record.data_ms);
    field("optimizer_ms", record.optimizer_ms);
    field("comm_bytes", record.comm_bytes);
    field("resident_bytes", record.resident_bytes);
    auto add_known = [&](const char* key, const std::optional<double>& value) {
        if (value) field(key, *value);
    };
    add_known("offload_bytes", record.offload_bytes);
    add_known("fp8_saturated", record.fp8_saturated);
    add_known("noise_scale", record.noise_scale);
    add_known("power_w", record.power_w);
    add_known("gpu_temperature_c", record.gpu_temperature_c);
    add_known("sm_clock_mhz", record.sm_clock_mhz);
}

template <class Field> void describe(const ValRecord& record, Field field) {
    field("loss", record.loss);
    field("bits_per_byte", record.bits_per_byte);
}

// Keys like "hellaswag_val/acc".
template <class Field> void describe(const QuestionsRecord& record, Field field) {
    for (const QuestionsRecord::File& file : record.files) {
        auto share = [&](const char* name, double value) {
            const std::string key = file.name + "/" + name;
            field(key.c_str(), value);
            field((key + "_stderr").c_str(), file.standard_error(value));
        };
        field((file.name + "/questions").c_str(), uint64_t(file.questions));
        share("acc", file.acc);
        share("acc_norm", file.acc_norm);
    }
}

// Keys like "stage_0/compute_ms".
template <class Field> void describe(const RanksRecord& record, Field field) {
    field("slowest_rank", uint64_t(record.slowest_rank));
    field("slowest_multiple", record.slowest_multiple);
    for (size_t i = 0; i < record.stages.size(); i++) {
        field(format("stage_%zu/compute_ms", i).c_str(), record.stages[i].compute_ms);
        field(format("stage_%zu/layers", i).c_str(), uint64_t(record.stages[i].layers));
    }
}

std::string opened(int step, double time) { return format("\"step\":%d,\"time\":%.3f", step, time); }

template <class Record> std::string numbers_line(const char* kind, const Record& record, const std::string& more = "") {
    std::string line = format("{\"kind\":\"%s\",", kind) + opened(record.step, record.time);
    describe(record, [&](const char* key, const auto& value) { line += format(",\"%s\":", key) + number(value); });
    return line + more + "}";
}

std::string norms_object(const std::vector<NormRecord::Value>& values) {
    const auto member = [](const NormRecord::Value& value) { return quoted(value.name) + ":" + number(value.value); };
    return "{" + joined(values, ",", member) + "}";
}

// Returns a scalar for each number of the record, tagged "kind/key".
template <class Record> Scalars scalars_of(const std::string& kind, const Record& record) {
    Scalars scalars;
    describe(record, [&]<class Value>(const std::string& key, const Value& value) {
        if constexpr (std::is_same_v<Value, std::optional<double>>) {
            if (value) scalars.emplace_back(kind + "/" + key, *value);
        } else {
            scalars.emplace_back(kind + "/" + key, double(value));
        }
    });
    return scalars;
}

Scalars scalars_of(const std::string&, const NormRecord& record) {
    Scalars scalars;
    for (const auto& [name, value] : record.gradients) scalars.emplace_back("grad_norms/" + name, value);
    for (const auto& [name, value] : record.activations) scalars.emplace_back("activation_rms/" + name, value);
    return scalars;
}

// Returns the step of a line from any of the files.
std::optional<int> step_of(const std::string& line) {
    int step = 0;
    if (std::sscanf(line.c_str(), "s:%d ", &step) == 1) return step;
    const double found = parse_record(line).number("step");
    return std::isnan(found) ? std::nullopt : std::optional(int(found));
}

// Returns whether a line of any of the files was written by validation, questions or a sample.
bool is_of_evaluation(std::string_view line) {
    for (const char* begin : {"{\"kind\":\"val\",", "{\"kind\":\"questions\",", "{\"step\":"})
        if (line.starts_with(begin)) return true;
    return line.starts_with("s:") && line.find(" trl:") == std::string_view::npos;
}

// Resolves a symbolic link: users move logs to other disks this way.
std::string without_links(const std::string& path) {
    std::error_code error;
    if (!std::filesystem::is_symlink(path, error)) return path;
    const std::filesystem::path target = std::filesystem::canonical(path, error);
    if (error) fail(Exit::io, "%s is a symbolic link whose target cannot be found: %s", path, error.message());
    return target;
}

// Keeps the lines that end in a newline and belong to committed steps. Usually these are the beginning of the file, and
// the rest is cut. If a crash left other data between them, the file is replaced.
LogFile continue_file(const std::string& name, int committed_step, bool has_evaluation) {
    const std::string path = without_links(name);
    const std::optional<InputFile> file = file_exists(path) ? std::optional(InputFile(path)) : std::nullopt;
    size_t kept = 0;
    bool is_beginning = file.has_value();
    auto for_each_kept = [&](const auto& visit) {
        for_each_line(*file, [&](std::string_view line, size_t offset) {
            const std::optional<int> step = step_of(std::string(line));
            if (!step || *step > committed_step) return;
            if (has_evaluation || *step < committed_step || !is_of_evaluation(line)) visit(line, offset);
        });
    };
    if (file)
        for_each_kept([&](std::string_view line, size_t offset) {
            is_beginning &= offset == kept;
            kept += line.size();
        });
    if (!is_beginning)
        write_file_atomically(path, kept, [&](OutputFile& out) {
            if (file) for_each_kept([&](std::string_view line, size_t) { out.append(line); });
        });
    return {path, kept};
}

}  // namespace

double QuestionsRecord::File::standard_error(double share) const {
    return std::sqrt(share * (1 - share) / (double(questions) - 1));
}

std::string json_line(const TrainRecord& record) {
    std::string more;
    if (!record.throttle.empty()) more += ",\"throttle\":" + quoted(record.throttle);
    if (!record.skipped.empty()) more += ",\"skipped\":" + quoted(record.skipped);
    return numbers_line("train", record, more);
}

std::string json_line(const ValRecord& record) { return numbers_line("val", record); }

std::string json_line(const QuestionsRecord& record) { return numbers_line("questions", record); }

std::string json_line(const RanksRecord& record) { return numbers_line("ranks", record); }

std::string json_line(const SampleRecord& record) {
    return "{" + opened(record.step, record.time) + ",\"prompt\":" + quoted(record.prompt) +
           ",\"text\":" + quoted(record.text) + "}";
}

std::string json_line(const NormRecord& record) {
    return "{\"kind\":\"norms\"," + opened(record.step, record.time) +
           ",\"grad_norms\":" + norms_object(record.gradients) +
           ",\"activation_rms\":" + norms_object(record.activations) + "}";
}

std::string json_line(const RollbackRecord& record) {
    const Rollback& back = record.rollback;
    std::string line = "{\"kind\":\"rollback\"," + opened(record.step, record.time) +
                       format(",\"from_step\":%d,\"skipped_samples\":", back.from_step) + number(back.skipped_samples);
    line += back.is_spike ? ",\"reason\":\"spike\",\"loss\":" + number(back.loss) + ",\"limit\":" + number(back.limit)
                          : ",\"reason\":\"nonfinite\"";
    return line + "}";
}

RunLog::RunLog(const std::string& dir, int committed_step, bool has_events, bool has_evaluation)
    : metrics_(continue_file(dir + "/metrics.jsonl", committed_step, has_evaluation)),
      main_log_(continue_file(dir + "/main.log", committed_step, has_evaluation)),
      samples_(continue_file(dir + "/samples.jsonl", committed_step, has_evaluation)) {
    if (has_events) events_ = begin_event_file(dir + "/tensorboard", committed_step);
}

template <class Record> void RunLog::write_metrics(const char* kind, const Record& record) {
    append(metrics_, json_line(record) + "\n");
    if (events_) append(*events_, event_record(record.step, record.time, scalars_of(kind, record)));
}

void RunLog::write(const TrainRecord& record) {
    write_metrics("train", record);
    append(main_log_, format("s:%d trl:%.4f lr:%.6f norm:%.2f\n", record.step, record.loss, record.learning_rate,
                             double(record.grad_norm)));
}

void RunLog::write(const ValRecord& record) {
    write_metrics("val", record);
    append(main_log_, format("s:%d tel:%.4f\n", record.step, record.loss));
}

void RunLog::write(const QuestionsRecord& record) {
    write_metrics("questions", record);
    // llm.c logs one number per step: HellaSwag's.
    append(main_log_, format("s:%d eval:%.4f\n", record.step, record.files.front().acc_norm));
}

void RunLog::write(const RanksRecord& record) { write_metrics("ranks", record); }

void RunLog::write(const SampleRecord& record) { append(samples_, json_line(record) + "\n"); }

void RunLog::write(const NormRecord& record) { write_metrics("norms", record); }

void RunLog::append(LogFile& file, const std::string& lines) { note(file.append(lines), file); }

void RunLog::note(bool is_written, const LogFile& file) {
    if (is_written || is_failing_) return;
    is_failing_ = true;
    news_ = "warning: " + file.error() + "; the records are kept in memory, and each step retries the write";
}

std::vector<LogFile*> RunLog::files() {
    std::vector<LogFile*> all{&metrics_, &main_log_, &samples_};
    if (events_) all.push_back(events_.get());
    return all;
}

std::string RunLog::end_step() {
    std::string error;
    for (LogFile* file : files()) {
        note(file->write_missing(), *file);
        if (error.empty()) error = file->error();
    }
    if (error.empty()) {
        if (is_failing_)
            news_ += (news_.empty() ? "" : "; ") + std::string("writing the log works again; no records were lost");
        is_failing_ = false;
        failed_steps_ = 0;
    } else if (++failed_steps_ == kMaxFailedSteps) {
        error_ = std::make_exception_ptr(
            Error(Exit::io, format("%s; giving up after %d steps of retries, the last log lines are lost",
                                   error.c_str(), kMaxFailedSteps)));
        has_given_up_ = true;
    }
    return std::exchange(news_, "");
}

void RunLog::write(const RollbackRecord& record) { append(metrics_, json_line(record) + "\n"); }

void RunLog::sync() {
    if (has_given_up_) return;
    for (LogFile* file : files()) file->sync();
}
