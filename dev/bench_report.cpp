#include "dev/bench_report.h"

#include "dev/bench_timing.h"
#include "runtime/io/files.h"

void Report::write() {
    if (!path_.empty()) write_file_atomically(path_, json_.dump(1) + "\n");
    written_ms_ = host_ms();
}

void Report::write_now_and_then() {
    if (host_ms() - written_ms_ > 1000) write();
}
