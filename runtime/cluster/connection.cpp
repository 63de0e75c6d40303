#include "runtime/cluster/connection.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace {

using MessageSize = uint32_t;  // precedes each message: bytes of kind and fields

}  // namespace

bool Connection::receive() {
    char buffer[16384];
    // Bounded, so that a peer that sends without pause does not delay the others.
    while (!has_ended_ && socket_ && received_.size() < limit_ + sizeof buffer) {
        const ssize_t count = ::recv(socket_.fd(), buffer, sizeof buffer, 0);
        if (count < 0 && errno == EAGAIN) break;
        if (count > 0)
            received_.append(buffer, size_t(count));
        else if (count == 0 || errno != EINTR)
            has_ended_ = true;
    }
    return socket_ && (!has_ended_ || received_.size() >= sizeof(MessageSize));
}

std::optional<Message> Connection::next() {
    MessageSize size = 0;
    if (received_.size() < sizeof size) return std::nullopt;
    std::memcpy(&size, received_.data(), sizeof size);
    const bool is_complete = received_.size() - sizeof size >= size;
    if (size == 0 || size > limit_ || (has_ended_ && !is_complete)) {
        has_ended_ = true;
        received_.clear();
        return std::nullopt;
    }
    if (!is_complete) return std::nullopt;
    Message message{MessageKind(received_[sizeof size]), received_.substr(sizeof size + 1, size - 1)};
    received_.erase(0, sizeof size + size);
    return message;
}

void Connection::send(MessageKind kind, const std::string& fields) {
    if (!is_open()) return;
    const MessageSize size = MessageSize(1 + fields.size());
    unsent_.append(reinterpret_cast<const char*>(&size), sizeof size);
    unsent_ += char(kind);
    unsent_ += fields;
    flush();
}

bool Connection::flush() {
    while (socket_ && !unsent_.empty()) {
        const ssize_t count = ::send(socket_.fd(), unsent_.data(), unsent_.size(), MSG_NOSIGNAL);
        if (count < 0 && errno == EAGAIN) return false;
        if (count > 0)
            unsent_.erase(0, size_t(count));
        else if (errno != EINTR)
            unsent_.clear();  // the connection is broken, which receive() will report
    }
    return true;
}

void Connection::finish_sending() {
    if (socket_) ::shutdown(socket_.fd(), SHUT_WR);
}

void wait_for_events(std::vector<pollfd> polled, TimePoint deadline) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    ::poll(polled.data(), polled.size(), int(std::clamp<long long>(left, 0, 100)));
}
