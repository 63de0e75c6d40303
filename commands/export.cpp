#include <CLI/App.hpp>

#include "commands/command_line.h"
#include "commands/model_io.h"
#include "model/huggingface.h"

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
    const GptShape& shape = model.gpt.options().shape;
    const int eot = model.tokenizer ? model.tokenizer->eot() : shape.vocab_size - 1;
    std::string written = "model.safetensors";
    auto write = [&](const char* name, const std::string& content) {
        write_file_atomically(directory + "/" + name, content);
        written += std::string(", ") + name;
    };
    const std::vector<NamedTensor> tensors = hf_tensors(model.gpt);
    write_safetensors(directory + "/model.safetensors", tensors);
    write("config.json", hf_config(shape, eot).dump(2) + "\n");
    write("generation_config.json", hf_generation_config(shape, eot).dump(2) + "\n");
    if (model.tokenizer) {
        write("tokenizer.json", model.tokenizer->json());
        write("tokenizer_config.json", hf_tokenizer_config(shape, eot, kEndOfText).dump(2) + "\n");
    }
    std::printf("wrote %s: %s (%zu tensors)\n", directory.c_str(), written.c_str(), tensors.size());
}

}  // namespace

void add_export(CLI::App& app) {
    auto options = std::make_shared<Options>();
    CLI::App* parser = app.add_subcommand("export", "weights for other programs");
    parser->add_flag("--hf")->description("as a Hugging Face GPT-2 directory")->required();
    parser->add_option("CHECKPOINT", options->checkpoint, kCheckpointHelp)->required();
    parser->add_option("DIR", options->directory, "absent or empty directory")->required();
    parser->callback([options] { export_huggingface(*options); });
}
