#include "training/run_files.h"

#include <ctime>
#include <nlohmann/json.hpp>

#include "model/arena.h"
#include "model/plan.h"
#include "model/update.h"
#include "runtime/io/files.h"
#include "runtime/io/json.h"
#include "runtime/io/process.h"
#include "training/models/model_io.h"

namespace {

// The settings that differ from the defaults, wrapped to the width of a terminal.
std::string settings_text(const Config& config) {
    constexpr size_t kWidth = 100;
    Config given = config;
    if (given.train.head_rows == default_head_rows(given.train.batch_size, given.train.seq_len))
        given.train.head_rows = 0;
    std::string text = "settings";
    size_t line_begin = 0;
    for (const std::string& setting : changed_settings(given)) {
        if (text.size() - line_begin + 1 + setting.size() > kWidth) {
            line_begin = text.size() + 1;
            text += "\n        ";
        }
        text += " " + setting;
    }
    return text;
}

// "runs/nano: steps 1 to 500, 4096 tokens each", "runs/nano: steps from 1, for 3 minutes, 4096 tokens each", both
// limits, or "runs/nano is complete: 500 steps are done".
std::string steps_text(const TrainingRun& run) {
    const std::string& dir = run.config.run.dir;
    if (run.is_complete()) return format("%s is complete: %d steps are done", dir.c_str(), run.state.step);
    std::string text = format("steps %d to %d", run.state.step + 1, run.length.end_step);
    if (run.length.end_step == 0) text = format("steps from %d", run.state.step + 1);
    if (run.config.train.max_minutes > 0) text += format(", for %g minutes", run.config.train.max_minutes);
    if (run.config.train.max_minutes > 0 && run.state.progress.trained_s > 0)
        text += format(" (%.1f so far)", run.state.progress.trained_s / 60);
    return dir + ": " + text + ", " + batch_text(run.config) + " tokens each";
}

// " (data 4, pipeline 2, context 1, tensor 1)", or empty if only data has several ranks.
std::string grid_text(const Grid& grid) {
    if (grid.data == grid.size()) return "";
    return format(" (data %d, pipeline %d, context %d, tensor %d)", grid.data, grid.pipeline, grid.context,
                  grid.tensor);
}

void print_description(TrainingRun& run) {
    const Config& c = run.config;
    const DeviceInfo device = device_info();
    run.matmul_path = device.matmul_path;
    run.progress.print(format("device   %s; %s", device.name.c_str(), device.matmul_path.c_str()));
    for (const std::string& line : run.kernel_lines) run.progress.print("kernels  " + line);
    if (run.comm.size > 1)
        run.progress.print(
            format("ranks    %d%s by %s", run.comm.size, grid_text(run.grid).c_str(), comm_library().c_str()));
    run.progress.print(
        format("model    %d layers, %d heads, %d channels, vocabulary %d: %.2f M parameters, %s, %.1f MiB",
               c.model.n_layer, c.model.n_head, c.model.n_embd, c.model.vocab_size,
               double(lay_out_tensors(run.gpt.options().shape).parameters) * 1e-6, name_of(c.train.precision),
               double(planned_bytes(run.gpt.options())) / 0x1p20));
    run.progress.print("update   " + rules_text(run.gpt.options()));
    run.progress.print(format("data     %s: %zu tokens, %zu windows of %d", run.dataset.train.description().c_str(),
                              run.dataset.train.token_count(), run.train_loader.windows(), c.train.seq_len));
    run.progress.print("run      " + steps_text(run));
    if (!run.sensors.problem().empty()) run.progress.print("sensors  not read: " + run.sensors.problem());
    run.progress.print(settings_text(c));
}

// Adds this start to run.json in run.dir; replaces an invalid file. {"starts": [{"step": steps done before, "time":
// Unix seconds, "revision", "host", "device", "ranks", "threads", "parameters", "flops_per_token", "memory_bytes":
// {category: bytes of rank 0's plan}}, ...]}, at most the last 100 starts.
void add_start(const TrainingRun& run, const char* revision) {
    using Json = nlohmann::ordered_json;
    constexpr size_t kMaxStarts = 100;
    const std::string path = run.config.run.dir + "/run.json";
    const Json before = file_exists(path) ? parse_json_or_null(read_file(path)) : Json();
    Json starts = before.is_object() && before.contains("starts") ? before["starts"] : Json();
    if (!starts.is_array()) starts = Json::array();
    while (starts.size() >= kMaxStarts) starts.erase(starts.begin());

    const DeviceInfo device = device_info();
    Json memory = Json::object();
    for (const MemoryRegion& region : plan_memory(run.gpt.options()))
        memory[category_of(region)] = memory.value(category_of(region), size_t(0)) + region.bytes;
    starts.push_back({{"step", run.state.step},
                      {"time", int64_t(std::time(nullptr))},
                      {"revision", revision},
                      {"host", host_name()},
                      {"device", device.name},
                      {"ranks", run.comm.size},
                      {"threads", device.threads},
                      {"parameters", lay_out_tensors(run.gpt.options().shape).parameters},
                      {"flops_per_token", flops_of_token(run.gpt.options(), run.config.train.seq_len)},
                      {"memory_bytes", memory}});
    write_file_atomically(path, Json{{"starts", starts}}.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");
}

void write_descriptions(const TrainingRun& run, const char* revision) {
    const std::string& dir = run.config.run.dir;
    GptOptions alone = run.gpt.options();
    alone.rank = 0, alone.ranks = 1, alone.tensor_parallel = {}, alone.pipeline = {}, alone.context = {};
    check_space(dir, saved_bytes(alone));
    write_file_atomically(dir + "/config.json", config_json(run.config));
    write_file_atomically(dir + "/revision.txt", std::string(revision) + "\n");
    add_start(run, revision);
    if (run.dataset.tokenizer) run.dataset.tokenizer->save(dir);
}

}  // namespace

void write_run_files(TrainingRun& run, const char* revision) {
    run_on_rank_0(run.comm, "write to run.dir", [&] {
        run.lock.guard([&] { write_descriptions(run, revision); });
        print_description(run);
    });
}
