// What a test may tell the stand-in for NCCL: which of this process's calls goes wrong, and how.
//
// A test of a whole program says it by the environment: STAND_IN_NCCL="ACTION CALL RANK".
#pragma once

#include <string>

namespace simt {

struct NcclPlan {
    // fail, remote   the call returns ncclSystemError, ncclRemoteError
    // no_interface   it returns what NCCL 2.28 returns on a machine without a network interface
    // late           it returns ncclInProgress and fails when it is asked about
    // hang           it stays in progress
    // stall          it is taken in, and never ends on the device
    // break          the same, and once it has been taken in who asks hears of ncclRemoteError
    // mismatch       it has one element more than this rank asked for
    std::string action;
    int call = 0;  // 1, 2, ... among calls that can fail, but for ncclCommGetAsyncError and ncclCommAbort
    int rank = 0;
    bool is_done = false;
};

NcclPlan& nccl_plan();
int nccl_calls();  // so far
int nccl_comms();  // that are neither destroyed nor aborted

}  // namespace simt
