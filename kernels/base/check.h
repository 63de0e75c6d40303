// Error reporting for the whole program: one exception with an exit code and a message.
//
// main() prints the message on stderr and exits with the code; nothing else prints errors or calls exit().
#pragma once

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <type_traits>

// Exit codes of the program, taken from sysexits.h if it has a suitable one. kExitCodes gives their meaning.
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

// The meaning of an exit code and whether the run is restarted after it. kExitCodes is the only list: RestartPolicy and
// `train_gpt --exit-codes` read it, and tests compare scripts/train.kubernetes.yaml and the documentation with it.
// 128 + N (signal N killed a rank) counts as `restart`, except for SIGINT and SIGTERM from the user (130 and 143).
struct ExitCode {
    Exit code;
    const char* name;
    // final: no restart, it would fail again; restart: until three restarts in a row commit no checkpoint.
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

// Checks an internal contract: `require(cols % 8 == 0, "norm: cols must be a multiple of 8, is %d", cols)`. Report user
// errors with fail() and the matching exit code instead.
template <class... Args> void require(bool condition, const char* pattern, const Args&... args) {
    if (!condition) fail(Exit::internal, pattern, args...);
}
