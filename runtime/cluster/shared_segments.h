// The shared memory of Open MPI's ranks on one machine, which those that are killed leave behind.
#pragma once

#include "runtime/io/io.h"

// A directory in /dev/shm that lives as long as this object, for the segments of ranks that are started meanwhile. If
// it cannot be made, or if the user has chosen another one (OMPI_MCA_btl_vader_backing_directory, in Open MPI 5
// OMPI_MCA_btl_sm_backing_directory), Open MPI's choice stays. Removes such directories of this user whose process was
// killed: it no longer holds the lock.
class SharedSegments {
public:
    SharedSegments();
    ~SharedSegments();
    SharedSegments(const SharedSegments&) = delete;

    void clear() const;  // when the ranks have ended

private:
    std::string path_;  // empty: there is none
    FileDescriptor lock_;
};
