// Locates the program's data files, relative to the program.
#include "runtime/io/installation.h"

#include "runtime/io/files.h"

std::string data_directory(const std::string& name) {
    const std::string installed = program_directory() + "/../share/train_gpt";
    return (directory_exists(installed) ? installed : program_directory() + "/../data") + "/" + name;
}
