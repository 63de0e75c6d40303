
#include <utility>

#include "test/simt/device_memory.h"
#include "test/simt/machine.h"
#include "test/simt/streams.h"

namespace simt {

static std::string describe(uint3 v) { return format("(%u, %u, %u)", v.x, v.y, v.z); }

std::string Fault::sentence() const {
    std::string text;
    if (!kernel.empty()) text += kernel + ": ";
    if (!place.empty()) text += place + ": ";
    return text + what;
}

std::vector<Fault>& pending_faults() {
    static std::vector<Fault> instance;
    return instance;
}

void note_fault(const std::string& what) {
    constexpr size_t kMaxFaults = 100;  // the first ones suffice; faults in every thread must not fill the memory
    const Machine& m = machine();
    Fault fault;
    fault.what = what;
    if (m.grid) fault.kernel = m.grid->name;
    if (m.me) fault.place = "block " + describe(m.me->block->index) + ", thread " + describe(m.me->thread);
    if (pending_faults().size() < kMaxFaults) pending_faults().push_back(fault);
}

void fault(const std::string& what) {
    Quiet quiet;
    note_fault(what);
    if (!machine().me) fail(Exit::internal, "simt: %s", what.c_str());
    abandon_launch();
}

std::vector<Fault> take_faults() {
    run_all_streams();
    check_device_memory();
    return std::exchange(pending_faults(), {});
}

}  // namespace simt
