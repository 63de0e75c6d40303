#include "runtime/cluster/watcher.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "runtime/cluster/message.h"

namespace {

constexpr size_t kTextLimit = size_t(1) << 16;  // bytes of one rank's text
constexpr double kRound_s = 0.1;                // at most between two looks at clocks
constexpr double kOwnSleep_s = 1;  // a round that took this much longer: this process was stopped or starved
constexpr double kSettle_s = 0.5;  // an error may be the consequence of a death that is seen a moment later
constexpr double kFarewell_s = 1;  // for the last word to reach the others
constexpr double kOnEnd_s = 2;
constexpr double kFailedTogether_s = 20;  // for a rank that may still be busy to ask, to learn why there is no answer

std::string report_fields(const RankReport& report) {
    return FieldWriter()
        .number(uint64_t(report.phase))
        .number(uint64_t(report.step))
        .number(report.ticks)
        .number(report.collective)
        .text(report.collective_name.substr(0, 100))
        .fields();
}

void run_quietly(const std::function<void()>& callback) {
    try {
        callback();
    } catch (...) {
        // What cannot be tidied up does not change how the process ends.
    }
}

}  // namespace

Watcher::Watcher(int rank, Group group, const WatchSettings& settings, double answer_s, Progress& progress)
    : rank_(rank),
      settings_(settings),
      answer_s_(answer_s),
      progress_(progress),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      connections_(std::move(group.connections)),
      has_left_(group.members.size()),
      questions_(group.members) {
    if (!wake_) fail(Exit::os, "the system gives no eventfd: %s", std::strerror(errno));
    const TimePoint now = Clock::now();
    last_round_ = reported_ = now;
    for (const Member& member : group.members) ranks_.push_back({member, {}, now, now, false});
    const size_t texts = rank_ == 0 ? 1 : ranks_.size();
    for (Connection& connection : connections_) connection.set_limit(texts * (kTextLimit + 8) + 8192);
    // Signals are for the trainer's threads.
    sigset_t all, before;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    std::string why;
    try {
        thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
        why = error.what();
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!why.empty()) fail(Exit::os, "the system gives no thread for the control channel: %s", why.c_str());
}

Watcher::~Watcher() {
    {
        const std::lock_guard lock(mutex_);
        quits_ = true;
    }
    wake();
    thread_.join();
}

// ---- the trainer's side ---------------------------------------------------------------------------------------------

std::string Watcher::ask(Question question, const char* what, const std::string& text) {
    require(text.size() <= kTextLimit, "%s: a text of %zu bytes for the control channel, at most %zu", what,
            text.size(), kTextLimit);
    progress_.ticks.fetch_add(1, std::memory_order_relaxed);
    std::unique_lock lock(mutex_);
    require(!has_finished_, "%s: asked after this rank has left the control channel", what);
    if (!answer_ || answer_->code == Exit::ok) {  // else the channel has failed, and this is why
        question_ = Asked{question, what, text};
        answer_.reset();
        wake();
        // Rank 0 answers in any case, and if it does not, the thread finds out.
        changed_.wait(lock, [this] { return answer_.has_value(); });
    }
    progress_.ticks.fetch_add(1, std::memory_order_relaxed);
    if (answer_->code != Exit::ok) throw Error(answer_->code, answer_->text);
    return answer_->text;
}

void Watcher::on_end(std::function<void()> callback) {
    const std::lock_guard lock(mutex_);
    on_end_ = std::move(callback);
}

void Watcher::leave(double limit_s) {
    std::unique_lock lock(mutex_);
    wants_to_leave_ = true;
    wake();
    if (changed_.wait_until(lock, Clock::now() + seconds(limit_s), [this] { return has_finished_; })) return;
    const std::string who =
        rank_ == 0 ? (staying_.size() == 1 ? "rank " : "ranks ") + text_of_ranks(staying_) : "others";
    fail(Exit::hang, "%s did not end the run within %g s of rank %d", who.c_str(), limit_s, rank_);
}

void Watcher::leave_with_error(Exit code, const std::string& sentence) {
    std::unique_lock lock(mutex_);
    if (wants_to_leave_) return;
    error_ = Verdict{rank_, code, true, sentence.substr(0, 4096)};
    wake();
    changed_.wait_until(lock, Clock::now() + seconds(2 * kFarewell_s), [this] { return has_finished_; });
}

void Watcher::wake() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.fd(), &one, sizeof one);
}

// ---- the thread -----------------------------------------------------------------------------------------------------

void Watcher::run() {
    while (!is_finished_) {
        wait_for_news();
        const TimePoint now = Clock::now();
        forgive_own_sleep(now);
        take_wishes(now);
        if (!is_finished_) listen(now);
        if (!is_finished_) report(now);
        if (!is_finished_) judge(now);
    }
}

void Watcher::wait_for_news() {
    std::vector<pollfd> polled{{wake_.fd(), POLLIN, 0}};
    for (const Connection& connection : connections_)
        polled.push_back({connection.fd(), short(POLLIN | (connection.has_unsent() ? POLLOUT : 0)), 0});
    ::poll(polled.data(), polled.size(), int(1000 * std::min(kRound_s, settings_.heartbeat_s)));
    uint64_t count;
    [[maybe_unused]] const ssize_t got = ::read(wake_.fd(), &count, sizeof count);
}

// While we did not run, nobody could be heard.
void Watcher::forgive_own_sleep(TimePoint now) {
    const Clock::duration slept = now - last_round_;
    last_round_ = now;
    if (slept < seconds(kRound_s + kOwnSleep_s)) return;
    for (WatchedRank& rank : ranks_) rank.heard += slept, rank.moved += slept;
}

void Watcher::take_wishes(TimePoint now) {
    std::optional<Asked> question;
    std::optional<Verdict> error;
    bool wants_to_leave, quits;
    {
        const std::lock_guard lock(mutex_);
        std::swap(question, question_);
        std::swap(error, error_);
        wants_to_leave = wants_to_leave_;
        quits = quits_;
    }
    if (question && rank_ == 0)
        questions_.take(0, std::move(*question), now);
    else if (question)
        connection_to(0).send(
            MessageKind::question,
            FieldWriter().number(uint64_t(question->question)).text(question->what).text(question->text).fields());
    if ((error || wants_to_leave) && failed_together_) quits = true;  // everybody knows why already
    if (quits) {
        linger(failed_together_ ? kFarewell_s : 0);
        return finish();
    }
    if (error) {
        told_error_ = true;
        if (rank_ != 0)
            connection_to(0).send(MessageKind::error,
                                  FieldWriter().number(uint64_t(error->code)).text(error->sentence).fields());
        else if (!pending_)
            pending_ = error, pending_since_ = now;
    }
    if (wants_to_leave && !said_goodbye_) {
        said_goodbye_ = true;
        if (rank_ != 0) connection_to(0).send(MessageKind::goodbye, "");
        has_left_[size_t(rank_)] = true;
    }
}

void Watcher::listen(TimePoint now) {
    for (size_t i = 0; i < connections_.size() && !is_finished_; ++i) {
        const int rank = rank_ == 0 ? int(i) : 0;
        Connection& connection = connections_[i];
        if (!connection.is_open()) continue;
        connection.flush();
        const bool is_open = connection.receive();
        while (const std::optional<Message> message = connection.next()) {
            if (rank_ == 0)
                hear(rank, *message, now);
            else
                hear_rank_0(*message, now);
            if (is_finished_ || !connection.is_open()) break;
        }
        if (!is_finished_ && !is_open) lost(rank);
    }
}

void Watcher::report(TimePoint now) {
    if (now < reported_ + seconds(settings_.heartbeat_s)) return;
    reported_ = now;
    const std::string fields = report_fields(progress_.report());
    for (Connection& connection : connections_)
        if (connection.is_open()) connection.send(MessageKind::heartbeat, fields);
}

void Watcher::take_report(int rank, const std::string& fields, TimePoint now) {
    FieldReader reader(fields);
    RankReport report;
    report.phase = Phase(std::min<uint64_t>(reader.number(), uint64_t(Phase::end)));
    report.step = int64_t(reader.number());
    report.ticks = reader.number();
    report.collective = reader.number();
    report.collective_name = reader.text();
    WatchedRank& watched = ranks_[size_t(rank)];
    if (report.ticks != watched.report.ticks) watched.moved = now;
    watched.heard = now;
    watched.report = report;
}

// Rank 0 judges all ranks, the others rank 0's silence only: who of them hangs is for rank 0 to say.
void Watcher::judge(TimePoint now) {
    if (failed_together_) {
        if (now > failed_since_ + seconds(kFailedTogether_s)) end(failure_.code, failure_.text);
        return;
    }
    if (rank_ != 0) {
        WatchSettings silence = settings_;
        silence.start_s = silence.step_s = silence.evaluation_s = silence.save_s = silence.end_s = 1e9;
        if (const auto hang = find_hang({ranks_[0]}, silence, now)) end(Exit::hang, hang->sentence);
        return;
    }
    take_report(0, report_fields(progress_.report()), now);
    if (const auto answer = questions_.answer(now, answer_s_)) {
        // Who did not come to ask cannot be told by an answer.
        if (answer->code == Exit::hang) return pronounce({0, Exit::hang, false, answer->text});
        answer_all(*answer);
        if (failed_together_) return;
    }
    std::vector<int> staying;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        ranks_[rank].is_excused = has_left_[rank] || questions_.has_asked(int(rank));
        if (!has_left_[rank]) staying.push_back(int(rank));
    }
    {
        const std::lock_guard lock(mutex_);
        staying_ = staying;
    }
    if (staying.empty()) {
        for (Connection& connection : connections_) connection.send(MessageKind::all_left, "");
        linger(kFarewell_s);
        return finish();
    }
    if (pending_ && now > pending_since_ + seconds(kSettle_s)) return pronounce(*pending_);
    if (const auto hang = find_hang(ranks_, settings_, now)) pronounce({hang->rank, Exit::hang, false, hang->sentence});
}

// ---- what rank 0 hears ----------------------------------------------------------------------------------------------

void Watcher::hear(int rank, const Message& message, TimePoint now) {
    FieldReader reader(message.fields);
    if (message.kind == MessageKind::heartbeat) take_report(rank, message.fields, now);
    if (message.kind == MessageKind::question) take_question(rank, reader, now);
    if (message.kind == MessageKind::goodbye) has_left_[size_t(rank)] = true;
    if (message.kind == MessageKind::error) {
        const Exit code = Exit(reader.number());
        const std::string sentence = reader.text();
        has_left_[size_t(rank)] = true;
        if (!pending_ && !failed_together_) pending_ = Verdict{rank, code, true, sentence}, pending_since_ = now;
    }
}

void Watcher::take_question(int rank, FieldReader& reader, TimePoint now) {
    Asked asked;
    asked.question = Question(reader.number());
    asked.what = reader.text();
    asked.text = reader.text();
    ranks_[size_t(rank)].moved = now;
    questions_.take(rank, std::move(asked), now);
}

void Watcher::answer_all(const Answer& answer) {
    for (WatchedRank& rank : ranks_) rank.moved = Clock::now();
    const std::string fields = FieldWriter().number(uint64_t(answer.code)).text(answer.text).fields();
    for (Connection& connection : connections_)
        if (connection.is_open()) connection.send(MessageKind::answer, fields);
    deliver(answer);
}

// The connection to `rank` has ended.
void Watcher::lost(int rank) {
    connection_to(rank).close();
    if (failed_together_ || (rank_ == 0 && has_left_[size_t(rank)])) return;
    const WatchedRank& dead = ranks_[size_t(rank)];
    const Verdict verdict{
        rank, Exit::peer_lost, false,
        dead.member.text() + " died: its connection closed without a goodbye; it was last " + dead.report.text()};
    if (rank_ == 0)
        pronounce(verdict);
    else
        end(Exit::peer_lost, verdict.sentence);
}

// Tells all ranks why the run ends, and ends this one, unless this one has said so itself.
void Watcher::pronounce(const Verdict& verdict) {
    Verdict told = verdict;
    if (told.is_error) {
        const WatchedRank& rank = ranks_[size_t(told.rank)];
        told.sentence = format("%s left with exit code %d: %s; it was last %s", rank.member.text().c_str(),
                               int(told.code), verdict.sentence.c_str(), rank.report.text().c_str());
        told.code = Exit::peer_lost;
    }
    const std::string fields = FieldWriter()
                                   .number(uint64_t(told.rank))
                                   .number(uint64_t(told.code))
                                   .number(told.is_error)
                                   .text(told.sentence)
                                   .fields();
    for (Connection& connection : connections_)
        if (connection.is_open()) connection.send(MessageKind::verdict, fields);
    linger(kFarewell_s, told.rank);  // which may be stopped for good
    obey(told);
}

// ---- what the other ranks hear --------------------------------------------------------------------------------------

void Watcher::hear_rank_0(const Message& message, TimePoint now) {
    FieldReader reader(message.fields);
    if (message.kind == MessageKind::heartbeat) take_report(0, message.fields, now);
    if (message.kind == MessageKind::answer) {
        Answer answer;
        answer.code = Exit(reader.number());
        answer.text = reader.text();
        deliver(answer);
    }
    if (message.kind == MessageKind::all_left) finish();
    if (message.kind == MessageKind::verdict) {
        Verdict verdict;
        verdict.rank = int(reader.number());
        verdict.code = Exit(reader.number());
        verdict.is_error = reader.number() != 0;
        verdict.sentence = reader.text();
        connection_to(0).close();  // rank 0 sees that it was heard
        obey(verdict);
    }
}

// ---- the end --------------------------------------------------------------------------------------------------------

void Watcher::obey(const Verdict& verdict) {
    if (told_error_ && verdict.is_error) return finish();
    end(verdict.code, verdict.sentence);
}

// Sends what is left and waits until the others, but for one, have closed: closing with unread bytes can destroy sent
// ones.
void Watcher::linger(double limit_s, int except_rank) {
    const TimePoint deadline = Clock::now() + seconds(limit_s);
    std::vector<bool> is_last(connections_.size());
    for (;;) {
        bool is_any_open = false;
        for (size_t i = 0; i < connections_.size(); ++i) {
            Connection& connection = connections_[i];
            if (!connection.is_open()) continue;
            if (connection.flush() && !is_last[i]) connection.finish_sending(), is_last[i] = true;
            const bool is_open = connection.receive();
            while (connection.next()) {}
            if (!is_open) connection.close();
            is_any_open |= is_open && int(i) != except_rank;
        }
        if (!is_any_open || Clock::now() >= deadline) break;
        ::usleep(2000);
    }
}

void Watcher::end(Exit code, const std::string& sentence) {
    std::string line = format("train_gpt: rank %d ends: %s", rank_, sentence.c_str());
    std::replace(line.begin(), line.end(), '\n', ' ');
    line += '\n';
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
    std::function<void()> callback;
    {
        const std::lock_guard lock(mutex_);
        callback = on_end_;
    }
    std::atomic<bool> is_done = !callback;
    std::thread runner;  // never joined: the process ends first
    if (callback) runner = std::thread([&] { run_quietly(callback), is_done = true; });
    for (const TimePoint deadline = Clock::now() + seconds(kOnEnd_s); !is_done && Clock::now() < deadline;)
        ::usleep(2000);
    ::_exit(int(code));
}

void Watcher::deliver(const Answer& answer) {
    if (answer.code != Exit::ok) {
        failed_together_ = true;
        failed_since_ = Clock::now();
        failure_ = answer;
    }
    const std::lock_guard lock(mutex_);
    answer_ = answer;
    changed_.notify_all();
}

// The thread's last act.
void Watcher::finish() {
    is_finished_ = true;
    for (Connection& connection : connections_) connection.close();
    const std::lock_guard lock(mutex_);
    has_finished_ = true;
    changed_.notify_all();
}
