// wgmma: products that four warps issue together, and the barrier of a cluster.
#include <algorithm>
#include <cstring>
#include <map>
#include <vector>

#include "test/simt/hopper_twins.h"
#include "test/simt/proxy.h"

namespace ptx {

namespace {

constexpr int kGroupLanes = 128;

// Accumulators in flight: their true values, and the number of pending products.
struct Accumulator {
    std::vector<float> values;
    int products = 0;
};

struct Lane {
    std::vector<Wgmma> open;
    std::vector<std::vector<Wgmma>> groups;  // the oldest first
    std::map<float*, Accumulator> accumulators;
    bool is_fenced = false;
    unsigned cluster_generation = 0;
};

struct Meeting {
    int arrived = 0;
    unsigned generation = 0;
};

struct State {
    std::vector<Lane> lanes;
    std::vector<Meeting> meetings;  // of warpgroups
};

State& state() {
    static State instance;
    return instance;
}

Lane& mine() { return state().lanes[size_t(simt::me().id)]; }

void start() {
    state().lanes.assign(size_t(simt::machine().fiber_count), {});
    state().meetings.assign(size_t(simt::machine().fiber_count + kGroupLanes - 1) / kGroupLanes, {});
}

void end() {
    if (simt::machine().abandoning) return;
    for (const Lane& lane : state().lanes)
        if (!lane.accumulators.empty()) return simt::note_fault("a wgmma is in flight when the block ends");
}

const bool installed = (simt::hooks().push_back({start, nullptr, end}), true);

// Address of 8 consecutive elements of an operand. The span of a row is 16, 32, 64 or 128 bytes by swizzle.
// K-major: x is the row (m or n), y is k / 8. MN-major: x is k, y is m / 8 or n / 8.
uint32_t operand_address(uint64_t descriptor, bool mn_major, int x, int y) {
    const int mode = int(descriptor >> 62), span = mode == SWIZZLE_NONE ? 16 : 256 >> mode;
    const auto field = [descriptor](int bit) { return uint32_t(descriptor >> bit & 0x3fff) << 4; };
    uint32_t leading = field(16), stride = field(32);
    if (mn_major && mode == SWIZZLE_NONE) std::swap(leading, stride);
    const int per_span = span / 16;
    uint32_t chunk;
    if (mn_major)
        chunk = uint32_t(y % per_span) * 16 + uint32_t(y / per_span) * leading;
    else
        chunk = uint32_t(y) * (mode ? 16 : leading);
    return swizzled(field(0) + uint32_t(x % 8 * span) + uint32_t(x / 8) * stride + chunk, mode);
}

// Calls f(address, x, y) for the 8-element chunks of rows (m or n) first .. end - 1.
template <class F> void each_chunk(uint64_t descriptor, bool mn_major, int first, int end, F f) {
    const int xs = mn_major ? 16 : end, ys = mn_major ? end / 8 : 2;
    for (int x = mn_major ? 0 : first; x < xs; x++)
        for (int y = mn_major ? first / 8 : 0; y < ys; y++) f(operand_address(descriptor, mn_major, x, y), x, y);
}

// Reports this warp's reads to the race detector, for its first and last lane.
void show_reads(const Wgmma& product) {
    const simt::Fiber& fiber = simt::me();
    if (!simt::tsan() || fiber.lane() % 31) return;
    const uint32_t block = uint32_t(fiber.block->rank) << simt::kRankShift;
    const int warp = fiber.local / 32 % 4;
    auto read = [block](uint32_t address, int, int) { async_access(simt::shared_pointer(block | address), 16, false); };
    simt::as_async(simt::me(), [&] {
        if (!product.a_in_registers) each_chunk(product.a, product.transpose_a, 16 * warp, 16 * warp + 16, read);
        each_chunk(product.b, product.transpose_b, 0, product.n, read);
    });
}

struct Tile {
    float a[64][16], b[16][256];
};

template <class T> void load_operands(Lane* lanes, const Wgmma& product, size_t index, Tile& tile) {
    const uint32_t block = uint32_t(simt::me().block->rank) << simt::kRankShift;
    auto load = [&](uint64_t descriptor, bool mn_major, int rows, auto put) {
        each_chunk(descriptor, mn_major, 0, rows, [&](uint32_t address, int x, int y) {
            T values[8];
            std::memcpy(values, async_pointer(block | address), 16);
            for (int i = 0; i < 8; i++)
                if (mn_major)
                    put(y * 8 + i, x, to_float(values[i]));
                else
                    put(x, y * 8 + i, to_float(values[i]));
        });
    };
    load(product.b, product.transpose_b, product.n, [&](int n, int k, float value) { tile.b[k][n] = value; });
    if (!product.a_in_registers)
        return load(product.a, product.transpose_a, 64, [&](int m, int k, float value) { tile.a[m][k] = value; });
    for (int m = 0; m < 64; m++)
        for (int k = 0; k < 16; k++) {
            const Lane& lane = lanes[m / 16 * 32 + m % 8 * 4 + k % 8 / 2];
            tile.a[m][k] = element<T>(lane.groups[0][index].registers[m % 16 / 8 + k / 8 * 2], k % 2);
        }
}

// Product `index` of the oldest group of the warpgroup.
template <class T> void multiply(Lane* lanes, size_t index) {
    static Tile tile;
    const Wgmma product = lanes[0].groups[0][index];
    load_operands<T>(lanes, product, index, tile);
    float* d[kGroupLanes];
    for (int l = 0; l < kGroupLanes; l++) d[l] = lanes[l].accumulators[lanes[l].groups[0][index].d].values.data();
    for (int m = 0; m < 64; m++) {
        auto at = [&](int n) -> float& {
            return d[m / 16 * 32 + m % 8 * 4 + n % 8 / 2][n / 8 * 4 + m % 16 / 8 * 2 + n % 2];
        };
        float sum[256];
        for (int n = 0; n < product.n; n++) sum[n] = product.scale_d ? at(n) : 0;
        for (int k = 0; k < 16; k++)
            for (int n = 0; n < product.n; n++) sum[n] += tile.a[m][k] * tile.b[k][n];
        for (int n = 0; n < product.n; n++) at(n) = sum[n];
    }
}

void check_agreement(const Lane* lanes) {
    const auto& first = lanes[0].groups[0];
    for (int l = 1; l < kGroupLanes; l++) {
        if (lanes[l].groups.empty() || lanes[l].groups[0].size() != first.size())
            simt::fault("the lanes of a warpgroup disagree on their wgmmas");
        for (size_t i = 0; i < first.size(); i++) {
            const Wgmma& other = lanes[l].groups[0][i];
            if (other.b != first[i].b || (!other.a_in_registers && other.a != first[i].a))
                simt::fault("the lanes of a warpgroup give different descriptors");
        }
    }
}

void finish_groups(Lane* lanes, int keep) {
    while (int(lanes[0].groups.size()) > keep) {
        check_agreement(lanes);
        for (size_t i = 0; i < lanes[0].groups[0].size(); i++) {
            if (lanes[0].groups[0][i].is_bf16)
                multiply<bf16>(lanes, i);
            else
                multiply<fp16>(lanes, i);
            for (int l = 0; l < kGroupLanes; l++) {
                auto found = lanes[l].accumulators.find(lanes[l].groups[0][i].d);
                if (--found->second.products) continue;
                std::copy(found->second.values.begin(), found->second.values.end(), found->first);
                lanes[l].accumulators.erase(found);
            }
        }
        for (int l = 0; l < kGroupLanes; l++) lanes[l].groups.erase(lanes[l].groups.begin());
    }
}

}  // namespace

void wgmma_fence() { mine().is_fenced = true; }

void issue_wgmma(const Wgmma& product) {
    simt::Quiet quiet;
    Lane& lane = mine();
    simt::async_order(simt::me());
    show_reads(product);
    if (!lane.is_fenced) simt::fault("wgmma without wgmma.fence before it");
    if (product.n % 8 || product.n < 8 || product.n > 256) simt::fault(format("wgmma with n %d", product.n));
    for (uint64_t descriptor : {product.a_in_registers ? product.b : product.a, product.b})
        if (descriptor >> 49 & 7) simt::fault("wgmma: the base offset of a descriptor is not modelled");
    float* end = product.d + product.n / 2;
    auto [found, is_new] = lane.accumulators.try_emplace(product.d, Accumulator{{product.d, end}, 0});
    if (!is_new && std::any_of(product.d, end, [](float x) { return !std::isnan(x); }))
        simt::fault("an accumulator was written while a wgmma is in flight");
    found->second.products++;
    std::fill(product.d, end, std::bit_cast<float>(0xffffffffu));
    lane.open.push_back(product);
}

void wgmma_commit() {
    simt::Quiet quiet;
    mine().groups.push_back(std::move(mine().open));
    mine().open.clear();
}

// The whole warpgroup learns of the completion: one thread may then release the buffers for all four warps.
void wgmma_wait_for(int keep) {
    simt::Quiet quiet;
    for (const auto& group : mine().groups)
        for (const Wgmma& product : group) {
            show_reads(product);
            if (product.source && std::memcmp(product.source, product.registers, sizeof product.registers) != 0)
                simt::fault("registers of A were written while a wgmma that reads them is in flight");
        }
    if (!mine().open.empty()) simt::fault("wgmma not committed before wait_group");
    mine().is_fenced = false;
    const int group = simt::me().id / kGroupLanes;
    Meeting& meeting = state().meetings[size_t(group)];
    const unsigned generation = meeting.generation;
    const simt::Order order = simt::order_of(simt::Place::warpgroup, uint32_t(group) * 4 + (generation & 1) * 2);
    simt::as_async(simt::me(), [order] {
        simt::release_order(order);
        simt::release_order(order + 1);
    });
    if (++meeting.arrived == kGroupLanes) {
        finish_groups(&state().lanes[size_t(group) * kGroupLanes], keep);
        meeting.arrived = 0;
        meeting.generation++;
        simt::wake(&meeting);
    } else {
        while (meeting.generation == generation) simt::wait_for_key(&meeting, "wgmma wait_group");
    }
    simt::acquire_both(order);
}

void cluster_arrive() {
    simt::Quiet quiet;
    simt::Machine& machine = simt::machine();
    simt::Barrier& barrier = machine.cluster_barrier;
    mine().cluster_generation = barrier.generation;
    simt::release_both(simt::order_of(simt::Place::cluster, (barrier.generation & 1) * 2));
    if (++barrier.arrived < machine.alive) return;
    barrier.arrived = 0;
    barrier.generation++;
    simt::wake(&barrier);
}

void cluster_wait() {
    simt::Quiet quiet;
    const unsigned generation = mine().cluster_generation;
    simt::Barrier& barrier = simt::machine().cluster_barrier;
    while (barrier.generation == generation) simt::wait_for_key(&barrier, "barrier.cluster.wait");
    simt::acquire_both(simt::order_of(simt::Place::cluster, (generation & 1) * 2));
}

}  // namespace ptx
