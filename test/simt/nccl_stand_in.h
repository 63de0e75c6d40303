// Faults of the stand-in for NCCL, for tests: which of this process's calls fails, and how.
//
// Tests of a whole program use the environment: STAND_IN_NCCL="ACTION CALL RANK".
#pragma once

#include <string>

namespace simt {

struct NcclPlan {
    // fail, remote   the call returns ncclSystemError, ncclRemoteError
    // no_interface   it returns NCCL 2.28's error on a machine without a network interface
    // late           it returns ncclInProgress and fails when it is polled
    // hang           it stays in progress
    // stall          it is accepted, and never ends on the device
    // break          the same, and after it is accepted polling returns ncclRemoteError
    // mismatch       it has one element more than this rank requested
    std::string action;
    int call = 0;  // 1, 2, ... among calls that can fail, except ncclCommGetAsyncError and ncclCommAbort
    int rank = 0;  // in the process's first communicator
    bool is_done = false;
};

NcclPlan& nccl_plan();
int nccl_calls();  // so far
int nccl_comms();  // neither destroyed nor aborted

}  // namespace simt
