#include "runtime/cluster/connection.h"

#include <algorithm>
#include <cerrno>

bool Connection::receive() {
    char buffer[16384];
    // Bounded, so that a peer that sends continuously does not delay the others.
    while (!has_ended_ && socket_ && received_.size() < limit_ + sizeof buffer) {
        const ssize_t count = ::recv(socket_, buffer, sizeof buffer, 0);
        if (count < 0 && errno == EAGAIN) break;
        if (count > 0)
            received_.append(buffer, size_t(count));
        else if (count == 0 || errno != EINTR)
            has_ended_ = true;
    }
    return socket_ && !(has_ended_ && received_.empty());
}

std::optional<Message> Connection::next() {
    std::string_view rest = received_;
    Message message;
    uint64_t size = 0;
    const bool has_size = take_field(rest, message.kind) && take_field(rest, size);
    if (has_size && size <= limit_ && size <= rest.size()) {
        message.fields = rest.substr(0, size);
        received_.erase(0, received_.size() - rest.size() + size);
        return message;
    }
    has_ended_ |= has_size && size > limit_;
    if (has_ended_) received_.clear();
    return std::nullopt;
}

void Connection::send(MessageKind kind, const std::string& fields) {
    if (!is_open()) return;
    unsent_ += pack(kind, fields);
    flush();
}

void Connection::flush() {
    while (socket_ && !unsent_.empty()) {
        const ssize_t count = ::send(socket_, unsent_.data(), unsent_.size(), MSG_NOSIGNAL);
        if (count < 0 && errno == EAGAIN) return;
        if (count > 0)
            unsent_.erase(0, size_t(count));
        else if (errno != EINTR)
            unsent_.clear();  // the connection is broken, which receive() will report
    }
}

void Connection::finish_sending() {
    flush();
    if (unsent_.empty()) ::shutdown(socket_, SHUT_WR);
}

void wait_for_events(std::vector<pollfd> polled, TimePoint deadline) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
    ::poll(polled.data(), polled.size(), int(std::clamp<long long>(left, 0, 100)));
}
