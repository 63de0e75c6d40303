// Every collective with a single rank. On a GPU this runs NCCL itself, so NCCL can be checked without a second GPU;
// elsewhere only exchange() does anything.
#include <numeric>

#include "kernels/comm.h"
#include "test/support/device_array.h"
#include "test/support/expect_error.h"

TEST_CASE("one rank's collectives leave its values unchanged", "[comm]") {
    for (bool deterministic : {false, true}) {
        Comm comm = open_comm({.deterministic = deterministic, .deadline_s = 60, .always = true});
        constexpr size_t kCount = 100003;
        std::vector<double> values(kCount);
        std::iota(values.begin(), values.end(), -50000.0);
        Array<float> array("array", Role::output, values);
        Array<bf16> narrow("narrow", Role::output, values);
        const std::vector<bf16> narrow_before = narrow.fetch();
        Array<double> sums("sums", Role::output, std::vector<double>{1.5, -2.5, 1e300});
        float* const data = array.on(OnDevice<float>());
        bf16* const narrow_data = narrow.on(OnDevice<bf16>());
        double* const sum = sums.on(OnDevice<double>());

        // Once with all elements, then with fewer elements but more often than tickets are kept.
        for (int round = 0; round < 300; round++) {
            const size_t count = round == 0 ? kCount : 1003;
            for (const View inp : {View(data), View(narrow_data)})
                wait(reduce_scatter_sum({.out = inp, .scratch = nullptr, .inp = inp, .count = count}, comm, {}), comm,
                     {});
            const Ticket gathered = all_gather(data, data, count * sizeof(float), comm, {});
            wait(all_reduce_sum(sum, 3, comm, {}), comm, {});
            wait(gathered, comm, {});
        }
        // The stream holds only waits.
        synchronize({});
        const double waited_ms = comm_totals(comm).waited_ms;
        CHECK((waited_ms > 0) == (comm.handle != nullptr));
        CHECK(all_reduce_max(-3, comm) == -3);
        drain(comm);
        check_same_bits(array, std::vector<float>(values.begin(), values.end()));
        check_same_bits(narrow, narrow_before);
        check_same_bits(sums, {1.5, -2.5, 1e300});
        CHECK(comm_totals(comm).bytes_sent == 0);
        close_comm(comm);
        CHECK(comm.handle == nullptr);
    }
}

TEST_CASE("a reduce-scatter refuses types that it does not support", "[comm]") {
    Comm comm = open_comm({.deadline_s = 60, .always = true});
    DeviceBuffer array(sizeof(double));
    auto expect_refused = [&](Dtype inp, Dtype out) {
        const ReduceScatter op{{array.data(), out}, nullptr, {array.data(), inp}, 1};
        expect_error(Exit::internal,
                     {format("reduce_scatter_sum on rank 0 of 1 does not support a sum of %s in %s", name_of(inp),
                             name_of(out))},
                     [&] { reduce_scatter_sum(op, comm, {}); });
    };
    expect_refused(Dtype::bf16, Dtype::fp16);
    expect_refused(Dtype::fp16, Dtype::bf16);
    expect_refused(Dtype::fp64, Dtype::fp64);
    expect_refused(Dtype::fp64, Dtype::fp32);
    expect_refused(Dtype::fp32, Dtype::fp64);
    expect_refused(Dtype::fp32, Dtype::bf16);  // one rank's sum is in place
    close_comm(comm);
}

TEST_CASE("one rank's exchange copies its messages in their order", "[comm]") {
    Comm comm = open_comm({.deadline_s = 60, .always = true});
    constexpr size_t kCount = 100003;
    std::vector<double> values(2 * kCount);
    std::iota(values.begin(), values.end(), 1.0);
    Array<float> array("array", Role::output, values);
    float* const data = array.on(OnDevice<float>());
    auto piece = [&](size_t begin, size_t count) -> Exchange::Message {
        return {0, data + begin, count * sizeof(float)};
    };
    // From the first half of the array to the second; two messages have the same size.
    struct Copied {
        size_t from, to, count;
    };
    const Copied copied[] = {
        {9, kCount + 2, 1}, {20, kCount + 10, kCount - 30}, {3, kCount + 4, 3}, {0, kCount + 7, 3}};
    Exchange op;
    std::vector<float> expected(values.begin(), values.end());
    for (const Copied& each : copied) {
        op.send.push_back(piece(each.from, each.count));
        op.receive.push_back(piece(each.to, each.count));
        std::copy_n(values.begin() + ptrdiff_t(each.from), each.count, expected.begin() + ptrdiff_t(each.to));
    }
    wait(exchange({}, comm, {}), comm, {});
    wait(exchange(op, comm, {}), comm, {});
    synchronize({});
    check_same_bits(array, expected);
    CHECK(comm_totals(comm).bytes_sent == 0);

    auto expect_refused = [&](const std::string& words) {
        expect_error(Exit::internal, {"exchange: rank 0", words}, [&] { exchange(op, comm, {}); });
    };
    op.receive.pop_back();
    expect_refused("4 and 3 messages");
    op.receive.push_back(piece(kCount + 7, 2));
    expect_refused("other messages than it receives");
    for (const Exchange::Message& wrong : {Exchange::Message{1, data, 4}, {-1, data, 4}, {0, data, 0}}) {
        op.receive.back() = wrong;
        expect_refused(format("a message of %zu bytes for rank %d", wrong.bytes, wrong.rank));
    }
    drain(comm);
    close_comm(comm);
}
