// The fuzzer: one program with all parsers.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime/io/files.h"
#include "test/fuzz/mutations.h"
#include "test/fuzz/parsers.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

static const Parser*& chosen() {
    static const Parser* parser = nullptr;
    return parser;
}

// Inputs that are read without an error. libFuzzer mutates such inputs less often the more it finds.
static const std::vector<std::string>& seeds() {
    static const std::vector<std::string> list = [] {
        const std::string directory = std::string("test/fuzz/corpus/") + chosen()->name;
        std::vector<std::string> read;
        if (directory_exists(directory))
            for (const std::string& name : list_directory(directory))
                if (name.starts_with("seed_")) read.push_back(read_file(directory + "/" + name));
        return read;
    }();
    return list;
}

// The parser's name is the last argument and is kept: libFuzzer restarts itself with its arguments when it merges.
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

// libFuzzer makes three of eight mutations itself, and six of eight for inputs that are not JSON.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
    Random random(seed);
    if (!seeds().empty() && random() % 8 == 0) {
        const std::string& seed_input = seeds()[random() % seeds().size()];
        size = std::min(seed_input.size(), max_size);
        std::memcpy(data, seed_input.data(), size);
    }
    const std::string_view input{reinterpret_cast<const char*>(data), size};
    std::optional<std::string> changed;
    switch (random() % 8) {
        case 0:
        case 1:
        case 2: changed = with_changed_json(input, std::string_view(chosen()->name) == "safetensors", random); break;
        case 3: changed = with_changed_end(input, random); break;
        case 4: changed = with_changed_number(input, random); break;
    }
    if (!changed || changed->size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
    std::memcpy(data, changed->data(), changed->size());
    return changed->size();
}
