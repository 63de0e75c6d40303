#include "data/text/text_quality.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/check.h"
#include "runtime/io/utf8.h"

void TextQuality::add(std::string_view text) {
    constexpr uint64_t kOnes = 0x0101010101010101, kHighs = 0x8080808080808080;
    bytes += text.size();
    for (size_t i = 0; i < text.size();) {
        uint64_t eight;
        if (i + 8 <= text.size()) {
            std::memcpy(&eight, text.data() + i, 8);
            // Fast path: eight nonzero ASCII bytes.
            if (((eight | (eight - kOnes)) & kHighs) == 0) {
                i += 8;
                continue;
            }
        }
        const size_t length = utf8_length(text.substr(i));
        invalid += length == 0;
        multibyte += length > 1;
        nul += text[i] == '\0';
        i += std::max<size_t>(length, 1);
    }
}

void TextQuality::add(const TextQuality& other) {
    bytes += other.bytes, invalid += other.invalid, multibyte += other.multibyte, nul += other.nul,
        dropped += other.dropped;
}

std::string TextQuality::sentence() const {
    std::string text;
    auto say = [&](const std::string& finding) { text += (text.empty() ? "" : "; ") + finding; };
    const char* const kept = dropped > 0 ? "" : " and are kept";
    if (invalid > 0) {
        text = format("%zu of %zu bytes are not UTF-8%s", size_t(invalid), size_t(bytes), kept);
        if (invalid > multibyte)
            text += "; it looks like Latin-1 or Windows-1252; convert it with iconv -f WINDOWS-1252 -t UTF-8";
    }
    if (nul > 0) say(format("%zu bytes are 0%s", size_t(nul), kept));
    if (dropped > 0)
        say(format("%zu of %zu bytes have no token and are dropped", size_t(dropped), size_t(bytes)));
    return text;
}
