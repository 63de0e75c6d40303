#include "runtime/start.h"

#include "runtime/together.h"
#include "runtime/train_state.h"

Comm join_ranks(const Place& place, const Config& config) {
    return open_comm({.rank = place.rank,
                      .size = place.size,
                      .local_rank = place.local_rank,
                      .deterministic = config.parallel.deterministic_reduce});
}

Start open_start(const Config& config, StartMode mode, const Comm& comm) {
    constexpr int kFresh = -1;
    Start start;
    int64_t step = kFresh;
    on_rank_0(comm, "open run.dir", [&] {
        start.opened = open_run_directory(config.run.dir, mode);
        start.checkpoint = checkpoint_to_resume(config.run.dir, start.opened.action);
        if (start.checkpoint) step = start.checkpoint->manifest().info.step;
    });
    step = all_reduce_max(int(step), comm);
    if (step != kFresh && !start.checkpoint) start.checkpoint.emplace(step_directory(config.run.dir, step));
    return start;
}
