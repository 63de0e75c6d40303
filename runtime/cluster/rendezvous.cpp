#include "runtime/cluster/rendezvous.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <list>
#include <map>
#include <sstream>

#include "kernels/check.h"
#include "runtime/cluster/sha256.h"
#include "runtime/io/io.h"

namespace {

constexpr char kVersion[] = "train_gpt control channel 1";
constexpr size_t kNonceBytes = 16;
constexpr size_t kGuestLimit = 1024;  // bytes of a message before it is known who sends it
constexpr size_t kGuests = 256;
constexpr double kGuestPatience_s = 5;

std::string host_name() {
    char name[256] = "?";
    ::gethostname(name, sizeof name - 1);
    return name;
}

// What both sides must know in order to understand each other.
std::string key_of(const Place& place, const std::string& shared) {
    return sha256(FieldWriter().text(kVersion).text(place.token).text(place.run_id).text(shared).fields());
}

std::string mac(const std::string& key, const char* who, const std::string& said) {
    return hmac_sha256(key, FieldWriter().text(who).text(said).fields());
}

void check_not_stopped() {
    if (stop_signal() != 0)
        fail(Exit::again, "signal %d asked to stop while the ranks of the run were still gathering", stop_signal());
}

int poll_some(std::vector<pollfd>& polled, TimePoint deadline) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    return ::poll(polled.data(), polled.size(), int(std::clamp<long long>(left, 0, 100)));
}

std::string refusal(Exit code, const std::string& sentence) {
    return FieldWriter().number(uint64_t(code)).text(sentence).fields();
}

std::string roster(const std::vector<Member>& members) {
    FieldWriter writer;
    for (const Member& member : members) writer.text(member.host).number(uint64_t(member.pid));
    return writer.fields();
}

// ---- rank 0 ---------------------------------------------------------------------------------------------------------

class Gathering {
public:
    Gathering(const Place& place, Socket listener, const std::string& key, double deadline_s)
        : size_(place.size), listener_(std::move(listener)), key_(key), deadline_s_(deadline_s) {
        for (int rank = 0; rank < size_; ++rank) {
            members_.push_back({rank, "", 0});
            ranks_.emplace_back(Socket(), kGuestLimit);
        }
        members_[0] = this_member(0);
    }

    Group gather() {
        const TimePoint deadline = Clock::now() + seconds(deadline_s_);
        while (joined_ < size_) {
            if (Clock::now() >= deadline) refuse_all(Exit::hang, missing_sentence());
            wait(deadline);
            check_signal();
            for (int i = 0; i < 64 && let_in(); ++i) {}
            for (auto guest = guests_.begin(); guest != guests_.end();) {
                const bool is_done = !listen_to(*guest);
                guest = is_done ? guests_.erase(guest) : std::next(guest);
            }
            for (int rank = 1; rank < size_; ++rank)
                if (ranks_[size_t(rank)].is_open() && !ranks_[size_t(rank)].receive())
                    refuse_all(Exit::peer_lost,
                               members_[size_t(rank)].text() + " died while the ranks of the run were gathering");
        }
        for (int rank = 1; rank < size_; ++rank) ranks_[size_t(rank)].send(MessageKind::roster, roster(members_));
        return {std::move(members_), std::move(ranks_)};
    }

private:
    struct Guest {
        Connection connection;
        std::string nonce, from;
        TimePoint since;
    };

    void wait(TimePoint deadline) {
        std::vector<pollfd> polled{{listener_.fd(), POLLIN, 0}};
        for (const Guest& guest : guests_) polled.push_back({guest.connection.fd(), POLLIN, 0});
        for (const Connection& rank : ranks_) polled.push_back({rank.fd(), POLLIN, 0});
        poll_some(polled, deadline);
    }

    void check_signal() {
        try {
            check_not_stopped();
        } catch (const Error& error) {
            refuse_all(error.code, error.what());
        }
    }

    // One connection that waits at the door. False if there is none.
    bool let_in() {
        SocketAddress from;
        Socket socket = accept_from(listener_, from);
        const int error = errno;
        if (!socket && (error == ECONNABORTED || error == EINTR)) return true;
        if (!socket && (error == EMFILE || error == ENFILE) && !guests_.empty()) return guests_.pop_front(), true;
        if (!socket) return false;
        // Whoever comes when too many are here takes the place of the one that has said nothing for longest; a rank
        // whose place is taken comes again.
        if (guests_.size() == kGuests) guests_.pop_front();
        guests_.push_back(
            {Connection(std::move(socket), kGuestLimit), random_bytes(kNonceBytes), from.text(), Clock::now()});
        guests_.back().connection.send(MessageKind::challenge,
                                       FieldWriter().text(kVersion).text(guests_.back().nonce).fields());
        return true;
    }

    // False if the guest is done with: it has joined, or it is turned away.
    bool listen_to(Guest& guest) {
        if (!guest.connection.receive() || Clock::now() > guest.since + seconds(kGuestPatience_s)) return false;
        const std::optional<Message> message = guest.connection.next();
        if (!message) return true;
        FieldReader reader(message->fields);
        const std::string said = reader.text(), proof = reader.text();
        FieldReader hello(said);
        const int64_t rank = int64_t(hello.number()), size = int64_t(hello.number());
        Member member{0, hello.text(), int64_t(hello.number())};
        const std::string nonce = hello.text();
        const bool knows_token = message->kind == MessageKind::hello && reader.sound() && hello.sound() &&
                                 nonce.size() == kNonceBytes &&
                                 same_secret(proof, mac(key_, "rank", guest.nonce + said));
        if (!knows_token) {
            ++turned_away_;
            last_turned_away_ = guest.from;
            return false;
        }
        guest.connection.send(MessageKind::welcome, mac(key_, "rank 0", nonce + guest.nonce));
        member.rank = int(std::clamp<int64_t>(rank, -1, INT_MAX));
        join(guest, member, size);
        return false;
    }

    void join(Guest& guest, const Member& member, int64_t size) {
        if (size != size_ || member.rank < 0 || member.rank >= size_)
            refuse_all(Exit::config,
                       format("%s says it is one of %lld ranks, but rank 0 on %s is one of %d", member.text().c_str(),
                              (long long)size, members_[0].host.c_str(), size_),
                       &guest);
        Member& taken = members_[size_t(member.rank)];
        if (taken.pid != 0)
            refuse_all(Exit::config,
                       format("two processes say they are rank %d: pid %lld on %s and pid %lld on %s", member.rank,
                              (long long)taken.pid, taken.host.c_str(), (long long)member.pid, member.host.c_str()),
                       &guest);
        taken = member;
        ranks_[size_t(member.rank)] = std::move(guest.connection);
        ++joined_;
    }

    // Tells all that are here, and `also`, and fails with it.
    [[noreturn]] void refuse_all(Exit code, const std::string& sentence, Guest* also = nullptr) {
        std::vector<Connection*> told;
        if (also) told.push_back(&also->connection);
        for (Connection& rank : ranks_)
            if (rank.is_open()) told.push_back(&rank);
        for (Connection* one : told) one->send(MessageKind::refused, refusal(code, sentence));
        const TimePoint deadline = Clock::now() + seconds(1);
        for (Connection* one : told)
            while (!one->flush() && Clock::now() < deadline) ::usleep(1000);
        throw Error(code, sentence);
    }

    std::string missing_sentence() const {
        std::vector<int> missing;
        std::map<std::string, std::vector<int>> there;
        for (const Member& member : members_) {
            if (member.pid == 0)
                missing.push_back(member.rank);
            else
                there[member.host].push_back(member.rank);
        }
        std::string sentence =
            format("%zu of %d ranks did not come to %s within %g s: missing %s; there are ", missing.size(), size_,
                   address_of(listener_).text().c_str(), deadline_s_, text_of_ranks(missing).c_str());
        for (const auto& [host, ranks] : there)
            sentence += text_of_ranks(ranks) + " on " + host + (host == there.rbegin()->first ? "" : ", ");
        if (turned_away_ > 0)
            sentence += format("; %d connections that did not know this run's token were turned away, the last from %s",
                               turned_away_, last_turned_away_.c_str());
        return sentence;
    }

    int size_, joined_ = 1, turned_away_ = 0;
    Socket listener_;
    std::string key_, last_turned_away_;
    double deadline_s_;
    std::vector<Member> members_;    // pid 0: not here yet
    std::vector<Connection> ranks_;  // those that have joined
    std::list<Guest> guests_;        // the longest waiting first
};

bool is_loopback_text(const std::string& host) {
    return host == "localhost" || host.starts_with("127.") || host == "::1";
}

Socket listen_for(const Place& place, const OpeningSettings& settings, int port, bool is_shared) {
    if (place.listen_fd >= 0) {
        int listens = 0;
        socklen_t size = sizeof listens;
        if (::getsockopt(place.listen_fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || !listens)
            fail(Exit::usage, "TRAIN_GPT_LISTEN_FD is %d, expected a socket that listens", place.listen_fd);
        return Socket(place.listen_fd);
    }
    const bool is_local = place.local_size == place.size;
    std::string host = settings.listen_host, why;
    if (host.empty()) host = is_local ? "127.0.0.1" : place.master_host;
    const bool may_loop = is_local || !settings.listen_host.empty() || is_loopback_text(host);
    // A name may stand for addresses of other machines; the first that is ours is meant.
    const TimePoint deadline = Clock::now() + seconds(10);
    for (;;) {  // again while the port is held by an earlier start of the run that is just ending
        int error = EADDRNOTAVAIL;
        if (!host.empty())
            for (const SocketAddress& address : resolve(host, port, why)) {
                if (address.is_loopback() && !may_loop) continue;
                Socket socket = listen_at(address);
                if (socket) return socket;
                error = errno;
                if (error == EADDRINUSE) break;
            }
        if (error == EADDRNOTAVAIL && settings.listen_host.empty()) {
            const std::vector<SocketAddress> own = own_addresses(port);
            Socket socket = !is_shared ? listen_everywhere(port) : own.empty() ? Socket() : listen_at(own[0]);
            if (socket) return socket;
            error = errno;
        }
        if (error != EADDRINUSE || Clock::now() > deadline)
            fail(Exit::os, "rank 0 cannot listen at %s, port %d: %s", host.c_str(), port,
                 why.empty() ? std::strerror(error) : why.c_str());
        ::usleep(100'000);
        check_not_stopped();
    }
}

// ---- the other ranks ------------------------------------------------------------------------------------------------

class Visitor {
public:
    Visitor(const Place& place, const std::string& key, double deadline_s)
        : place_(place), key_(key), deadline_s_(deadline_s), deadline_(Clock::now() + seconds(deadline_s)) {}

    // Knocks until rank 0 lets us in.
    Group join(const std::string& host, int port) {
        std::string why = "no answer";
        for (double pause_s = 0.02;; pause_s = std::min(1.0, 1.5 * pause_s)) {
            for (const SocketAddress& address : resolve(host, port, why)) {
                Socket socket = connect_to(address, std::min(deadline_, Clock::now() + seconds(3)), why);
                if (!socket) continue;
                Connection connection(std::move(socket), kGuestLimit);
                if (introduce(connection, address.text(), why))
                    return wait_for_all(std::move(connection), address.text());
            }
            check_not_stopped();
            if (Clock::now() + seconds(pause_s) > deadline_)
                fail(Exit::hang, "rank %d on %s did not reach rank 0 at %s, port %d, within %g s: %s", place_.rank,
                     host_name().c_str(), host.c_str(), port, deadline_s_, why.c_str());
            ::usleep(useconds_t(pause_s * 1e6));
        }
    }

private:
    // The next message; null when the peer closes, or at `deadline`.
    std::optional<Message> hear(Connection& connection, TimePoint deadline) {
        for (;;) {
            const bool is_open = connection.receive();
            if (std::optional<Message> message = connection.next()) return message;
            if (!is_open || Clock::now() >= deadline) return std::nullopt;
            check_not_stopped();
            std::vector<pollfd> polled{{connection.fd(), POLLIN, 0}};
            poll_some(polled, deadline);
        }
    }

    // Challenge, hello, welcome. False, with a reason, if this is not rank 0 of our run, or not yet.
    bool introduce(Connection& connection, const std::string& address, std::string& why) {
        const std::optional<Message> challenge = hear(connection, std::min(deadline_, Clock::now() + seconds(5)));
        if (!challenge && Clock::now() >= deadline_) return false;  // an earlier try's reason says more
        FieldReader reader(challenge ? std::string_view(challenge->fields) : "");
        const std::string version = reader.text(), nonce = reader.text();
        if (!challenge || challenge->kind != MessageKind::challenge || version != kVersion || !reader.sound()) {
            why = address + " does not speak this program's protocol";
            return false;
        }
        const Member me = this_member(place_.rank);
        const std::string my_nonce = random_bytes(kNonceBytes);
        const std::string said = FieldWriter()
                                     .number(uint64_t(me.rank))
                                     .number(uint64_t(place_.size))
                                     .text(me.host)
                                     .number(uint64_t(me.pid))
                                     .text(my_nonce)
                                     .fields();
        connection.send(MessageKind::hello, FieldWriter().text(said).text(mac(key_, "rank", nonce + said)).fields());
        // Without a limit of its own: who knows us already must not take us for dead because it is slow.
        const std::optional<Message> welcome = hear(connection, deadline_);
        if (welcome && welcome->kind == MessageKind::welcome &&
            same_secret(welcome->fields, mac(key_, "rank 0", my_nonce + nonce)))
            return true;
        why = address + " does not accept this rank's token, or shows a wrong one itself: it is another run's";
        return false;
    }

    Group wait_for_all(Connection connection, const std::string& address) {
        connection.set_limit(size_t(1) << 20);
        // Rank 0 gives up first, and says why.
        const std::optional<Message> message = hear(connection, deadline_ + seconds(15));
        if (!message)
            fail(Exit::peer_lost, "rank 0 at %s died while the ranks of the run were gathering", address.c_str());
        FieldReader reader(message->fields);
        if (message->kind == MessageKind::refused) {
            const Exit code = Exit(reader.number());
            throw Error(code, reader.text());
        }
        Group group;
        for (int rank = 0; rank < place_.size; ++rank) {
            const std::string host = reader.text();
            group.members.push_back({rank, host, int64_t(reader.number())});
        }
        if (message->kind != MessageKind::roster || !reader.sound())
            fail(Exit::internal, "rank 0 at %s sent something that is no list of ranks", address.c_str());
        group.connections.push_back(std::move(connection));
        return group;
    }

    const Place& place_;
    std::string key_;
    double deadline_s_;
    TimePoint deadline_;
};

// ---- with a launcher that names no address --------------------------------------------------------------------------

struct Invitation {
    std::string host, secret;
    int port = 0;
};

// Rank 0 says where it listens, or why it cannot: the others wait for its word in any case.
Invitation invite(const Place& place, const OpeningSettings& settings, const Share& share, Socket& listener) {
    Invitation invitation;
    if (place.rank == 0) {
        try {
            listener = listen_for(place, settings, 0, true);
        } catch (const Error& error) {
            share(std::string("error ") + error.what());
            throw;
        }
        const SocketAddress at = address_of(listener);
        invitation.host = at.host();
        invitation.port = at.port();
        invitation.secret = hexadecimal(random_bytes(32));
        share(format("listens %s %d %s", invitation.host.c_str(), invitation.port, invitation.secret.c_str()));
        return invitation;
    }
    const std::string text = share("");
    std::istringstream words(text);
    std::string verb;
    words >> verb >> invitation.host >> invitation.port >> invitation.secret;
    if (text.starts_with("error ")) fail(Exit::os, "%s", text.c_str() + 6);
    if (verb != "listens" || !words || invitation.secret.size() != 64)
        fail(Exit::internal, "what rank 0 shared is not where it listens: \"%s\"", text.substr(0, 100).c_str());
    return invitation;
}

}  // namespace

std::string Member::text() const { return format("rank %d on %s (pid %lld)", rank, host.c_str(), (long long)pid); }

Member this_member(int rank) { return {rank, host_name(), ::getpid()}; }

std::string text_of_ranks(const std::vector<int>& ascending) {
    std::string text;
    for (size_t first = 0, last; first < ascending.size(); first = last + 1) {
        for (last = first; last + 1 < ascending.size() && ascending[last + 1] == ascending[last] + 1;) ++last;
        text += (text.empty() ? "" : ", ") + std::to_string(ascending[first]);
        if (last > first) text += (last > first + 1 ? "-" : ", ") + std::to_string(ascending[last]);
    }
    return text;
}

Group open_group(const Place& place, const OpeningSettings& settings, const Share& share) {
    require(place.size > 1, "a run of %d ranks has nobody to meet", place.size);
    Socket listener;
    std::string host = place.master_host, secret;
    if (place.local_size == place.size) host = settings.listen_host.empty() ? "127.0.0.1" : settings.listen_host;
    int port = place.master_port;
    if (share) {
        const Invitation invitation = invite(place, settings, share, listener);
        host = invitation.host, port = invitation.port, secret = invitation.secret;
    } else if (host.empty() || port == 0) {
        fail(Exit::usage, "%s does not say where rank 0 is: set MASTER_ADDR and MASTER_PORT", place.launcher.c_str());
    } else if (place.rank == 0) {
        listener = listen_for(place, settings, port, false);
    }
    const std::string key = key_of(place, secret);
    if (place.rank == 0) return Gathering(place, std::move(listener), key, settings.deadline_s).gather();
    return Visitor(place, key, settings.deadline_s).join(host, port);
}
