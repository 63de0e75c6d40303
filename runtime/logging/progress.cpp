// TrainingProgress: the live line, or plain lines.
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "runtime/io/process.h"
#include "runtime/logging/logging.h"

namespace {

size_t terminal_columns(std::FILE* out) {
    winsize size{};
    return ::ioctl(::fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

// Returns whether the process may draw on its terminal: a background job would disturb the shell's output.
bool is_in_foreground(std::FILE* out) {
    const pid_t group = ::tcgetpgrp(::fileno(out));
    return group == -1 || group == ::getpgrp();  // -1: not this session's terminal, so no shell uses it
}

bool is_live_on(std::FILE* out, TerminalMode wanted, int ranks) {
    const bool is_wanted = wanted == TerminalMode::live || (wanted == TerminalMode::automatic && ranks == 1);
    return is_wanted && out && ::isatty(::fileno(out)) == 1;
}

}  // namespace

std::string printable(const std::string& text) {
    const auto replace = nlohmann::json::error_handler_t::replace;
    const std::string valid = nlohmann::json::parse(nlohmann::json(text).dump(-1, ' ', false, replace));
    std::string clean;
    for (size_t i = 0; i < valid.size(); i++) {
        const auto byte = static_cast<unsigned char>(valid[i]);
        const auto next = static_cast<unsigned char>(i + 1 < valid.size() ? valid[i + 1] : 0);
        if (byte == 0xc2 && next < 0xa0)
            i++;  // U+0080 to U+009F
        else if ((byte >= 0x20 && byte != 0x7f) || byte == '\n' || byte == '\t')
            clean += valid[i];
    }
    return clean;
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

std::string progress_line(const TrainRecord& record, int total_steps, double step_ms) {
    const double tokens_per_s = record.tokens_per_s * record.step_ms / step_ms;
    const double remaining_s = (total_steps - record.step) * step_ms / 1000;
    std::string line = format("step %d/%d | loss %.4f | lr %.2e | norm %.2f | %s tokens/s | %.0f ms | %s left",
                              record.step, total_steps, record.loss, record.learning_rate, double(record.grad_norm),
                              with_commas(tokens_per_s).c_str(), step_ms, duration(remaining_s).c_str());
    return record.skipped.empty() ? line : line + " | skipped: " + record.skipped + " is not finite";
}

TrainingProgress::TrainingProgress(std::FILE* out, TerminalMode mode, int ranks, int total_steps, int every_steps,
                                   const Patience& patience)
    : out_(out),
      is_live_(is_live_on(out, mode, ranks)),
      total_steps_(total_steps),
      every_steps_(every_steps),
      patience_(patience),
      since_ms_(now_ms()),
      plain_ms_(since_ms_) {
    if (out_) watcher_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
}

TrainingProgress::~TrainingProgress() {
    if (!out_) return;
    watcher_.request_stop();
    watcher_.join();
    finish();
}

void TrainingProgress::finish() {
    if (!out_) return;
    const std::lock_guard lock(mutex_);
    activity_.clear();
    if (is_drawn_) draw();
    if (is_drawn_) std::fputc('\n', out_);
    is_drawn_ = false;
    std::fflush(out_);
}

void TrainingProgress::begin(const std::string& activity) {
    const std::lock_guard lock(mutex_);
    activity_ = activity;
    since_ms_ = now_ms();
}

void TrainingProgress::end_at(int total_steps) {
    const std::lock_guard lock(mutex_);
    total_steps_ = total_steps;
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
    const bool is_first = !last_;
    last_ = record;
    activity_.clear();
    since_ms_ = now_ms();
    const double kept = is_live_ ? 0.9 : 1;  // the live line gradually forgets the steps before
    mean_steps_ = kept * mean_steps_ + 1;
    mean_ms_ = kept * mean_ms_ + record.step_ms;
    if (is_live_) {
        draw();
    } else if (is_first || record.step % every_steps_ == 0 || record.step == total_steps_) {
        print_lines(progress_line(record, total_steps_, mean_ms_ / mean_steps_));
        mean_steps_ = mean_ms_ = 0;
    }
}

void TrainingProgress::show(const ValRecord& record, const std::string& part) {
    std::string line = format("step %d | validation loss %.4f", record.step, record.loss) + part;
    if (record.bits_per_byte) line += format(" | %.4f bits per byte", *record.bits_per_byte);
    say(line);
}

void TrainingProgress::show(const QuestionsRecord& record) {
    for (const QuestionsRecord::File& file : record.files)
        say(format("step %d | %s, %zu questions | acc %.4f | acc_norm %.4f", record.step, file.name.c_str(),
                   file.questions, file.acc, file.acc_norm));
}

void TrainingProgress::show(const SampleRecord& record) {
    say(format("step %d | sample\n", record.step) + printable(record.text));
}

void TrainingProgress::say(const std::string& line) {
    if (!out_) return;
    const std::lock_guard lock(mutex_);
    const bool was_drawn = is_drawn_;
    erase();
    print_lines(line);
    if (was_drawn) draw();
}

// The thread: checks every tick whether a long activity should be shown.
void TrainingProgress::watch(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    const auto tick = std::chrono::duration<double>(patience_.tick_s);
    while (!wake_.wait_for(lock, stop, tick, [&] { return stop.stop_requested(); })) look();
}

void TrainingProgress::look() {
    if (is_live_) {
        if (is_long()) draw();
    } else if (!activity_.empty() && now_ms() - std::max(since_ms_, plain_ms_) >= patience_.plain_s * 1000) {
        print_lines(activity());
    }
}

bool TrainingProgress::is_long() const {
    return !activity_.empty() && now_ms() - since_ms_ >= patience_.terminal_s * 1000;
}

// "step 13/500 | micro-step 3/32 | 12 s"
std::string TrainingProgress::activity() const { return activity_ + " | " + duration((now_ms() - since_ms_) / 1000); }

// Returns the live line: a long activity, if any, then the last step.
std::string TrainingProgress::progress_text() const {
    std::string text = stop_signal() && !activity_.empty() ? "stopping after this step | " : "";
    if (is_long()) text += activity();
    if (!last_) return text;
    const std::string line = progress_line(*last_, total_steps_, mean_ms_ / mean_steps_);
    return text + (is_long() ? line.substr(line.find(" | ")) : line);
}

// A line that wraps cannot be rewritten, so it is cut at the terminal's width. Where the shell or a signal handler has
// printed something since, the cursor is below that, and the line continues there.
void TrainingProgress::draw() {
    if (!is_in_foreground(out_)) return;
    std::string line = progress_text();
    line.resize(std::min(line.size(), terminal_columns(out_) - 1));
    erase();
    std::fputs(line.c_str(), out_);
    std::fflush(out_);
    is_drawn_ = true;
}

// Moves the cursor to the start of the live line and clears it.
void TrainingProgress::erase() {
    if (is_drawn_) std::fputs("\r\x1b[K", out_);
    is_drawn_ = false;
}

void TrainingProgress::print_lines(const std::string& text) {
    plain_ms_ = now_ms();
    std::fprintf(out_, "%s\n", text.c_str());
    std::fflush(out_);
}
