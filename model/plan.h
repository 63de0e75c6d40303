// The memory plan of a rank, made before anything is allocated.
#pragma once

#include "model/gpt.h"

// Bytes that Gpt allocates on the device: its one allocation.
size_t planned_bytes(const GptOptions& options);

// Fails with Exit::os, the plan's table and the keys that would make it smaller, if the device has less memory free
// than the plan needs.
void check_fits(const GptOptions& options);

// A table for the terminal: bytes by category and by buffer, the total, the number of parameters.
std::string plan_table(const GptOptions& options);
