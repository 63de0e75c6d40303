// Times calls in steady state: enough work is queued ahead to hide the launch cost.
#pragma once

#include <functional>
#include <vector>

struct Timing {
    int warm_up;      // number of untimed calls at the beginning
    double batch_ms;  // approximate work between two marks on the stream; 0: one call
    double total_ms;  // approximate total time
    int least;        // minimum number of batches, however long they take
};

// Milliseconds per call.
struct Times {
    double median = 0, min = 0, max = 0;  // over batches
    int count = 0;                        // batches
};
Times times_of(std::vector<double> milliseconds);

// Times `call`, which queues work on the default stream. Queues all batches before waiting for the first.
Times time_calls(const std::function<void()>& call, const Timing& timing);

// Milliseconds of the host's clock since an arbitrary time.
double host_ms();
