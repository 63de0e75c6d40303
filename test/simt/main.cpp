// The test program's main(): takes the simulator's options from the command line and passes the others to Catch2.
//
//   --seed N          random orders from a seed instead of the fixed adversarial order
//   --strict-proxy    asynchronous units see shared memory as of the last fence.proxy.async
//   --capability N    ten times the compute capability, 90 by default; it also limits the shared memory of a block
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "test/simt/fault.h"
#include "test/simt/options.h"
#include "test/simt/reports.h"
#include "test/support/run_tests.h"

int main(int argc, char** argv) {
    std::vector<char*> others;
    for (int i = 0; i < argc; i++) {
        if (!std::strcmp(argv[i], "--strict-proxy"))
            simt::options().strict_proxy = true;
        else if (!std::strcmp(argv[i], "--seed") && i + 1 < argc)
            simt::options().seed = std::strtoull(argv[++i], nullptr, 10);
        else if (!std::strcmp(argv[i], "--capability") && i + 1 < argc)
            simt::options() = simt::with_capability(std::atoi(argv[++i]));
        else
            others.push_back(argv[i]);
    }
    simt::count_sanitizer_reports();
    int failed = run_tests(int(others.size()), others.data());
    for (const simt::Fault& fault : simt::take_faults()) {  // of work that was never waited for
        std::fprintf(stderr, "%s\n", fault.sentence().c_str());
        failed++;
    }
    return failed ? 1 : 0;
}
