#include "runtime/cluster/rendezvous.h"

#include <fcntl.h>
#include <sodium.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <map>

#include "runtime/cluster/socket.h"
#include "runtime/cluster/wire_format.h"
#include "runtime/io/files.h"
#include "runtime/io/joined.h"
#include "runtime/io/process.h"

namespace {

constexpr char kVersion[] = "train_gpt control channel 3";
constexpr size_t kNonceBytes = 16;
constexpr size_t kUnauthenticatedLimit = 1024;  // bytes of a message
constexpr size_t kMaxUnauthenticated = 256;     // connections
constexpr double kAuthentication_s = 5;

const unsigned char* bytes_of(std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); }

// `nonce` is the receiver's nonce.
std::string mac_of(const std::string& key, const char* sender, const std::string& nonce, const std::string& text) {
    return hmac_sha256(key, pack(sender, nonce, text));
}

std::string stop_sentence() { return format("received signal %d during the rendezvous of the ranks", stop_signal()); }

// Returns an empty string if the launcher does not provide the host.
std::string host_of_rank_0(const RankEnvironment& environment) {
    return environment.local_size == environment.size ? "127.0.0.1" : environment.master_host;
}

void check_not_stopped() {
    if (stop_signal() != 0) throw Error(Exit::again, stop_sentence());
}

// ---- rank 0 ---------------------------------------------------------------------------------------------------------

// Admits ranks until none is missing.
struct Admission {
    // A connection that has not authenticated yet.
    struct Candidate {
        Connection connection;
        std::string nonce, address;
        TimePoint since;
    };

    const int size;
    const FileDescriptor listener;
    const std::string key;
    const double timeout_s;
    std::vector<Peer> peers = std::vector<Peer>(size_t(size));  // by rank; missing ranks have no pid
    std::list<Candidate> candidates = {};                       // oldest first
    int rejected = 0;
    std::string last_rejected = {};

    std::vector<Peer> admit_all() {
        peers[0].member = this_member(0);
        const TimePoint deadline = Clock::now() + seconds(timeout_s);
        while (std::ranges::any_of(peers, is_missing, &Peer::member)) {
            if (Clock::now() >= deadline) refuse_all(Exit::hang, missing_sentence());
            std::vector<pollfd> polled{{listener, POLLIN, 0}};
            for (const Candidate& candidate : candidates) polled.push_back(candidate.connection.events());
            for (const Peer& peer : peers) polled.push_back(peer.connection.events());
            wait_for_events(polled, deadline);
            if (stop_signal() != 0) refuse_all(Exit::again, stop_sentence());
            accept_one();
            std::erase_if(candidates, [this](Candidate& candidate) { return is_decided(candidate); });
            for (Peer& peer : peers)
                if (peer.connection.is_open() && !peer.connection.receive())
                    refuse_all(Exit::peer_lost, peer.member.text() + " died during the rendezvous of the ranks");
        }
        const Member& me = peers[0].member;
        for (Peer& peer : peers) peer.connection.send(MessageKind::complete, pack(me.host, me.pid));
        return std::move(peers);
    }

    // Accepts a pending connection, if there is one.
    void accept_one() {
        SocketAddress from;
        FileDescriptor socket = accept_from(listener, from);
        const bool is_full = socket ? candidates.size() == kMaxUnauthenticated : errno == EMFILE || errno == ENFILE;
        // Drop the oldest candidate to make room; if it is a rank, it connects again.
        if (is_full && !candidates.empty()) candidates.pop_front();
        if (!socket) return;
        candidates.push_back(
            {Connection(std::move(socket), kUnauthenticatedLimit), random_hex(kNonceBytes), from.text(), Clock::now()});
        candidates.back().connection.send(MessageKind::challenge, pack(kVersion, candidates.back().nonce));
    }

    // Returns true once the candidate has been admitted or rejected. Unless admitted, its connection is then closed.
    bool is_decided(Candidate& candidate) {
        Connection& connection = candidate.connection;
        if (!connection.receive() || Clock::now() > candidate.since + seconds(kAuthentication_s)) return true;
        const std::optional<Message> message = connection.next();
        if (!message) return false;
        std::string hello, mac, nonce;
        int64_t size_of_run = 0;
        Member member;
        const bool is_authentic = message->kind == MessageKind::hello && unpack(message->fields, hello, mac) &&
                                  unpack(hello, member.rank, size_of_run, member.host, member.pid, nonce) &&
                                  is_same_secret(mac, mac_of(key, "rank", candidate.nonce, hello));
        if (is_authentic) {
            connection.send(MessageKind::welcome, mac_of(key, "rank 0", nonce, candidate.nonce));
            admit(connection, member, size_of_run);
        } else {
            ++rejected, last_rejected = candidate.address;
        }
        return true;
    }

    void admit(Connection& connection, const Member& member, int64_t size_of_run) {
        std::string error;
        const bool is_in_range = size_of_run == size && member.rank >= 0 && member.rank < size;
        const Member& known = peers[is_in_range ? size_t(member.rank) : 0].member;
        if (!is_in_range)
            error = format("%s was started in a run of %ld ranks, rank 0 on %s in one of %d", member.text().c_str(),
                           size_of_run, known.host.c_str(), size);
        else if (!is_missing(known))
            error = format("two processes were started as rank %d: pid %ld on %s and pid %ld on %s", member.rank,
                           known.pid, known.host.c_str(), member.pid, member.host.c_str());
        if (!error.empty()) {
            connection.send(MessageKind::leave, pack(Exit::config, error));
            refuse_all(Exit::config, error);
        }
        peers[size_t(member.rank)] = {member, std::move(connection)};
    }

    // Sends the error to all admitted ranks and fails with it.
    [[noreturn]] void refuse_all(Exit code, const std::string& sentence) {
        for (Peer& peer : peers) peer.connection.send(MessageKind::leave, pack(code, sentence));
        throw Error(code, sentence);
    }

    static bool is_missing(const Member& member) { return member.pid == 0; }

    std::string missing_sentence() const {
        std::vector<int> missing;
        std::vector<Member> present;
        for (int rank = 0; rank < size; ++rank)
            if (const Member& member = peers[size_t(rank)].member; is_missing(member))
                missing.push_back(rank);
            else
                present.push_back(member);
        std::string sentence = format("%zu of %d ranks did not connect to %s within %g s: missing %s; connected %s",
                                      missing.size(), size, address_of(listener).text().c_str(), timeout_s,
                                      text_of_ranks(missing).c_str(), text_of_members(present).c_str());
        if (rejected > 0)
            sentence += format("; rejected %d connections without this run's token, the last from %s", rejected,
                               last_rejected.c_str());
        return sentence;
    }
};

// As described at open_group(); port 0 selects a free port.
FileDescriptor listen_for(const RankEnvironment& environment, int port, double timeout_s) {
    if (const int fd = environment.listen_fd; fd >= 0) {
        int listens = 0;
        socklen_t size = sizeof listens;
        if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) != 0 || !listens)
            fail(Exit::usage, "TRAIN_GPT_LISTEN_FD is %d, expected a listening socket", fd);
        return FileDescriptor(fd);
    }
    const std::string host = host_of_rank_0(environment);
    // If this machine's name resolves only to a loopback address, the other machines cannot reach it.
    const bool may_loop = host == "localhost" || host.starts_with("127.") || host == "::1";
    // An earlier start of the run that is still exiting may briefly hold the port.
    for (const TimePoint deadline = Clock::now() + seconds(std::min(10.0, timeout_s));; ::usleep(100'000)) {
        check_not_stopped();
        std::string reason;
        int error = EADDRNOTAVAIL;
        // A name may stand for addresses of several machines; the first that belongs to this one is used.
        for (const SocketAddress& address : host.empty() ? own_addresses() : resolve(host, port, reason)) {
            if (address.is_loopback() && !may_loop) continue;
            if (FileDescriptor socket = listen_at(address)) return socket;
            error = errno;
            if (error == EADDRINUSE) break;
        }
        if (error == EADDRNOTAVAIL && !host.empty()) {
            if (FileDescriptor socket = listen_on_all_interfaces(port)) return socket;
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
    const std::function<std::string(std::string& reason)> find_key;  // empty, with the reason, if not yet known
    const double timeout_s;
    const TimePoint deadline = Clock::now() + seconds(timeout_s);

    // Connects until rank 0 admits this rank.
    std::vector<Peer> join(const std::string& host, int port) const {
        std::string reason = "no answer";
        for (double pause_s = 0.02;; pause_s = std::min(1.0, 1.5 * pause_s)) {
            for (const SocketAddress& address : resolve(host, port, reason)) {
                FileDescriptor socket = connect_to(address, std::min(deadline, Clock::now() + seconds(3)), reason);
                if (!socket) continue;
                Connection connection(std::move(socket), kUnauthenticatedLimit);
                if (authenticate(connection, address.text(), reason))
                    return finish_joining(std::move(connection), address.text());
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
        const std::string key = find_key(reason);
        if (key.empty()) return false;
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
        // No separate timeout: rank 0 may have admitted this rank already and would report it as lost.
        const std::optional<Message> welcome = receive(connection, deadline);
        if (welcome && welcome->kind == MessageKind::welcome &&
            is_same_secret(welcome->fields, mac_of(key, "rank 0", my_nonce, nonce)))
            return true;
        reason = address + " rejected this rank's token or has a different one: it belongs to another run";
        return false;
    }

    // Waits until all ranks have joined.
    std::vector<Peer> finish_joining(Connection connection, const std::string& address) const {
        connection.set_limit(size_t(1) << 20);
        // Rank 0 times out first and sends the reason.
        const std::optional<Message> message = receive(connection, deadline + seconds(15));
        if (!message) fail(Exit::peer_lost, "rank 0 at %s died during the rendezvous of the ranks", address);
        Exit code = Exit::internal;
        std::string sentence;
        if (message->kind == MessageKind::leave && unpack(message->fields, code, sentence)) throw Error(code, sentence);
        std::vector<Peer> peers(1);
        Member& rank_0 = peers[0].member;
        if (message->kind != MessageKind::complete || !unpack(message->fields, rank_0.host, rank_0.pid))
            fail(Exit::internal, "rank 0 at %s sent a malformed message at the end of the rendezvous", address);
        peers[0].connection = std::move(connection);
        return peers;
    }
};

// Listens at environment.master_port, or at a free port if there is no environment.master_host. Returns the connection
// details for the other ranks. They wait for the broadcast in any case, so an error is returned in the same way.
std::string listen_and_invite(const RankEnvironment& environment, double timeout_s, FileDescriptor& listener) {
    try {
        const std::string& host = environment.master_host;
        listener = listen_for(environment, host.empty() ? 0 : environment.master_port, timeout_s);
        const SocketAddress address = address_of(listener);
        return pack(Exit::ok, "", host.empty() ? address.host() : host, address.port(), random_hex(32));
    } catch (const Error& error) {
        return pack(error.code, error.what(), "", 0, "");
    }
}

constexpr size_t kTokenBytes = 16;

// A file with a fresh token, written by rank 0; removed when this object is destroyed.
class TokenFile {
public:
    // Replaces a file left by an earlier start that was killed.
    explicit TokenFile(const std::string& path) : path_(path) {
        std::string temporary = path + ".XXXXXX";
        const FileDescriptor file(::mkostemp(temporary.data(), O_CLOEXEC));  // readable for this user only
        if (!file || ::write(file, token.data(), token.size()) != ssize_t(token.size()) || ::fsync(file) != 0 ||
            ::rename(temporary.c_str(), path.c_str()) != 0)
            fail(Exit::cannot_create,
                 "%s: cannot write the run's token for the other ranks: %s; set TRAIN_GPT_TOKEN instead", path,
                 std::strerror(errno));
    }
    ~TokenFile() { ::unlink(path_.c_str()); }
    TokenFile(const TokenFile&) = delete;

    const std::string token = random_hex(kTokenBytes);

private:
    const std::string path_;
};

// Returns the token that rank 0 wrote, or an empty string.
std::string read_token(const std::string& path) {
    const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    struct stat status;
    if (!file || ::fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) return {};
    if (status.st_uid != ::geteuid() || (status.st_mode & (S_IRWXG | S_IRWXO)) != 0) return {};
    std::string token(2 * kTokenBytes, '\0');
    return ::read(file, token.data(), token.size()) == ssize_t(token.size()) ? token : std::string();
}

}  // namespace

std::string hmac_sha256(std::string_view key, std::string_view text) {
    crypto_auth_hmacsha256_state state;
    unsigned char mac[crypto_auth_hmacsha256_BYTES];
    ::crypto_auth_hmacsha256_init(&state, bytes_of(key), key.size());
    ::crypto_auth_hmacsha256_update(&state, bytes_of(text), text.size());
    ::crypto_auth_hmacsha256_final(&state, mac);
    return {std::begin(mac), std::end(mac)};
}

bool is_same_secret(std::string_view a, std::string_view b) {
    return a.size() == b.size() && ::sodium_memcmp(a.data(), b.data(), a.size()) == 0;
}

std::string Member::text() const { return format("rank %d%s on %s (pid %ld)", rank, place.c_str(), host.c_str(), pid); }

Member this_member(int rank) { return {rank, host_name(), ::getpid(), {}}; }

std::string text_of_ranks(const std::vector<int>& ascending) {
    std::string text;
    for (size_t first = 0, last; first < ascending.size(); first = last + 1) {
        for (last = first; last + 1 < ascending.size() && ascending[last + 1] == ascending[last] + 1;) ++last;
        text += (text.empty() ? "" : ", ") + std::to_string(ascending[first]);
        if (last > first) text += (last > first + 1 ? "-" : ", ") + std::to_string(ascending[last]);
    }
    return text;
}

std::string text_of_members(const std::vector<Member>& members) {
    std::map<std::string, std::vector<int>> by_host;
    for (const Member& member : members) by_host[member.host].push_back(member.rank);
    return joined(by_host, ", ", [](const auto& host) { return text_of_ranks(host.second) + " on " + host.first; });
}

std::vector<Peer> open_group(const RankEnvironment& environment, double timeout_s, const TextBroadcast& broadcast) {
    FileDescriptor listener;
    std::string host = host_of_rank_0(environment), secret;
    int port = environment.master_port;
    const bool is_broadcast = broadcast && (environment.master_host.empty() || environment.token.empty());
    std::optional<TokenFile> token_file;
    if (is_broadcast) {
        const std::string mine = environment.rank == 0 ? listen_and_invite(environment, timeout_s, listener) : "";
        const std::string text = broadcast(mine);
        Exit code = Exit::ok;
        std::string error;
        if (!unpack(text, code, error, host, port, secret))
            fail(Exit::internal, "rank 0 broadcast a malformed address: \"%s\"", text.substr(0, 100));
        if (code != Exit::ok) throw Error(code, error);
    } else if (host.empty() || port == 0) {
        fail(Exit::usage, "%s provides no address of rank 0: set MASTER_ADDR and MASTER_PORT", environment.launcher);
    } else if (environment.rank == 0) {
        if (environment.token.empty() && !environment.token_file.empty()) token_file.emplace(environment.token_file);
        listener = listen_for(environment, port, timeout_s);
    }
    // The key of the HMACs: known to all ranks of this run and to no other process.
    const auto key_with = [&](const std::string& token) { return pack(kVersion, token, environment.run_id, secret); };
    if (environment.rank == 0)
        return Admission{environment.size, std::move(listener),
                         key_with(token_file ? token_file->token : environment.token), timeout_s}
            .admit_all();
    const bool is_in_file = environment.token.empty() && !environment.token_file.empty() && !is_broadcast;
    const auto find_key = [&](std::string& reason) {
        const std::string token = is_in_file ? read_token(environment.token_file) : environment.token;
        if (is_in_file && token.empty()) reason = "rank 0 has not written the run's token to " + environment.token_file;
        return is_in_file && token.empty() ? std::string() : key_with(token);
    };
    return Joiner{environment.rank, environment.size, find_key, timeout_s}.join(host, port);
}
