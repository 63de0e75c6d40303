#define CATCH_CONFIG_RUNNER
#include "test/run_tests.h"

#include "test/catch.h"

int run_tests(int argc, char** argv) { return Catch::Session().run(argc, argv); }
