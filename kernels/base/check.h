// Error reporting of the whole program: one exception that carries an exit code and a message.
//
// main() prints the message on stderr and exits with the code; nothing else prints errors or calls exit().
#pragma once

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <type_traits>

// Exit codes of the program, from sysexits.h where it has a fitting one. kExitCodes says what they mean.
enum class Exit : int {
    ok = 0,
    usage = 64,
    data = 65,
    no_input = 66,
    internal = 70,
    os = 71,
    cannot_create = 73,
    io = 74,
    again = 75,
    peer_lost = 76,
    permission = 77,
    config = 78,
    non_finite = 79,
    hang = 80,
    corruption = 81,
};

// What an exit code means, and whether the run is started again after it. kExitCodes is the only list of this:
// RestartPolicy and `train_gpt --exit-codes` read it, and tests compare scripts/train.kubernetes.yaml and the
// documentation with it. 128 + N, the death of a rank by signal N, is as `restart`, but for a user's SIGINT and SIGTERM
// (130 and 143).
struct ExitCode {
    Exit code;
    const char* name;
    // final: no, the next start would end the same way; restart: yes, until three restarts in a row commit no
    // checkpoint.
    const char* policy;
    const char* meaning;
};

inline constexpr ExitCode kExitCodes[] = {
    {Exit::ok, "ok", "final", "done"},
    {Exit::usage, "usage", "final", "the command line is wrong"},
    {Exit::data, "data", "final", "the content of a file is wrong"},
    {Exit::no_input, "no_input", "final", "a file, or a checkpoint to resume from, is missing"},
    {Exit::internal, "internal", "final", "internal error: please report it"},
    {Exit::os, "os", "restart", "the system refused memory or a thread"},
    {Exit::cannot_create, "cannot_create", "final", "an output cannot be created"},
    {Exit::io, "io", "restart", "reading or writing failed, disk full included"},
    {Exit::again, "again", "restart", "stopped by a signal, checkpoint committed"},
    {Exit::peer_lost, "peer_lost", "restart", "another rank died or ended with an error"},
    {Exit::permission, "permission", "final", "permission denied"},
    {Exit::config, "config", "final", "the configuration is wrong"},
    {Exit::non_finite, "non_finite", "final", "training diverged: gradients stayed non-finite, or the loss is a spike"},
    {Exit::hang, "hang", "restart", "a rank hung or did not join"},
    {Exit::corruption, "corruption", "final", "silent data corruption is suspected"},
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

// Converts an argument of fail() or require() for printf, so that %s accepts a std::string.
template <class T> const T& printf_argument(const T& value) {
    static_assert(!std::is_class_v<T>, "printf prints numbers and characters");
    return value;
}
inline const char* printf_argument(const std::string& text) { return text.c_str(); }

// Throws Error. The message names the file, the key and the numbers.
template <class... Args> [[noreturn]] void fail(Exit code, const char* pattern, const Args&... args) {
    if constexpr (sizeof...(args) == 0)
        throw Error(code, pattern);
    else
        throw Error(code, format(pattern, printf_argument(args)...));
}

// An internal contract: `require(cols % 8 == 0, "norm: cols must be a multiple of 8, is %d", cols)`. Errors of the user
// are reported with fail() and the fitting exit code instead.
template <class... Args> void require(bool condition, const char* pattern, const Args&... args) {
    if (!condition) fail(Exit::internal, pattern, args...);
}
