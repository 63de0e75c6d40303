// Which checkpoints may be deleted: a pure function, so that it can be tested on millions of cases.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct StoredCheckpoint {
    int64_t step = 0;
    std::string run_id;
    bool valid = false;    // re-read just now and found sound
    bool healthy = false;  // from its manifest
};

// Steps to delete so that the newest `keep` (>= 1) healthy checkpoints of `run_id` stay. Never deleted: the newest
// valid one, any of another run, any that is not valid (the user may want to inspect it), and the newest `keep`
// unhealthy ones as long as no healthy one is newer. An unhealthy checkpoint never causes a healthy one to be deleted.
// Ascending.
std::vector<int64_t> steps_to_delete(const std::vector<StoredCheckpoint>& stored, const std::string& run_id, int keep);
