#include "runtime/cluster/control_channel.h"

#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace {

constexpr size_t kTextLimit = size_t(1) << 16;  // bytes of one rank's text
constexpr double kRound_s = 0.1;                // at most between two checks of the deadlines
constexpr double kOwnPause_s = 1;               // a round that took this much longer: the process was stopped
constexpr double kSettle_s = 0.5;               // an error may follow from a death that is detected a moment later
constexpr double kDrain_s = 1;                  // for the last messages to arrive
constexpr double kFailedCollective_s = 20;      // for a rank that is still computing to call the failed collective

std::string packed(const RankStatus& status) {
    return pack(status.phase, status.step, status.ticks, status.collective, status.collective_name.substr(0, 100));
}

}  // namespace

ControlChannel::ControlChannel(const RankEnvironment& environment, const ControlSettings& settings,
                               const TextBroadcast& broadcast)
    : rank_(environment.rank), settings_(settings), members_{this_member(environment.rank)} {
    if (environment.size == 1) return;
    Group group = open_group(environment, settings.rendezvous, broadcast);
    members_ = std::move(group.members);
    connections_ = std::move(group.connections);
    wake_ = Socket(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (!wake_) fail(Exit::os, "cannot create an eventfd: %s", std::strerror(errno));
    if (rank_ == 0) collective_.emplace(members_);
    last_round_ = last_heartbeat_ = Clock::now();
    for (const Member& member : members_) ranks_.push_back({member, {}, last_round_, last_round_});
    const size_t texts = rank_ == 0 ? 1 : members_.size();
    for (Connection& connection : connections_) connection.set_limit(texts * (kTextLimit + 8) + 8192);
    // Signals are handled by the trainer's threads.
    sigset_t all, before;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    std::string error;
    try {
        thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& failure) {
        error = failure.what();
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (!error.empty()) fail(Exit::os, "cannot start the control channel's thread: %s", error.c_str());
}

ControlChannel::~ControlChannel() {
    if (!thread_.joinable()) return;
    {
        const std::lock_guard lock(mutex_);
        is_closing_ = true;
        wake_thread();
    }
    thread_.join();
}

// ---- called by the trainer ------------------------------------------------------------------------------------------

std::vector<std::string> ControlChannel::all_gather(const std::string& mine, const char* what) {
    if (!is_connected()) return {mine};
    const std::string reply = collective({TextOperation::all_gather, what, mine});
    std::string_view fields = reply;
    std::vector<std::string> texts(members_.size());
    for (std::string& text : texts) take_field(fields, text);
    return texts;
}

void ControlChannel::require_same(const std::string& mine, const char* what) {
    if (is_connected()) collective({TextOperation::require_same, what, mine});
}

std::string ControlChannel::collective(TextRequest request) {
    require(request.text.size() <= kTextLimit, "%s: a text of %zu bytes for the control channel, at most %zu",
            request.what.c_str(), request.text.size(), kTextLimit);
    progress_.ticks.fetch_add(1, std::memory_order_relaxed);
    std::unique_lock lock(mutex_);
    require(!has_finished_, "%s: a collective after this rank has left the control channel", request.what.c_str());
    if (!failed_since_) {
        reply_.reset();
        if (rank_ == 0)
            collective_->add(0, std::move(request), Clock::now());
        else
            connection_to(0).send(MessageKind::request, pack(request.operation, request.what, request.text));
        wake_thread();
        // No timeout: rank 0 always replies, and if rank 0 is lost, the thread ends the process.
        changed_.wait(lock, [this] { return reply_.has_value(); });
    }
    progress_.ticks.fetch_add(1, std::memory_order_relaxed);
    if (reply_->code != Exit::ok) throw Error(reply_->code, reply_->text);
    return reply_->text;
}

void ControlChannel::leave() {
    if (!is_connected()) return;
    std::unique_lock lock(mutex_);
    has_left_ = ranks_[size_t(rank_)].has_left = true;
    if (failed_since_)
        is_closing_ = true;
    else if (rank_ != 0)
        connection_to(0).send(MessageKind::goodbye, "");
    wake_thread();
    const double limit_s = settings_.leave_timeout_s;
    if (changed_.wait_until(lock, Clock::now() + seconds(limit_s), [this] { return has_finished_; })) return;
    std::vector<int> remaining;
    for (const MonitoredRank& rank : ranks_)
        if (!rank.has_left) remaining.push_back(rank.member.rank);
    const std::string who =
        rank_ == 0 ? (remaining.size() == 1 ? "rank " : "ranks ") + text_of_ranks(remaining) : "other ranks";
    fail(Exit::hang, "%s did not leave the run within %g s of rank %d", who.c_str(), limit_s, rank_);
}

void ControlChannel::leave_with_error(Exit code, const std::string& sentence) {
    std::unique_lock lock(mutex_);
    if (!is_connected() || has_left_) return;
    has_reported_error_ = true;
    const EndOfRun end{rank_, code, true, sentence.substr(0, 4096)};
    if (failed_since_)
        is_closing_ = true;  // all ranks have the same error
    else if (rank_ == 0)
        report_error(end, Clock::now());
    else
        connection_to(0).send(MessageKind::error, pack(end.code, end.sentence));
    wake_thread();
    changed_.wait_until(lock, Clock::now() + seconds(2 * kDrain_s), [this] { return has_finished_; });
}

void ControlChannel::wake_thread() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.fd(), &one, sizeof one);
}

// ---- the thread -----------------------------------------------------------------------------------------------------

void ControlChannel::run() {
    std::unique_lock lock(mutex_);
    while (!has_finished_) {
        std::vector<pollfd> polled{{wake_.fd(), POLLIN, 0}};
        for (const Connection& connection : connections_) polled.push_back(connection.events());
        lock.unlock();
        wait_for_events(polled, Clock::now() + seconds(std::min(kRound_s, settings_.hang.heartbeat_s)));
        lock.lock();
        uint64_t count;
        [[maybe_unused]] const ssize_t got = ::read(wake_.fd(), &count, sizeof count);
        const TimePoint now = Clock::now();
        ignore_own_pause(now);
        if (is_closing_) {
            drain_connections(failed_since_ ? kDrain_s : 0);
            return finish();
        }
        receive_all(now);
        if (!has_finished_) send_heartbeat(now);
        if (!has_finished_) check(now);
    }
}

// While this process was stopped or had no CPU time, it could not receive anything.
void ControlChannel::ignore_own_pause(TimePoint now) {
    const Clock::duration pause = now - std::exchange(last_round_, now);
    if (pause < seconds(kRound_s + kOwnPause_s)) return;
    for (MonitoredRank& rank : ranks_) rank.last_heard += pause, rank.last_progress += pause;
}

void ControlChannel::receive_all(TimePoint now) {
    for (size_t i = 0; i < connections_.size(); ++i) {
        const int rank = rank_ == 0 ? int(i) : 0;
        Connection& connection = connections_[i];
        if (!connection.is_open()) continue;
        connection.flush();
        const bool is_open = connection.receive();
        while (const std::optional<Message> message = connection.next()) {
            handle(rank, *message, now);
            if (has_finished_) return;
        }
        if (!is_open) handle_lost_connection(rank);
        if (has_finished_) return;
    }
}

// Rank 0 receives the second group of messages, the other ranks the third. Malformed ones are ignored.
void ControlChannel::handle(int rank, const Message& message, TimePoint now) {
    RankStatus status;
    TextRequest request;
    TextReply reply;
    EndOfRun end;
    end.rank = rank;
    const std::string& fields = message.fields;
    if (message.kind == MessageKind::heartbeat &&
        unpack(fields, status.phase, status.step, status.ticks, status.collective, status.collective_name) &&
        status.phase >= Phase::start && status.phase <= Phase::end)
        update_status(rank, status, now);

    if (message.kind == MessageKind::request && unpack(fields, request.operation, request.what, request.text)) {
        ranks_[size_t(rank)].last_progress = now;
        collective_->add(rank, std::move(request), now);
    }
    if (message.kind == MessageKind::goodbye) ranks_[size_t(rank)].has_left = true;
    if (message.kind == MessageKind::error && unpack(fields, end.code, end.sentence)) {
        ranks_[size_t(rank)].has_left = end.is_reported = true;
        report_error(end, now);
    }

    if (message.kind == MessageKind::reply && unpack(fields, reply.code, reply.text)) deliver(reply);
    if (message.kind == MessageKind::all_left) finish();
    if (message.kind == MessageKind::end_of_run && unpack(fields, end.rank, end.code, end.is_reported, end.sentence)) {
        connection_to(0).close();  // tells rank 0 that the message has arrived
        end_here(end);
    }
}

void ControlChannel::handle_lost_connection(int rank) {
    connection_to(rank).close();
    const MonitoredRank& lost = ranks_[size_t(rank)];
    if (failed_since_ || lost.has_left) return;
    const EndOfRun end{
        rank, Exit::peer_lost, false,
        lost.member.text() + " died: its connection closed before it left the run; it was last " + lost.status.text()};
    if (rank_ == 0)
        end_run(end);
    else
        end_here(end);
}

void ControlChannel::update_status(int rank, const RankStatus& status, TimePoint now) {
    MonitoredRank& monitored = ranks_[size_t(rank)];
    if (status.ticks != monitored.status.ticks) monitored.last_progress = now;
    monitored.last_heard = now;
    monitored.status = status;
}

void ControlChannel::send_heartbeat(TimePoint now) {
    if (now < last_heartbeat_ + seconds(settings_.hang.heartbeat_s)) return;
    last_heartbeat_ = now;
    send_to_all(MessageKind::heartbeat, packed(progress_.status()));
}

// Rank 0 monitors all ranks, the others only whether rank 0 is silent.
void ControlChannel::check(TimePoint now) {
    if (failed_since_) {
        if (now > *failed_since_ + seconds(kFailedCollective_s)) end_process(reply_->code, reply_->text);
    } else if (rank_ == 0) {
        check_as_rank_0(now);
    } else if (const auto hang = find_silent_rank({ranks_[0]}, settings_.hang.silence_s, now)) {
        end_process(Exit::hang, hang->sentence);
    }
}

void ControlChannel::check_as_rank_0(TimePoint now) {
    update_status(0, progress_.status(), now);
    if (const auto reply = collective_->reply(now, settings_.collective_timeout_s)) {
        // A reply would not reach a rank that has not called the collective.
        if (reply->code == Exit::hang) return end_run({0, Exit::hang, false, reply->text});
        for (MonitoredRank& rank : ranks_) rank.last_progress = now;
        send_to_all(MessageKind::reply, pack(reply->code, reply->text));
        deliver(*reply);
        if (failed_since_) return;
    }
    for (MonitoredRank& rank : ranks_) rank.is_waiting = collective_->has_request(rank.member.rank);
    if (std::ranges::all_of(ranks_, &MonitoredRank::has_left)) {
        send_to_all(MessageKind::all_left, "");
        drain_connections(kDrain_s);
        return finish();
    }
    if (error_ && now > error_since_ + seconds(kSettle_s)) return end_run(*error_);
    if (const auto hang = find_hang(ranks_, settings_.hang, now))
        end_run({hang->rank, Exit::hang, false, hang->sentence});
}

void ControlChannel::send_to_all(MessageKind kind, const std::string& fields) {
    for (Connection& connection : connections_) connection.send(kind, fields);
}

// On rank 0.
void ControlChannel::report_error(const EndOfRun& end, TimePoint now) {
    if (!error_ && !failed_since_) error_ = end, error_since_ = now;
}

void ControlChannel::deliver(const TextReply& reply) {
    if (reply.code != Exit::ok) failed_since_ = Clock::now();
    reply_ = reply;
    changed_.notify_all();
}

// ---- the end --------------------------------------------------------------------------------------------------------

// On rank 0: tells all ranks why the run ends, then ends this one.
void ControlChannel::end_run(EndOfRun end) {
    if (end.is_reported) {
        const MonitoredRank& rank = ranks_[size_t(end.rank)];
        end.sentence = format("%s left with exit code %d: %s; it was last %s", rank.member.text().c_str(),
                              int(end.code), end.sentence.c_str(), rank.status.text().c_str());
        end.code = Exit::peer_lost;
    }
    send_to_all(MessageKind::end_of_run, pack(end.rank, end.code, end.is_reported, end.sentence));
    drain_connections(kDrain_s, end.rank);  // a rank that hangs may never close
    end_here(end);
}

// A rank that has reported an error itself exits with its own code.
void ControlChannel::end_here(const EndOfRun& end) {
    if (has_reported_error_ && end.is_reported) return finish();
    end_process(end.code, end.sentence);
}

void ControlChannel::end_process(Exit code, const std::string& sentence) const {
    std::string line = format("train_gpt: rank %d ends: %s", rank_, sentence.c_str());
    std::ranges::replace(line, '\n', ' ');
    line += '\n';
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
    ::_exit(int(code));
}

// Sends what is left and waits until the others, except for one, have closed their ends: closing a connection that has
// unread data can destroy data that was sent.
void ControlChannel::drain_connections(double limit_s, int except_rank) {
    const TimePoint deadline = Clock::now() + seconds(limit_s);
    for (bool is_any_open = true; is_any_open;) {
        is_any_open = false;
        for (size_t i = 0; i < connections_.size(); ++i) {
            Connection& connection = connections_[i];
            if (connection.flush()) connection.finish_sending();
            const bool is_open = connection.receive();
            while (connection.next()) {}
            if (!is_open) connection.close();
            is_any_open |= is_open && int(i) != except_rank;
        }
        if (Clock::now() >= deadline) return;
        ::usleep(2000);
    }
}

// The thread's last action.
void ControlChannel::finish() {
    has_finished_ = true;
    for (Connection& connection : connections_) connection.close();
    changed_.notify_all();
}
