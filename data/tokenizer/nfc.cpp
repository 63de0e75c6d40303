#include "data/tokenizer/nfc.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "kernels/base/check.h"
#include "runtime/io/utf8.h"

namespace {

// Appends the NFC of valid UTF-8.
void append_nfc(std::string_view text, std::string& out) {
    utf8proc_uint8_t* mapped = nullptr;
    const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
    const auto options = utf8proc_option_t(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    const utf8proc_ssize_t count = utf8proc_map(bytes, utf8proc_ssize_t(text.size()), &mapped, options);
    const std::unique_ptr<utf8proc_uint8_t, void (*)(void*)> owned(mapped, std::free);
    require(count >= 0, "utf8proc: %s", utf8proc_errmsg(count));
    out.append(reinterpret_cast<const char*>(mapped), size_t(count));
}

// Returns whether NFC may change the character or combine it with the previous one: a mark, a Hangul vowel or tail, or
// a character that is not its own NFC.
bool is_unsettled(utf8proc_int32_t character) {
    constexpr utf8proc_int32_t kFirstVowel = 0x1160, kLastTail = 0x11ff;
    const utf8proc_property_t* property = utf8proc_get_property(character);
    const bool is_mark = property->category == UTF8PROC_CATEGORY_MN || property->category == UTF8PROC_CATEGORY_MC ||
                         property->category == UTF8PROC_CATEGORY_ME || property->combining_class != 0;
    if (is_mark || (character >= kFirstVowel && character <= kLastTail)) return true;
    if (!utf8proc_codepoint_valid(character)) return false;
    utf8proc_uint8_t bytes[4];
    const std::string alone(reinterpret_cast<char*>(bytes), size_t(utf8proc_encode_char(character, bytes)));
    return to_nfc(alone) != alone;
}

}  // namespace

bool is_certainly_nfc(std::string_view text) {
    static const std::vector<bool> unsettled = [] {
        std::vector<bool> all(0x110000);
        for (size_t character = 0x300; character < all.size(); character++)
            all[character] = is_unsettled(utf8proc_int32_t(character));
        return all;
    }();
    for (size_t at = 0; at < text.size();) {
        if (uint8_t(text[at]) < 0xcc) {  // a character below U+0300, which NFC does not change, or a continuation byte
            at++;
            continue;
        }
        const size_t length = utf8_length(text.substr(at));
        utf8proc_int32_t character = 0;
        if (length > 0)
            utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data() + at), utf8proc_ssize_t(length),
                             &character);
        if (unsettled[size_t(character)]) return false;
        at += std::max<size_t>(length, 1);
    }
    return true;
}

// Returns the length of the valid UTF-8 prefix to normalize at once. The prefix ends before U+11A7: the character does
// not compose, but utf8proc 2.8 treats it as the empty tail of a Hangul syllable and drops it.
static size_t run_length(std::string_view text) {
    size_t end = 0;
    while (end < text.size() && !(end > 0 && text.substr(end).starts_with("\u11a7"))) {
        const size_t length = utf8_length(text.substr(end));
        if (length == 0) break;
        end += length;
    }
    return end;
}

std::string to_nfc(std::string_view text) {
    std::string out;
    while (!text.empty()) {
        size_t length = run_length(text);
        if (length > 0)
            append_nfc(text.substr(0, length), out);
        else
            out += text[length++];
        text.remove_prefix(length);
    }
    return out;
}
