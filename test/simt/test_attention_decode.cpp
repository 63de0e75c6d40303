// attention_decode loads keys and values before it computes with them, so that the loads overlap: changes in memory
// after a warp's first exchange have no effect.
#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/ops.h"
#include "test/simt/after_meeting.h"
#include "test/simt/device_memory.h"
#include "test/simt/machine.h"
#include "test/simt/planted.h"

TEST_CASE("attention_decode: a warp loads four keys and their values before it uses the first", "[simt]") {
    if (simt::tsan()) return;  // the change is a race
    // One head. Each warp has four of the cached keys.
    constexpr int kSize = 32, kKeys = 33, kWarps = 8;
    std::vector<float> kept(kKeys * 2 * kSize), row(3 * kSize);
    for (size_t i = 0; i < kept.size(); i++) kept[i] = std::sin(float(i));
    for (size_t i = 0; i < row.size(); i++) row[i] = std::cos(float(i));
    int changes = 0;
    auto decode = [&](bool must_change) {
        const DeviceArray<float> cache(kept), qkv(row), out(kSize);
        const DeviceArray<ops::AttentionDecode::Place> places({{.sequence = 0, .position = kKeys - 1, .first_key = 0}});
        auto* there = reinterpret_cast<float*>(simt::on_device(cache.data()));
        simt::after_meeting() = [&] {
            if (!std::exchange(must_change, false)) return;
            for (int key = simt::me().warp(); key < kKeys - 1; key += kWarps, changes++)
                std::fill_n(there + key * 2 * kSize, 2 * kSize, NAN);
        };
        ops::attention_decode({.out = View(out.data(), Dtype::fp32),
                               .cache = View(cache.data(), Dtype::fp32),
                               .qkv = ConstView(qkv.data(), Dtype::fp32),
                               .places = places.data(),
                               .scratch = nullptr,
                               .rows = 1,
                               .capacity = kKeys,
                               .n_head = 1,
                               .n_kv_head = 1,
                               .head_size = kSize,
                               .scale = 0.25f},
                              {});
        const cudaError_t ended = cudaStreamSynchronize(cuda_stream({}));
        simt::after_meeting() = nullptr;
        check_cuda(ended, "synchronize");
        return out.fetch();
    };
    const std::vector<float> expected = decode(false);
    CHECK(decode(true) == expected);
    CHECK(changes == 4);
}
