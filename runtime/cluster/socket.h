// Non-blocking TCP sockets and their addresses, for Linux.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <chrono>

#include "runtime/io/files.h"

// The clock of all deadlines: CLOCK_MONOTONIC, so that setting the time of day does not affect them.
using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

inline Clock::duration seconds(double count) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(count));
}
inline double seconds_between(TimePoint from, TimePoint to) { return std::chrono::duration<double>(to - from).count(); }

// An IPv4 or IPv6 address.
struct SocketAddress {
    union {
        sockaddr any;
        sockaddr_in v4;
        sockaddr_in6 v6;
        sockaddr_storage storage{};
    };
    socklen_t size = sizeof(sockaddr_storage);
    int port() const { return ntohs(v4.sin_port); }  // at the same offset in IPv6
    std::string host() const;                        // numeric: "10.0.0.3", "fe80::1"
    std::string text() const;                        // "10.0.0.3:4242", "[fe80::1]:4242"
    bool is_loopback() const;
};

// Returns the addresses of a host name or numeric address. If it has none at present, returns an empty vector and sets
// `reason`.
std::vector<SocketAddress> resolve(const std::string& host, int port, std::string& reason);

// Returns the addresses, with port 0, of this machine's active network interfaces, IPv4 first, without loopback and
// link-local addresses.
std::vector<SocketAddress> own_addresses();

// Returns a listening socket; port 0 selects a free port. On failure returns no socket and sets errno.
FileDescriptor listen_at(const SocketAddress& address);
FileDescriptor listen_on_loopback();  // at 127.0.0.1, on a free port
FileDescriptor listen_on_all_interfaces(int port);

// Returns the local address of a socket.
SocketAddress address_of(const FileDescriptor& socket);

// Connects before `deadline`. On failure returns no socket and sets `reason`.
FileDescriptor connect_to(const SocketAddress& address, TimePoint deadline, std::string& reason);

// Accepts one pending connection. If there is none, returns no socket and sets errno.
FileDescriptor accept_from(const FileDescriptor& listener, SocketAddress& from);
