// cp.async.
#include <vector>

#include "test/simt/ptx_twins.h"

namespace ptx {

namespace {

struct Copy {
    char* to;
    const char* from;
    int bytes, used;
};

struct Copies {
    std::vector<Copy> open;
    std::vector<std::vector<Copy>> groups;  // the oldest first
};

std::vector<Copies>& copies_of_threads() {
    static std::vector<Copies> instance;
    return instance;
}

Copies& mine() { return copies_of_threads()[size_t(simt::me().id)]; }

void start() {
    copies_of_threads().resize(size_t(simt::machine().fiber_count));
    for (Copies& copies : copies_of_threads()) {
        copies.open.clear();
        copies.groups.clear();
    }
}

void finish() {
    size_t left = 0;
    for (const Copies& copies : copies_of_threads()) {
        left += copies.open.size();
        for (const auto& group : copies.groups) left += group.size();
    }
    if (left && !simt::machine().abandoning)
        simt::note_fault(format("%zu copies by cp.async are in flight when the block ends", left));
}

void install() {
    static const bool installed = (simt::hooks().push_back({start, nullptr, finish}), true);
    (void)installed;
}

const bool installed_at_start = (install(), true);

void land(const Copy& copy) {
    if (copy.used) simt::saw_read(copy.from, size_t(copy.used));
    simt::saw_write(copy.to, size_t(copy.bytes));
    simt::Quiet quiet;
    std::memset(copy.to, 0, size_t(copy.bytes));
    std::memcpy(copy.to, copy.from, size_t(copy.used));
}

}  // namespace

void copy_async(uint32_t to, const void* from, int bytes, int used) {
    if (to % uint32_t(bytes) || reinterpret_cast<uintptr_t>(from) % uintptr_t(bytes))
        simt::fault(format("cp.async of %d bytes: to 0x%x, from %p, not both aligned to that", bytes, to, from));
    if (used < 0 || used > bytes) simt::fault(format("cp.async of %d bytes, of which %d are used", bytes, used));
    char* p = simt::shared_pointer(to);
    simt::saw_write(p, size_t(bytes));
    simt::Quiet quiet;
    std::memset(p, 0xff, size_t(bytes));
    mine().open.push_back({p, static_cast<const char*>(from), bytes, used});
}

void cp_async_commit() {
    simt::Quiet quiet;
    mine().groups.push_back(std::move(mine().open));
    mine().open.clear();
}

void cp_async_wait_for(int keep) {
    for (;;) {
        std::vector<Copy> group;
        {
            simt::Quiet quiet;
            if (int(mine().groups.size()) <= keep) return;
            group = std::move(mine().groups.front());
            mine().groups.erase(mine().groups.begin());
        }
        for (const Copy& copy : group) land(copy);
    }
}

void cp_async_wait_all() {
    cp_async_commit();
    cp_async_wait_for(0);
}

}  // namespace ptx
