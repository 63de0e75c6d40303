// MPI's version, its error messages, and the broadcast of a text.
#pragma once

#include <mpi.h>

#include "kernels/base/check.h"

inline void check_mpi(int code, const char* what) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    MPI_Error_string(code, text, &length);
    fail(Exit::peer_lost, "MPI error in %s: %s", what, text);
}

// Returns rank 0's text on every rank. `broadcast(data, bytes)` broadcasts rank 0's bytes.
template <class Broadcast> std::string share_text(const std::string& mine, Broadcast broadcast) {
    size_t length = mine.size();
    broadcast(&length, sizeof length);
    std::string text = mine;
    text.resize(length);
    broadcast(text.data(), length);
    return text;
}

// "Open MPI v4.1.4". Needs no MPI_Init.
inline std::string mpi_library() {
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    MPI_Get_library_version(text, &length);
    const std::string version(text, size_t(length));
    return version.substr(0, version.find_first_of(",\n"));
}
