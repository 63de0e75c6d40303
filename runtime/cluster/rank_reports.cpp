#include "runtime/cluster/rank_reports.h"

#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <ranges>

#include "runtime/cluster/background_thread.h"
#include "runtime/cluster/rendezvous.h"
#include "runtime/cluster/wire_format.h"
#include "runtime/io/process.h"

namespace {

constexpr size_t kLongest = 1024;     // bytes of a report
constexpr double kOthersFirst_s = 5;  // lets another rank, which knows more, report a hang first
constexpr double kOwnPause_s = 1;     // a round longer by this much means that this process was stopped

// Fills in an abstract address, which has no file.
socklen_t address_of_name(const std::string& name, sockaddr_un& address) {
    address = {};
    address.sun_family = AF_UNIX;
    name.copy(address.sun_path + 1, sizeof address.sun_path - 1);
    return socklen_t(offsetof(sockaddr_un, sun_path) + 1 + std::min(name.size(), sizeof address.sun_path - 1));
}

FileDescriptor datagram_socket() {
    FileDescriptor socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!socket) fail(Exit::os, "cannot create a Unix socket: %s", std::strerror(errno));
    return socket;
}

// Returns the pid of the datagram's sender, or 0 if it is not a process of this user.
pid_t sender_of(const msghdr& message) {
    for (cmsghdr* part = CMSG_FIRSTHDR(&message); part; part = CMSG_NXTHDR(const_cast<msghdr*>(&message), part)) {
        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_CREDENTIALS) continue;
        ucred credentials;
        std::memcpy(&credentials, CMSG_DATA(part), sizeof credentials);
        if (credentials.uid == ::geteuid()) return credentials.pid;
    }
    return 0;
}

}  // namespace

std::jthread start_reports(const RankEnvironment& environment, std::shared_ptr<const RankActivity> activity,
                           double every_s) {
    if (environment.supervisor.empty()) return {};
    return start_thread([socket = datagram_socket(), rank = environment.rank, name = environment.supervisor,
                         activity = std::move(activity), every_s](const std::stop_token& stop) {
        sockaddr_un address;
        const socklen_t size = address_of_name(name, address);
        do {
            const std::string text = pack(rank) + activity->now().packed();
            // Lost if the supervisor has ended or does not read: the ranks do not depend on it.
            ::sendto(socket, text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL,
                     reinterpret_cast<const sockaddr*>(&address), size);
        } while (!stops_within(stop, every_s));
    });
}

RankReports::RankReports(int first, int count, bool all, const ControlSettings& settings)
    : first_(first),
      count_(count),
      is_alone_(all && count == 1),
      settings_(settings),
      socket_(datagram_socket()),
      name_("train_gpt." + random_hex(16)) {
    sockaddr_un address;
    const socklen_t size = address_of_name(name_, address);
    const int on = 1;
    if (::setsockopt(socket_, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) != 0 ||
        ::bind(socket_, reinterpret_cast<const sockaddr*>(&address), size) != 0)
        fail(Exit::os, "cannot bind a Unix socket: %s", std::strerror(errno));
    begin();
}

void RankReports::begin() {
    receive(Clock::now());  // drops earlier starts' reports
    ranks_.clear();
    begun_ = last_round_ = Clock::now();
    first_end_.reset();
}

void RankReports::receive(TimePoint now) {
    for (;;) {
        char bytes[kLongest];
        alignas(cmsghdr) char control[256];
        iovec part{bytes, sizeof bytes};
        msghdr message{};
        message.msg_iov = &part, message.msg_iovlen = 1;
        message.msg_control = control, message.msg_controllen = sizeof control;
        const ssize_t count = ::recvmsg(socket_, &message, MSG_DONTWAIT);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) return;
        RankStatus status;
        int rank = 0;
        const pid_t pid = sender_of(message);
        std::string_view fields(bytes, size_t(count));
        if (pid == 0 || !take_field(fields, rank) || !status.unpack_from(fields)) continue;
        if (rank < first_ || rank >= first_ + count_) continue;
        const auto known = ranks_.try_emplace(rank, MonitoredRank{this_member(rank), {}, now, now}).first;
        known->second.member.pid = pid;
        known->second.note(status, now);
    }
}

std::optional<std::string> RankReports::find_hang() {
    const TimePoint now = Clock::now();
    // While this process was stopped or had no CPU time, it could not receive reports, so that time does not count.
    const Clock::duration round = now - std::exchange(last_round_, now);
    if (round >= seconds(kOwnPause_s)) {
        begun_ += round;
        if (first_end_) *first_end_ += round;
        for (MonitoredRank& rank : std::views::values(ranks_)) rank.last_heard += round, rank.last_progress += round;
    }
    receive(now);
    if (int(ranks_.size()) < count_ && now > begun_ + seconds(settings_.start_s)) {
        std::vector<int> missing;
        for (int rank = first_; rank < first_ + count_; ++rank)
            if (!ranks_.contains(rank)) missing.push_back(rank);
        return format("%zu of %d ranks did not start within %g s (parallel.start_timeout_s): missing %s",
                      missing.size(), count_, settings_.start_s, text_of_ranks(missing).c_str());
    }
    const auto reported = std::views::values(ranks_);
    const auto ended = std::ranges::find_if(
        reported, [](const MonitoredRank& rank) { return ::kill(pid_t(rank.member.pid), 0) != 0 && errno == ESRCH; });
    if (ended != reported.end()) {  // the launcher should notice; mpirun may hang if a rank dies in MPI_Init
        if (!first_end_) first_end_ = now;
        const double since_s = seconds_between(*first_end_, now);
        if (since_s <= 2 * settings_.silence_s) return std::nullopt;
        return format("%s ended %.1f s ago, but the launcher of the ranks is still running",
                      (*ended).member.text().c_str(), since_s);
    }
    if (int(ranks_.size()) < count_) return std::nullopt;
    const std::vector<MonitoredRank> all(reported.begin(), reported.end());
    const std::optional<EndOfRun> end =
        is_alone_ ? ::find_hang(all, settings_, now) : find_silent_rank(all, settings_.silence_s + kOthersFirst_s, now);
    return end ? std::optional(end->sentence) : std::nullopt;
}
