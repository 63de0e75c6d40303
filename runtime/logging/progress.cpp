// TrainingProgress: when and where to draw. The layout is in terminal_view.cpp.
#include <langinfo.h>
#include <locale.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>

#include "runtime/io/process.h"
#include "runtime/logging/terminal_view.h"

namespace {

winsize terminal_size(std::FILE* out) {
    winsize size{};
    if (::ioctl(::fileno(out), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) size.ws_col = 80, size.ws_row = 24;
    return size;
}

// Returns whether the process may draw on its terminal: a background job would disturb the shell's output.
bool is_in_foreground(std::FILE* out) {
    const pid_t group = ::tcgetpgrp(::fileno(out));
    return group == -1 || group == ::getpgrp();  // -1: not this session's terminal, so no shell uses it
}

// Returns whether the user's locale uses UTF-8.
bool has_unicode() {
    const locale_t locale = ::newlocale(LC_CTYPE_MASK, "", nullptr);
    if (locale == nullptr) return false;
    const bool is_utf8 = std::strcmp(::nl_langinfo_l(CODESET, locale), "UTF-8") == 0;
    ::freelocale(locale);
    return is_utf8;
}

TerminalMode mode_on(std::FILE* out, TerminalMode wanted, int ranks) {
    const bool can_rewrite = out && ::isatty(::fileno(out)) == 1 && (ranks == 1 || wanted != TerminalMode::automatic);
    return can_rewrite ? wanted : TerminalMode::plain;
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

std::string progress_line(const TrainRecord& record, int total_steps, double remaining_s) {
    std::string line = format("step %d/%d | loss %.4f | lr %.2e | norm %.2f | %s tokens/s | %.0f ms | %s left",
                              record.step, total_steps, record.loss, record.learning_rate, double(record.grad_norm),
                              with_commas(record.tokens_per_s).c_str(), record.step_ms, duration(remaining_s).c_str());
    return record.skipped.empty() ? line : line + " | skipped: " + record.skipped + " is not finite";
}

TrainingProgress::TrainingProgress(std::FILE* out, TerminalMode mode, int ranks, int total_steps, int every_steps,
                                   const Patience& patience)
    : out_(out),
      mode_(mode_on(out, mode, ranks)),
      total_steps_(total_steps),
      every_steps_(every_steps),
      patience_(patience),
      is_unicode_(has_unicode()),
      state_(std::make_unique<ViewState>()),
      since_ms_(now_ms()),
      plain_ms_(since_ms_) {
    if (out_) watcher_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
}

TrainingProgress::~TrainingProgress() {
    if (!out_) return;
    watcher_.request_stop();
    watcher_.join();
    activity_.clear();
    if (is_drawn_) draw();
    if (is_drawn_) std::fputc('\n', out_);
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
    const bool is_first = !state_->last;
    state_->add(record);
    activity_.clear();
    since_ms_ = now_ms();
    is_stale_ = true;
    if (mode_ != TerminalMode::plain) {
        if (!is_view() || since_ms_ - drawn_ms_ >= patience_.redraw_s * 1000) draw();
    } else if (is_first || record.step % every_steps_ == 0 || record.step == total_steps_) {
        print_lines(progress_line(record, total_steps_, state_->remaining_s(total_steps_)));
    }
}

void TrainingProgress::show(const ValRecord& record) {
    std::string line = format("step %d | validation loss %.4f", record.step, record.loss);
    if (record.bits_per_byte) line += format(" | %.4f bits per byte", *record.bits_per_byte);
    {
        const std::lock_guard lock(mutex_);
        state_->validation = record;
    }
    say(line);
}

void TrainingProgress::show(const QuestionsRecord& record) {
    for (const QuestionsRecord::File& file : record.files)
        say(format("step %d | %s, %zu questions | acc %.4f | acc_norm %.4f | acc_per_token %.4f", record.step,
                   file.name.c_str(), file.questions, file.acc, file.acc_norm, file.acc_per_token));
}

void TrainingProgress::show(const SampleRecord& record) {
    say(format("step %d | sample\n", record.step) + printable(record.text));
}

void TrainingProgress::say(const std::string& line) {
    if (!out_) return;
    const std::lock_guard lock(mutex_);
    if (mode_ != TerminalMode::plain) leave_if_moved();
    const bool was_drawn = is_drawn_;
    erase();
    print_lines(line);
    if (was_drawn) draw();
}

// The block needs a finished step, whose numbers are most of its content.
bool TrainingProgress::is_view() const {
    const winsize size = terminal_size(out_);
    return (mode_ == TerminalMode::automatic || mode_ == TerminalMode::view) && state_->last &&
           fits_view(size.ws_col, size.ws_row);
}

// The thread: checks every tick whether a long activity should be shown and whether the terminal has changed.
void TrainingProgress::watch(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    const auto tick = std::chrono::duration<double>(patience_.tick_s);
    while (!wake_.wait_for(lock, stop, tick, [&] { return stop.stop_requested(); })) look();
}

void TrainingProgress::look() {
    const double now = now_ms();
    if (mode_ != TerminalMode::plain) {
        const bool has_changed =
            terminal_size(out_).ws_col != width_ || continued_ != times_continued() || stop_signal_ != stop_signal();
        if (is_long() || is_stale_ || (is_drawn_ && has_changed)) draw();
    } else if (!activity_.empty() && now - std::max(since_ms_, plain_ms_) >= patience_.plain_s * 1000) {
        print_lines(activity());
    }
}

bool TrainingProgress::is_long() const {
    return !activity_.empty() && now_ms() - since_ms_ >= patience_.terminal_s * 1000;
}

// "step 13/500 | micro-step 3/32 | 12 s"
std::string TrainingProgress::activity() const { return activity_ + " | " + duration((now_ms() - since_ms_) / 1000); }

// Returns the single line: a long activity, if any, then the last step.
std::string TrainingProgress::progress_text() const {
    std::string text = stop_signal() && !activity_.empty() ? "stopping after this step | " : "";
    if (is_long()) text += activity();
    if (!state_->last) return text;
    const std::string line = progress_line(*state_->last, total_steps_, state_->remaining_s(total_steps_));
    return text + (is_long() ? line.substr(line.find(" | ")) : line);
}

// Leaves the line or block if it may no longer be in place and starts the next one below it. This happens if the shell
// printed its prompt after a suspension, a signal handler printed its notice, or the terminal became narrower and may
// have wrapped the text.
void TrainingProgress::leave_if_moved() {
    const winsize size = terminal_size(out_);
    const bool has_company = continued_ != times_continued() || stop_signal_ != stop_signal();
    if (is_drawn_ && (size.ws_col < width_ || (has_company && rows_ > 1))) {
        std::fputc('\n', out_);
        is_drawn_ = false;
    }
    continued_ = times_continued(), stop_signal_ = stop_signal(), width_ = size.ws_col;
}

void TrainingProgress::draw() {
    if (!is_in_foreground(out_)) return;
    leave_if_moved();
    const winsize size = terminal_size(out_);
    std::string picture;
    int rows = 1;
    if (is_view()) {
        const bool is_stopping = stop_signal() && !activity_.empty();
        std::string status = is_stopping ? "stopping after this step; press Ctrl-C again to stop now   " : "";
        if (is_long()) status += activity();
        const std::vector<std::string> lines =
            view_lines(*state_, total_steps_, status, size.ws_col, size.ws_row, is_unicode_);
        for (const std::string& line : lines) picture += (picture.empty() ? "" : "\x1b[K\n") + line;
        picture += "\x1b[J";
        rows = int(lines.size());
    } else {
        picture = progress_text();
        // A line that wraps cannot be rewritten.
        picture.resize(std::min(picture.size(), size_t(size.ws_col) - 1));
    }
    // Replace the old text line by line: erasing the block first would flicker.
    if (is_drawn_ && rows_ > 1) picture = format("\r\x1b[%dA", rows_ - 1) + picture;
    if (is_drawn_ && rows_ == 1) picture = "\r\x1b[K" + picture;
    std::fwrite(picture.data(), 1, picture.size(), out_);
    std::fflush(out_);
    is_drawn_ = true, is_stale_ = false, rows_ = rows, drawn_ms_ = now_ms();
}

// Moves the cursor to the start of the line or block and clears everything from there.
void TrainingProgress::erase() {
    if (is_drawn_ && rows_ > 1) std::fprintf(out_, "\r\x1b[%dA\x1b[J", rows_ - 1);
    if (is_drawn_ && rows_ == 1) std::fputs("\r\x1b[K", out_);
    is_drawn_ = false;
}

void TrainingProgress::print_lines(const std::string& text) {
    plain_ms_ = now_ms();
    std::fprintf(out_, "%s\n", text.c_str());
    std::fflush(out_);
}
