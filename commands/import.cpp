#include "commands/import.h"

#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include "model/huggingface.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/io/io.h"

namespace {

// Every tensor of the model from a GPT2LMHeadModel, with or without its "transformer." prefix.
void import_huggingface(Gpt& gpt, const std::string& directory) {
    const std::string config_path = directory + "/config.json";
    check_hf_config(parse_json(read_file(config_path), config_path, Exit::data), gpt.options().shape, config_path);
    const Safetensors file(directory);
    const std::string prefix = file.find("transformer.wte.weight") ? "transformer." : "";
    std::vector<NamedTensor> tensors = hf_tensors(gpt);
    for (NamedTensor& tensor : tensors) tensor.name = prefix + tensor.name;
    file.load(tensors, [&](const Safetensors::Entry& entry) {
        const Safetensors::Entry& wte = file.at(prefix + "wte.weight");
        const bool is_tied_head = entry.name == "lm_head.weight" && entry.bytes == wte.bytes &&
                                  std::memcmp(entry.data, wte.data, wte.bytes) == 0;
        if (!is_tied_head && !is_hf_mask(entry.name))
            fail(Exit::data, "%s: %s has no place in a GPT-2 with a tied head", entry.file, entry.name);
    });
}

}  // namespace

void load_initial_weights(Gpt& gpt, const std::string& path) {
    if (file_exists(path + "/config.json") && !directory_exists(checkpoints_directory(path)))
        import_huggingface(gpt, path);
    else
        open_checkpoint(path).load(gpt.master_tensors(), OtherTensors::ignore);
}
