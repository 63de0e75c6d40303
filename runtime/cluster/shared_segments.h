// The shared memory of Open MPI's ranks on one machine, which killed ranks do not remove.
#pragma once

#include "runtime/io/files.h"

// Creates a directory in /dev/shm for the segments of ranks that are started while this object exists, and removes it
// at the end. If the directory cannot be created, or the user has chosen another one
// (OMPI_MCA_btl_vader_backing_directory, in Open MPI 5 OMPI_MCA_btl_sm_backing_directory), Open MPI's choice stays.
class SharedSegments {
public:
    SharedSegments();
    ~SharedSegments();
    SharedSegments(const SharedSegments&) = delete;

private:
    std::string path_;  // empty: there is none
    FileDescriptor lock_;
};

// Removes such directories of this user whose process was killed and so no longer holds the lock.
void remove_abandoned_segments();
