// The GPU's collectives with one rank: streams and events, failures, and the kernel that adds as a tree. Several ranks
// are several processes: test/program/test_simulated_ranks.py.
#include <nccl.h>

#include <cstring>

#include "kernels/comm.h"
#include "kernels/cpu/tree_sum.h"
#include "kernels/cuda/tree_sum.h"
#include "kernels/shared/dispatch.h"
#include "test/reference/tree_sum.h"
#include "test/simt/nccl_stand_in.h"
#include "test/simt/planted.h"
#include "test/simt/sanitizers.h"
#include "test/support/expect_error.h"
#include "test/support/random_values.h"

namespace {

constexpr int kThreads = 32;
constexpr size_t kCount = 100, kBytes = kCount * sizeof(float);

// Writes a value over NaN, so that an early read gives NaN.
struct Set {
    float* out;
    float value;
};
void set_kernel(Set op) {
    for (size_t i = threadIdx.x; i < kCount; i += kThreads) op.out[i] = op.value;
}
void launch_set(const Set& op, cudaStream_t stream = nullptr) {
    launch(set_kernel, {.name = "set", .blocks = dim3(1), .threads = kThreads}, ::Stream{stream}, op);
}

struct Copy {
    float* out;
    const float* inp;
};
void copy_kernel(Copy op) {
    for (size_t i = threadIdx.x; i < kCount; i += kThreads) op.out[i] = op.inp[i];
}
void launch_copy(const Copy& op, cudaStream_t stream = nullptr) {
    launch(copy_kernel, {.name = "copy", .blocks = dim3(1), .threads = kThreads}, ::Stream{stream}, op);
}

// A communicator of one rank that uses the library.
class OneRank {
public:
    explicit OneRank(bool deterministic = false, double deadline_s = 20)
        : comm(open_comm({.deterministic = deterministic, .deadline_s = deadline_s, .always = true})) {}
    ~OneRank() {
        simt::nccl_plan() = {};
        if (comm.handle) close_comm(comm);
    }
    OneRank(const OneRank&) = delete;
    OneRank& operator=(const OneRank&) = delete;

    Comm comm;
};

// The next call of the library, after `skipped` calls, takes that action.
void plan(const char* action, int skipped = 0) { simt::nccl_plan() = {action, simt::nccl_calls() + 1 + skipped, 0}; }

bool all_are(const DeviceArray<float>& array, float value) {
    for (float each : array.fetch())
        if (!(each == value)) return false;
    return true;
}

// Compares the sums of the CPU and of the GPU, for several parts as the rank's own, with the textbook's.
template <class Out, class In> void check_tree_sum(int parts, size_t count) {
    std::vector<In> values(size_t(parts) * count);
    std::vector<Out> expected(count), on_cpu(count);
    std::vector<double> terms(static_cast<size_t>(parts));
    for (size_t i = 0; i < count; i++) {
        for (size_t part = 0; part < terms.size(); part++) {
            terms[part] = ref::tree_term(int(part), i, dtype_of<In>);
            values[part * count + i] = from_float<In>(float(terms[part]));
        }
        expected[i] = from_float<Out>(float(ref::rounded(ref::tree_sum(terms), dtype_of<Out>)));
    }
    auto is_expected = [&](const std::vector<Out>& sum) {
        return std::memcmp(sum.data(), expected.data(), count * sizeof(Out)) == 0;
    };
    INFO(name_of(dtype_of<In>) << " in " << name_of(dtype_of<Out>) << ", " << parts << " parts of " << count);
    tree_sum(on_cpu.data(), values.data(), count, parts, count);
    CHECK(is_expected(on_cpu));
    for (int own : {0, parts / 2, parts - 1}) {
        // The rank's own part among the others must not be read.
        const size_t begin = size_t(own) * count, shift = own > 0;  // a misaligned own part
        std::vector<In> others = values, mine(shift);
        mine.insert(mine.end(), &values[begin], &values[begin + count]);
        std::fill_n(&others[begin], count, from_float<In>(NAN));
        DeviceArray<Out> out(count);
        DeviceArray<In> on_device(others), own_array(mine);
        tree_sum({.out = out.data(),
                  .own = own_array.data() + shift,
                  .others = on_device.data(),
                  .own_part = own,
                  .parts = parts,
                  .count = count},
                 ::Stream());
        INFO("own " << own);
        CHECK(is_expected(out.fetch()));
    }
}

}  // namespace

TEST_CASE("tree_sum adds in the documented order and rounds once, on the CPU and the GPU", "[simt][comm]") {
    const std::pair<Dtype, Dtype> types[] = {
        {Dtype::fp32, Dtype::fp32}, {Dtype::bf16, Dtype::bf16}, {Dtype::bf16, Dtype::fp32}, {Dtype::fp32, Dtype::bf16},
        {Dtype::fp16, Dtype::fp16}, {Dtype::fp16, Dtype::fp32}, {Dtype::fp32, Dtype::fp16}};
    for (const auto& [inp, out] : types)
        ops::dispatch("test", View(nullptr, out), View(nullptr, inp), []<class Out, class In>() {
            for (int parts : {1, 2, 3, 4, 5, 7, 8, 13, 64, 100})
                for (size_t count : {1, 64, 1027, 2052}) check_tree_sum<Out, In>(parts, count);
        });
    TreeSum too_many{};
    too_many.parts = kMaxTreeParts + 1;
    expect_error(Exit::internal, {"4097 parts"}, [&] { tree_sum(too_many, ::Stream()); });
    DeviceArray<float> array(1);
    auto expect_refused = [&](const char* words, View out, ConstView others) {
        const TreeSum op{.out = out, .own = array.data(), .others = others, .own_part = 0, .parts = 2, .count = 1};
        expect_error(Exit::internal, {"tree_sum", words}, [&] { tree_sum(op, ::Stream()); });
    };
    expect_refused("fp32 and bf16", array.data(), {array.data(), Dtype::bf16});
    expect_refused("fp64", {array.data(), Dtype::fp64}, array.data());
}

TEST_CASE("a collective begins after the stream's work and its ticket waits for it", "[simt][comm]") {
    for (bool deterministic : {false, true}) {
        OneRank one(deterministic);
        DeviceArray<float> inp(kCount), out(kCount), copy(kCount), gathered(kCount), second(kCount), exchanged(kCount),
            third(kCount);
        launch_set({inp.data(), 3});
        const Ticket reduced = reduce_scatter_sum(
            {.out = out.data(), .scratch = nullptr, .inp = inp.data(), .count = kCount}, one.comm, {});
        // The program's stream comes first: its work must have waited for the caller's kernel.
        all_reduce_max(0, one.comm);
        wait(reduced, one.comm, {});
        launch_copy({copy.data(), out.data()});
        const Ticket ticket = all_gather(gathered.data(), copy.data(), kBytes, one.comm, {});
        wait(ticket, one.comm, {});
        launch_copy({second.data(), gathered.data()});
        wait(exchange({{{0, second.data(), kBytes}}, {{0, exchanged.data(), kBytes}}}, one.comm, {}), one.comm, {});
        launch_copy({third.data(), exchanged.data()});
        // The caller's stream comes first: its copy must wait for the program's stream.
        check_cuda(cudaStreamSynchronize(cuda_stream({})), "synchronize");
        CHECK(all_are(copy, 3));
        CHECK(all_are(second, 3));
        CHECK(all_are(third, 3));
        CHECK(sentences(simt::take_faults()) == "");
    }
}

TEST_CASE("a collective that waits for other ranks does not block the caller's stream", "[simt][comm]") {
    OneRank one(false, 1);
    DeviceArray<float> values(kCount), other(kCount);
    plan("stall");
    all_gather(values.data(), values.data(), kBytes, one.comm, {});
    launch_set({other.data(), 2});
    const Event done = make_event(cudaEventDisableTiming);
    check_cuda(cudaEventRecord(done.get(), cuda_stream({})), "record");
    int asked = 0;
    while (asked < 100 && !has_happened(done.get(), "the caller's kernel")) asked++;
    CHECK(asked < 100);
    drain(one.comm);  // returns after the deadline
    CHECK(all_are(other, 2));
}

TEST_CASE("messages must match and be device memory", "[simt][comm]") {
    DeviceArray<float> inp(2 * kCount), out(kCount);
    std::vector<float> host(kCount);
    OneRank one;
    const auto send = [&](float* from) { exchange({{{0, from, kBytes}}, {{0, out.data(), kBytes}}}, one.comm, {}); };
    plan("mismatch", 1);
    send(inp.data());
    expect_error(Exit::os, {"rank 0 waits for 400 elements of type 1 from rank 0, which sends 401 of type 1"},
                 [&] { close_comm(one.comm); });
    simt::take_faults();
    one.comm = open_comm({.always = true});
    expect_error(Exit::internal, {"ncclSend of what is not device memory"}, [&] { send(host.data()); });
    simt::take_faults();
}

TEST_CASE("a stream that does not wait for its ticket reads too early", "[simt][comm]") {
    if (simt::options().seed || simt::tsan()) return;  // depends on chance; the race is reported
    for (bool exchanges : {false, true}) {
        OneRank one;
        DeviceArray<float> inp(kCount), out(kCount), copy(kCount);
        launch_set({inp.data(), 3});
        if (exchanges)
            exchange({{{0, inp.data(), kBytes}}, {{0, out.data(), kBytes}}}, one.comm, {});
        else
            all_gather(out.data(), inp.data(), kBytes, one.comm, {});
        launch_copy({copy.data(), out.data()});
        check_cuda(cudaStreamSynchronize(cuda_stream({})), "synchronize");
        CHECK(!all_are(copy, 3));
        drain(one.comm);
        CHECK(all_are(out, 3));
    }
}

TEST_CASE("tickets older than the ring of events", "[simt][comm]") {
    OneRank one;
    DeviceArray<float> values(kCount), copy(kCount);
    DeviceArray<double> sum(std::vector<double>{1.5});
    launch_set({values.data(), 1});
    const Ticket old = all_gather(values.data(), values.data(), kBytes, one.comm, {});
    Ticket last;
    for (int i = 0; i < 600; i++) last = all_reduce_sum(sum.data(), 1, one.comm, {});
    wait(old, one.comm, {});
    launch_copy({copy.data(), values.data()});
    CHECK(all_are(copy, 1));
    wait({}, one.comm, {});  // the default ticket has always finished
    wait(last, one.comm, {});
    CHECK(sum.fetch()[0] == 1.5);
    CHECK(comm_totals(one.comm).bytes_sent == 0);  // a single rank sends nothing
}

TEST_CASE("small host values, and counters", "[simt][comm]") {
    OneRank one;
    CHECK(all_reduce_max(-7, one.comm) == -7);
    CHECK(comm_totals(one.comm).waited_ms > 0);
    CHECK(reduce_scatter_scratch_bytes(Dtype::fp32, 10, 4, true) == 160);
    CHECK(reduce_scatter_scratch_bytes(Dtype::fp32, 10, 4, false) == 0);
    CHECK(reduce_scatter_scratch_bytes(Dtype::fp32, 10, 4, false, Dtype::bf16) == 160);
    CHECK(reduce_scatter_scratch_bytes(Dtype::bf16, 10, 4, false) == 80);
    CHECK(reduce_scatter_scratch_bytes(Dtype::fp16, 10, 1, true) == 0);
    CHECK(simt::nccl_comms() == 1);
    close_comm(one.comm);
    CHECK(simt::nccl_comms() == 0);
    CHECK(comm_library().starts_with("NCCL 2.28.9, started by any launcher"));
}

TEST_CASE("each library call that fails is reported by name", "[simt][comm]") {
    DeviceArray<float> values(kCount);
    auto gather = [&](const Comm& comm) { wait(all_gather(values.data(), values.data(), kBytes, comm, {}), comm, {}); };
    struct Case {
        const char *action, *words;
        Exit code;
    };
    for (const Case& each :
         {Case{"fail", "ncclAllGather failed in all_gather (collective 1): unhandled system", Exit::os},
          Case{"remote", "ncclAllGather failed in all_gather", Exit::peer_lost},
          Case{"late", "ncclAllGather failed in all_gather", Exit::internal},
          Case{"hang", "waited 1 s for the other ranks in all_gather", Exit::hang}}) {
        OneRank one(false, 1);
        plan(each.action);
        expect_error(each.code, {each.words}, [&] { gather(one.comm); });
        CHECK(simt::nccl_comms() == 0);
        expect_error(Exit::peer_lost, {"aborted"}, [&] { gather(one.comm); });
        drain(one.comm);
    }
    for (const char* action : {"fail", "late", "hang"}) {
        plan(action, 1);
        expect_error(action[0] == 'h'   ? Exit::hang
                     : action[0] == 'f' ? Exit::os
                                        : Exit::internal,
                     {"ncclCommInitRankConfig"}, [] { OneRank one(false, 1); });
        simt::nccl_plan() = {};
    }
    plan("fail");
    expect_error(Exit::os, {"ncclGetUniqueId"}, [] { OneRank one; });
    for (const int skipped : {0, 1}) {
        plan("no_interface", skipped);
        expect_error(Exit::os,
                     {skipped ? "ncclCommInitRankConfig" : "ncclGetUniqueId", "no socket interface found",
                      "NCCL_SOCKET_IFNAME", "lo if all ranks"},
                     [] { OneRank one; });
    }
    for (const char* call : {"ncclGroupStart", "ncclGroupEnd"}) {
        OneRank one(true);
        plan("fail", call[9] == 'E');
        expect_error(Exit::os, {call}, [&] {
            reduce_scatter_sum({.out = values.data(), .scratch = nullptr, .inp = values.data(), .count = kCount},
                               one.comm, {});
        });
    }
    const char* const calls[] = {"ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"};
    for (int number = 0; number < 4; number++) {
        OneRank one;
        DeviceArray<float> other(kCount);
        plan("fail", number);
        expect_error(Exit::os, {calls[number], "failed in exchange (collective 1)"}, [&] {
            exchange({{{0, values.data(), kBytes}}, {{0, other.data(), kBytes}}}, one.comm, {});
        });
        CHECK(simt::nccl_comms() == 0);
    }
    for (const char* call : {"ncclCommFinalize", "ncclCommDestroy"}) {
        OneRank one;
        plan("fail", call[8] == 'D');
        expect_error(Exit::os, {call}, [&] { close_comm(one.comm); });
    }
    CHECK(sentences(simt::take_faults()) == "");
}

TEST_CASE("the host does not wait forever for work that stalls on the device", "[simt][comm]") {
    {
        OneRank one(false, 1);
        plan("stall");
        expect_error(Exit::hang, {"waited 1 s for the other ranks in all_reduce_max"},
                     [&] { all_reduce_max(1, one.comm); });
    }
    {
        OneRank one(false, 20);
        plan("break");
        expect_error(Exit::peer_lost, {"NCCL's work on the GPU failed in all_reduce_max"},
                     [&] { all_reduce_max(1, one.comm); });
    }
    OneRank one(false, 1);
    DeviceArray<float> values(kCount);
    plan("stall");
    const Ticket ticket = all_gather(values.data(), values.data(), kBytes, one.comm, {});
    wait(ticket, one.comm, {});
    drain(one.comm);  // returns after the deadline, so that work waiting for the ticket continues
    CHECK(simt::nccl_comms() == 0);
    check_cuda(cudaStreamSynchronize(cuda_stream({})), "synchronize");
}
