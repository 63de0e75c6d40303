#include <CLI/App.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "commands/command.h"
#include "commands/model_io.h"
#include "kernels/check.h"
#include "model/huggingface.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/io/io.h"

namespace {

struct Options {
    std::string checkpoint;
    std::string directory;
};

void export_huggingface(const Options& options) {
    LoadedModel model = load_model(options.checkpoint, 1);
    const std::string& directory = options.directory;
    if (directory_exists(directory) && !list_directory(directory).empty())
        fail(Exit::cannot_create, "%s is not empty; nothing was written", directory);
    make_directories(directory);
    int eot = model.config.model.vocab_size - 1;
    if (file_exists(model.tokenizer_path)) {
        const Tokenizer tokenizer = Tokenizer::load(model.tokenizer_path);
        tokenizer.save(directory + "/tokenizer.json");
        eot = tokenizer.eot();
    }
    const std::vector<NamedTensor> tensors = hf_tensors(model.gpt);
    write_safetensors(directory + "/model.safetensors", tensors);
    write_file_atomically(directory + "/config.json", hf_config(model.gpt.options().shape, eot).dump(2) + "\n");
    std::printf("wrote %s: config.json, model.safetensors (%zu tensors)\n", directory.c_str(), tensors.size());
}

}  // namespace

Command add_export(CLI::App& app) {
    auto options = std::make_shared<Options>();
    CLI::App* parser = app.add_subcommand("export", "weights for other programs");
    parser
        ->add_flag_function(
            "--hf", [](int64_t) {}, "as a Hugging Face GPT-2 directory")
        ->required();
    parser->add_option("CHECKPOINT", options->checkpoint, kCheckpointHelp)->required();
    parser->add_option("DIR", options->directory, "absent or empty directory")->required();
    return {parser, [options] { export_huggingface(*options); }};
}
