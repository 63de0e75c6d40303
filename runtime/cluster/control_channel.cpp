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
    try {
        thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
        fail(Exit::os, "cannot start the control channel's thread: %s", error.what());
    }
}

ControlChannel::~ControlChannel() {
    if (!thread_.joinable()) return;
    {
        const std::lock_guard lock(mutex_);
        is_closing_ = true;
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

std::string ControlChannel::collective(const TextRequest& request) {
    require(request.text.size() <= kTextLimit, "%s: a text of %zu bytes for the control channel, at most %zu",
            request.what, request.text.size(), kTextLimit);
    ++progress_.ticks;
    std::unique_lock lock(mutex_);
    require(!has_finished_, "%s: a collective after this rank has left the control channel", request.what);
    if (!failed_since_) {
        reply_.reset();
        tell_rank_0(MessageKind::request, pack(request.operation, request.what, request.text));
        // No timeout: rank 0 always replies, and if rank 0 is lost, the thread ends the process.
        changed_.wait(lock, [this] { return reply_.has_value(); });
    }
    ++progress_.ticks;
    if (reply_->code != Exit::ok) throw Error(reply_->code, reply_->text);
    return reply_->text;
}

void ControlChannel::leave() {
    if (!is_connected()) return;
    std::unique_lock lock(mutex_);
    has_left_ = true;
    tell_rank_0(MessageKind::goodbye, "");
    const double limit_s = settings_.leave_timeout_s;
    if (changed_.wait_until(lock, Clock::now() + seconds(limit_s), [this] { return has_finished_; })) return;
    std::vector<int> remaining;  // known to rank 0
    for (const MonitoredRank& rank : ranks_)
        if (!rank.has_left) remaining.push_back(rank.member.rank);
    const std::string who =
        rank_ == 0 ? (remaining.size() == 1 ? "rank " : "ranks ") + text_of_ranks(remaining) : "other ranks";
    fail(Exit::hang, "%s did not leave the run within %g s of rank %d", who, limit_s, rank_);
}

void ControlChannel::leave_with_error(Exit code, const std::string& sentence) {
    std::unique_lock lock(mutex_);
    if (!is_connected() || has_left_) return;
    has_left_ = has_reported_error_ = true;
    tell_rank_0(MessageKind::error, pack(code, sentence.substr(0, 4096)));
    changed_.wait_until(lock, Clock::now() + seconds(2 * kDrain_s), [this] { return has_finished_; });
}

void ControlChannel::tell_rank_0(MessageKind kind, const std::string& fields) {
    if (rank_ == 0)
        handle(0, {kind, fields}, Clock::now());
    else
        connections_[0].send(kind, fields);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.fd(), &one, sizeof one);
}

// ---- the thread -----------------------------------------------------------------------------------------------------

void ControlChannel::run() {
    sigset_t all;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, nullptr);  // the trainer's threads handle signals
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
        // While this process was stopped or had no CPU time, it could not receive anything.
        const Clock::duration round = now - std::exchange(last_round_, now);
        if (round >= seconds(kRound_s + kOwnPause_s))
            for (MonitoredRank& rank : ranks_) rank.last_heard += round, rank.last_progress += round;
        // After a failed collective all ranks leave with the same error, so no message is needed.
        if (is_closing_ || (has_left_ && failed_since_)) {
            drain_connections(failed_since_ ? kDrain_s : 0);
            return finish();
        }
        receive_all(now);
        if (now >= last_heartbeat_ + seconds(settings_.hang.heartbeat_s)) {
            last_heartbeat_ = now;
            const auto s = progress_.status();
            const Message heartbeat{MessageKind::heartbeat,
                                    pack(s.phase, s.step, s.ticks, s.collective, s.collective_name.substr(0, 100))};
            send_to_all(heartbeat.kind, heartbeat.fields);
            if (rank_ == 0) handle(0, heartbeat, now);
        }
        if (!has_finished_) check(now);
    }
}

void ControlChannel::receive_all(TimePoint now) {
    for (const Member& member : members_) {
        Connection& connection = connections_[size_t(member.rank)];
        if (!connection.is_open()) continue;
        connection.flush();
        const bool is_open = connection.receive();
        while (const std::optional<Message> message = connection.next()) {
            handle(member.rank, *message, now);
            if (has_finished_) return;
        }
        if (!is_open) handle_lost_connection(member.rank);
        if (has_finished_) return;
    }
}

// Ignores malformed messages.
void ControlChannel::handle(int rank, const Message& message, TimePoint now) {
    const auto& [kind, fields] = message;
    MonitoredRank& sender = ranks_[size_t(rank)];
    RankStatus status;
    if (kind == MessageKind::heartbeat &&
        unpack(fields, status.phase, status.step, status.ticks, status.collective, status.collective_name) &&
        status.phase >= Phase::start && status.phase <= Phase::end) {
        if (status.ticks != sender.status.ticks) sender.last_progress = now;
        sender.last_heard = now;
        sender.status = status;
    }
    EndOfRun end{rank, Exit::peer_lost, true, ""};
    if (rank_ == 0) {
        TextRequest request;
        if (kind == MessageKind::request && unpack(fields, request.operation, request.what, request.text)) {
            sender.last_progress = now;
            collective_->add(rank, request, now);
        }
        if (kind == MessageKind::goodbye || kind == MessageKind::error) sender.has_left = true;
        if (kind == MessageKind::error && unpack(fields, end.code, end.sentence) && !error_ && !failed_since_)
            error_ = end, error_since_ = now;
    } else {
        TextReply reply;
        if (kind == MessageKind::reply && unpack(fields, reply.code, reply.text)) deliver(reply);
        if (kind == MessageKind::all_left) finish();
        if (kind == MessageKind::end_of_run && unpack(fields, end.rank, end.code, end.is_reported, end.sentence)) {
            connections_[0].close();  // shows rank 0 that the message has arrived
            end_here(end);
        }
    }
}

void ControlChannel::handle_lost_connection(int rank) {
    connections_[size_t(rank)].close();
    const MonitoredRank& lost = ranks_[size_t(rank)];
    if (!failed_since_ && !lost.has_left)
        end_run({rank, Exit::peer_lost, false,
                 lost.member.text() + " died: its connection closed before it left the run; it was last " +
                     lost.status.text()});
}

// Rank 0 monitors all ranks, the others only whether rank 0 is silent.
void ControlChannel::check(TimePoint now) {
    if (failed_since_) {
        if (now > *failed_since_ + seconds(kFailedCollective_s)) end_process(reply_->code, reply_->text);
    } else if (rank_ == 0) {
        check_all_ranks(now);
    } else if (const auto hang = find_silent_rank({ranks_[0]}, settings_.hang.silence_s, now)) {
        end_process(Exit::hang, hang->sentence);
    }
}

void ControlChannel::check_all_ranks(TimePoint now) {
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

void ControlChannel::deliver(const TextReply& reply) {
    if (reply.code != Exit::ok) failed_since_ = Clock::now();
    reply_ = reply;
    changed_.notify_all();
}

// ---- the end --------------------------------------------------------------------------------------------------------

// Tells the connected ranks why the run ends, then ends this one.
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
