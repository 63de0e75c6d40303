#include "test/simt/options.h"

#include <cstdlib>
#include <string>

namespace simt {

// A trainer has no command line options for the simulator.
static Options from_environment() {
    Options given;
    if (const char* seed = std::getenv("SIMULATED_SEED")) given.seed = std::stoull(seed);
    return given;
}

Options& options() {
    static Options instance = from_environment();
    return instance;
}

uint32_t random_below(uint32_t end) {
    static uint64_t state = 0, seed_of_state = 0;
    if (seed_of_state != options().seed) state = (seed_of_state = options().seed) * 77 + 5;
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return uint32_t((state >> 33) % end);
}

}  // namespace simt
