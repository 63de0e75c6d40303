#include "runtime/cluster/socket.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace {

FileDescriptor new_socket(const SocketAddress& address) {
    return FileDescriptor(::socket(address.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
}

void set_option(int socket, int level, int option) {
    const int on = 1;
    ::setsockopt(socket, level, option, &on, sizeof on);
}

SocketAddress numeric_address(const char* host, int port) {
    std::string reason;
    return resolve(host, port, reason).at(0);
}

}  // namespace

std::string SocketAddress::host() const {
    char host[NI_MAXHOST];
    return ::getnameinfo(&any, size, host, sizeof host, nullptr, 0, NI_NUMERICHOST) == 0 ? host : "?";
}

std::string SocketAddress::text() const {
    return format(any.sa_family == AF_INET6 ? "[%s]:%d" : "%s:%d", host().c_str(), port());
}

bool SocketAddress::is_loopback() const {
    return any.sa_family == AF_INET6 ? IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr) : ntohl(v4.sin_addr.s_addr) >> 24 == 127;
}

std::vector<SocketAddress> resolve(const std::string& host, int port, std::string& reason) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (error != 0) reason = format("cannot resolve the host name %s: %s", host.c_str(), ::gai_strerror(error));
    std::vector<SocketAddress> addresses;
    for (const addrinfo* info = found; info; info = info->ai_next) {
        SocketAddress& address = addresses.emplace_back();
        std::memcpy(&address.storage, info->ai_addr, info->ai_addrlen);
        address.size = info->ai_addrlen;
    }
    if (found) ::freeaddrinfo(found);
    return addresses;
}

std::vector<SocketAddress> own_addresses() {
    std::vector<SocketAddress> addresses;
    ifaddrs* all = nullptr;
    if (::getifaddrs(&all) != 0) return addresses;
    for (const int family : {AF_INET, AF_INET6})
        for (const ifaddrs* one = all; one; one = one->ifa_next) {
            if (!one->ifa_addr || one->ifa_addr->sa_family != family || !(one->ifa_flags & IFF_UP)) continue;
            SocketAddress address;
            address.size = family == AF_INET ? sizeof address.v4 : sizeof address.v6;
            std::memcpy(&address.storage, one->ifa_addr, address.size);
            // A link-local address has no meaning without the interface's name.
            const bool is_link_local = family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&address.v6.sin6_addr);
            if (!is_link_local && !address.is_loopback()) addresses.push_back(address);
        }
    ::freeifaddrs(all);
    return addresses;
}

FileDescriptor listen_at(const SocketAddress& address) {
    FileDescriptor socket = new_socket(address);
    if (!socket) return socket;
    set_option(socket, SOL_SOCKET, SO_REUSEADDR);
    // The queue is long because a client that finds it full waits a second before it retries.
    if (::bind(socket, &address.any, address.size) != 0 || ::listen(socket, 4096) != 0) return {};
    return socket;
}

FileDescriptor listen_on_loopback() { return listen_at(numeric_address("127.0.0.1", 0)); }

FileDescriptor listen_on_all_interfaces(int port) {
    FileDescriptor both = listen_at(numeric_address("::", port));
    if (both || errno == EADDRINUSE) return both;
    return listen_at(numeric_address("0.0.0.0", port));  // a machine without IPv6
}

SocketAddress address_of(const FileDescriptor& socket) {
    SocketAddress address;
    ::getsockname(socket, &address.any, &address.size);
    return address;
}

FileDescriptor connect_to(const SocketAddress& address, TimePoint deadline, std::string& reason) {
    FileDescriptor socket = new_socket(address);
    int error = socket && ::connect(socket, &address.any, address.size) == 0 ? 0 : errno;
    if (error == EINPROGRESS || error == EINTR) {
        pollfd polled{socket, POLLOUT, 0};
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
        socklen_t size = sizeof error;
        if (::poll(&polled, 1, int(std::max<long long>(left, 0))) <= 0)
            error = ETIMEDOUT;
        else if (::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size) != 0)
            error = errno;
    }
    // TCP's simultaneous open can connect a socket to itself if its own port equals the port it connects to.
    if (error == 0 && address_of(socket).text() == address.text()) error = ECONNREFUSED;
    if (error != 0) {
        reason = address.text() + ": " + std::strerror(error);
        return {};
    }
    set_option(socket, IPPROTO_TCP, TCP_NODELAY);
    return socket;
}

FileDescriptor accept_from(const FileDescriptor& listener, SocketAddress& from) {
    from.size = sizeof from.storage;
    FileDescriptor socket(::accept4(listener, &from.any, &from.size, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket) set_option(socket, IPPROTO_TCP, TCP_NODELAY);
    return socket;
}
