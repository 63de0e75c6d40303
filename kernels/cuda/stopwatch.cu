// Stopwatch on a GPU: a pair of events around each lap, made once and used again in later steps.
#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/cuda/launch.cuh"
#include "kernels/device.h"

namespace {

class Lap {
public:
    Lap() {
        check_cuda(cudaEventCreate(&begin_), "cudaEventCreate");
        check_cuda(cudaEventCreate(&end_), "cudaEventCreate");
    }
    Lap(Lap&& other) noexcept { *this = std::move(other); }
    Lap& operator=(Lap&& other) noexcept {
        std::swap(begin_, other.begin_);
        std::swap(end_, other.end_);
        return *this;
    }
    ~Lap() {
        if (begin_) cudaEventDestroy(begin_);
        if (end_) cudaEventDestroy(end_);
    }

    void start(Stream stream) { check_cuda(cudaEventRecord(begin_, cuda_stream(stream)), "cudaEventRecord"); }
    void stop(Stream stream) { check_cuda(cudaEventRecord(end_, cuda_stream(stream)), "cudaEventRecord"); }

    bool has_finished() const { return has_happened(end_, "timing a stream"); }

    double ms() const {
        float ms = 0;
        check_cuda(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
        return ms;
    }

private:
    cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

}  // namespace

struct Stopwatch::Laps {
    std::vector<Lap> laps;  // the first `used` have been stopped but not reported
    size_t used = 0;
};

Stopwatch::Stopwatch() : laps_(std::make_unique<Laps>()) {}
Stopwatch::Stopwatch(Stopwatch&&) noexcept = default;
Stopwatch& Stopwatch::operator=(Stopwatch&&) noexcept = default;
Stopwatch::~Stopwatch() = default;

void Stopwatch::start(Stream stream) {
    if (laps_->used == laps_->laps.size()) laps_->laps.emplace_back();
    laps_->laps[laps_->used].start(stream);
}

void Stopwatch::stop(Stream stream) { laps_->laps[laps_->used++].stop(stream); }

double Stopwatch::take_ms() {
    const auto begin = laps_->laps.begin(), end = begin + ptrdiff_t(laps_->used);
    double ms = 0;
    auto lap = begin;
    for (; lap != end && lap->has_finished(); ++lap) ms += lap->ms();
    std::rotate(begin, lap, end);
    laps_->used = size_t(end - lap);
    return ms;
}
