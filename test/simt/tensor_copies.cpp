// TMA: tensor and bulk copies between global and shared memory.
#include <algorithm>
#include <vector>

#include "test/simt/hopper_twins.h"
#include "test/simt/mbarrier.h"
#include "test/simt/proxy.h"

namespace ptx {

namespace {

struct Load {
    TensorMap map;
    int at[5];
    uint32_t to, bar, bytes;
    int mask;          // of blocks, for a multicast; or -1
    const char* flat;  // the source of a bulk copy without a map
    simt::Fiber* issuer;
    void* unit;
};

struct Store {
    TensorMap map;
    int at[5];
    uint32_t from;
    bool add, is_read;  // is_read: the source has been taken into `bytes`
    char* flat;
    simt::Fiber* issuer;
    std::vector<char> bytes;
};

struct Stores {
    std::vector<Store> open;
    std::vector<std::vector<Store>> groups;  // the oldest first
};

struct InFlight {
    std::vector<Load> loads;
    std::vector<Stores> stores;  // by thread
};

InFlight& in_flight() {
    static InFlight instance;
    return instance;
}

Stores& mine() { return in_flight().stores[size_t(simt::me().id)]; }

TensorMap map_of(const void* map, int rank) {
    TensorMap copy;
    std::memcpy(&copy, map, sizeof copy);
    if (copy.magic != TensorMap::kMagic) simt::fault("this is no tensor map");
    if (copy.rank != rank) simt::fault(format("%d coordinates for a tensor map of rank %d", rank, copy.rank));
    return copy;
}

// A multicast writes to the same offsets in every block of the mask.
template <class F> void each_target(const Load& load, F f) {
    if (load.mask < 0) return f(load.to, load.bar);
    for (int rank = 0; rank < simt::machine().cluster; rank++)
        if (load.mask >> rank & 1) f(mapa(load.to, uint32_t(rank)), mapa(load.bar, uint32_t(rank)));
}

void land_piece(const Load& load, uint32_t to, uint32_t offset, const char* from, unsigned valid) {
    char piece[16] = {};
    const int bytes = load.map.element_bytes;
    for (int k = 0; k < 16 / bytes; k++)
        if (valid >> k & 1) std::memcpy(piece + k * bytes, from + k * bytes, size_t(bytes));
    async_write(swizzled(to + offset, load.map.swizzle), piece, 16);
}

void land(const Load& load) {
    simt::machine().me = load.issuer;  // faults are reported for it
    each_target(load, [&](uint32_t to, uint32_t bar) {
        on_unit(load.unit, [&] {
            async_access(simt::shared_pointer(to), load.bytes, true);
            if (load.flat)
                async_write(to, load.flat, load.bytes);
            else
                each_piece(load.map, load.at, [&](uint32_t offset, const char* from, unsigned valid) {
                    land_piece(load, to, offset, from, valid);
                });
            Mbarrier* barrier = mbarrier_at(bar);
            const simt::Order order = order_of_mbarrier(bar, barrier->phase);
            simt::release_order(order);
            simt::release_order(order + 1);
            barrier->bytes -= load.bytes;
            check_phase(*barrier);
        });
    });
    give_back_unit(load.unit);
    simt::machine().me = nullptr;
}

void issue(Load load) {
    simt::Quiet quiet;
    if (load.to % 128 && !load.flat) simt::fault("a tensor copy to a shared address that is not aligned to 128 bytes");
    if (load.bytes % 16 || load.to % 16) simt::fault("a bulk copy whose size or address is no multiple of 16 bytes");
    simt::async_order(*load.issuer);
    load.unit = take_unit();
    each_target(load, [&](uint32_t to, uint32_t) {
        on_unit(load.unit, [&] {
            async_access(simt::shared_pointer(to), load.bytes, true);
            async_write(to, nullptr, load.bytes);
        });
    });
    in_flight().loads.push_back(load);
}

// Reads shared memory as late as the wait allows.
void read_source(Store& store) {
    if (store.is_read) return;
    store.is_read = true;
    simt::as_async(*store.issuer, [&] {
        async_access(simt::shared_pointer(store.from), store.bytes.size(), false);
        for (size_t offset = 0; offset < store.bytes.size(); offset += 16)
            std::memcpy(&store.bytes[offset],
                        async_pointer(swizzled(store.from + uint32_t(offset), store.flat ? 0 : store.map.swizzle)), 16);
    });
}

template <class T> void add_to(char* to, const char* value) {
    T x, y;
    std::memcpy(&x, to, sizeof x);
    std::memcpy(&y, value, sizeof y);
    x = from_float<T>(to_float(x) + to_float(y));
    std::memcpy(to, &x, sizeof x);
}

void finish(Store& store) {
    read_source(store);
    simt::as_async(*store.issuer, [&] {
        if (store.flat) {
            std::memcpy(store.flat, store.bytes.data(), store.bytes.size());
            return;
        }
        const int bytes = store.map.element_bytes;
        each_piece(store.map, store.at, [&](uint32_t offset, char* to, unsigned valid) {
            for (int k = 0; k < 16 / bytes; k++) {
                if (!(valid >> k & 1)) continue;
                const char* value = &store.bytes[offset + uint32_t(k * bytes)];
                if (!store.add)
                    std::memcpy(to + k * bytes, value, size_t(bytes));
                else if (bytes == 4)
                    add_to<float>(to + k * bytes, value);
                else
                    add_to<bf16>(to + k * bytes, value);
            }
        });
    });
}

// Finishes the oldest `count` groups. Their order is undefined: the newest first, or random with a seed.
void finish_oldest(std::vector<std::vector<Store>>& groups, int count) {
    for (; count > 0; count--) {
        const int chosen = simt::options().seed ? int(simt::random_below(uint32_t(count))) : count - 1;
        auto group = groups.begin() + chosen;
        std::for_each(group->rbegin(), group->rend(), finish);
        groups.erase(group);
    }
}

void start() {
    in_flight().loads.clear();
    in_flight().stores.clear();
    in_flight().stores.resize(size_t(simt::machine().fiber_count));
}

bool land_one() {
    auto& loads = in_flight().loads;
    if (loads.empty()) return false;
    const size_t chosen = simt::options().seed ? simt::random_below(uint32_t(loads.size())) : 0;
    const Load load = loads[chosen];
    loads.erase(loads.begin() + long(chosen));
    land(load);
    return true;
}

void end() {
    const bool is_faulty = simt::machine().abandoning;
    if (!in_flight().loads.empty() && !is_faulty) simt::note_fault("a tensor copy is in flight when the block ends");
    bool is_reading = false;
    for (Stores& stores : in_flight().stores) {
        is_reading |= !stores.open.empty();
        for (const auto& group : stores.groups)
            for (const Store& store : group) is_reading |= !store.is_read;
        if (!is_faulty) finish_oldest(stores.groups, int(stores.groups.size()));
    }
    if (is_reading && !is_faulty) simt::note_fault("a bulk store still reads shared memory when the block ends");
}

const bool installed = (simt::hooks().push_back({start, land_one, end}), true);

}  // namespace

void tensor_load(uint32_t to, const void* map, uint32_t bar, int mask, const int* at, int rank) {
    simt::Quiet quiet;
    Load load{map_of(map, rank), {}, to, bar, 0, mask, nullptr, &simt::me(), nullptr};
    std::copy(at, at + 5, load.at);
    load.bytes = uint32_t(load.map.box_bytes());
    issue(load);
}

void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
    issue({{}, {}, to, bar, bytes, -1, static_cast<const char*>(from), &simt::me(), nullptr});
}

void tensor_store(const void* map, uint32_t from, bool add, const int* at, int rank) {
    simt::Quiet quiet;
    Store store{map_of(map, rank), {}, from, add, false, nullptr, &simt::me(), {}};
    std::copy(at, at + 5, store.at);
    if (*std::min_element(at, at + rank) < 0)
        simt::fault("a tensor store that begins before the tensor: an H200 stops with an illegal instruction");
    if (from % 128) simt::fault("a tensor store from a shared address that is not aligned to 128 bytes");
    store.bytes.resize(store.map.box_bytes());
    simt::as_async(simt::me(), [&] { async_access(simt::shared_pointer(from), store.bytes.size(), false); });
    mine().open.push_back(store);
}

void bulk_store(void* to, uint32_t from, uint32_t bytes) {
    simt::Quiet quiet;
    mine().open.push_back({{}, {}, from, false, false, static_cast<char*>(to), &simt::me(), std::vector<char>(bytes)});
}

void bulk_commit() {
    simt::Quiet quiet;
    if (simt::options().kind_stores)
        for (Store& store : mine().open) read_source(store);
    mine().groups.push_back(std::move(mine().open));
    mine().open.clear();
}

void bulk_wait_for(int keep, bool reads_only) {
    simt::Quiet quiet;
    auto& groups = mine().groups;
    for (size_t i = 0; i + size_t(keep) < groups.size(); i++)
        for (Store& store : groups[i]) read_source(store);
    if (!reads_only) finish_oldest(groups, int(groups.size()) - keep);
    join_async();
}

}  // namespace ptx
