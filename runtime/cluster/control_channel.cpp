#include "runtime/cluster/control_channel.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "runtime/cluster/background_thread.h"
#include "runtime/io/process.h"

namespace {

constexpr size_t kTextLimit = size_t(1) << 16;  // bytes of one rank's text
constexpr double kRound_s = 0.1;                // maximum between two checks of the deadlines
constexpr double kOwnPause_s = 1;               // a round longer by this much means that the process was stopped
constexpr double kSettle_s = 0.5;               // a death that caused the error may be detected a moment later
constexpr double kDrain_s = 1;                  // for the last messages to arrive
constexpr double kFailedCollective_s = 20;      // for a rank that is still computing to call the failed collective

}  // namespace

ControlChannel::ControlChannel(const RankEnvironment& environment, const ControlSettings& settings,
                               const TextBroadcast& broadcast, std::shared_ptr<RankActivity> activity)
    : rank_(environment.rank), settings_(settings), activity_(std::move(activity)) {
    if (environment.size == 1) return;
    std::vector<Peer> peers = open_group(environment, settings.start_s, broadcast);
    wake_ = FileDescriptor(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (!wake_) fail(Exit::os, "cannot create an eventfd: %s", std::strerror(errno));
    last_round_ = last_heartbeat_ = Clock::now();
    for (Peer& peer : peers) {
        peer.member.place = settings.grid.text_of(peer.member.rank);
        ranks_.push_back({peer.member, {}, last_round_, last_round_});
        connections_.push_back(std::move(peer.connection));
        connections_.back().set_limit(size_t(environment.size) * (kTextLimit + 8) + 8192);
    }
    thread_ = start_thread([this](const std::stop_token& stop) { run(stop); });
}

// ---- called by the trainer ------------------------------------------------------------------------------------------

std::vector<std::string> ControlChannel::all_gather(const std::string& mine, const char* what) {
    const std::string reply = collective({.what = what, .text = mine});
    std::string_view fields = reply;
    std::vector<std::string> texts;
    for (std::string text; take_field(fields, text);) texts.push_back(text);
    return texts;
}

std::string ControlChannel::collective(const TextRequest& request) {
    activity_->note_progress();
    if (!is_connected()) return pack(request.text);
    require(request.text.size() <= kTextLimit, "%s: text of %zu bytes for the control channel, limit %zu", request.what,
            request.text.size(), kTextLimit);
    std::unique_lock lock(mutex_);
    require(!has_finished_, "%s: collective called after this rank left the control channel", request.what);
    if (!failed_since_) {
        reply_.reset();
        send_to_rank_0(MessageKind::request, pack(request.must_be_same, request.what, request.text));
        // No timeout: rank 0 always replies, and if rank 0 is lost, the thread ends the process.
        changed_.wait(lock, [this] { return reply_.has_value(); });
    }
    if (reply_->code != Exit::ok) throw Error(reply_->code, reply_->text);
    return reply_->text;
}

std::vector<std::string> ControlChannel::member_texts() const {
    std::vector<std::string> texts;
    for (const MonitoredRank& rank : ranks_) texts.push_back(rank.member.text());
    return texts;
}

void ControlChannel::leave() {
    if (!is_connected()) return;
    std::unique_lock lock(mutex_);
    has_left_ = true;
    send_to_rank_0(MessageKind::leave, pack(Exit::ok, ""));
    // No timeout: if a rank does not leave, the thread ends the process.
    changed_.wait(lock, [this] { return has_finished_; });
}

void ControlChannel::leave_with_error(Exit code, const std::string& sentence) {
    std::unique_lock lock(mutex_);
    if (!is_connected() || has_left_) return;
    has_left_ = has_reported_error_ = true;
    send_to_rank_0(MessageKind::leave, pack(code, sentence.substr(0, 4096)));
    changed_.wait_until(lock, Clock::now() + seconds(2 * kDrain_s), [this] { return has_finished_; });
}

void ControlChannel::send_to_rank_0(MessageKind kind, const std::string& fields) {
    if (rank_ == 0)
        handle(0, {kind, fields}, Clock::now());
    else
        connections_[0].send(kind, fields);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_, &one, sizeof one);
}

// ---- the thread -----------------------------------------------------------------------------------------------------

void ControlChannel::run(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (!has_finished_) {
        std::vector<pollfd> polled{{wake_, POLLIN, 0}};
        for (const Connection& connection : connections_) polled.push_back(connection.events());
        lock.unlock();
        wait_for_events(polled, Clock::now() + seconds(std::min(kRound_s, settings_.heartbeat_s)));
        lock.lock();
        uint64_t count;
        [[maybe_unused]] const ssize_t got = ::read(wake_, &count, sizeof count);
        const TimePoint now = Clock::now();
        // While this process was stopped or had no CPU time, it could not receive heartbeats, so that time does not
        // count.
        const Clock::duration round = now - std::exchange(last_round_, now);
        if (round >= seconds(kRound_s + kOwnPause_s))
            for (MonitoredRank& rank : ranks_) rank.last_heard += round, rank.last_progress += round;
        // After a failed collective all ranks leave with the same error, so no message is needed.
        if (stop.stop_requested() || (has_left_ && failed_since_)) {
            drain_connections(failed_since_ ? kDrain_s : 0);
            return finish();
        }
        receive_all(now);
        if (now >= last_heartbeat_ + seconds(settings_.heartbeat_s)) {
            last_heartbeat_ = now;
            const Message heartbeat{MessageKind::heartbeat, activity_->now().packed()};
            send_to_all(heartbeat.kind, heartbeat.fields);
            if (rank_ == 0) handle(0, heartbeat, now);
        }
        if (!has_finished_) check(now);
    }
}

void ControlChannel::receive_all(TimePoint now) {
    for (size_t rank = 0; rank < connections_.size() && !has_finished_; ++rank) {
        Connection& connection = connections_[rank];
        if (!connection.is_open()) continue;
        connection.flush();
        const bool is_open = connection.receive();
        while (const std::optional<Message> message = connection.next()) {
            handle(int(rank), *message, now);
            if (has_finished_) return;
        }
        if (is_open) continue;
        connection.close();
        const MonitoredRank& lost = ranks_[rank];
        if (!failed_since_ && !lost.has_left)
            end_run({int(rank), Exit::peer_lost,
                     lost.member.text() + " died: its connection closed before it left the run; it was last " +
                         lost.status.text()});
    }
}

// Ignores malformed messages.
void ControlChannel::handle(int rank, const Message& message, TimePoint now) {
    const auto& [kind, fields] = message;
    MonitoredRank& sender = ranks_[size_t(rank)];
    RankStatus status;
    if (kind == MessageKind::heartbeat && status.unpack_from(fields)) sender.note(status, now);
    if (rank_ == 0) {
        TextRequest request;
        if (kind == MessageKind::request && unpack(fields, request.must_be_same, request.what, request.text)) {
            sender.last_progress = sender.requested = now;
            sender.request = request;
        }
        Exit code = Exit::ok;
        std::string sentence;
        if (kind == MessageKind::leave && unpack(fields, code, sentence)) {
            sender.has_left = true;
            if (code != Exit::ok && !error_ && !failed_since_) {
                const std::string left = sender.member.text() + " left with exit code " + std::to_string(int(code));
                error_ = {rank, Exit::peer_lost, left + ": " + sentence + "; it was last " + sender.status.text(),
                          true};
                error_since_ = now;
            }
        }
    } else {
        TextReply reply;
        EndOfRun end;
        if (kind == MessageKind::reply && unpack(fields, reply.code, reply.text)) deliver(reply);
        if (kind == MessageKind::end_of_run && unpack(fields, end.rank, end.code, end.sentence, end.is_reported)) {
            connections_[0].close();  // shows rank 0 that the message has arrived
            end_here(end);
        }
    }
}

void ControlChannel::check(TimePoint now) {
    if (failed_since_) {
        if (now > *failed_since_ + seconds(kFailedCollective_s)) end_here({0, reply_->code, reply_->text});
        return;
    }
    // Only rank 0 receives requests, calls of leave() and reported errors.
    if (const auto reply = reply_to_requests(ranks_, settings_.collective_timeout_s, now)) {
        // A reply would not reach a rank that has not called the collective.
        if (reply->code == Exit::hang) return end_run({0, Exit::hang, reply->text});
        for (MonitoredRank& rank : ranks_) rank.last_progress = now, rank.request.reset();
        send_to_all(MessageKind::reply, pack(reply->code, reply->text));
        deliver(*reply);
        if (failed_since_) return;
    }
    if (std::ranges::all_of(ranks_, &MonitoredRank::has_left)) return end_run({});
    if (error_ && now > error_since_ + seconds(kSettle_s)) return end_run(*error_);
    // Rank 0 monitors all ranks; the others only check that rank 0 is not silent.
    const auto hang =
        rank_ == 0 ? find_hang(ranks_, settings_, now) : find_silent_rank(ranks_, settings_.silence_s, now);
    if (hang) end_run(*hang);
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
void ControlChannel::end_run(const EndOfRun& end) {
    send_to_all(MessageKind::end_of_run, pack(end.rank, end.code, end.sentence, end.is_reported));
    drain_connections(kDrain_s, end.rank);  // a rank that hangs may never close
    end_here(end);
}

// A rank that has reported an error exits with its own code.
void ControlChannel::end_here(const EndOfRun& end) {
    if (end.code == Exit::ok || (has_reported_error_ && end.is_reported)) return finish();
    std::string line = format("train_gpt: rank %d ends: %s", rank_, printable_text(end.sentence).c_str());
    std::ranges::replace(line, '\n', ' ');
    line += '\n';
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
    ::_exit(int(end.code));
}

// Sends the remaining data and waits until all other ranks except `except_rank` have closed their ends. Closing a
// connection with unread data can destroy data in transit.
void ControlChannel::drain_connections(double limit_s, int except_rank) {
    const TimePoint deadline = Clock::now() + seconds(limit_s);
    bool is_any_open;
    do {
        ::usleep(2000);
        is_any_open = false;
        for (size_t i = 0; i < connections_.size(); ++i) {
            Connection& connection = connections_[i];
            connection.finish_sending();
            const bool is_open = connection.receive();
            while (connection.next()) {}
            if (!is_open) connection.close();
            is_any_open |= is_open && int(i) != except_rank;
        }
    } while (is_any_open && Clock::now() < deadline);
}

// The thread's last action.
void ControlChannel::finish() {
    has_finished_ = true;
    for (Connection& connection : connections_) connection.close();
    changed_.notify_all();
}
