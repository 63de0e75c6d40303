#include "runtime/cluster/supervisor.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "runtime/cluster/shared_segments.h"
#include "runtime/cluster/socket.h"

namespace {

constexpr int kMaxFailedRestarts = 3;

int signal_of(int code) { return code > 128 && code < 128 + NSIG ? code - 128 : 0; }

// "exit code 76 (another rank died or ended with an error)"
std::string text_of(int code) {
    const ExitCode* const row = row_of(code);
    if (row) return format("exit code %d (%s)", code, row->meaning);
    if (signal_of(code))
        return format("exit code %d (killed by signal %d, %s)", code, signal_of(code), ::strsignal(signal_of(code)));
    return format("exit code %d", code);
}

}  // namespace

const ExitCode* row_of(int code) {
    const auto row = std::ranges::find(kExitCodes, Exit(code), &ExitCode::code);
    return row == std::end(kExitCodes) ? nullptr : row;
}

bool may_restart(int code) {
    const ExitCode* const row = row_of(code);
    if (row) return std::strcmp(row->policy, "restart") == 0;
    const int signal = signal_of(code);
    return signal != 0 && signal != SIGINT && signal != SIGTERM;
}

Restart RestartPolicy::decide(const RunEnd& end) {
    if (end.code == int(Exit::ok) || end.stop_signal != 0) return {};
    const std::string ended = "the run ended with " + text_of(end.code);
    if (!may_restart(end.code)) return {.sentence = ended + ", which a restart would not fix: not restarted"};
    if (end.has_committed) in_vain_ = 0;
    if (in_vain_ == kMaxFailedRestarts)
        return {.sentence =
                    ended + format("; giving up after %d restarts in a row that committed no checkpoint", in_vain_)};
    const double wait_s = double(1 << in_vain_++);
    std::string sentence = ended + format("; restarting in %g s", wait_s);
    if (!end.has_committed && in_vain_ > 1)
        sentence += format(" (%d of at most %d restarts without a new checkpoint)", in_vain_, kMaxFailedRestarts);
    return {true, wait_s, sentence};
}

int supervise(const std::function<std::vector<std::string>()>& next_command,
              const std::function<std::vector<int64_t>()>& committed_steps, RankReports& reports,
              StopSignals& signals) {
    ::setenv("TRAIN_GPT_SUPERVISOR", reports.name().c_str(), 1);
    RestartPolicy policy;
    for (;;) {
        const std::vector<int64_t> before = committed_steps();
        reports.begin();
        const int code = run_child(next_command(), signals, [&] { return reports.find_hang(); });
        remove_abandoned_segments();
        const std::vector<int64_t> after = committed_steps();
        const bool has_committed =
            std::ranges::any_of(after, [&](int64_t step) { return !std::ranges::count(before, step); });
        const Restart restart = policy.decide({code, signals.received(), has_committed});
        if (!restart.sentence.empty()) std::fprintf(stderr, "train_gpt: %s\n", restart.sentence.c_str());
        if (!restart.is_due) return code;
        for (const TimePoint begin = Clock::now() + seconds(restart.after_s); Clock::now() < begin;)
            if (signals.wait(seconds_between(Clock::now(), begin)) != 0) return int(Exit::again);
    }
}
