// A program compiled for a newer CPU dies of an illegal instruction at some point, possibly before main(). This check
// runs before any other code of the program and names the missing CPU feature instead. It is compiled without the
// registers and instructions that it checks for, and makes only system calls.
#include <unistd.h>

#include "kernels/base/check.h"

// The compiler predefines the macro of a feature in use as 1; an undefined macro expands to its own name.
#define TEXT_OF(macro) #macro
#define IS_USED(macro) (TEXT_OF(macro)[0] == '1')
#define REQUIRE_FEATURE(macro, name) \
    if (IS_USED(macro) && !__builtin_cpu_supports(name)) end_without(name)
#define BASELINE \
    __attribute__((target("general-regs-only,no-bmi,no-bmi2"), noinline, no_sanitize("address", "thread", "undefined")))

namespace {

BASELINE void print(const char* text) {
    size_t length = 0;
    while (text[length]) length++;
    if (::write(STDERR_FILENO, text, length) < 0) return;
}

[[noreturn]] BASELINE void end_without(const char* feature) {
    print("train_gpt: this program was compiled for CPUs with ");
    print(feature);
    print(", which this CPU does not have; build it on this machine with `make`\n");
    ::_exit(int(Exit::os));
}

BASELINE void require_cpu_features(int, char**, char**) {
    __builtin_cpu_init();
    REQUIRE_FEATURE(__SSE4_2__, "sse4.2");
    REQUIRE_FEATURE(__POPCNT__, "popcnt");
    REQUIRE_FEATURE(__AVX__, "avx");
    REQUIRE_FEATURE(__AVX2__, "avx2");
    REQUIRE_FEATURE(__FMA__, "fma");
    REQUIRE_FEATURE(__BMI__, "bmi");
    REQUIRE_FEATURE(__BMI2__, "bmi2");
    REQUIRE_FEATURE(__AVX512F__, "avx512f");
    REQUIRE_FEATURE(__AVX512CD__, "avx512cd");
    REQUIRE_FEATURE(__AVX512BW__, "avx512bw");
    REQUIRE_FEATURE(__AVX512DQ__, "avx512dq");
    REQUIRE_FEATURE(__AVX512VL__, "avx512vl");
    REQUIRE_FEATURE(__AVX512BF16__, "avx512bf16");
}

// Called before constructors; the linker keeps this section although no code refers to it.
__attribute__((section(".preinit_array"), used)) void (*const before_constructors)(int, char**,
                                                                                   char**) = require_cpu_features;

}  // namespace
