// This process: its exit status, output, signals, clocks and memory.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "kernels/base/check.h"

// Escapes control characters for the terminal, like \x1b; keeps newlines and tabs. Names of files, arguments and keys
// may contain control characters that move the cursor or change colors.
std::string printable_text(std::string_view message);

// Returns the exit status for main(): the result of `body`, or the exit code of an exception, whose message is printed
// on stderr after the program's name.
int exit_status(const char* program, const std::function<Exit()>& body);

// Flushes standard output. Fails with Exit::io, giving the reason, if any output could not be written.
void flush_output();

// Installs the signal handlers. The first SIGINT, SIGTERM, SIGUSR1 or SIGUSR2 only sets a flag, which the trainer reads
// between steps to save and exit with Exit::again. (mpirun forwards SIGUSR1 and SIGUSR2 to the ranks; on SIGTERM it
// soon kills them.) A second signal, if it is SIGINT or SIGTERM, exits immediately with 128 + its number, as shells
// report it; this is safe, since committed files are never open for writing. SIGHUP, SIGPIPE and SIGXFSZ are ignored,
// so that a closed terminal, a closed pipe and a file size limit are write errors and do not kill the process. With
// `notice`, the first signal prints on stderr that the run stops after this step, and how to stop it immediately.
void install_signal_handlers(bool notice = false);

// The first signal received that requests a stop, or 0.
int stop_signal();

// Raises the limit of open files, up to the hard limit, so that `count` more can be open. Never lowers it.
void allow_open_files(size_t count);

// Seconds since 1970 (UTC), including the fraction.
double unix_time();

// Milliseconds of a monotonic clock with an arbitrary origin, for time differences.
double now_ms();

// Resident bytes of this process, including the program and its libraries; 0 if unknown.
size_t resident_bytes();

// The name of this machine; "?" if unknown.
std::string host_name();

// Returns `bytes` random bytes from the system's cryptographic generator as 2 * `bytes` lower-case hexadecimal digits.
// Fails with Exit::os if the system has none.
std::string random_hex(size_t bytes);
