// The fuzzer: build/fuzz PARSER [options of libFuzzer] [corpora].
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "test/fuzz/parsers.h"

static const Parser*& chosen() {
    static const Parser* parser = nullptr;
    return parser;
}

// Takes the parser's name from the command line, whose other arguments are libFuzzer's.
extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
    chosen() = *argc > 1 ? find_parser((*argv)[1]) : nullptr;
    if (!chosen()) {
        std::fprintf(stderr, "usage: %s PARSER [options of libFuzzer] [corpora]; the parsers are", (*argv)[0]);
        for (const Parser& parser : parsers()) std::fprintf(stderr, " %s", parser.name);
        std::fprintf(stderr, "\n");
        std::exit(64);
    }
    (*argv)[1] = (*argv)[0];
    ++*argv;
    --*argc;
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::string wrong = finding(*chosen(), {reinterpret_cast<const char*>(data), size});
    if (!wrong.empty()) {
        std::fprintf(stderr, "%s: %s\n", chosen()->name, wrong.c_str());
        std::abort();
    }
    return 0;
}
