#include "runtime/logging/logging.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

#include "kernels/check.h"

namespace {

// The shortest digits that restore the number.
template <class T> std::string number(T value) {
    if (std::isnan(value)) return "\"nan\"";
    if (std::isinf(value)) return value > 0 ? "\"inf\"" : "\"-inf\"";
    char digits[64];
    return {digits, std::to_chars(digits, std::end(digits), value).ptr};
}

std::string number_or_null(const std::optional<double>& value) { return value ? number(*value) : "null"; }

// The step of a line of main.log or of metrics.jsonl.
std::optional<int> step_of(const std::string& line) {
    int step = 0;
    if (std::sscanf(line.c_str(), "s:%d ", &step) == 1) return step;
    const auto json = nlohmann::json::parse(line, nullptr, false);
    if (!json.is_object() || !json.contains("step") || !json["step"].is_number_integer()) return std::nullopt;
    return json["step"].get<int>();
}

// The lines of the text that end in a newline and belong to steps that count.
std::string committed_lines(const std::string& text, int committed_step) {
    std::string kept;
    for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
        const std::string line = text.substr(begin, end + 1 - begin);
        const std::optional<int> step = step_of(line);
        if (step && *step <= committed_step) kept += line;
    }
    return kept;
}

OutputFile continue_file(const std::string& path, int committed_step) {
    const std::string text = file_exists(path) ? read_file(path) : "";
    write_file_atomically(path, committed_lines(text, committed_step));
    return OutputFile::open_to_append(path);
}

std::string with_commas(double value) {
    std::string digits = format("%.0f", value);
    for (int place = int(digits.size()) - 3; place > 0; place -= 3) digits.insert(size_t(place), ",");
    return digits;
}

std::string duration(double seconds) {
    const double minutes = std::floor(seconds / 60), hours = std::floor(minutes / 60);
    if (minutes < 1) return format("%.0f s", seconds);
    if (hours < 1) return format("%.0f min %02.0f s", minutes, std::floor(seconds - minutes * 60));
    return format("%.0f h %02.0f min", hours, minutes - hours * 60);
}

size_t terminal_width(std::FILE* out) {
    winsize size{};
    const bool is_known = ::ioctl(::fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    return is_known ? size.ws_col : 80;
}

}  // namespace

std::string json_line(const TrainRecord& record) {
    std::string line = format("{\"kind\":\"train\",\"step\":%d", record.step);
    line += ",\"loss\":" + number(record.loss);
    line += ",\"lr\":" + number(record.learning_rate);
    line += ",\"grad_norm\":" + number(record.grad_norm);
    line += ",\"loss_scale\":" + number(record.loss_scale);
    line += ",\"tokens\":" + std::to_string(record.tokens);
    line += ",\"step_ms\":" + number(record.step_ms);
    line += ",\"tokens_per_s\":" + number(record.tokens_per_s);
    line += ",\"mfu\":" + number_or_null(record.mfu);
    line += ",\"compute_ms\":" + number(record.compute_ms());
    line += ",\"comm_ms\":" + number(record.comm_ms);
    line += ",\"data_ms\":" + number(record.data_ms);
    line += ",\"optimizer_ms\":" + number(record.optimizer_ms);
    line += ",\"comm_bytes\":" + std::to_string(record.comm_bytes);
    if (!record.skipped.empty()) line += ",\"skipped\":" + nlohmann::json(record.skipped).dump();
    return line + "}";
}

std::string json_line(const ValRecord& record) {
    return format("{\"kind\":\"val\",\"step\":%d", record.step) + ",\"loss\":" + number(record.loss) +
           ",\"bits_per_byte\":" + number_or_null(record.bits_per_byte) + "}";
}

RunLog::RunLog(const std::string& dir, int committed_step)
    : metrics_(continue_file(dir + "/metrics.jsonl", committed_step)),
      main_log_(continue_file(dir + "/main.log", committed_step)) {}

void RunLog::write(const TrainRecord& record) {
    metrics_.append(json_line(record) + "\n");
    main_log_.append(format("s:%d trl:%.4f lr:%.6f norm:%.2f\n", record.step, record.loss, record.learning_rate,
                            double(record.grad_norm)));
}

void RunLog::write(const ValRecord& record) {
    metrics_.append(json_line(record) + "\n");
    main_log_.append(format("s:%d tel:%.4f\n", record.step, record.loss));
}

void RunLog::sync() {
    metrics_.sync();
    main_log_.sync();
}

std::string progress_line(const TrainRecord& record, int total_steps, double remaining_s) {
    std::string line = format("step %d/%d | loss %.4f | lr %.2e | norm %.2f | %s tokens/s | %.0f ms | %s left",
                              record.step, total_steps, record.loss, record.learning_rate, double(record.grad_norm),
                              with_commas(record.tokens_per_s).c_str(), record.step_ms, duration(remaining_s).c_str());
    return record.skipped.empty() ? line : line + " | skipped: " + record.skipped + " is not finite";
}

TrainingProgress::TrainingProgress(std::FILE* out, int ranks, int total_steps, int every_steps)
    : out_(out),
      total_steps_(total_steps),
      every_steps_(every_steps),
      is_terminal_(out && ranks == 1 && ::isatty(::fileno(out)) == 1) {}

TrainingProgress::~TrainingProgress() {
    if (line_is_open_) std::fputc('\n', out_);
    if (out_) std::fflush(out_);
}

void TrainingProgress::show(const TrainRecord& record) {
    if (!out_) return;
    const bool is_first = smoothed_ms_ == 0;
    smoothed_ms_ = is_first ? record.step_ms : 0.9 * smoothed_ms_ + 0.1 * record.step_ms;
    const std::string line = progress_line(record, total_steps_, (total_steps_ - record.step) * smoothed_ms_ / 1000);
    if (is_terminal_) {
        // A line that wraps could not be rewritten.
        erase_line();
        std::fputs(line.substr(0, terminal_width(out_) - 1).c_str(), out_);
        line_is_open_ = true;
    } else if (is_first || record.step % every_steps_ == 0 || record.step == total_steps_) {
        std::fprintf(out_, "%s\n", line.c_str());
    }
    std::fflush(out_);
}

void TrainingProgress::say(const std::string& line) {
    if (!out_) return;
    erase_line();
    std::fprintf(out_, "%s\n", line.c_str());
    std::fflush(out_);
}

void TrainingProgress::erase_line() {
    if (line_is_open_) std::fputs("\r\x1b[K", out_);
    line_is_open_ = false;
}
