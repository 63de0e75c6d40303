#include "runtime/checkpoint/retention.h"

#include <algorithm>

#include "kernels/check.h"

std::vector<int64_t> steps_to_delete(const std::vector<StoredCheckpoint>& stored, const std::string& run_id, int keep) {
    require(keep >= 1, "retention: at least one checkpoint must be kept, not %d", keep);
    std::vector<StoredCheckpoint> own;
    for (const StoredCheckpoint& checkpoint : stored)
        if (checkpoint.valid && checkpoint.run_id == run_id) own.push_back(checkpoint);
    std::sort(own.begin(), own.end(), [](auto& a, auto& b) { return a.step > b.step; });

    // From the newest to the oldest; an unhealthy one matters until a healthy one follows it.
    std::vector<int64_t> superfluous;
    int healthy = 0, unhealthy = 0;
    for (const StoredCheckpoint& checkpoint : own)
        if (checkpoint.healthy ? healthy++ >= keep : healthy > 0 || unhealthy++ >= keep)
            superfluous.push_back(checkpoint.step);
    std::reverse(superfluous.begin(), superfluous.end());
    return superfluous;
}
