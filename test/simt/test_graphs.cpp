// Recorded work: it is carried out when it is launched, with the arguments of the recording.
#include <numeric>

#include "kernels/ops.h"
#include "test/simt/planted.h"
#include "test/simt/streams.h"
#include "test/support/expect_error.h"

namespace {

constexpr size_t kCount = 40;

void set(DeviceArray<float>& to, float value) { ops::fill({.out = to.data(), .count = kCount, .value = value}, {}); }

void add(DeviceArray<float>& to, DeviceArray<float>& from) {
    ops::add({.out = View(to.data(), Dtype::fp32), .inp = ConstView(from.data(), Dtype::fp32), .count = kCount}, {});
}

}  // namespace

TEST_CASE("the program's stream is not the legacy one", "[simt]") {
    const size_t before = simt::default_stream()->done + simt::default_stream()->queue.size();
    DeviceArray<float> x(kCount);
    set(x, 3);
    CHECK(x.fetch()[0] == 3);
    CHECK(simt::default_stream()->done + simt::default_stream()->queue.size() == before);
}

TEST_CASE("a recording calls its function twice, and replays the second call", "[simt]") {
    DeviceArray<float> sum(kCount), term(kCount);
    set(sum, 0);
    Recording recording;
    int calls = 0;
    for (int i = 1; i <= 5; i++) {
        set(term, float(i));
        recording.run({}, [&] {
            calls++;
            add(sum, term);
            copy_on_device(term.data(), sum.data(), sizeof(float), {});
        });
        CHECK(sum.fetch()[kCount - 1] == float(i * (i + 1) / 2));
        CHECK(term.fetch()[0] == sum.fetch()[0]);
    }
    CHECK(calls == 2);
}

TEST_CASE("without graphs a recording always calls its function", "[simt]") {
    graphs_are_on() = false;
    Recording recording;
    int calls = 0;
    for (int i = 0; i < 4; i++) recording.run({}, [&] { calls++; });
    graphs_are_on() = true;
    CHECK(calls == 4);
}

TEST_CASE("a GEMM is recorded if it has run before", "[simt]") {
    std::vector<float> numbers(2 * kCount);
    std::iota(numbers.begin(), numbers.end(), 5.0f);
    DeviceArray<float> out(kCount), inp(std::vector<float>{2, 3}), weight(numbers);
    int outputs = kCount;
    const auto queue = [&] {
        ops::matmul_forward({.out = View(out.data(), Dtype::fp32),
                             .pre_activation = nullptr,
                             .inp = ConstView(inp.data(), Dtype::fp32),
                             .weight = ConstView(weight.data(), Dtype::fp32),
                             .bias = nullptr,
                             .rows = 1,
                             .n = outputs,
                             .k = 2},
                            {});
    };
    Recording recording;
    for (int i = 0; i < 3; i++) {
        set(out, 0);
        recording.run({}, queue);
        CHECK(out.fetch()[0] == 2 * 5 + 3 * 6);
        CHECK(out.fetch()[kCount - 1] == 2 * 83 + 3 * 84);
    }
    Recording other;
    other.run({}, queue);
    outputs--;  // a GEMM whose algorithm has not been chosen
    expect_error(Exit::os, {"no algorithm"}, [&] { other.run({}, queue); });
}

// Nothing of a failed recording is carried out, and the stream can be used again.
TEST_CASE("what cannot be recorded is an error", "[simt]") {
    DeviceArray<float> x(kCount);
    float host = 0;
    Event event = make_event();
    const std::vector<std::pair<const char*, std::function<void()>>> wrong = {
        {"a copy to the host", [&] { copy_to_host(&host, x.data(), sizeof(host), {}); }},
        {"a copy to the GPU", [&] { copy_to_device(x.data(), &host, sizeof(host), {}); }},
        {"a wait", [&] { synchronize({}); }},
        {"an allocation", [&] { device_free(device_alloc(16), 16); }},
        {"a mark", [&] { check_cuda(cudaEventRecord(event.get(), cuda_stream({})), "cudaEventRecord"); }}};
    for (const auto& [what, act] : wrong) {
        INFO(what);
        set(x, 1);
        synchronize({});
        Recording recording;
        bool must_act = false;
        const auto queue = [&] {
            set(x, 2);
            if (must_act) act();
        };
        recording.run({}, queue);
        set(x, 1);
        must_act = true;
        expect_error(Exit::os, {"capturing"}, [&] {
            try {
                recording.run({}, queue);
            } catch (const Error& error) {  // an event only invalidates the capture
                const std::string said = error.what();
                if (said.find("cudaErrorStreamCaptureInvalidated") == std::string::npos) throw;
                CHECK(said.find("device.graphs=false") != std::string::npos);
                fail(Exit::os, "capturing");
            }
        });
        CHECK(x.fetch()[0] == 1);
        must_act = false;
        recording.run({}, queue);
        CHECK(x.fetch()[0] == 2);
    }
}

TEST_CASE("the function's own error ends a recording", "[simt]") {
    DeviceArray<float> x(kCount);
    Recording recording;
    bool fails = false;
    const auto queue = [&] {
        set(x, 2);
        if (fails) fail(Exit::data, "planted");
    };
    recording.run({}, queue);
    set(x, 1);
    fails = true;
    expect_error(Exit::data, {"planted"}, [&] { recording.run({}, queue); });
    CHECK(x.fetch()[0] == 1);
    fails = false;
    for (int i = 0; i < 2; i++) recording.run({}, queue);
    CHECK(x.fetch()[0] == 2);
}

// Many small copies to the GPU do not wait for the copies before them.
TEST_CASE("the host does not wait for the inputs of earlier micro-steps", "[simt]") {
    if (simt::options().seed) return;  // then a stream advances by chance
    DeviceArray<float> x(kCount);
    synchronize({});
    const size_t done = cuda_stream({})->done;
    for (int i = 0; i < 100; i++) {
        const std::vector<float> values(kCount, float(i));
        copy_to_device(x.data(), values.data(), kCount * sizeof(float), {});
    }
    CHECK(cuda_stream({})->done == done);
    CHECK(x.fetch()[kCount - 1] == 99);
}
