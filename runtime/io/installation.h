// Where the program and its files are.
#pragma once

#include <string>

// The path of the running program, or "" if unknown, and its directory, or ".".
std::string program_path();
std::string program_directory();

// The path as a user would type it: relative if it is below the current directory, else absolute.
std::string command_path(const std::string& path);

// A directory of data files of the program: PREFIX/share/train_gpt/NAME if `make install` put the program in
// PREFIX/bin, else data/NAME of the repository that contains the build directory.
std::string data_directory(const std::string& name);
