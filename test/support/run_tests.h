// Catch2's runner. Version 2 is compiled with it, in half a minute: once, for all test programs.
#pragma once

// Runs the program's cases as its command line tells Catch2. Returns main()'s exit code: 0 if all passed.
int run_tests(int argc, char** argv);
