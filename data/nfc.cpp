// A table of its own instead of a library: it is one page, and ICU and utf8proc would be a dependency of every build.
#include "data/nfc.h"

#include <algorithm>
#include <iterator>

#include "data/nfc_table.h"
#include "data/pretokenizer.h"

namespace {

// Hangul syllables are computed (The Unicode Standard, section 3.12).
constexpr uint32_t kSyllable = 0xac00, kLead = 0x1100, kVowel = 0x1161, kTail = 0x11a7;
constexpr uint32_t kLeads = 19, kVowels = 21, kTails = 28;

const Decomposition* decomposition_of(uint32_t character) {
    const auto found = std::ranges::lower_bound(kDecompositions, character, {}, &Decomposition::character);
    return found != std::end(kDecompositions) && found->character == character ? &*found : nullptr;
}

uint8_t combining_class(uint32_t character) {
    if (character < 0x300) return 0;
    const auto above = std::ranges::upper_bound(kCombiningRuns, character, {}, &CombiningRun::first);
    if (above == std::begin(kCombiningRuns)) return 0;
    const CombiningRun& run = above[-1];
    return character - run.first < run.count ? run.value : 0;
}

void decompose(uint32_t character, std::vector<uint32_t>& out) {
    if (const uint32_t index = character - kSyllable; index < kLeads * kVowels * kTails) {
        out.push_back(kLead + index / (kVowels * kTails));
        out.push_back(kVowel + index / kTails % kVowels);
        if (index % kTails > 0) out.push_back(kTail + index % kTails);
        return;
    }
    const Decomposition* parts = character < 0xc0 ? nullptr : decomposition_of(character);
    if (!parts) return out.push_back(character);
    decompose(parts->first, out);
    if (parts->second) decompose(parts->second, out);
}

uint32_t code_point(std::string_view character) {
    const size_t length = character.size();
    uint32_t code = length == 1 ? uint8_t(character[0]) : uint8_t(character[0]) & (0xff >> (length + 1));
    for (size_t i = 1; i < length; i++) code = code << 6 | (uint8_t(character[i]) & 0x3f);
    return code;
}

// The character that two make, 0 if there is none.
uint32_t composed(uint32_t first, uint32_t second) {
    static const auto pairs = [] {
        std::unordered_map<uint64_t, uint32_t> map;
        for (const Decomposition& d : kDecompositions)
            if (d.composes) map[uint64_t(d.first) << 32 | d.second] = d.character;
        return map;
    }();
    if (first - kLead < kLeads && second - kVowel < kVowels)
        return kSyllable + ((first - kLead) * kVowels + second - kVowel) * kTails;
    const uint32_t syllable = first - kSyllable;
    if (syllable < kLeads * kVowels * kTails && syllable % kTails == 0 && second - kTail - 1 < kTails - 1)
        return first + second - kTail;
    const auto found = pairs.find(uint64_t(first) << 32 | second);
    return found == pairs.end() ? 0 : found->second;
}

void append_utf8(uint32_t c, std::string& out) {
    if (c < 0x80) {
        out += char(c);
        return;
    }
    if (c >= 0x10000) out += char(0xf0 | c >> 18);
    if (c >= 0x10000) out += char(0x80 | (c >> 12 & 0x3f));
    if (c < 0x10000 && c >= 0x800) out += char(0xe0 | c >> 12);
    out += char(c >= 0x800 ? 0x80 | (c >> 6 & 0x3f) : 0xc0 | c >> 6);
    out += char(0x80 | (c & 0x3f));
}

// Decomposed characters in, canonical order and composition as in Unicode Standard Annex 15, section 1.3.
void compose(std::vector<uint32_t>& text) {
    for (size_t begin = 0; begin < text.size();) {
        if (combining_class(text[begin]) == 0) {
            begin++;
            continue;
        }
        size_t end = begin;
        while (end < text.size() && combining_class(text[end]) != 0) end++;
        std::stable_sort(text.begin() + ptrdiff_t(begin), text.begin() + ptrdiff_t(end),
                         [](uint32_t a, uint32_t b) { return combining_class(a) < combining_class(b); });
        begin = end;
    }
    constexpr size_t kNone = SIZE_MAX;
    size_t starter = kNone, out = 0;
    int last_class = -1;  // of what stands between the starter and here; -1: nothing
    for (const uint32_t character : text) {
        const uint8_t its_class = combining_class(character);
        const bool is_blocked = last_class >= int(its_class);
        const uint32_t one = starter == kNone || is_blocked ? 0 : composed(text[starter], character);
        if (one) {
            text[starter] = one;
            continue;
        }
        if (its_class == 0) {
            starter = out;
            last_class = -1;
        } else {
            last_class = its_class;
        }
        text[out++] = character;
    }
    text.resize(out);
}

}  // namespace

// The characters that may be changed, or change what stands before them (NFC_Quick_Check is not Yes).
static std::vector<bool> unsettled_characters() {
    std::vector<bool> unsettled(0x110000);
    for (const Decomposition& d : kDecompositions) {
        if (!d.composes) unsettled[d.character] = true;
        if (d.composes) unsettled[d.second] = true;
    }
    for (const CombiningRun& run : kCombiningRuns)
        for (uint32_t i = 0; i < run.count; i++) unsettled[run.first + i] = true;
    for (uint32_t i = 0; i < kVowels; i++) unsettled[kVowel + i] = true;
    for (uint32_t i = 1; i < kTails; i++) unsettled[kTail + i] = true;
    return unsettled;
}

bool is_certainly_nfc(std::string_view text) {
    static const std::vector<bool> unsettled = unsettled_characters();
    for (size_t at = 0; at < text.size();) {
        if (uint8_t(text[at]) < 0xcc) {  // below U+0300 all characters are settled; or the rest of one
            at++;
            continue;
        }
        const size_t length = utf8_length(text.substr(at));
        if (length > 0 && unsettled[code_point(text.substr(at, length))]) return false;
        at += std::max<size_t>(length, 1);
    }
    return true;
}

std::string to_nfc(std::string_view text) {
    std::string out;
    std::vector<uint32_t> characters;
    auto flush = [&] {
        compose(characters);
        for (const uint32_t c : characters) append_utf8(c, out);
        characters.clear();
    };
    while (!text.empty()) {
        const size_t length = utf8_length(text);
        if (length == 0) {
            flush();
            out += text[0];
            text.remove_prefix(1);
            continue;
        }
        const uint32_t code = code_point(text.substr(0, length));
        if (code < 0x300) flush();  // a starter that nothing before it composes with
        decompose(code, characters);
        text.remove_prefix(length);
    }
    flush();
    return out;
}
