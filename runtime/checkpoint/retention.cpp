#include "runtime/checkpoint/retention.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "kernels/check.h"

namespace {

// Steps of this run that can be loaded and are healthy or not, as asked; the newest first.
std::vector<int64_t> newest_first(const std::vector<StoredCheckpoint>& stored, const std::string& run_id,
                                  bool healthy) {
    std::vector<int64_t> steps;
    for (const StoredCheckpoint& checkpoint : stored)
        if (checkpoint.valid && checkpoint.healthy == healthy && checkpoint.run_id == run_id)
            steps.push_back(checkpoint.step);
    std::sort(steps.begin(), steps.end(), std::greater<>());
    return steps;
}

}  // namespace

std::vector<int64_t> steps_to_delete(const std::vector<StoredCheckpoint>& stored, const std::string& run_id, int keep) {
    require(keep >= 1, "retention: at least one checkpoint must be kept, not %d", keep);
    std::vector<int64_t> healthy = newest_first(stored, run_id, true);
    std::vector<int64_t> unhealthy = newest_first(stored, run_id, false);
    int64_t newest_healthy = healthy.empty() ? std::numeric_limits<int64_t>::min() : healthy.front();

    std::vector<int64_t> superfluous;
    for (size_t i = size_t(keep); i < healthy.size(); i++) superfluous.push_back(healthy[i]);
    for (size_t i = 0; i < unhealthy.size(); i++)
        if (i >= size_t(keep) || unhealthy[i] < newest_healthy) superfluous.push_back(unhealthy[i]);
    std::sort(superfluous.begin(), superfluous.end());
    return superfluous;
}
