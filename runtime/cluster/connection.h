// Messages over a non-blocking socket, with a buffer for each direction.
#pragma once

#include <poll.h>

#include <optional>

#include "runtime/cluster/socket.h"
#include "runtime/cluster/wire_format.h"
#include "runtime/io/files.h"

class Connection {
public:
    Connection() = default;  // closed
    // Treats a peer that announces a message with more than `limit` bytes of fields as closed.
    Connection(FileDescriptor socket, size_t limit) : socket_(std::move(socket)), limit_(limit) {}
    // Returns the events to poll for: input and, with unsent data, output; none if the connection is closed.
    pollfd events() const { return {socket_, short(POLLIN | (unsent_.empty() ? 0 : POLLOUT)), 0}; }
    bool is_open() const { return bool(socket_); }
    void set_limit(size_t limit) { limit_ = limit; }

    // Reads the data that has arrived. Returns false once the peer has closed the connection or violated the protocol
    // and next() has no message left to return.
    bool receive();
    // Returns the oldest complete message that has arrived, if any.
    std::optional<Message> next();

    // Sends as much as the socket accepts; flush() sends the rest. Does nothing on a closed connection.
    void send(MessageKind kind, const std::string& fields);
    void flush();
    void finish_sending();  // flush(); if no data remains, the peer then reads end of file
    void close() { socket_ = {}; }

private:
    FileDescriptor socket_;
    size_t limit_ = 0;
    bool has_ended_ = false;
    std::string received_, unsent_;
};

// Waits for one of the events until `deadline`, but at most 0.1 s.
void wait_for_events(std::vector<pollfd> polled, TimePoint deadline);
