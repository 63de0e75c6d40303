// The numbers that Gpt::end_step() sums over the ranks for a training run.
#pragma once

// kStop > 0: a rank was asked to stop. kEnd: the last step according to train.max_minutes and rank 0's clock, 0 while
// undecided. kPower: watts of the ranks' GPUs. kThrottled: ranks with GPUs throttled by heat or power. kLost > 0:
// run.dir was moved or removed. kSave...: the state of the save in progress. kFailed: ranks that cannot continue after
// this step. kNoise: Gpt::first_norm_squared().
enum Vote { kStop, kEnd, kPower, kThrottled, kLost, kSaveUnfinished, kSaveFailed, kSaveCommitted, kFailed, kNoise };
inline constexpr int kVotes = kNoise + 1;
