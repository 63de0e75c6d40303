#include <algorithm>
#include <chrono>
#include <cmath>

#include "runtime/io/json.h"
#include "runtime/io/process.h"
#include "runtime/logging/logging.h"

std::string printable(const std::string& text) { return printable_text(valid_utf8(text)); }

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

std::string progress_line(const TrainRecord& record, int total_steps, int64_t total_tokens, double step_ms,
                          double tokens_per_s) {
    const double remaining_s = double(total_tokens - record.tokens) / tokens_per_s;
    std::string line = format("step %d/%d | loss %.4f | lr %.2e | norm %.2f | %s tokens/s | %.0f ms | %s left",
                              record.step, total_steps, record.loss, record.learning_rate, double(record.grad_norm),
                              with_commas(tokens_per_s).c_str(), step_ms, duration(remaining_s).c_str());
    return record.skipped.empty() ? line : line + " | skipped: " + record.skipped + " is not finite";
}

TrainingProgress::TrainingProgress(std::FILE* out, int total_steps, int every_steps, double patience_s)
    : out_(out),
      total_steps_(total_steps),
      every_steps_(every_steps),
      patience_s_(patience_s),
      since_ms_(now_ms()),
      line_ms_(since_ms_) {
    if (out_) watcher_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
}

void TrainingProgress::begin(const std::string& activity) {
    const std::lock_guard lock(mutex_);
    activity_ = activity;
    since_ms_ = now_ms();
}

void TrainingProgress::end_at(int total_steps, int64_t total_tokens) {
    const std::lock_guard lock(mutex_);
    total_steps_ = total_steps;
    total_tokens_ = total_tokens;
}

void TrainingProgress::begin_micro_step(int step, int index, int count) {
    const std::lock_guard lock(mutex_);
    const std::string of_steps = total_steps_ > 0 ? format("/%d", total_steps_) : "";
    activity_ = format("step %d%s | micro-step %d/%d", step, of_steps.c_str(), index, count);
    if (index == 1) since_ms_ = now_ms();
}

void TrainingProgress::show(const TrainRecord& record) {
    if (!out_) return;
    const std::lock_guard lock(mutex_);
    activity_.clear();
    since_ms_ = now_ms();
    new_steps_++;
    new_steps_ms_ += record.step_ms;
    new_tokens_ += record.tokens_per_s * record.step_ms / 1000;
    if (!has_shown_step_ || record.step % every_steps_ == 0 || record.step == total_steps_) {
        print_lines(progress_line(record, total_steps_, total_tokens_, new_steps_ms_ / new_steps_,
                                  new_tokens_ / new_steps_ms_ * 1000));
        has_shown_step_ = true;
        new_steps_ = 0;
        new_steps_ms_ = 0;
        new_tokens_ = 0;
    }
}

void TrainingProgress::show(const ValRecord& record, const std::string& part) {
    std::string line = format("step %d | validation loss %.4f", record.step, record.loss) + part;
    if (record.bits_per_byte) line += format(" | %.4f bits per byte", *record.bits_per_byte);
    print(line);
}

void TrainingProgress::show(const QuestionsRecord& record) {
    for (const QuestionsRecord::File& file : record.files)
        print(format("step %d | %s, %zu questions | acc %.4f | acc_norm %.4f", record.step, file.name.c_str(),
                     file.questions, file.acc, file.acc_norm));
}

void TrainingProgress::show(const SampleRecord& record) {
    print(format("step %d | sample\n", record.step) + printable(record.text));
}

void TrainingProgress::print(const std::string& line) {
    if (!out_) return;
    const std::lock_guard lock(mutex_);
    print_lines(line);
}

// The thread: prints a long activity, such as "step 13/500 | micro-step 3/32 | 42 s".
void TrainingProgress::watch(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    const auto tick = std::chrono::duration<double>(std::min(1.0, patience_s_ / 10));
    while (!wake_.wait_for(lock, stop, tick, [&] { return stop.stop_requested(); })) {
        const double now = now_ms();
        if (!activity_.empty() && now - std::max(since_ms_, line_ms_) >= patience_s_ * 1000)
            print_lines(activity_ + " | " + duration((now - since_ms_) / 1000));
    }
}

void TrainingProgress::print_lines(const std::string& text) {
    line_ms_ = now_ms();
    std::fprintf(out_, "%s\n", text.c_str());
    std::fflush(out_);
}
