#include "runtime/cluster/socket.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "kernels/check.h"

namespace {

void set_option(const Socket& socket, int level, int option) {
    const int on = 1;
    ::setsockopt(socket.fd(), level, option, &on, sizeof on);
}

void set_port(SocketAddress& address, int port) {
    if (address.bytes.ss_family == AF_INET6)
        reinterpret_cast<sockaddr_in6&>(address.bytes).sin6_port = htons(uint16_t(port));
    else
        reinterpret_cast<sockaddr_in&>(address.bytes).sin_port = htons(uint16_t(port));
}

const sockaddr* pointer(const SocketAddress& address) { return reinterpret_cast<const sockaddr*>(&address.bytes); }

Socket new_socket(int family) { return Socket(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)); }

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
    if (this != &other) {
        if (fd_ >= 0) ::close(fd_);
        fd_ = other.release();
    }
    return *this;
}

Socket::~Socket() {
    if (fd_ >= 0) ::close(fd_);
}

int Socket::release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
}

int SocketAddress::port() const {
    if (bytes.ss_family == AF_INET6) return ntohs(reinterpret_cast<const sockaddr_in6&>(bytes).sin6_port);
    return ntohs(reinterpret_cast<const sockaddr_in&>(bytes).sin_port);
}

std::string SocketAddress::host() const {
    char host[NI_MAXHOST];
    return ::getnameinfo(pointer(*this), size, host, sizeof host, nullptr, 0, NI_NUMERICHOST) == 0 ? host : "?";
}

std::string SocketAddress::text() const {
    return format(bytes.ss_family == AF_INET6 ? "[%s]:%d" : "%s:%d", host().c_str(), port());
}

bool SocketAddress::is_loopback() const {
    if (bytes.ss_family == AF_INET6)
        return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(bytes).sin6_addr);
    return ntohl(reinterpret_cast<const sockaddr_in&>(bytes).sin_addr.s_addr) >> 24 == 127;
}

std::vector<SocketAddress> resolve(const std::string& host, int port, std::string& why) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &found);
    if (error != 0) {
        why = format("the name %s: %s", host.c_str(), ::gai_strerror(error));
        return {};
    }
    std::vector<SocketAddress> addresses;
    for (const addrinfo* info = found; info; info = info->ai_next) {
        if (info->ai_family != AF_INET && info->ai_family != AF_INET6) continue;
        SocketAddress address;
        std::memcpy(&address.bytes, info->ai_addr, info->ai_addrlen);
        address.size = info->ai_addrlen;
        set_port(address, port);
        addresses.push_back(address);
    }
    ::freeaddrinfo(found);
    return addresses;
}

std::vector<SocketAddress> own_addresses(int port) {
    std::vector<SocketAddress> addresses;
    ifaddrs* all = nullptr;
    if (::getifaddrs(&all) != 0) return addresses;
    for (const int family : {AF_INET, AF_INET6})
        for (const ifaddrs* one = all; one; one = one->ifa_next) {
            if (!one->ifa_addr || one->ifa_addr->sa_family != family || !(one->ifa_flags & IFF_UP)) continue;
            SocketAddress address;
            address.size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
            std::memcpy(&address.bytes, one->ifa_addr, address.size);
            // A link-local address means nothing without the name of the interface.
            if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<sockaddr_in6&>(address.bytes).sin6_addr))
                continue;
            set_port(address, port);
            if (!address.is_loopback()) addresses.push_back(address);
        }
    ::freeifaddrs(all);
    return addresses;
}

Socket listen_at(const SocketAddress& address) {
    Socket socket = new_socket(address.bytes.ss_family);
    if (!socket) return socket;
    set_option(socket, SOL_SOCKET, SO_REUSEADDR);
    // A long queue: whoever finds it full waits a second before the next try.
    if (::bind(socket.fd(), pointer(address), address.size) != 0 || ::listen(socket.fd(), 4096) != 0) {
        const int error = errno;
        socket = Socket();
        errno = error;
    }
    return socket;
}

Socket listen_on_loopback() {
    sockaddr_in loopback{};
    loopback.sin_family = AF_INET;
    loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    SocketAddress address;
    std::memcpy(&address.bytes, &loopback, sizeof loopback);
    address.size = sizeof loopback;
    return listen_at(address);
}

Socket listen_everywhere(int port) {
    SocketAddress both;
    both.bytes.ss_family = AF_INET6;
    both.size = sizeof(sockaddr_in6);
    set_port(both, port);
    Socket socket = listen_at(both);
    if (socket || errno == EADDRINUSE) return socket;
    SocketAddress old;  // a machine without IPv6
    old.bytes.ss_family = AF_INET;
    old.size = sizeof(sockaddr_in);
    set_port(old, port);
    return listen_at(old);
}

SocketAddress address_of(const Socket& socket) {
    SocketAddress address;
    address.size = sizeof address.bytes;
    if (::getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&address.bytes), &address.size) != 0) address.size = 0;
    return address;
}

Socket connect_to(const SocketAddress& address, TimePoint deadline, std::string& why) {
    Socket socket = new_socket(address.bytes.ss_family);
    int error = socket ? 0 : errno;
    if (socket && ::connect(socket.fd(), pointer(address), address.size) != 0) error = errno;
    if (error == EINPROGRESS || error == EINTR) {
        pollfd wait{socket.fd(), POLLOUT, 0};
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
        socklen_t size = sizeof error;
        if (::poll(&wait, 1, int(std::max<long long>(left, 0))) <= 0)
            error = ETIMEDOUT;
        else if (::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size) != 0)
            error = errno;
    }
    // Two ends that connect to each other's port at once can meet without anybody listening.
    if (error == 0 && address_of(socket).text() == address.text()) error = ECONNREFUSED;
    if (error != 0) {
        why = format("%s: %s", address.text().c_str(), std::strerror(error));
        return Socket();
    }
    set_option(socket, IPPROTO_TCP, TCP_NODELAY);
    return socket;
}

Socket accept_from(const Socket& listener, SocketAddress& from) {
    from.size = sizeof from.bytes;
    Socket socket(
        ::accept4(listener.fd(), reinterpret_cast<sockaddr*>(&from.bytes), &from.size, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket) set_option(socket, IPPROTO_TCP, TCP_NODELAY);
    return socket;
}

bool Connection::receive() {
    char buffer[16384];
    // Bounded, so that one peer that never stops talking does not keep the others waiting.
    while (!ended_ && socket_ && arrived_.size() < limit_ + sizeof buffer) {
        const ssize_t got = ::recv(socket_.fd(), buffer, sizeof buffer, 0);
        if (got > 0)
            arrived_.append(buffer, size_t(got));
        else if (got == 0 || (errno != EAGAIN && errno != EINTR))
            ended_ = true;
        else if (errno == EAGAIN)
            break;
    }
    return socket_ && (!ended_ || arrived_.size() >= 4);
}

std::optional<Message> Connection::next() {
    if (arrived_.size() < 4) return std::nullopt;
    size_t size = 0;
    for (size_t i = 0; i < 4; ++i) size |= size_t(uint8_t(arrived_[i])) << 8 * i;
    if (size == 0 || size > limit_ || (ended_ && arrived_.size() - 4 < size)) {
        ended_ = true;
        arrived_.clear();
        return std::nullopt;
    }
    if (arrived_.size() - 4 < size) return std::nullopt;
    Message message{MessageKind(uint8_t(arrived_[4])), arrived_.substr(5, size - 1)};
    arrived_.erase(0, 4 + size);
    return message;
}

void Connection::send(MessageKind kind, const std::string& fields) {
    const size_t size = 1 + fields.size();
    for (size_t i = 0; i < 4; ++i) unsent_ += char(size >> 8 * i);
    unsent_ += char(kind);
    unsent_ += fields;
    flush();
}

bool Connection::flush() {
    while (socket_ && !unsent_.empty()) {
        const ssize_t sent = ::send(socket_.fd(), unsent_.data(), unsent_.size(), MSG_NOSIGNAL);
        if (sent > 0)
            unsent_.erase(0, size_t(sent));
        else if (errno == EAGAIN)
            return false;
        else if (errno != EINTR)
            unsent_.clear();  // the peer is gone, which receive() will tell
    }
    return true;
}

void Connection::finish_sending() {
    if (socket_) ::shutdown(socket_.fd(), SHUT_WR);
}
