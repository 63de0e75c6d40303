// Stopwatch on a GPU: a pair of events around each lap, made once and used again in later steps.
#include <algorithm>
#include <vector>

#include "kernels/cuda/launch.cuh"

namespace {

struct Lap {
    Event begin = make_event(), end = make_event();
};

void record(const Event& event, Stream stream) {
    check_cuda(cudaEventRecord(event.get(), cuda_stream(stream)), "cudaEventRecord");
}

double ms_of(const Lap& lap) {
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, lap.begin.get(), lap.end.get()), "cudaEventElapsedTime");
    return ms;
}

}  // namespace

struct Stopwatch::Laps {
    std::vector<Lap> laps;  // the first `used` have been stopped but not reported
    size_t used = 0;
};

Stopwatch::Stopwatch() : laps_(std::make_shared<Laps>()) {}

void Stopwatch::start(Stream stream) {
    if (laps_->used == laps_->laps.size()) laps_->laps.emplace_back();
    record(laps_->laps[laps_->used].begin, stream);
}

void Stopwatch::stop(Stream stream) { record(laps_->laps[laps_->used++].end, stream); }

double Stopwatch::take_ms() {
    const auto begin = laps_->laps.begin(), end = begin + ptrdiff_t(laps_->used);
    double ms = 0;
    auto lap = begin;
    for (; lap != end && has_happened(lap->end.get(), "timing a stream"); ++lap) ms += ms_of(*lap);
    std::rotate(begin, lap, end);
    laps_->used = size_t(end - lap);
    return ms;
}
