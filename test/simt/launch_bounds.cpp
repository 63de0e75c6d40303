#include "test/simt/launch_bounds.h"

#include <algorithm>

#include "test/simt/machine.h"

// The linker's list of the places of the no-operations that __launch_bounds__'s attribute inserts.
extern "C" {
[[gnu::weak]] extern const unsigned char* const __start___patchable_function_entries[];
[[gnu::weak]] extern const unsigned char* const __stop___patchable_function_entries[];
}

namespace simt {

int launch_bound(const void* kernel) {
    constexpr unsigned char kNoOperation = 0x90;
    const auto* entry = static_cast<const unsigned char*>(kernel);
    const auto *first = __start___patchable_function_entries, *last = __stop___patchable_function_entries;
    for (; first < last; first++)
        if (*first < entry && entry - *first <= kMaxThreads &&
            std::all_of(*first, entry, [](unsigned char byte) { return byte == kNoOperation; }))
            return int(entry - *first);
    return kMaxThreads;
}

}  // namespace simt
