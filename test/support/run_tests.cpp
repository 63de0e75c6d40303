#define CATCH_CONFIG_RUNNER
#include "test/support/run_tests.h"

#include "test/support/catch.h"

int run_tests(int argc, char** argv) { return Catch::Session().run(argc, argv); }
