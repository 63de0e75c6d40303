// This process as the system sees it.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "kernels/check.h"

// What main() returns: body's result; or what it threw, which is told on stderr after the program's name.
int exit_status(const char* program, const std::function<Exit()>& body);

// Milliseconds since some moment, by a clock that never goes back: for differences.
double now_ms();

// Bytes of memory that are resident now, the program and its libraries included. 0 where the system does not say.
size_t resident_bytes();

// The running program's file; empty where the system does not say.
std::string program_path();

// The directory that the running program's file lies in; "." where the system does not say.
std::string program_directory();
