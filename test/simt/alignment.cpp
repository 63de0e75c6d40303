// Handles the sanitizer's calls, because kernels are compiled with -fsanitize=alignment even without its library.

#include "test/simt/machine.h"

namespace {

// The layout that GCC and Clang use for the call.
struct SourceLocation {
    const char* file;
    uint32_t line, column;
};
struct TypeDescriptor {
    uint16_t kind, info;
    char name[1];
};
struct TypeMismatch {
    SourceLocation location;
    const TypeDescriptor* type;
    unsigned char log_alignment, access;
};

void report(const TypeMismatch* mismatch, uintptr_t address) {
    simt::Quiet quiet;
    const unsigned alignment = 1u << mismatch->log_alignment;
    const char* wrong = address == 0 ? "null" : "misaligned";
    simt::note_fault(format("%s access: %s at address 0x%zx needs an alignment of %u (%s:%u)", wrong,
                            mismatch->type->name, address, alignment, mismatch->location.file,
                            mismatch->location.line));
}

}  // namespace

extern "C" void __ubsan_handle_type_mismatch_v1(void* mismatch, uintptr_t address) {
    report(static_cast<const TypeMismatch*>(mismatch), address);
}
extern "C" void __ubsan_handle_type_mismatch_v1_abort(void* mismatch, uintptr_t address) {
    report(static_cast<const TypeMismatch*>(mismatch), address);
}
