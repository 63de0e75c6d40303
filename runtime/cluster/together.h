// What one rank does for all of them.
#pragma once

#include <exception>

#include "kernels/check.h"
#include "kernels/comm.h"

// Rank 0 does `part`. If it fails there it fails everywhere, with the same exit code; rank 0 says what was wrong.
template <class Part> void on_rank_0(const Comm& comm, const char* action, Part part) {
    std::exception_ptr error;
    int code = 0;
    if (comm.rank == 0) {
        try {
            part();
        } catch (const Error& e) {
            error = std::current_exception();
            code = int(e.code);
        } catch (...) {
            error = std::current_exception();
            code = int(Exit::internal);
        }
    }
    code = all_reduce_max(code, comm);
    if (error) std::rethrow_exception(error);
    if (code != 0) fail(Exit(code), "rank %d ends because rank 0 could not %s", comm.rank, action);
}
