// Unicode's normalization form C, which Qwen's tokenizers ask for (Unicode Standard Annex 15).
#pragma once

#include <string>
#include <string_view>

// The text with every run of valid UTF-8 in normalization form C; other bytes stay as they are.
std::string to_nfc(std::string_view text);

// Whether to_nfc() gives the text back, as far as a look at each character tells; never true wrongly.
bool is_certainly_nfc(std::string_view text);
