// Unicode normalization form C (NFC, Unicode Standard Annex 15), which Qwen's tokenizers require.
#pragma once

#include <string>
#include <string_view>

// Returns the text with all valid UTF-8 in NFC. Other bytes are unchanged.
std::string to_nfc(std::string_view text);

// Returns true only if to_nfc() does not change the text. A fast check per character, which may return false for text
// in NFC.
bool is_certainly_nfc(std::string_view text);
