// MPI's version and error messages as text.
#pragma once

#include <mpi.h>

#include <string>

inline std::string mpi_error(int code) {
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    return {text, size_t(length)};
}

// "Open MPI v4.1.4". Needs no MPI_Init.
inline std::string mpi_library() {
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    MPI_Get_library_version(text, &length);
    const std::string version(text, size_t(length));
    return version.substr(0, version.find_first_of(",\n"));
}
