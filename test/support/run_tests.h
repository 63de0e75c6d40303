// Catch2's runner. Version 2 takes half a minute to compile, so all test programs share this file.
#pragma once

// Runs the test cases selected on the command line. Returns main()'s exit code: 0 if all passed.
int run_tests(int argc, char** argv);
