#include <CLI/App.hpp>

#include "commands/command_line.h"
#include "commands/hf_config.h"
#include "commands/llmc_files.h"
#include "commands/model_io.h"
#include "model/huggingface.h"

namespace {

struct Options {
    std::string checkpoint;
    std::string directory;  // with --llmc the model file
    bool llmc = false;
    std::string dtype = name_of(Dtype::fp32);  // with --llmc
    std::string tokenizer;                     // with --llmc: its file; empty: none
};

void export_huggingface(const Options& options) {
    LoadedModel model = load_model(options.checkpoint, 1);
    const std::string& directory = options.directory;
    if (directory_exists(directory) && !list_directory(directory).empty())
        fail(Exit::cannot_create, "%s is not empty; nothing was written", directory);
    const Config::Model& described = model.config.model;
    const int eot = model.tokenizer ? model.tokenizer->eot() : described.vocab_size - 1;
    const nlohmann::ordered_json config = hf_config(described, eot, Dtype::fp32);
    make_directories(directory);
    std::string written = "model.safetensors";
    auto write = [&](const char* name, const std::string& content) {
        write_file_atomically(directory + "/" + name, content);
        written += std::string(", ") + name;
    };
    const std::vector<NamedTensor> tensors = hf_tensors(model.gpt);
    write_safetensors(directory + "/model.safetensors", tensors);
    write("config.json", config.dump(2) + "\n");
    write("generation_config.json", hf_generation_config(described, eot).dump(2) + "\n");
    if (model.tokenizer) {
        write("tokenizer.json", model.tokenizer->json());
        write("tokenizer_config.json", hf_tokenizer_config(described, eot, kEndOfText).dump(2) + "\n");
    }
    std::printf("wrote %s: %s (%zu tensors)\n", directory.c_str(), written.c_str(), tensors.size());
}

void export_llmc(const Options& options) {
    const LoadedModel model = load_model(options.checkpoint, 1);
    check_llmc_parts(model.config.model, options.checkpoint);
    const std::string &path = options.directory, &tokenizer_path = options.tokenizer;
    std::string tokenizer;
    if (!tokenizer_path.empty()) {
        if (!model.tokenizer) fail(Exit::no_input, "%s: the run has no tokenizer.json", options.checkpoint);
        if (tokenizer_path == path) fail(Exit::usage, "the model and the tokenizer are both to be %s", path);
        if (file_exists(tokenizer_path)) fail(Exit::cannot_create, "%s exists; nothing was written", tokenizer_path);
        tokenizer = model.tokenizer->llmc();
    }
    const Dtype dtype = options.dtype == name_of(Dtype::bf16) ? Dtype::bf16 : Dtype::fp32;
    write_llmc_model(path, model.gpt, dtype);
    std::printf("wrote %s: llm.c model, %s\n", path.c_str(), name_of(dtype));
    if (tokenizer_path.empty()) return;
    write_file_atomically(tokenizer_path, tokenizer);
    std::printf("wrote %s: llm.c tokenizer, %d tokens\n", tokenizer_path.c_str(), model.tokenizer->vocab_size());
}

}  // namespace

void add_export(CLI::App& app) {
    auto options = std::make_shared<Options>();
    CLI::App* parser = app.add_subcommand("export", "weights for other programs");
    CLI::App* format = parser->add_option_group("format")->require_option(1);
    format->add_flag("--hf")->description("as a Hugging Face directory");
    CLI::Option* llmc = format->add_flag("--llmc", options->llmc, "as a model file of llm.c");
    parser->add_option("CHECKPOINT", options->checkpoint, kCheckpointHelp)->required();
    parser->add_option("OUT", options->directory, "--hf: absent or empty directory; --llmc: the file")->required();
    parser->add_option("--dtype", options->dtype, "--llmc: fp32 (exact, the default) or bf16")
        ->check(CLI::IsMember({name_of(Dtype::fp32), name_of(Dtype::bf16)}))
        ->needs(llmc);
    parser->add_option("--tokenizer", options->tokenizer, "--llmc: file for the tokenizer in llm.c's format")
        ->type_name("FILE")
        ->needs(llmc);
    parser->callback([options] { options->llmc ? export_llmc(*options) : export_huggingface(*options); });
}
