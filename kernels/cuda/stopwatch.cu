// Stopwatch and Timeline on a GPU: events in the stream, created once and reused in later steps.
#include "kernels/cuda/launch.cuh"
#include "kernels/trace.h"

namespace {

struct Lap {
    Event begin = make_event(), end = make_event();
};

void record(const Event& event, Stream stream) {
    check_cuda(cudaEventRecord(event.get(), cuda_stream(stream)), "cudaEventRecord");
}

double ms_between(const Event& begin, const Event& end) {
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin.get(), end.get()), "cudaEventElapsedTime");
    return ms;
}

void wait_for(const Event& event) { check_cuda(cudaEventSynchronize(event.get()), "waiting for the GPU"); }

}  // namespace

struct Stopwatch::Laps {
    std::vector<Lap> laps;  // the first `used` are stopped but not yet reported
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
    for (; lap != end && has_happened(lap->end.get(), "timing a stream"); ++lap) ms += ms_between(lap->begin, lap->end);
    std::rotate(begin, lap, end);
    laps_->used = size_t(end - lap);
    return ms;
}

struct Timeline::Marks {
    struct Anchor {
        Event event = make_event();
        double ms = 0;  // on the host's clock
    };
    struct Mark {
        Event event = make_event();
        size_t anchor = 0;
    };
    std::vector<Anchor> anchors;  // the first n_anchors are in use
    std::vector<Mark> marks;      // the first n_marks are not yet taken
    size_t n_anchors = 0, n_marks = 0;
};

Timeline::Timeline() : marks_(std::make_shared<Marks>()) {}

void Timeline::anchor(Stream stream) {
    Marks& m = *marks_;
    if (m.n_anchors == m.anchors.size()) m.anchors.emplace_back();
    Marks::Anchor& anchor = m.anchors[m.n_anchors++];
    check_cuda(cudaStreamSynchronize(cuda_stream(stream)), "waiting for the GPU");
    record(anchor.event, stream);
    wait_for(anchor.event);
    anchor.ms = steady_ms();
}

size_t Timeline::mark(Stream stream) {
    Marks& m = *marks_;
    require(m.n_anchors > 0, "Timeline: mark() before the first anchor()");
    if (m.n_marks == m.marks.size()) m.marks.emplace_back();
    Marks::Mark& mark = m.marks[m.n_marks];
    mark.anchor = m.n_anchors - 1;
    record(mark.event, stream);
    return m.n_marks++;
}

std::vector<double> Timeline::take_ms() {
    Marks& m = *marks_;
    std::vector<double> moments;
    for (size_t i = 0; i < m.n_marks; i++) {
        const Marks::Anchor& anchor = m.anchors[m.marks[i].anchor];
        wait_for(m.marks[i].event);
        moments.push_back(anchor.ms + ms_between(anchor.event, m.marks[i].event));
    }
    if (m.n_anchors > 0)
        std::swap(m.anchors[0], m.anchors[m.n_anchors - 1]);  // later marks are measured relative to it
    m.n_anchors = std::min(m.n_anchors, size_t(1));
    m.n_marks = 0;
    return moments;
}
