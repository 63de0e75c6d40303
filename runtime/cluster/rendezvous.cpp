#include "runtime/cluster/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <map>

#include "kernels/check.h"
#include "runtime/cluster/authentication.h"
#include "runtime/io/io.h"

namespace {

constexpr char kVersion[] = "train_gpt control channel 2";
constexpr size_t kNonceBytes = 16;
constexpr size_t kUnauthenticatedLimit = 1024;  // bytes of a message
constexpr size_t kMostUnauthenticated = 256;    // connections
constexpr double kAuthentication_s = 5;

// The key of the HMACs, from what both sides share. `secret` comes from TextBroadcast.
std::string key_of(const RankEnvironment& environment, const std::string& secret) {
    return pack(kVersion, environment.token, environment.run_id, secret);
}

// `nonce` is the receiver's.
std::string mac_of(const std::string& key, const char* sender, const std::string& nonce, const std::string& text) {
    return hmac_sha256(key, pack(sender, nonce, text));
}

std::string stop_sentence() {
    return format("signal %d asked to stop during the rendezvous of the ranks", stop_signal());
}

void check_not_stopped() {
    if (stop_signal() != 0) throw Error(Exit::again, stop_sentence());
}

// ---- rank 0 ---------------------------------------------------------------------------------------------------------

class Admission {
public:
    Admission(int size, Socket listener, const std::string& key, double timeout_s)
        : size_(size), listener_(std::move(listener)), key_(key), timeout_s_(timeout_s), group_(size) {
        group_.members[0] = this_member(0);
    }

    Group admit_all() {
        const TimePoint deadline = Clock::now() + seconds(timeout_s_);
        while (std::ranges::any_of(group_.members, is_missing)) {
            if (Clock::now() >= deadline) refuse_all(Exit::hang, missing_sentence());
            std::vector<pollfd> polled{{listener_.fd(), POLLIN, 0}};
            for (const Candidate& candidate : candidates_) polled.push_back(candidate.connection.events());
            for (const Connection& rank : group_.connections) polled.push_back(rank.events());
            wait_for_events(polled, deadline);
            if (stop_signal() != 0) refuse_all(Exit::again, stop_sentence());
            for (int i = 0; i < 64 && accept_one(); ++i) {}
            std::erase_if(candidates_, [this](Candidate& candidate) { return is_decided(candidate); });
            for (const Member& member : group_.members) {
                Connection& connection = group_.connections[size_t(member.rank)];
                if (connection.is_open() && !connection.receive())
                    refuse_all(Exit::peer_lost, member.text() + " died during the rendezvous of the ranks");
            }
        }
        std::string roster;
        for (const Member& member : group_.members) roster += pack(member.host, member.pid);
        for (Connection& connection : group_.connections) connection.send(MessageKind::roster, roster);
        return std::move(group_);
    }

private:
    // A connection that has not authenticated yet.
    struct Candidate {
        Connection connection;
        std::string nonce, address;
        TimePoint since;
    };

    // Accepts a pending connection. Returns false if there is none.
    bool accept_one() {
        SocketAddress from;
        Socket socket = accept_from(listener_, from);
        const int error = errno;
        if (!socket && (error == ECONNABORTED || error == EINTR)) return true;
        const bool is_full = socket ? candidates_.size() == kMostUnauthenticated : error == EMFILE || error == ENFILE;
        // The oldest candidate makes room; if it is a rank, it connects again.
        if (is_full && !candidates_.empty()) candidates_.pop_front();
        if (!socket) return is_full && !candidates_.empty();
        candidates_.push_back(
            {Connection(std::move(socket), kUnauthenticatedLimit), random_hex(kNonceBytes), from.text(), Clock::now()});
        candidates_.back().connection.send(MessageKind::challenge, pack(kVersion, candidates_.back().nonce));
        return true;
    }

    // Returns true if the candidate has been admitted or rejected, and its connection is to be closed unless admitted.
    bool is_decided(Candidate& candidate) {
        Connection& connection = candidate.connection;
        if (!connection.receive() || Clock::now() > candidate.since + seconds(kAuthentication_s)) return true;
        const std::optional<Message> message = connection.next();
        if (!message) return false;
        std::string hello, mac, nonce;
        int64_t size = 0;
        Member member;
        const bool is_authentic = message->kind == MessageKind::hello && unpack(message->fields, hello, mac) &&
                                  unpack(hello, member.rank, size, member.host, member.pid, nonce) &&
                                  is_same_secret(mac, mac_of(key_, "rank", candidate.nonce, hello));
        if (!is_authentic) {
            ++rejected_;
            last_rejected_ = candidate.address;
            return true;
        }
        connection.send(MessageKind::welcome, mac_of(key_, "rank 0", nonce, candidate.nonce));
        admit(connection, member, size);
        return true;
    }

    void admit(Connection& connection, const Member& member, int64_t size) {
        std::string error;
        const bool is_in_range = size == size_ && member.rank >= 0 && member.rank < size_;
        const Member& known = group_.members[is_in_range ? size_t(member.rank) : 0];
        if (!is_in_range)
            error = format("%s was started as one of %lld ranks, but rank 0 on %s as one of %d", member.text().c_str(),
                           (long long)size, known.host.c_str(), size_);
        else if (!is_missing(known))
            error = format("two processes were started as rank %d: pid %lld on %s and pid %lld on %s", member.rank,
                           (long long)known.pid, known.host.c_str(), (long long)member.pid, member.host.c_str());
        if (!error.empty()) {
            connection.send(MessageKind::refused, pack(Exit::config, error));
            refuse_all(Exit::config, error);
        }
        group_.members[size_t(member.rank)] = member;
        group_.connections[size_t(member.rank)] = std::move(connection);
    }

    // Sends the error to all admitted ranks and fails with it.
    [[noreturn]] void refuse_all(Exit code, const std::string& sentence) {
        for (Connection& rank : group_.connections) rank.send(MessageKind::refused, pack(code, sentence));
        throw Error(code, sentence);
    }

    static bool is_missing(const Member& member) { return member.pid == 0; }

    std::string missing_sentence() const {
        std::vector<int> missing;
        std::map<std::string, std::vector<int>> present;  // by host
        for (const Member& member : group_.members)
            (is_missing(member) ? missing : present[member.host]).push_back(member.rank);
        std::string connected;
        for (const auto& [host, ranks] : present)
            connected += (connected.empty() ? "" : ", ") + text_of_ranks(ranks) + " on " + host;
        std::string sentence =
            format("%zu of %d ranks did not connect to %s within %g s: missing %s; connected %s", missing.size(), size_,
                   address_of(listener_).text().c_str(), timeout_s_, text_of_ranks(missing).c_str(), connected.c_str());
        if (rejected_ > 0)
            sentence += format("; %d connections without this run's token were rejected, the last from %s", rejected_,
                               last_rejected_.c_str());
        return sentence;
    }

    const int size_;
    const Socket listener_;
    const std::string key_;
    const double timeout_s_;
    Group group_;                      // of the admitted ranks
    std::list<Candidate> candidates_;  // the oldest first
    int rejected_ = 0;
    std::string last_rejected_;
};

Socket inherited_listener(int fd) {
    int listens = 0;
    socklen_t size = sizeof listens;
    if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || !listens)
        fail(Exit::usage, "TRAIN_GPT_LISTEN_FD is %d, expected a listening socket", fd);
    return Socket(fd);
}

// As described at open_group().
Socket listen_for(const RankEnvironment& environment, const RendezvousSettings& settings, int port, bool is_broadcast) {
    if (environment.listen_fd >= 0) return inherited_listener(environment.listen_fd);
    const bool is_local = environment.local_size == environment.size;
    std::string host = settings.listen_host, reason;
    if (host.empty()) host = is_local ? "127.0.0.1" : environment.master_host;
    const bool is_loopback_text = host == "localhost" || host.starts_with("127.") || host == "::1";
    const bool may_loop = is_local || !settings.listen_host.empty() || is_loopback_text;
    // The port may be held for a moment by an earlier start of the run that is just exiting.
    for (const TimePoint deadline = Clock::now() + seconds(10);; ::usleep(100'000)) {
        check_not_stopped();
        int error = EADDRNOTAVAIL;
        // A name may stand for addresses of several machines; the first that belongs to this one is used.
        if (!host.empty())
            for (const SocketAddress& address : resolve(host, port, reason)) {
                if (address.is_loopback() && !may_loop) continue;
                if (Socket socket = listen_at(address)) return socket;
                error = errno;
                if (error == EADDRINUSE) break;
            }
        if (error == EADDRNOTAVAIL && settings.listen_host.empty()) {
            const std::vector<SocketAddress> own = own_addresses();
            Socket socket = !is_broadcast ? listen_on_all_interfaces(port) : own.empty() ? Socket() : listen_at(own[0]);
            if (socket) return socket;
            error = errno;
        }
        if (error != EADDRINUSE || Clock::now() > deadline)
            fail(Exit::os, "rank 0 cannot listen at %s, port %d: %s", host, port,
                 reason.empty() ? std::strerror(error) : reason);
    }
}

// ---- the other ranks ------------------------------------------------------------------------------------------------

struct Joiner {
    const int rank, size;
    const std::string key;
    const double timeout_s;
    const TimePoint deadline = Clock::now() + seconds(timeout_s);

    // Connects until rank 0 admits this rank.
    Group join(const std::string& host, int port) const {
        std::string reason = "no answer";
        for (double pause_s = 0.02;; pause_s = std::min(1.0, 1.5 * pause_s)) {
            for (const SocketAddress& address : resolve(host, port, reason)) {
                Socket socket = connect_to(address, std::min(deadline, Clock::now() + seconds(3)), reason);
                if (!socket) continue;
                Connection connection(std::move(socket), kUnauthenticatedLimit);
                if (authenticate(connection, address.text(), reason))
                    return receive_roster(std::move(connection), address.text());
            }
            check_not_stopped();
            if (Clock::now() + seconds(pause_s) > deadline)
                fail(Exit::hang, "rank %d on %s could not join rank 0 at %s, port %d, within %g s: %s", rank,
                     this_member(rank).host, host, port, timeout_s, reason);
            ::usleep(useconds_t(pause_s * 1e6));
        }
    }

    // Returns the next message, or nothing if the peer closes the connection or at `limit`.
    std::optional<Message> receive(Connection& connection, TimePoint limit) const {
        for (;;) {
            const bool is_open = connection.receive();
            if (std::optional<Message> message = connection.next()) return message;
            if (!is_open || Clock::now() >= limit) return std::nullopt;
            check_not_stopped();
            wait_for_events({connection.events()}, limit);
        }
    }

    // Challenge, hello, welcome. Returns false and sets `reason` if the peer is not (or not yet) rank 0 of this run.
    bool authenticate(Connection& connection, const std::string& address, std::string& reason) const {
        const std::optional<Message> challenge =
            receive(connection, std::min(deadline, Clock::now() + seconds(kAuthentication_s)));
        if (!challenge && Clock::now() >= deadline) return false;  // the reason of an earlier attempt is more useful
        std::string version, nonce;
        if (!challenge || challenge->kind != MessageKind::challenge || !unpack(challenge->fields, version, nonce) ||
            version != kVersion) {
            reason = address + " does not speak this program's protocol";
            return false;
        }
        const Member me = this_member(rank);
        const std::string my_nonce = random_hex(kNonceBytes);
        const std::string hello = pack(rank, size, me.host, me.pid, my_nonce);
        connection.send(MessageKind::hello, pack(hello, mac_of(key, "rank", nonce, hello)));
        // No timeout of its own: rank 0 may have admitted this rank already and would report its loss.
        const std::optional<Message> welcome = receive(connection, deadline);
        if (welcome && welcome->kind == MessageKind::welcome &&
            is_same_secret(welcome->fields, mac_of(key, "rank 0", my_nonce, nonce)))
            return true;
        reason = address + " does not accept this rank's token or has a different one: it belongs to another run";
        return false;
    }

    Group receive_roster(Connection connection, const std::string& address) const {
        connection.set_limit(size_t(1) << 20);
        // Rank 0 times out first and sends the reason.
        const std::optional<Message> message = receive(connection, deadline + seconds(15));
        if (!message) fail(Exit::peer_lost, "rank 0 at %s died during the rendezvous of the ranks", address);
        Exit code = Exit::internal;
        std::string sentence;
        if (message->kind == MessageKind::refused && unpack(message->fields, code, sentence))
            throw Error(code, sentence);
        Group group(size);
        std::string_view fields = message->fields;
        bool is_sound = message->kind == MessageKind::roster;
        for (Member& member : group.members)
            is_sound = is_sound && take_field(fields, member.host) && take_field(fields, member.pid);
        if (!is_sound || !fields.empty())
            fail(Exit::internal, "rank 0 at %s sent a message that is no list of ranks", address);
        group.connections[0] = std::move(connection);
        return group;
    }
};

// ---- with a launcher that gives no address --------------------------------------------------------------------------

struct Invitation {
    Exit code = Exit::ok;  // or why rank 0 cannot listen; the other ranks receive the broadcast in any case
    std::string error, host, secret;
    int port = 0;
};

// Rank 0 listens and broadcasts its address and a fresh secret.
Invitation exchange_address(const RankEnvironment& environment, const RendezvousSettings& settings,
                            const TextBroadcast& broadcast, Socket& listener) {
    Invitation invitation;
    auto& [code, error, host, secret, port] = invitation;
    if (environment.rank == 0) {
        try {
            listener = listen_for(environment, settings, 0, true);
            host = address_of(listener).host(), port = address_of(listener).port(), secret = random_hex(32);
        } catch (const Error& failure) {
            code = failure.code, error = failure.what();
        }
        broadcast(pack(code, error, host, secret, port));
    } else if (const std::string text = broadcast(""); !unpack(text, code, error, host, secret, port)) {
        fail(Exit::internal, "rank 0 broadcast a message that is no address: \"%s\"", text.substr(0, 100));
    }
    if (code != Exit::ok) throw Error(code, error);
    return invitation;
}

}  // namespace

std::string Member::text() const { return format("rank %d on %s (pid %lld)", rank, host.c_str(), (long long)pid); }

Member this_member(int rank) {
    char host[256] = "?";
    ::gethostname(host, sizeof host - 1);
    return {rank, host, ::getpid()};
}

Group::Group(int size) : members(size_t(size)), connections(size_t(size)) {
    for (int rank = 0; rank < size; ++rank) members[size_t(rank)].rank = rank;
}

std::string text_of_ranks(const std::vector<int>& ascending) {
    std::string text;
    for (size_t first = 0, last; first < ascending.size(); first = last + 1) {
        for (last = first; last + 1 < ascending.size() && ascending[last + 1] == ascending[last] + 1;) ++last;
        text += (text.empty() ? "" : ", ") + std::to_string(ascending[first]);
        if (last > first) text += (last > first + 1 ? "-" : ", ") + std::to_string(ascending[last]);
    }
    return text;
}

Group open_group(const RankEnvironment& environment, const RendezvousSettings& settings,
                 const TextBroadcast& broadcast) {
    require(environment.size > 1, "a rendezvous of %d ranks", environment.size);
    Socket listener;
    std::string host = environment.master_host, secret;
    if (environment.local_size == environment.size)
        host = settings.listen_host.empty() ? "127.0.0.1" : settings.listen_host;
    int port = environment.master_port;
    if (broadcast) {
        const Invitation invitation = exchange_address(environment, settings, broadcast, listener);
        host = invitation.host, port = invitation.port, secret = invitation.secret;
    } else if (host.empty() || port == 0) {
        fail(Exit::usage, "%s gives no address of rank 0: set MASTER_ADDR and MASTER_PORT", environment.launcher);
    } else if (environment.rank == 0) {
        listener = listen_for(environment, settings, port, false);
    }
    const std::string key = key_of(environment, secret);
    if (environment.rank != 0)
        return Joiner{environment.rank, environment.size, key, settings.timeout_s}.join(host, port);
    return Admission(environment.size, std::move(listener), key, settings.timeout_s).admit_all();
}
