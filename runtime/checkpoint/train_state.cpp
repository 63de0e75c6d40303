#include "runtime/checkpoint/train_state.h"

#include <cstdio>

#include "kernels/check.h"
#include "kernels/device.h"
#include "runtime/io/io.h"

TrainState new_state(const Config& config) {
    TrainState state;
    state.run_id = new_run_id();
    state.loss_scale = LossScaler(config.loss_scale).state();
    return state;
}

CheckpointInfo checkpoint_info(const TrainState& state, const Config& config, const std::string& dataset_digest) {
    CheckpointInfo info;
    info.step = state.step;
    info.parent_step = state.saved_step;
    info.run_id = state.run_id;
    info.config = config_json(config);
    info.config_digest = config_digest(config);
    info.dataset_digest = dataset_digest;
    info.state = {{"updates", state.updates}, {"cursor", state.cursor}, {"loss_scale", to_json(state.loss_scale)}};
    if (const std::string choices = device_choices(); !choices.empty()) info.state["device_choices"] = choices;
    return info;
}

std::optional<Checkpoint> checkpoint_to_resume(const std::string& run_dir, StartAction action) {
    if (action != StartAction::resume && action != StartAction::resume_or_start) return std::nullopt;
    auto report = [](const std::string& sentence) { std::fprintf(stderr, "train_gpt: %s\n", sentence.c_str()); };
    std::optional<Checkpoint> newest = find_newest_valid(run_dir, report);
    if (newest) return newest;
    const std::string directory = checkpoints_directory(run_dir);
    if (action == StartAction::resume) fail(Exit::no_input, "%s: no checkpoint to resume from", directory.c_str());
    if (directory_exists(directory) && !list_directory(directory).empty())
        fail(Exit::no_input,
             "%s: what is there has been set aside and none is left to resume from; --fresh starts anew",
             directory.c_str());
    return std::nullopt;
}

namespace {

void refuse_changes(const Checkpoint& checkpoint, const Config& config, const std::string& dataset_digest) {
    const CheckpointInfo& info = checkpoint.manifest().info;
    const Config saved = parse_config(info.config, checkpoint.directory() + "/MANIFEST.json");
    std::string changes;
    for (const std::string& difference : config_differences(saved, config)) changes += "\n  " + difference;
    if (dataset_digest != info.dataset_digest)
        changes += "\n  data.train: the files of " + config.data.train + " are not those that it was trained on";
    if (!changes.empty())
        fail(Exit::config,
             "%s: since this checkpoint was saved, what decides the run's result has changed:%s\n"
             "--accept-changes continues with the new values, --fresh starts anew",
             checkpoint.directory().c_str(), changes.c_str());
}

}  // namespace

TrainState resumed_state(const Checkpoint& checkpoint, const Config& config, const std::string& dataset_digest,
                         bool accept_changes) {
    if (!accept_changes) refuse_changes(checkpoint, config, dataset_digest);
    const CheckpointInfo& info = checkpoint.manifest().info;
    const std::string origin = checkpoint.directory() + "/MANIFEST.json";
    TrainState state;
    state.step = int(info.step);
    state.saved_step = info.step;
    state.run_id = info.run_id;
    try {
        state.updates = info.state.at("updates").get<int64_t>();
        state.cursor = info.state.at("cursor").get<uint64_t>();
        state.loss_scale = loss_scale_state_from_json(info.state.at("loss_scale"), origin);
        state.device_choices = info.state.value("device_choices", "");
    } catch (const nlohmann::json::exception& error) {
        fail(Exit::data, "%s: state: %s", origin.c_str(), error.what());
    }
    return state;
}
