#include <CLI/App.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>

#include "commands/command_line.h"
#include "commands/inspect_llmc.h"
#include "data/reject_file.h"
#include "data/shards.h"
#include "data/tokenizer.h"
#include "runtime/logging/logging.h"

namespace {

void inspect_shard(const std::string& path) {
    constexpr uint64_t kFirstTokens = 32;
    const TokenShard shard(path);
    const ShardHeader& header = shard.header;
    print_line(format("%s: %s", path.c_str(), header.name));
    print_line(format("%d tokens of %d bytes, %zu bytes with the header", header.token_count, header.token_bytes,
                      header.file_bytes()));
    if (header.is_masked) print_line("it has a loss mask, which training ignores");
    if (shard.token_count() == 0) return;

    std::optional<Tokenizer> tokenizer;
    const std::string beside = std::filesystem::path(path).replace_filename("tokenizer.json");
    if (file_exists(beside)) tokenizer = Tokenizer::load(beside);
    uint32_t smallest = UINT32_MAX, largest = 0;
    uint64_t largest_at = 0, eot_count = 0;
    for (uint64_t i = 0; i < shard.token_count(); i++) {
        const uint32_t id = shard.token(i);
        smallest = std::min(smallest, id);
        if (id > largest) largest = id, largest_at = i;
        eot_count += tokenizer && id == uint32_t(tokenizer->eot());
    }
    print_line(format("ids from %u to %u", smallest, largest));
    if (!tokenizer) return;
    if (largest >= uint32_t(tokenizer->vocab_size()))
        reject_file(path, "token %zu is %u, but tokenizer.json beside it has %d tokens", largest_at, largest,
                    tokenizer->vocab_size());
    std::vector<int32_t> first;
    for (uint64_t i = 0; i < std::min(kFirstTokens, shard.token_count()); i++) first.push_back(int32_t(shard.token(i)));
    print_line(format("%zu x %s", eot_count, kEndOfText));
    print_line("begins with " + quoted(tokenizer->decode(first), 200));
}

void inspect_tokenizer(const std::string& path) {
    Tokenizer tokenizer = Tokenizer::load(path);
    int32_t longest = 0;
    for (int32_t id = 0; id < tokenizer.vocab_size(); id++)
        if (tokenizer.token(id).size() > tokenizer.token(longest).size()) longest = id;
    print_line(format("%s: byte-level BPE tokenizer", path.c_str()));
    print_line(format("%d tokens, %zu merges, %s is %d", tokenizer.vocab_size(), tokenizer.merges().size(), kEndOfText,
                      tokenizer.eot()));
    print_line(format("the longest token is %d, %s", longest, quoted(tokenizer.token(longest), 80).c_str()));
    print_line("xxh3 " + tokenizer.digest());
}

void inspect(const std::string& path) {
    if (inspect_runtime_path(path, print_line)) return;
    const MappedFile file(path);
    if (shard_header(file.text()))
        inspect_shard(path);
    else if (is_tokenizer_file(file.text()) || path.ends_with("vocab.json"))
        inspect_tokenizer(path);
    else if (!inspect_llmc_file(path))
        reject_file(
            path,
            "neither a checkpoint, a run, a token shard, a tokenizer, a safetensors file nor one of llm.c's; it "
            "looks like %s",
            describe_content(file.text().substr(0, 512), file.size()));
}

}  // namespace

void add_inspect(CLI::App& app) {
    auto path = std::make_shared<std::string>();
    auto model = std::make_shared<std::string>();
    CLI::App* parser = app.add_subcommand("inspect", "what is this file, and is it sound");
    parser->add_option("PATH", *path, "checkpoint, run, token shard, tokenizer, safetensors file or a file of llm.c")
        ->required();
    parser->add_option("--model", *model, "PATH is a debug state of llm.c: compare it with what this model file gives")
        ->type_name("MODEL.bin");
    parser->callback([path, model] { model->empty() ? inspect(*path) : compare_with_debug_state(*model, *path); });
}
