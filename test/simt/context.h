// Stacks and the switch between them.
#pragma once

#include <cstddef>

namespace simt {

inline constexpr size_t kStackBytes = 256 * 1024;

// A stack above a guard page. Freed with free_stack().
char* allocate_stack();
void free_stack(char* stack);

// The stack pointer with which switch_stack() enters `entry` on a new stack.
void* first_frame(char* stack, void (*entry)());

// Saves the current context in *from and continues where `to` was saved.
extern "C" void simt_switch_stack(void** from, void* to);

}  // namespace simt
