#include "runtime/checkpoint/start.h"

#include "runtime/checkpoint/train_state.h"
#include "runtime/cluster/cluster.h"

Start open_start(const Config& config, StartMode mode, const StartData& data, const Comm& comm) {
    constexpr int kFresh = -1;
    Start start;
    int64_t step = kFresh;
    run_on_rank_0(comm, "open run.dir", [&] {
        start.opened = open_run_directory(config.run.dir, mode);
        start.checkpoint = checkpoint_to_resume(config.run.dir, start.opened.action);
        if (start.checkpoint) step = start.checkpoint->manifest().info.step;
    });
    step = all_reduce_max(int(step), comm);
    if (step != kFresh && !start.checkpoint) start.checkpoint.emplace(step_directory(config.run.dir, step));
    start.state = start.checkpoint ? resumed_state(*start.checkpoint, config, data.digest, data.accept_changes)
                                   : new_state(config);
    start.dataset_digest = data.digest;
    return start;
}
