// A hook for tests that change memory while a kernel runs.
#pragma once

#include <functional>

namespace simt {

// Called when all lanes of a warp have arrived at a shuffle, before the first of them continues.
std::function<void()>& after_meeting();

}  // namespace simt
