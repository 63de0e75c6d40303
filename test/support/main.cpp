// main() of every test program except the simulated GPU's.
#include "test/support/run_tests.h"

int main(int argc, char** argv) { return run_tests(argc, argv); }
