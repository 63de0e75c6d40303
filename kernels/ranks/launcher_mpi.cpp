// mpirun does not pass rank 0's address, so GPU ranks started by it receive the address through MPI: initialize MPI,
// broadcast one message, finalize MPI. Nothing later depends on MPI.
#include "kernels/base/check.h"
#include "kernels/comm.h"
#include "kernels/ranks/mpi_text.h"

static std::string share(const std::string& mine) {
    int size = 0;
    check_mpi(MPI_Init(nullptr, nullptr), "MPI_Init");
    check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size), "MPI_Comm_size");
    if (size == 1)
        fail(Exit::config,
             "the launcher started several ranks, but MPI sees only one: start them with the mpirun of the MPI library "
             "that this program was built with (%s), or set MASTER_ADDR and MASTER_PORT",
             launcher_library());
    const std::string text = share_text(mine, [](void* data, size_t bytes) {
        check_mpi(MPI_Bcast(data, int(bytes), MPI_BYTE, 0, MPI_COMM_WORLD), "MPI_Bcast");
    });
    check_mpi(MPI_Finalize(), "MPI_Finalize");
    return text;
}

std::function<std::string(const std::string& mine)> launcher_share(const Comm&) { return share; }

std::string launcher_library() { return mpi_library(); }
