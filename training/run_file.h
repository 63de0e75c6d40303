// run.json: where and with what a run was started, for `report`.
#pragma once

struct TrainingRun;

// Adds this start to run.json in run.dir; what is no such file is replaced. {"starts": [{"step": done before, "time":
// Unix seconds, "revision", "host", "device", "ranks", "threads", "parameters", "flops_per_token", "memory_bytes":
// {category: of rank 0's plan}}, ...]}, at most the last 100.
void add_start(const TrainingRun& run, const char* revision);
