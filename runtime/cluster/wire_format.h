// Serialization of the messages between ranks. All ranks run the same binary, so an integer is 8 bytes in the machine's
// byte order; a text follows its length. Parsing is safe on arbitrary bytes: it never reads beyond its input and never
// allocates more than its input holds.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

#include "kernels/base/check.h"

enum class MessageKind : uint8_t {
    challenge = 1,  // rank 0 to each new connection: protocol version, nonce
    hello,          // the answer to it: rank, run size, host, pid and nonce, with an HMAC
    welcome,        // rank 0: an HMAC over both nonces, which authenticates rank 0
    complete,       // rank 0: its host and pid; the rendezvous is complete
    heartbeat,      // in both directions: a RankStatus
    request,        // to rank 0: a TextRequest
    reply,          // rank 0 to all: a TextReply
    leave,          // Exit::ok, or the sender's exit code and error message; also during the rendezvous
    end_of_run,     // rank 0 to all: Exit::ok if every rank has left, or why the run ends: an EndOfRun
};

struct Message {
    MessageKind kind = MessageKind::heartbeat;
    std::string fields;  // from pack()
};

// A call of a collective of the control channel.
struct TextRequest {
    bool must_be_same = false;  // require_same(), else all_gather()
    std::string what;           // the subject, for errors
    std::string text;           // this rank's
};

struct TextReply {
    Exit code = Exit::ok;
    std::string text;  // all_gather: the texts by rank, each as a field; if not ok: the error message
};

template <class Field> void append_field(std::string& packed, const Field& field) {
    if constexpr (std::is_convertible_v<const Field&, std::string_view>) {
        const std::string_view text = field;
        append_field(packed, text.size());
        packed += text;
    } else {
        const uint64_t number = uint64_t(field);
        packed.append(reinterpret_cast<const char*>(&number), sizeof number);
    }
}

// Removes one field from the front of `packed`. Returns false if it is not complete.
template <class Field> bool take_field(std::string_view& packed, Field& field) {
    uint64_t number = 0;
    if (packed.size() < sizeof number) return false;
    std::memcpy(&number, packed.data(), sizeof number);
    packed.remove_prefix(sizeof number);
    if constexpr (std::is_same_v<Field, std::string>) {
        if (number > packed.size()) return false;
        field = packed.substr(0, number);
        packed.remove_prefix(number);
    } else {
        field = Field(number);
    }
    return true;
}

template <class... Fields> std::string pack(const Fields&... fields) {
    std::string packed;
    (append_field(packed, fields), ...);
    return packed;
}

// Reads what pack() wrote. Returns false unless `packed` holds exactly these fields.
template <class... Fields> bool unpack(std::string_view packed, Fields&... fields) {
    return (take_field(packed, fields) && ...) && packed.empty();
}
