#include <CLI/App.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>

#include "commands/command_line.h"
#include "commands/inspect_llmc.h"
#include "data/shards/dataset_record.h"
#include "data/shards/shards.h"
#include "data/tokenizer/tokenizer.h"
#include "runtime/io/files.h"
#include "runtime/io/json.h"
#include "runtime/io/reject_file.h"
#include "runtime/logging/logging.h"
#include "training/models/hf_config.h"

namespace {

using Json = nlohmann::ordered_json;

struct Options {
    std::string path;
    bool all = false;
    std::string llmc_model;  // empty: describe the path
};

constexpr uint64_t kTokensAtOnce = 1 << 16;

void inspect_shard(const std::string& path) {
    constexpr size_t kFirstTokens = 32;
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
    std::vector<uint32_t> first, ids;
    for (uint64_t begin = 0; begin < shard.token_count(); begin += ids.size()) {
        ids.resize(size_t(std::min(kTokensAtOnce, shard.token_count() - begin)));
        shard.read(begin, ids.size(), ids.data());
        if (begin == 0) first.assign(ids.begin(), ids.begin() + ptrdiff_t(std::min(kFirstTokens, ids.size())));
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
    print_line(format("%zu x %s", eot_count, tokenizer ? tokenizer->token(tokenizer->eot()).c_str() : kEndOfText));
    print_line("begins with " + quoted(tokenizer->decode(std::vector<int32_t>(first.begin(), first.end())), 200));
}

void inspect_tokenizer(const std::string& path) {
    Tokenizer tokenizer = Tokenizer::load(path);
    int32_t longest = 0;
    for (int32_t id = 0; id < tokenizer.vocab_size(); id++)
        if (tokenizer.token(id).size() > tokenizer.token(longest).size()) longest = id;
    print_line(format("%s: %s BPE tokenizer", path.c_str(),
                      tokenizer.rules().byte_tokens.empty() ? "byte-level" : "character-level"));
    print_line(format("%d tokens, %zu merges, %s is %d", tokenizer.vocab_size(), tokenizer.merges().size(),
                      tokenizer.token(tokenizer.eot()).c_str(), tokenizer.eot()));
    print_line(format("the longest token is %d, %s", longest, quoted(tokenizer.token(longest), 80).c_str()));
    if (const std::string remark = tokenizer.remark(); !remark.empty()) print_line(remark);
    print_line("xxh3 " + tokenizer.digest());
}

Json read_json(const std::string& path) { return parse_json(read_file(path), path, Exit::data); }

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
                      record.tokenizer_kind.c_str(), size_t(record.vocab_size), digest.empty() ? "" : ", xxh3 ",
                      digest.c_str()));
    for (const DatasetRecord::Split& split : record.splits) inspect_split(directory, split, record.vocab_size);
}

// Says whether model.init_from accepts the model, or why not.
std::string fitness(const Json& config, const std::string& path) {
    try {
        const Config::Model model = hf_model(config, path);
        return format("%s, %d layers, %d heads, %d channels, %d positions, vocabulary %d; usable as model.init_from",
                      name_of(model.family), model.n_layer, model.n_head, model.n_embd, model.n_positions,
                      model.vocab_size);
    } catch (const Error& error) {
        return std::string("not usable as model.init_from: ") + error.what();
    }
}

bool is_huggingface(const std::string& directory) {
    const std::string config = directory + "/config.json";
    return file_exists(config) && read_json(config).contains("model_type");
}

void inspect_huggingface(const Options& options) {
    const std::string &directory = options.path, config_path = directory + "/config.json";
    const Json config = read_json(config_path);
    print_line(format("%s: Hugging Face directory; %s", directory.c_str(), fitness(config, config_path).c_str()));
    const bool is_split = file_exists(directory + "/model.safetensors.index.json");
    inspect_runtime_path(directory + (is_split ? "/model.safetensors.index.json" : "/model.safetensors"), options.all,
                         print_line);
    const std::string tokenizer = directory + "/tokenizer.json";
    if (!file_exists(tokenizer)) return print_line("no tokenizer.json");
    inspect_tokenizer(tokenizer);
}

// The last record of a kind in metrics.jsonl, as "step 20, loss 3.1".
std::string last_record(std::string_view metrics, const std::string& kind) {
    std::string found;
    for (size_t begin = 0, end; (end = metrics.find('\n', begin)) != std::string::npos; begin = end + 1) {
        const Json line = parse_json_or_null(metrics.substr(begin, end - begin));
        if (line.is_object() && line.value("kind", Json()) == kind && line.contains("step") && line.contains("loss"))
            found = "step " + printed(line["step"]) + ", loss " + printed(line["loss"]);
    }
    return found.empty() ? "none" : found;
}

bool is_run(const std::string& directory) {
    return file_exists(directory + "/metrics.jsonl") || directory_exists(checkpoints_directory(directory));
}

// The limits of a run, as "500 steps" or "2 epochs or 3 minutes".
std::string limits_text(const Config::Train& train) {
    std::string text;
    for (const auto& [limit, unit] :
         {std::pair{double(train.max_steps), "steps"}, {train.max_epochs, "epochs"}, {train.max_minutes, "minutes"}})
        if (limit > 0) text += (text.empty() ? "" : " or ") + format("%g %s", limit, unit);
    return text;
}

std::string paths_text(const DataParts& parts) {
    std::string text;
    for (const DataPart& part : parts) text += (text.empty() ? "" : ", ") + part.path;
    return text;
}

void inspect_run(const Options& options) {
    const std::string& run = options.path;
    const std::string config_path = run + "/config.json", metrics = run + "/metrics.jsonl";
    print_line(format("%s: run, %zu checkpoint(s)", run.c_str(), committed_steps(run).size()));
    if (file_exists(config_path)) {
        const Config config = parse_config(read_file(config_path), config_path);
        print_line(format("%d layers, %d heads, %d channels, vocabulary %d, %s; %s, %zu tokens per step, from %s",
                          config.model.n_layer, config.model.n_head, config.model.n_embd, config.model.vocab_size,
                          name_of(config.train.precision), limits_text(config.train).c_str(),
                          size_t(config.train.total_batch_tokens), paths_text(config.data.train).c_str()));
    }
    if (file_exists(metrics)) {
        const MappedFile file(metrics);
        print_line("last training record: " + last_record(file.text(), "train"));
        print_line("last validation: " + last_record(file.text(), "val"));
    }
    if (file_exists(run + "/tokenizer.json")) inspect_tokenizer(run + "/tokenizer.json");
    inspect_runtime_path(run, options.all, print_line);
}

void inspect(const Options& options) {
    const std::string& path = options.path;
    if (is_run(path)) return inspect_run(options);
    if (inspect_runtime_path(path, options.all, print_line)) return;
    if (const auto dataset = find_dataset_record(path)) return inspect_dataset(path, *dataset);
    if (is_huggingface(path)) return inspect_huggingface(options);
    if (directory_exists(path))
        fail(Exit::no_input,
             "%s is not a checkpoint, a run, a data set (dataset.json) or a Hugging Face directory (config.json)",
             path);
    const MappedFile file(path);
    if (shard_header(file.text()))
        inspect_shard(path);
    else if (is_tokenizer_file(file.text()) || path.ends_with("vocab.json"))
        inspect_tokenizer(path);
    else if (!inspect_llmc_file(path))
        reject_file(
            path,
            "not a checkpoint, a run, a token shard, a tokenizer, a safetensors file or an llm.c file; it looks like "
            "%s",
            describe_content(file.text().substr(0, 512), file.size()));
}

}  // namespace

void add_inspect(CLI::App& app) {
    auto options = std::make_shared<Options>();
    CLI::App* parser = app.add_subcommand("inspect", "identify a file or directory and check it");
    parser
        ->add_option("PATH", options->path,
                     "checkpoint, run, data set, token shard, tokenizer, safetensors file, Hugging Face directory or "
                     "llm.c file")
        ->required();
    parser->add_flag("--all", options->all, "list every tensor, even if all layers have the same ones");
    parser
        ->add_option("--model", options->llmc_model,
                     "if PATH is an llm.c debug state: run this model file and compare the results")
        ->type_name("MODEL.bin");
    parser->callback([options] {
        options->llmc_model.empty() ? inspect(*options) : compare_with_debug_state(options->llmc_model, options->path);
    });
}
