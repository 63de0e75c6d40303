// How every part of the program reports a mistake: one exception that carries an exit code and a sentence.
//
// main() prints the sentence on stderr and exits with the code; nothing else prints errors or calls exit().
#pragma once

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

// Exit codes of the program: sysexits.h's where it has one, our own from 75 on (75 means "start me again").
enum class Exit : int {
    ok = 0,
    usage = 64,          // the command line is wrong
    data = 65,           // a file's content is wrong
    no_input = 66,       // a file that was asked for is not there
    internal = 70,       // a broken promise inside the program: a bug
    os = 71,             // the system refused something: memory, a thread
    cannot_create = 73,  // an output could not be made
    io = 74,             // reading or writing failed half-way, disk full included
    again = 75,          // stopped by a signal, checkpoint committed: requeue
    peer_lost = 76,      // another rank died
    permission = 77,
    config = 78,      // the configuration is wrong: do not requeue
    non_finite = 79,  // the loss or the gradients stayed non-finite
    hang = 80,        // a wait reached its deadline
    corruption = 81,  // silent data corruption suspected
};

struct Error : std::runtime_error {
    Exit code;
    Error(Exit exit_code, const std::string& sentence) : std::runtime_error(sentence), code(exit_code) {}
};

// printf into a std::string.
[[gnu::format(printf, 1, 2)]] inline std::string format(const char* pattern, ...) {
    va_list args, again;
    va_start(args, pattern);
    va_copy(again, args);
    std::string text(static_cast<size_t>(std::vsnprintf(nullptr, 0, pattern, args)), '\0');
    std::vsnprintf(text.data(), text.size() + 1, pattern, again);
    va_end(args);
    va_end(again);
    return text;
}

// An argument of fail() and require() as printf takes it: their patterns print a std::string by %s.
template <class T> const T& printf_argument(const T& value) { return value; }
inline const char* printf_argument(const std::string& text) { return text.c_str(); }

// Ends the current action with a sentence that names the file, the key and the numbers.
template <class... Args> [[noreturn]] void fail(Exit code, const char* pattern, const Args&... args) {
    if constexpr (sizeof...(args) == 0)
        throw Error(code, pattern);
    else
        throw Error(code, format(pattern, printf_argument(args)...));
}

// A promise between parts of the program: `require(cols % 8 == 0, "norm: cols must be a multiple of 8, is %d", cols)`.
// What a user can get wrong is reported with fail() and the fitting exit code instead.
template <class... Args> void require(bool condition, const char* pattern, const Args&... args) {
    if (!condition) fail(Exit::internal, pattern, args...);
}
