#include "training/run_file.h"

#include <unistd.h>

#include <ctime>
#include <nlohmann/json.hpp>

#include "training/run.h"

void add_start(const TrainingRun& run, const char* revision) {
    using Json = nlohmann::ordered_json;
    constexpr size_t kMostStarts = 100;
    const std::string path = run.config.run.dir + "/run.json";
    const Json before = file_exists(path) ? parse_json_or_null(read_file(path)) : Json();
    Json starts = before.is_object() && before.contains("starts") ? before["starts"] : Json();
    if (!starts.is_array()) starts = Json::array();
    while (starts.size() >= kMostStarts) starts.erase(starts.begin());

    char host[256] = "";
    ::gethostname(host, sizeof(host) - 1);
    const DeviceInfo device = device_info();
    Json memory = Json::object();
    for (const MemoryRegion& region : plan_memory(run.gpt.options()))
        memory[region.category] = memory.value(region.category, size_t(0)) + region.bytes;
    starts.push_back({{"step", run.state.step},
                      {"time", int64_t(std::time(nullptr))},
                      {"revision", revision},
                      {"host", host},
                      {"device", device.name},
                      {"ranks", run.comm.size},
                      {"threads", device.threads},
                      {"parameters", run.gpt.layout().parameters},
                      {"flops_per_token", run.token_flops},
                      {"memory_bytes", memory}});
    write_file_atomically(path, Json{{"starts", starts}}.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
}
