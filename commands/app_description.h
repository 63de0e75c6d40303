// What the program says about its own command line, to shells and to man: all of it is derived from the options that
// CLI11 knows, the table of configuration keys and the table of exit codes.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

inline const std::vector<std::string> kCompletionShells = {"bash", "zsh", "fish"};

// The script that makes a shell of kCompletionShells complete train_gpt's arguments, with the help of --complete.
std::string completion_script(const std::string& shell);

// What the last of `words` may become; the ones before it are the arguments so far. A line is "word<TAB>help" or
// ":files PATTERN", for the names of files that match. This is what the scripts ask for with --complete WORD...
std::string completions(const CLI::App& app, const std::vector<std::string>& words);

// The manual page in man(7)'s language. `version` is the program's, like "0.1.0 (f9419f7e0b12, 2026-11-22)".
std::string man_page(const CLI::App& app, const std::string& version);
