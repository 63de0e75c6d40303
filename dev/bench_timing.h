// How long calls take in steady state: as much work is queued ahead as hides the cost of launching it.
#pragma once

#include <functional>
#include <vector>

struct Timing {
    int warm_up;      // calls before the first that is timed
    double batch_ms;  // about so much work between two marks on the stream; 0: one call
    double total_ms;  // about so long altogether
    int least;        // batches, however long they take
};

// Milliseconds of a call.
struct Times {
    double median = 0, min = 0, max = 0;  // over batches
    int count = 0;                        // batches
};
Times times_of(std::vector<double> milliseconds);

// Times `call`, which queues work on the default stream. All batches are queued before the first is waited for.
Times time_calls(const std::function<void()>& call, const Timing& timing);

// Milliseconds since some moment in the past, by the host's clock.
double host_ms();
