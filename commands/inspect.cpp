#include "data/inspect.h"

#include <CLI/App.hpp>
#include <memory>

#include "commands/command_line.h"
#include "kernels/check.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/io/io.h"
#include "runtime/logging/logging.h"

namespace {

void inspect(const std::string& path) {
    if (inspect_runtime_path(path, print_line) || inspect_data_file(path, print_line)) return;
    const MappedFile file(path);
    fail(Exit::data,
         "%s: neither a checkpoint, a run, a token shard, a tokenizer nor a safetensors file; it looks like %s", path,
         describe_content(file.text().substr(0, 512), file.size()));
}

}  // namespace

void add_inspect(CLI::App& app) {
    auto path = std::make_shared<std::string>();
    CLI::App* parser = app.add_subcommand("inspect", "what is this file, and is it sound");
    parser->add_option("PATH", *path, "checkpoint, run, token shard, tokenizer or safetensors file")->required();
    parser->callback([path] { inspect(*path); });
}
