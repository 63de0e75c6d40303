#include "test/simt/context.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#include "test/simt/sanitizers.h"

// Saves the registers that a call must preserve. The two floating-point control words are not saved: no kernel changes
// them.
asm(R"(
.text
.globl simt_switch_stack
.type simt_switch_stack, @function
simt_switch_stack:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size simt_switch_stack, .-simt_switch_stack
)");

namespace simt {

static constexpr size_t kGuardBytes = 4096;

// Bypasses the C library: ThreadSanitizer would immediately clear its shadow of each stack, which is slow.
char* allocate_stack() {
    const long mapped = syscall(SYS_mmap, nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == -1) throw std::bad_alloc();
    syscall(SYS_mprotect, mapped, kGuardBytes, PROT_NONE);
    return reinterpret_cast<char*>(mapped) + kGuardBytes;
}

void free_stack(char* stack) {
    unpoison(stack, kStackBytes);
    syscall(SYS_munmap, stack - kGuardBytes, kGuardBytes + kStackBytes);
}

void* first_frame(char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + kStackBytes);
    *--top = nullptr;  // the return address of entry(); also aligns the stack like a call
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; saved++) *--top = nullptr;
    return top;
}

}  // namespace simt
