// The numbers that Gpt::end_step() sums over the ranks for a training run.
#pragma once

#include "kernels/base/grid.h"

// kStop > 0: a rank was asked to stop. kEnd: the last step according to train.max_minutes and rank 0's clock, 0 while
// undecided. kPower: watts of the ranks' GPUs. kThrottled: ranks with GPUs throttled by heat or power. kLost > 0:
// run.dir was moved or removed. kSave...: the state of the save in progress. kFailed: ranks that cannot continue after
// this step. kNoise: Gpt::first_norm_squared().
enum Vote { kStop, kEnd, kPower, kThrottled, kLost, kSaveUnfinished, kSaveFailed, kSaveCommitted, kFailed, kNoise };
inline constexpr int kVotes = kNoise + 1;
// With several ranks, as many votes follow: each rank's own is TrainingRun::compute_ms, and it leaves the others 0. So
// the sums are the times of all ranks, without a further collective.
inline int vote_count(const Grid& grid) { return kVotes + (grid.size() > 1 ? grid.size() : 0); }
