// What ranks say to each other on the control channel: messages of a kind and a few fields, little-endian, lengths
// before texts. A reader trusts nothing: whatever bytes arrive, it ends, stays within them and takes no memory beyond.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

enum class MessageKind : uint8_t {
    challenge = 1,  // rank 0 to whoever connects: version, nonce
    hello,          // the answer: who I am, my nonce, and the MAC over all of it
    welcome,        // rank 0: a MAC over both nonces, so that it is known as well
    refused,        // rank 0: exit code, sentence; there will be no group
    roster,         // rank 0: all ranks are here, and these are they
    heartbeat,      // both ways: RankReport
    question,       // to rank 0: number, operation, name, my text
    answer,         // rank 0: number, all texts
    no_answer,      // rank 0: exit code, sentence; the same on every rank
    goodbye,        // to rank 0: I have left in order
    all_left,       // rank 0: so have all
    error,          // to rank 0: I leave with an exit code and a sentence
    verdict,        // rank 0: the run ends, because of whom, with which exit code and sentence
};

struct Message {
    MessageKind kind = MessageKind::heartbeat;
    std::string fields;
};

class FieldWriter {
public:
    FieldWriter& number(uint64_t value) {
        for (int shift = 0; shift < 64; shift += 8) fields_ += char(value >> shift);
        return *this;
    }
    FieldWriter& text(std::string_view value) {
        number(value.size());
        fields_ += value;
        return *this;
    }
    const std::string& fields() const { return fields_; }

private:
    std::string fields_;
};

// Reads in the order of writing. What is not there reads as 0 or "", and sound() is false from then on.
class FieldReader {
public:
    explicit FieldReader(std::string_view fields) : rest_(fields) {}
    explicit FieldReader(std::string&&) = delete;  // it would be gone before it is read
    uint64_t number() {
        uint64_t value = 0;
        if (rest_.size() < 8) return broken_ = true, 0;
        for (size_t i = 0; i < 8; ++i) value |= uint64_t(uint8_t(rest_[i])) << 8 * i;
        rest_.remove_prefix(8);
        return value;
    }
    std::string text() {
        const uint64_t size = number();
        if (size > rest_.size()) return broken_ = true, "";
        const std::string value(rest_.substr(0, size));
        rest_.remove_prefix(size);
        return value;
    }
    // Whether all that was read was there, and nothing is left.
    bool sound() const { return !broken_ && rest_.empty(); }

private:
    std::string_view rest_;
    bool broken_ = false;
};
