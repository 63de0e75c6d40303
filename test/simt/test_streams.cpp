// Streams and events: work that is not waited for has not happened.
#include <atomic>

#include "test/simt/planted.h"
#include "test/simt/sanitizers.h"

namespace {

struct Add {
    float* out;
    const float* inp;
    float value;
};
void add_kernel(Add op) {
    if (threadIdx.x == 0) op.out[0] = op.inp[0] + op.value;
}
constexpr int kThreads = 32;

struct TwoStreams {
    cudaStream_t first, second;
    cudaEvent_t event;
    TwoStreams() {
        cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking);
        cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking);
        cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    }
    ~TwoStreams() {
        cudaEventDestroy(event);
        cudaStreamDestroy(first);
        cudaStreamDestroy(second);
    }
    TwoStreams(const TwoStreams&) = delete;
    TwoStreams& operator=(const TwoStreams&) = delete;
};

void launch_add(const Add& op, cudaStream_t stream) {
    launch(add_kernel, {.name = "add", .blocks = dim3(1), .threads = kThreads}, ::Stream{stream}, op);
}

}  // namespace

TEST_CASE("work is carried out late, in the order of its stream", "[simt]") {
    DeviceArray<float> x(std::vector<float>{1});
    float host = 5;
    check_cuda(cudaMemcpyAsync(x.data(), &host, 4, cudaMemcpyHostToDevice, cuda_stream({})), "copy");
    launch_add({x.data(), x.data(), 1}, nullptr);
    host = 7;  // too early: the copy has not run
    const std::string faults = sentences(simt::take_faults());
    CHECK((faults != "") == simt::tsan());
    CHECK(x.fetch()[0] == 8);
}

TEST_CASE("a stream sees another's work after an event, and not before", "[simt]") {
    TwoStreams streams;
    for (bool waits : {true, false}) {
        DeviceArray<float> x(std::vector<float>{1}), y(std::vector<float>{1});
        launch_add({x.data(), x.data(), 1}, streams.first);
        check_cuda(cudaEventRecord(streams.event, streams.first), "record");
        if (waits) check_cuda(cudaStreamWaitEvent(streams.second, streams.event), "wait");
        launch_add({y.data(), x.data(), 10}, streams.second);
        simt::run_stream(streams.second);
        float host = 0;
        check_cuda(cudaMemcpyAsync(&host, y.data(), 4, cudaMemcpyDeviceToHost, streams.second), "copy");
        simt::run_stream(streams.second);
        const std::string faults = sentences(simt::take_faults());
        if (waits) CHECK(host == 12);
        if (!waits && !simt::options().seed) CHECK(host == 11);  // with a seed it depends on chance
        if (waits) CHECK(faults == "");  // without waiting, ThreadSanitizer may not report it, but the value shows it
    }
}

TEST_CASE("streams advance while the host waits for another process", "[simt]") {
    for (bool asks : {false, true}) {
        TwoStreams streams;
        std::atomic<bool> has_sent = false;
        int asked = 0;
        simt::queue_work(streams.first, [&] { has_sent = true; });
        simt::queue_poll(streams.second, [&] {  // the other process answers what the first stream sends
            require(++asked < 100, "the other process waits for ever");
            return has_sent.load();
        });
        check_cuda(cudaEventRecord(streams.event, streams.second), "record");
        if (asks)
            while (cudaEventQuery(streams.event) == cudaErrorNotReady) {}
        else
            check_cuda(cudaStreamSynchronize(streams.second), "cudaStreamSynchronize");
        CHECK(has_sent);
    }
}

// CUDA's legacy stream, and streams created without cudaStreamNonBlocking.
TEST_CASE("the legacy stream waits for blocking streams, and they for it", "[simt]") {
    cudaStream_t blocking = nullptr;
    check_cuda(cudaStreamCreate(&blocking), "create");
    TwoStreams streams;
    for (cudaStream_t other : {blocking, streams.first})
        for (bool legacy_first : {true, false}) {
            if (other != blocking && (simt::options().seed || simt::tsan())) continue;  // depends on chance
            DeviceArray<float> x(std::vector<float>{1}), y(std::vector<float>{1});
            const cudaStream_t first = legacy_first ? cudaStreamLegacy : other,
                               second = legacy_first ? other : cudaStreamLegacy;
            launch_add({x.data(), x.data(), 1}, first);
            launch_add({y.data(), x.data(), 10}, second);
            check_cuda(cudaStreamSynchronize(second), "synchronize");
            CHECK(sentences(simt::take_faults()) == "");
            CHECK(y.fetch()[0] == (other == blocking ? 12 : 11));
        }
    // Destroyed streams and events block nothing.
    DeviceArray<float> x(std::vector<float>{1});
    launch_add({x.data(), x.data(), 1}, blocking);
    launch_add({x.data(), x.data(), 1}, cudaStreamLegacy);
    check_cuda(cudaStreamSynchronize(cudaStreamLegacy), "synchronize");
    check_cuda(cudaStreamDestroy(blocking), "destroy");
    CHECK(x.fetch()[0] == 3);
}

TEST_CASE("an event completes with its stream, visibly to the host", "[simt]") {
    TwoStreams streams;
    DeviceArray<float> x(std::vector<float>{1});
    launch_add({x.data(), x.data(), 1}, streams.first);
    check_cuda(cudaEventRecord(streams.event, streams.first), "record");
    if (!simt::options().seed) {  // with a seed a stream may be ahead of the query
        CHECK(cudaEventQuery(streams.event) == cudaErrorNotReady);
        CHECK(cudaStreamQuery(streams.first) == cudaErrorNotReady);
    }
    CHECK(cudaEventSynchronize(streams.event) == cudaSuccess);
    CHECK(cudaEventQuery(streams.event) == cudaSuccess);
    CHECK(x.fetch()[0] == 2);
}

TEST_CASE("copies in the wrong direction, too long, or of freed memory", "[simt]") {
    DeviceArray<float> x(4);
    float host[8] = {};
    CHECK(cudaMemcpyAsync(host, x.data(), 16, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
    CHECK(cudaMemcpyAsync(host, host + 4, 16, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue);
    CHECK(cudaMemcpyAsync(x.data(), host, 20, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
    CHECK(cudaMemsetAsync(host, 0, 16) == cudaErrorInvalidValue);
    CHECK(cudaMemsetAsync(x.data(), 0, 17) == cudaErrorInvalidValue);
    CHECK(cudaGetLastError() == cudaErrorInvalidValue);
    CHECK(cudaGetLastError() == cudaSuccess);
    CHECK(cudaFree(host) == cudaErrorInvalidDevicePointer);
    void* memory = nullptr;
    CHECK(cudaMalloc(&memory, size_t(1) << 46) == cudaErrorMemoryAllocation);
}

TEST_CASE("debug_sync waits for each launch", "[simt]") {
    DeviceArray<float> x(std::vector<float>{1});
    debug_sync() = true;
    launch_add({x.data(), x.data(), 1}, nullptr);
    CHECK(cudaStreamQuery(cuda_stream({})) == cudaSuccess);
    debug_sync() = false;
    CHECK(x.fetch()[0] == 2);
}
