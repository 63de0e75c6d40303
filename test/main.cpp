// The tests' main() comes from Catch2: version 2 makes it here, version 3 has it in its library and ignores the define.
#define CATCH_CONFIG_MAIN
#include "test/catch.h"
