// A stopwatch's times of a stream, on every device: bounded by the host's clock and by the time outside a lap.
#include "kernels/ops.h"
#include "kernels/trace.h"
#include "test/support/device_array.h"

namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) {
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

void work(DeviceBuffer& buffer, int times) {
    for (int i = 0; i < times; i++)
        ops::fill({.out = static_cast<float*>(buffer.data()), .count = buffer.bytes() / sizeof(float), .value = 1}, {});
}

}  // namespace

TEST_CASE("a stopwatch sums finished laps, each once", "[stopwatch]") {
    DeviceBuffer buffer(size_t(256) << 10);
    Stopwatch watch;
    CHECK(watch.take_ms() == 0);
    for (int laps : {1, 3, 2}) {
        const Clock::time_point start = Clock::now();
        for (int lap = 0; lap < laps; lap++) {
            watch.start({});
            work(buffer, 2);
            watch.stop({});
        }
        double ms = watch.take_ms();  // of the laps that have finished so far
        synchronize({});
        ms += watch.take_ms();
        CHECK(ms > 0);
        CHECK(ms <= ms_since(start));
        CHECK(watch.take_ms() == 0);
    }
}

TEST_CASE("a stopwatch leaves out what a stream does between laps", "[stopwatch]") {
    DeviceBuffer buffer(size_t(64) << 10);
    Stopwatch watch;
    double inside = 1e9, outside = 1e9;  // minima over trials, as other programs use the machine too
    for (int trial = 0; trial < 5; trial++) {
        for (bool is_inside : {false, true}) {
            watch.start({});
            work(buffer, is_inside ? 20 : 1);
            watch.stop({});
            work(buffer, is_inside ? 0 : 20);
            synchronize({});
            double& best = is_inside ? inside : outside;
            best = std::min(best, watch.take_ms());
        }
    }
    CHECK(outside < inside / 4);
}

TEST_CASE("a stopwatch moves with its laps", "[stopwatch]") {
    DeviceBuffer buffer(4096);
    Stopwatch first;
    first.start({});
    work(buffer, 1);
    first.stop({});
    Stopwatch second = std::move(first);
    synchronize({});
    CHECK(second.take_ms() > 0);
}

TEST_CASE("a timeline's marks are as far apart as a stopwatch says, on the host's axis", "[timeline]") {
    DeviceBuffer buffer(size_t(64) << 10);
    Timeline timeline;
    Stopwatch watch;
    auto host_ms = [] { return ms_since(Clock::time_point()); };
    for (int round = 0; round < 2; round++) {  // the second reuses the first one's marks
        const double before = host_ms();
        timeline.anchor({});
        const double anchored = host_ms();
        CHECK(timeline.mark({}) == 0);
        watch.start({});
        work(buffer, 5);
        watch.stop({});
        CHECK(timeline.mark({}) == 1);
        work(buffer, 5);
        timeline.anchor({});  // later marks are measured from here
        CHECK(timeline.mark({}) == 2);
        const std::vector<double> moments = timeline.take_ms();
        const double after = host_ms(), between = watch.take_ms();
        REQUIRE(moments.size() == 3);
        CHECK(moments[0] >= before);
        CHECK(moments[0] <= anchored + 1);
        CHECK(moments[1] - moments[0] >= between - 1e-6);
        CHECK(between > 0);
        CHECK(moments[2] >= moments[1]);
        CHECK(moments[2] <= after + 1);
        CHECK(timeline.take_ms().empty());
    }
}

TEST_CASE("a trace has the spans of streams and of the host, sorted by start", "[timeline]") {
    DeviceBuffer buffer(size_t(64) << 10);
    Trace trace;
    {
        const HostSpan outer(&trace, "outer");
        trace.begin_step(3, {});
        trace.record({.lane = Lane::device, .name = "first"}, {}, [&] { work(buffer, 2); });
        record(&trace, {.lane = Lane::device, .name = "second"}, {}, [&] { work(buffer, 2); });
    }
    trace.begin_step(0, {});
    trace.add({.name = "later", .begin_ms = 1e15, .end_ms = 1e15});
    int calls = 0;
    record(nullptr, {.name = "not traced"}, {}, [&] { calls++; });
    const HostSpan nothing(nullptr, "not traced");
    const std::vector<Span> spans = trace.take();
    CHECK(calls == 1);
    REQUIRE(spans.size() == 4);
    std::vector<std::string> names;
    for (const Span& span : spans) {
        names.push_back(span.name);
        CHECK(span.end_ms >= span.begin_ms);
        CHECK(span.step == (span.name == "later" ? 0 : 3));
    }
    CHECK(names == std::vector<std::string>{"outer", "first", "second", "later"});
    CHECK(spans[1].end_ms <= spans[2].begin_ms);
    CHECK(spans[2].end_ms > spans[2].begin_ms);
    CHECK(trace.take().empty());
}
