#include "test/simt/memory_fault.h"

#include <ucontext.h>

#include <cstdlib>

#include "test/simt/device_memory.h"
#include "test/simt/machine.h"

namespace simt {

namespace {

// The compiler may keep values in the 128 bytes below a stack pointer.
constexpr uintptr_t kRedZoneBytes = 128;
constexpr size_t kSignalStackBytes = 64 * 1024;

uintptr_t& bad_address() {
    static uintptr_t address = 0;
    return address;
}

// Execution continues here on the thread's own stack after the signal handler has returned.
void landing() {
    {
        Quiet quiet;
        note_fault(describe_address(bad_address()));
    }
    stop_broken_thread();
    std::abort();  // a broken thread is never resumed
}

void handler(int signal, siginfo_t* info, void* context) {
    Machine& m = machine();
    if (!m.me) {  // the host's own fault: handled as usual
        struct sigaction usual = {};
        usual.sa_handler = SIG_DFL;
        sigaction(signal, &usual, nullptr);
        return;
    }
    bad_address() = reinterpret_cast<uintptr_t>(info->si_addr);
    auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    uintptr_t sp = (uintptr_t(registers[REG_RSP]) - kRedZoneBytes) & ~uintptr_t(15);
    registers[REG_RSP] = greg_t(sp - 8);
    registers[REG_RIP] = greg_t(reinterpret_cast<uintptr_t>(&landing));
}

}  // namespace

static constexpr int kSignals[] = {SIGSEGV, SIGBUS};

MemoryFaultHandler::MemoryFaultHandler() {
    // The handler needs its own stack, because an overflowing stack has no room for it.
    static char* const own_stack = static_cast<char*>(std::malloc(kSignalStackBytes));
    stack_t stack = {};
    sigaltstack(nullptr, &stack);
    if (stack.ss_flags & SS_DISABLE) {
        stack = {};
        stack.ss_size = kSignalStackBytes;
        stack.ss_sp = own_stack;
        sigaltstack(&stack, nullptr);
    }
    struct sigaction action = {};
    action.sa_sigaction = handler;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 2; i++) sigaction(kSignals[i], &action, &before_[i]);
}

MemoryFaultHandler::~MemoryFaultHandler() {
    for (int i = 0; i < 2; i++) sigaction(kSignals[i], &before_[i], nullptr);
}

}  // namespace simt
