// The fuzzer: one program for all parsers.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "test/fuzz/parsers.h"

static const Parser*& chosen() {
    static const Parser* parser = nullptr;
    return parser;
}

// The parser's name is the last argument, and stays: libFuzzer starts itself again with its arguments when it merges.
extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
    chosen() = find_parser((*argv)[*argc - 1]);
    if (chosen()) return 0;
    std::fprintf(stderr, "usage: %s [options of libFuzzer] [corpora] -ignore_remaining_args=1 PARSER; the parsers are",
                 (*argv)[0]);
    for (const Parser& parser : parsers()) std::fprintf(stderr, " %s", parser.name);
    std::fprintf(stderr, "\n");
    std::exit(64);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::string wrong = finding(*chosen(), {reinterpret_cast<const char*>(data), size});
    if (!wrong.empty()) {
        std::fprintf(stderr, "%s: %s\n", chosen()->name, wrong.c_str());
        std::abort();
    }
    return 0;
}
