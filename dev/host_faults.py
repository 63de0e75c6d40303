"""Faults in what runs on the host, for dev/plant_faults.py: as in kernel_faults.py, and behind each its witnesses, the
tests that it is shown to: "test_cpu: NAMES", "program: NAMES" of test/program, "faults: NAMES" of test/faults."""
LOADER, MIXTURE, SHARDS, DATASET = "data/loader.cpp", "data/mixture.cpp", "data/shards.cpp", "data/dataset.cpp"
PARQUET, TOKENIZER_FILES = "data/parquet.cpp", "data/tokenizer_files.cpp"
OUT_DIRECTORY, ORDERED = "data/out_directory.cpp", "data/ordered_parallel.h"
MAIN, RUN, SAVING, DIVERGENCE = ("train_gpt.cu", "commands/training_run.cpp", "commands/saving.cpp",
                                 "commands/divergence.cpp")
HF_CONFIG = "commands/hf_config.cpp"
RETENTION, START, SAVE, SHARD = ("runtime/checkpoint/retention.cpp", "runtime/checkpoint/start.cpp",
                                 "runtime/checkpoint/save.cpp", "runtime/checkpoint/shard.cpp")
CHECKPOINT, BACKGROUND = "runtime/checkpoint/checkpoint.cpp", "runtime/checkpoint/background_save.cpp"
RUN_DIRECTORY = "runtime/checkpoint/run_directory.cpp"
SUPERVISOR, RENDEZVOUS, CONTROL = ("runtime/cluster/supervisor.cpp", "runtime/cluster/rendezvous.cpp",
                                   "runtime/cluster/control_channel.cpp")
REPORTS, LAUNCHER, MONITOR = ("runtime/cluster/rank_reports.cpp", "runtime/cluster/local_launcher.cpp",
                              "runtime/cluster/rank_monitor.cpp")
SCHEDULE, LOSS_SCALE = "runtime/config/schedule.cpp", "runtime/config/loss_scale.cpp"
LOG_FILE, LOGGING = "runtime/logging/log_file.cpp", "runtime/logging/logging.cpp"
LOCK, DROPOUT = "runtime/io/lock.cpp", "kernels/cpu/dropout.cpp"

FAULTS = [
    # ---- data
    (LOADER, "a stream's epoch is counted by the run's samples", "uint32_t(index / windows)",
     "uint32_t(sample / windows)", "test_cpu: mixture*"),
    (MIXTURE, "all streams are shuffled with one seed", "~uint64_t(stream)", "~uint64_t(0)", "test_cpu: mixture*"),
    (LOADER, "of a window over two shards only the first is watched", "shard <= stream.shard_at(begin + count)",
     "shard <= stream.shard_at(begin)", "test_cpu: loader*"),
    (PARQUET, "a column chunk without a dictionary uses the last one's",
     "chunk_++, chunk_values_ = 0, has_dictionary_ = false;", "chunk_++, chunk_values_ = 0;", "test_cpu: parquet*"),
    (PARQUET, "a page of nulls alone needs a width", "    if (present == 0) return indices_.clear();\n", "",
     "test_cpu: parquet*"),
    (TOKENIZER_FILES, "llm.c's merges: a stale neighbor", "        before[end] = begin;\n", "",
     "test_cpu: tokenizer files*"),
    # ---- divergence
    (DIVERGENCE, "going back forgets the time of the last start",
     "    progress.trained_s = before.progress.trained_s;\n", "",
     "program: test_divergence.Divergence."
     "test_a_run_that_goes_back_keeps_the_configuration_and_the_time_of_its_last_start"),
    (DIVERGENCE, "going back restores the digest before --accept-changes",
     "    run.state.config_digest = before.config_digest;\n", "",
     "program: test_divergence.Divergence."
     "test_a_run_that_goes_back_keeps_the_configuration_and_the_time_of_its_last_start"),
    (DIVERGENCE, "going back leaves the compute weights", "    run.gpt.masters_changed();\n", "",
     "program: test_divergence.Divergence."
     "test_a_run_that_goes_back_continues_as_if_started_from_that_checkpoint_at_later_data "
     "test_divergence.Ranks.test_several_ranks_go_back_together"),
    (DIVERGENCE, "half of the ranks are a majority", "2 * most->second.size() > size_t(run.comm.size)",
     "2 * most->second.size() >= size_t(run.comm.size)",
     "program: test_divergence.Ranks.test_a_rank_whose_weights_have_changed_is_named"),
    # ---- saves
    (SAVING, "failed saves count although not in a row", "        run.failed_saves = 0;\n", "",
     "faults: test_io_errors.IoErrors.test_only_the_third_failed_save_in_a_row_ends_the_run"),
    (SAVING, "a slow save is warned of at each step", "    run.slow_save = save.step();\n", "",
     "faults: test_io_errors.IoErrors.test_a_save_that_takes_long_is_warned_of_once"),
    (RETENTION, "a rename before a deletion is not synced", "        sync_directory(directory_of(doomed));\n", "",
     "test_cpu: *retention*,*before its files are deleted"),
    (START, "a resumed run has its parent's parent", "        state.parent_step = state.step;\n", "",
     "test_cpu: start*"),
    (START, "a fixed loss scale that was changed stays",
     "    if (!config.loss_scale.dynamic) state.progress.loss_scale.scale = float(config.loss_scale.fixed);\n", "",
     "test_cpu: start*"),
    # ---- ranks
    (SUPERVISOR, "shared memory of killed ranks stays", "        if (segments) segments->clear();\n", "",
     "program: test_supervise.Several.test_ranks_that_are_killed_are_started_again_and_the_run_is_the_same"),
    (RENDEZVOUS, "the number of ranks is a rank", "member.rank < size;", "member.rank <= size;",
     "test_cpu: rendezvous: a rank outside*"),
    (CONTROL, "the last error wins", "code != Exit::ok && !error_ && !failed_since_",
     "code != Exit::ok && !failed_since_", "test_cpu: control*"),
    # ---- others of the first 58
    (HF_CONFIG, "qwen3's heads have 64 channels", "ModelFamily::qwen3 ? 128 : 0", "ModelFamily::qwen3 ? 64 : 0",
     "test_cpu: [config]"),
    (DROPOUT, "a dropped infinity is a NaN", "keep[i] > 0 ? to_float(inp[i]) * keep[i] : 0.0f",
     "to_float(inp[i]) * keep[i]", "test_cpu: dropout*"),
]
