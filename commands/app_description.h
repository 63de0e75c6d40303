// Shell completion and the man page, both generated from the options that CLI11 knows, the table of configuration keys
// and the table of exit codes.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

inline const std::vector<std::string> kCompletionShells = {"bash", "zsh", "fish"};

// The completion script for a shell of kCompletionShells. The script calls train_gpt --complete.
std::string completion_script(const std::string& shell);

// The completions of the last of `words`; the others are the arguments before it. Each line is "word<TAB>help", or
// ":files PATTERN" for the names of matching files. Implements --complete WORD..., which the scripts call.
std::string completions(const CLI::App& app, const std::vector<std::string>& words);

// The man page, as roff for man(7). `version` is the program's, e.g. "0.1.0 (f9419f7e0b12, 2026-11-22)".
std::string man_page(const CLI::App& app, const std::string& version);
