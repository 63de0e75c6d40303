// run.json: the host, device and program revision of each start of a run, for `report`.
#pragma once

struct TrainingRun;

// Adds this start to run.json in run.dir; replaces an invalid file. {"starts": [{"step": steps done before, "time":
// Unix seconds, "revision", "host", "device", "ranks", "threads", "parameters", "flops_per_token", "memory_bytes":
// {category: bytes of rank 0's plan}}, ...]}, at most the last 100 starts.
void add_start(const TrainingRun& run, const char* revision);
