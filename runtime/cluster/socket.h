// TCP sockets that never block, and the messages that pass through them. Linux.
#pragma once

#include <sys/socket.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "runtime/cluster/message.h"

// All waits go by this clock, CLOCK_MONOTONIC: setting the time of day ends none.
using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

inline Clock::duration seconds(double count) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(count));
}

// Owns a file descriptor.
class Socket {
public:
    Socket() = default;
    explicit Socket(int fd) : fd_(fd) {}
    Socket(Socket&& other) noexcept : fd_(other.release()) {}
    Socket& operator=(Socket&& other) noexcept;
    ~Socket();
    int fd() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }
    int release();

private:
    int fd_ = -1;
};

struct SocketAddress {
    sockaddr_storage bytes{};
    socklen_t size = 0;
    int port() const;
    std::string host() const;  // numeric: "10.0.0.3", "fe80::1"
    std::string text() const;  // "10.0.0.3:4242", "[fe80::1]:4242"
    bool is_loopback() const;
};

// The addresses of a name or number; empty, with a reason in `why`, where there are none (now).
std::vector<SocketAddress> resolve(const std::string& host, int port, std::string& why);

// The addresses of this machine's network interfaces that are up, without loopback, with this port.
std::vector<SocketAddress> own_addresses(int port);

// A socket that listens; port 0 takes a free one. Not a socket, with errno set, where the system refuses.
Socket listen_at(const SocketAddress& address);

// At 127.0.0.1, a free port.
Socket listen_on_loopback();

// At every interface.
Socket listen_everywhere(int port);

// The address that a socket of ours is bound to.
SocketAddress address_of(const Socket& socket);

// Connects until `deadline`. Not a socket, with a reason in `why`, where nobody listens.
Socket connect_to(const SocketAddress& address, TimePoint deadline, std::string& why);

// The next connection that waits at a listening socket; not a socket, with errno set, where there is none.
Socket accept_from(const Socket& listener, SocketAddress& from);

// Messages over one socket. Nothing blocks: what cannot be sent yet is kept and sent by flush().
class Connection {
public:
    // A peer that announces a message of more than `limit` bytes counts as closed.
    Connection(Socket socket, size_t limit) : socket_(std::move(socket)), limit_(limit) {}
    int fd() const { return socket_.fd(); }
    bool is_open() const { return bool(socket_); }
    void set_limit(size_t limit) { limit_ = limit; }

    // Takes what has arrived. False once the peer has closed or broken the rules and next() has nothing more either.
    bool receive();
    std::optional<Message> next();  // the oldest whole message that has arrived

    void send(MessageKind kind, const std::string& fields);
    bool flush();  // true when nothing is left to send
    bool has_unsent() const { return !unsent_.empty(); }
    void finish_sending();  // the peer will read the end after what has been sent
    void close() { socket_ = Socket(); }

private:
    Socket socket_;
    size_t limit_;
    bool ended_ = false;
    std::string arrived_, unsent_;
};
