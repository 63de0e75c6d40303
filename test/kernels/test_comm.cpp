// Every collective with a single rank. On a GPU this runs NCCL itself, so NCCL can be checked without a second GPU;
// elsewhere the collectives do nothing.
#include <numeric>

#include "kernels/comm.h"
#include "test/support/device_array.h"

TEST_CASE("one rank's collectives leave its values unchanged", "[comm]") {
    for (bool deterministic : {false, true}) {
        Comm comm = open_comm({.deterministic = deterministic, .deadline_s = 60, .always = true});
        constexpr size_t kCount = 100003;
        std::vector<double> values(kCount);
        std::iota(values.begin(), values.end(), -50000.0);
        Array<float> array("array", Role::output, values);
        Array<double> sums("sums", Role::output, std::vector<double>{1.5, -2.5, 1e300});
        float* const data = array.on(OnDevice<float>());
        double* const sum = sums.on(OnDevice<double>());

        // Once with all elements, then with fewer elements but more often than tickets are kept.
        for (int round = 0; round < 300; round++) {
            const size_t count = round == 0 ? kCount : 1003;
            wait(reduce_scatter_sum({.out = data, .scratch = nullptr, .inp = data, .count = count}, comm, {}), comm,
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
        check_same_bits(sums, {1.5, -2.5, 1e300});
        CHECK(comm_totals(comm).bytes_sent == 0);
        close_comm(comm);
        CHECK(comm.handle == nullptr);
    }
}
