#include <algorithm>
#include <filesystem>
#include <memory>

#include "commands/command_line.h"
#include "data/shards/dataset_record.h"
#include "data/shards/shards.h"
#include "data/tokenizer/tokenizer.h"
#include "kernels/trace.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/io/files.h"
#include "runtime/io/reject_file.h"
#include "runtime/logging/logging.h"
#include "training/models/hf_config.h"
#include "training/models/llmc_files.h"

namespace {

constexpr uint64_t kTokensAtOnce = 1 << 16;

void inspect_shard(const std::string& path) {
    // Uses the checksums of a dataset.json in the same directory; accepts any token id.
    const TokenStream stream({path}, INT32_MAX);
    const TokenShard& shard = stream.shards().front();
    const ShardHeader& header = shard.header();
    print_line(format("%s: %s", path.c_str(), header.name));
    print_line(format("%d tokens of %d bytes, %zu bytes with the header", header.token_count, header.token_bytes,
                      header.file_bytes()));
    if (header.is_masked) print_line("has a loss mask, which training ignores");
    if (shard.token_count() == 0) return;

    std::optional<Tokenizer> tokenizer;
    const std::string beside = std::filesystem::path(path).replace_filename("tokenizer.json");
    if (file_exists(beside)) tokenizer = Tokenizer::load(beside);
    uint32_t smallest = UINT32_MAX, largest = 0;
    uint64_t largest_at = 0, eot_count = 0;
    std::vector<uint32_t> ids;
    for (uint64_t begin = 0; begin < shard.token_count(); begin += ids.size()) {
        ids.resize(size_t(std::min(kTokensAtOnce, shard.token_count() - begin)));
        shard.read(begin, ids.size(), ids.data());
        for (size_t i = 0; i < ids.size(); i++) {
            smallest = std::min(smallest, ids[i]);
            if (ids[i] > largest) largest = ids[i], largest_at = begin + i;
            eot_count += tokenizer && ids[i] == uint32_t(tokenizer->eot());
        }
    }
    if (shard.has_checksums()) print_line("all blocks of 64 KiB match the CRC32C in dataset.json");
    print_line(format("ids from %u to %u", smallest, largest));
    if (!tokenizer) return;
    if (largest >= uint32_t(tokenizer->vocab_size()))
        reject_file(path, "token %zu is %u, but tokenizer.json next to it has %d tokens", largest_at, largest,
                    tokenizer->vocab_size());
    print_line(format("%zu x %s", eot_count, tokenizer->token(tokenizer->eot()).c_str()));
}

void inspect_tokenizer(const std::string& path) {
    const Tokenizer tokenizer = Tokenizer::load(path);
    print_line(format("%s: %s BPE tokenizer", path.c_str(),
                      tokenizer.rules().byte_tokens.empty() ? "byte-level" : "character-level"));
    print_line(format("%d tokens, %zu merges, %s is %d", tokenizer.vocab_size(), tokenizer.merges().size(),
                      tokenizer.token(tokenizer.eot()).c_str(), tokenizer.eot()));
    if (const std::string warning = tokenizer.warning(); !warning.empty()) print_line(warning);
    print_line("xxh3 " + tokenizer.digest());
}

// Checks that all shards of a split exist, are complete and match dataset.json, with ids within the vocabulary.
void inspect_split(const std::string& directory, const DatasetRecord::Split& split, uint64_t vocab_size) {
    std::vector<std::string> shards;
    for (const std::string& name : split.shards) shards.push_back(directory + "/" + name);
    const TokenStream stream(shards, int(vocab_size));
    if (stream.token_count() != split.tokens)
        reject_file(directory + "/" + DatasetRecord::kName,
                    "the %zu shards of %s have %zu tokens in total, but %zu are recorded", shards.size(), split.name,
                    stream.token_count(), split.tokens);
    std::vector<int32_t> block(kTokensAtOnce);
    for (uint64_t i = 0; i < split.tokens; i += block.size())
        stream.read(i, size_t(std::min<uint64_t>(block.size(), split.tokens - i)), block.data());
    print_line(format("  %s: %zu tokens in %zu shard(s), from %zu bytes of text in %zu document(s); %s",
                      split.name.c_str(), split.tokens, shards.size(), split.text_bytes, split.documents,
                      split.checksums.empty() ? "valid; no checksums are recorded" : "valid"));
}

void inspect_dataset(const std::string& directory, const DatasetRecord& record) {
    const std::string path = directory + "/tokenizer.json";
    std::string digest;  // empty: the ids were converted without their tokenizer
    if (!record.tokenizer_digest.empty() || file_exists(path)) digest = Tokenizer::load(path).digest();
    if (digest != record.tokenizer_digest)
        reject_file(path, "its digest is %s, but dataset.json records \"%s\"", digest, record.tokenizer_digest);
    print_line(format("%s: data set, tokenizer %s with %zu tokens%s%s", directory.c_str(),
                      record.tokenizer_kind.c_str(), record.vocab_size, digest.empty() ? "" : ", xxh3 ",
                      digest.c_str()));
    for (const DatasetRecord::Split& split : record.splits) inspect_split(directory, split, record.vocab_size);
}

void inspect_checkpoint(const std::string& path) {
    const Checkpoint checkpoint(path);
    const Manifest& manifest = checkpoint.manifest();
    size_t bytes = 0;
    for (const ShardFile& shard : manifest.shards) bytes += shard.bytes;
    const char* const state = manifest.info.healthy ? "valid" : "valid, but with non-finite values";
    print_line(format("%s: checkpoint of step %d, run %s, written by %d rank(s), %zu tensors, %.1f MiB, %s",
                      path.c_str(), manifest.info.step, manifest.info.run_id.c_str(), manifest.world_size,
                      manifest.tensors.size(), double(bytes) / 0x1p20, state));
    print_line("configuration " + manifest.info.config_digest + ", data " + manifest.info.dataset_digest);
}

void inspect_run(const std::string& run) {
    const std::vector<int64_t> steps = committed_steps(run);
    const std::string config_path = run + "/config.json", tokenizer = run + "/tokenizer.json";
    print_line(format("%s: run, %zu checkpoint(s)", run.c_str(), steps.size()));
    if (file_exists(config_path)) {
        const Config config = parse_config(read_file(config_path), config_path);
        print_line(format("%d layers, %d heads, %d channels, vocabulary %d, %s, %s tokens per step",
                          config.model.n_layer, config.model.n_head, config.model.n_embd, config.model.vocab_size,
                          name_of(config.train.precision), batch_text(config).c_str()));
    }
    if (file_exists(tokenizer)) inspect_tokenizer(tokenizer);
    for (const int64_t step : steps) inspect_checkpoint(step_directory(run, step));
}

void inspect_safetensors(const std::string& path) {
    const Safetensors file(path);
    print_line(format("%s: safetensors, %zu tensors, valid", path.c_str(), file.entries().size()));
    for (const Safetensors::Entry& tensor : file.entries())
        print_line(format("  %-36s %s %s", tensor.name.c_str(), tensor.type.c_str(), shape_text(tensor.shape).c_str()));
}

// Says whether model.init_from accepts the model, or why not.
std::string fitness(const std::string& path) {
    try {
        const Config::Model model = hf_model(read_file(path), path);
        return format("%s, %d layers, %d heads, %d channels, %d positions, vocabulary %d; usable as model.init_from",
                      name_of(model.family), model.n_layer, model.n_head, model.n_embd, model.n_positions,
                      model.vocab_size);
    } catch (const Error& error) {
        return std::string("not usable as model.init_from: ") + error.what();
    }
}

bool is_huggingface(const std::string& directory) {
    const std::string config = directory + "/config.json";
    return file_exists(config) && is_hf_config(read_file(config), config);
}

void inspect_huggingface(const std::string& directory) {
    const std::string config = directory + "/config.json", tokenizer = directory + "/tokenizer.json";
    print_line(format("%s: Hugging Face directory; %s", directory.c_str(), fitness(config).c_str()));
    inspect_safetensors(directory);
    file_exists(tokenizer) ? inspect_tokenizer(tokenizer) : print_line("no tokenizer.json");
}

void inspect_llmc_model(const std::string& path) {
    const LlmcModel model(path);
    const GptShape& s = model.shape;
    print_line(format("%s: llm.c GPT-2 model, %s, valid", path.c_str(), name_of(model.type)));
    print_line(format("%d layers, %d heads, %d channels, %d positions, vocabulary %d padded to %d", s.n_layer, s.n_head,
                      s.n_embd, s.n_positions, s.vocab_size, model.padded_vocab));
}

void inspect(const std::string& path) {
    if (file_exists(path + "/metrics.jsonl") || directory_exists(checkpoints_directory(path))) return inspect_run(path);
    if (file_exists(path + "/MANIFEST.json")) return inspect_checkpoint(path);
    if (path.ends_with(".safetensors") || path.ends_with(".safetensors.index.json")) return inspect_safetensors(path);
    if (const auto dataset = find_dataset_record(path)) return inspect_dataset(path, *dataset);
    if (is_huggingface(path)) return inspect_huggingface(path);
    if (directory_exists(path))
        fail(Exit::no_input,
             "%s is not a checkpoint, a run, a data set (dataset.json) or a Hugging Face directory (config.json)",
             path);
    const MappedFile file(path);
    if (shard_header(file.text()))
        inspect_shard(path);
    else if (is_tokenizer_file(file.text()) || path.ends_with("vocab.json"))
        inspect_tokenizer(path);
    else if (is_llmc_model(file.text()))
        inspect_llmc_model(path);
    else
        reject_file(
            path,
            "not a checkpoint, a run, a token shard, a tokenizer, a safetensors file or a model of llm.c; it looks "
            "like %s",
            describe_content(file.text().substr(0, 512), file.size()));
}

}  // namespace

void add_inspect(CLI::App& app) {
    auto path = std::make_shared<std::string>();
    const Command command(app, "inspect", "identify a file or directory and check it");
    command
        .add("PATH", path.get(),
             "checkpoint, run, data set, token shard, tokenizer, safetensors file, Hugging Face directory or "
             "llm.c model file")
        .required();
    command.on_parsed([path] { inspect(*path); });
}
