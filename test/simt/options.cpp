#include "test/simt/options.h"

namespace simt {

Options& options() {
    static Options instance;
    return instance;
}

uint32_t random_below(uint32_t end) {
    static uint64_t state = 0, seed_of_state = 0;
    if (seed_of_state != options().seed) state = (seed_of_state = options().seed) * 77 + 5;
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return uint32_t((state >> 33) % end);
}

}  // namespace simt
