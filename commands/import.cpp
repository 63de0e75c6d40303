#include "commands/import.h"

#include <cstring>
#include <nlohmann/json.hpp>

#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/inspect.h"
#include "runtime/checkpoint/train_state.h"
#include "runtime/io/files.h"
#include "runtime/io/json.h"

namespace {

// Every tensor of the model from a GPT2LMHeadModel, with or without its "transformer." prefix.
void import_huggingface(Gpt& gpt, const std::string& directory) {
    const std::string config_path = directory + "/config.json";
    check_hf_config(parse_json(read_file(config_path), config_path, Exit::data), gpt.options().shape, config_path);
    const Safetensors file(directory);
    const std::string prefix = file.find("transformer.wte.weight") ? "transformer." : "";
    read_float_tensors(file, hf_float_tensors(gpt, prefix), [&](const SafetensorsView& view) {
        const SafetensorsView& wte = file.at(prefix + "wte.weight");
        const bool is_tied_head = view.name == "lm_head.weight" && view.bytes == wte.bytes &&
                                  std::memcmp(view.data, wte.data, wte.bytes) == 0;
        if (!is_tied_head && !is_hf_mask(view.name))
            fail(Exit::data, "%s: %s has no place in a GPT-2 with a tied head", view.file.c_str(), view.name.c_str());
    });
}

}  // namespace

std::vector<FloatTensor> hf_float_tensors(const Gpt& gpt, const std::string& prefix) {
    std::vector<FloatTensor> tensors;
    for (const HfTensor& tensor : hf_tensors(gpt))
        tensors.push_back({.name = prefix + tensor.name,
                           .shape = tensor.shape,
                           .get = [tensor] { return hf_values(tensor); },
                           .set = [tensor](const std::vector<float>& values) { set_hf_values(tensor, values); }});
    return tensors;
}

void load_initial_weights(Gpt& gpt, const std::string& path) {
    if (file_exists(path + "/config.json") && !directory_exists(checkpoints_directory(path)))
        import_huggingface(gpt, path);
    else
        open_checkpoint(path).load(to_load(gpt.master_tensors()), OtherTensors::ignore);
}
