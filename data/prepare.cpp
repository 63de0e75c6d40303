#include "data/prepare.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "data/bpe_trainer.h"
#include "data/encoder.h"
#include "data/text_input.h"
#include "kernels/check.h"
#include "runtime/io/io.h"

// Everything is made in this folder inside OUT and moved when all of it is there; finding it there after a crash also
// tells that OUT is ours.
static const char* const kUnfinished = "prepare.unfinished";
static const char* const kDatasetFile = "dataset.json";
static const char* const kTokenizerFile = "tokenizer.json";

static void check_options(const PrepareOptions& options) {
    if (options.inputs.empty()) fail(Exit::usage, "prepare: no input file was given");
    if (options.out_dir.empty()) fail(Exit::usage, "prepare: no output directory was given");
    if (!(options.val_fraction >= 0 && options.val_fraction < 1))
        fail(Exit::usage, "prepare: the held-out fraction is %g, but must be in [0, 1)", options.val_fraction);
    if (options.shard_tokens < 1 || options.shard_tokens > INT32_MAX)
        fail(Exit::usage, "prepare: a shard of %llu tokens; 1 to %d are possible",
             (unsigned long long)options.shard_tokens, INT32_MAX);
    if (!(options.bpe_dropout >= 0 && options.bpe_dropout < 1))
        fail(Exit::usage, "prepare: the BPE-dropout is %g, but must be in [0, 1)", options.bpe_dropout);
    if (options.copies < 1 || options.copies > 1000)
        fail(Exit::usage, "prepare: %d copies of the training text; 1 to 1000 are possible", options.copies);
    if (options.tokenizer == "bpe" && (options.vocab_size < 257 || options.vocab_size > 1 << 20))
        fail(Exit::usage, "prepare: vocab_size is %d, but a \"bpe\" tokenizer has 257 to %d tokens", options.vocab_size,
             1 << 20);
}

// Made by prepare: nothing at all, a finished data set, or one that was being made.
static void check_out_dir(const std::string& out) {
    if (!directory_exists(out)) return;
    std::vector<std::string> names = list_directory(out);
    auto has = [&](const char* name) { return std::find(names.begin(), names.end(), name) != names.end(); };
    if (!names.empty() && !has(kDatasetFile) && !has(kUnfinished))
        fail(Exit::cannot_create,
             "%s: holds %zu files, the first called %s, and no %s, so an earlier prepare did not make it; nothing was "
             "written",
             out.c_str(), names.size(), names.front().c_str(), kDatasetFile);
}

static void check_vocab_size(const Tokenizer& tokenizer, const PrepareOptions& options) {
    if (options.vocab_size != 0 && options.vocab_size != tokenizer.vocab_size())
        fail(Exit::usage, "prepare: vocab_size is %d, but the tokenizer \"%s\" has %d tokens", options.vocab_size,
             options.tokenizer.c_str(), tokenizer.vocab_size());
}

static Tokenizer train_tokenizer(const TextInput& input, uint64_t train_end, int vocab_size,
                                 const ProgressLine& progress) {
    BpeTrainer trainer;
    input.read(0, train_end, [&](std::string_view text, bool) { trainer.add(text); });
    Tokenizer tokenizer = trainer.train(vocab_size);
    progress(format("trained a tokenizer of %d tokens", tokenizer.vocab_size()));
    if (tokenizer.vocab_size() < vocab_size)
        progress(format("the text has no more pairs that occur twice, so there are fewer than the %d tokens asked for",
                        vocab_size));
    return tokenizer;
}

static Tokenizer make_tokenizer(const PrepareOptions& options, const TextInput& input, uint64_t train_end,
                                const ProgressLine& progress) {
    if (options.tokenizer == "bpe") return train_tokenizer(input, train_end, options.vocab_size, progress);
    Tokenizer tokenizer = options.tokenizer == "bytes" ? Tokenizer::bytes() : Tokenizer::load(options.tokenizer);
    check_vocab_size(tokenizer, options);
    return tokenizer;
}

struct Split {
    std::string name;
    uint64_t tokens = 0, text_bytes = 0, documents = 0;
    std::vector<std::string> shards;
};

// Which part of the input, and how.
struct Part {
    const char* name;
    uint64_t begin, end;
    int copies;
    double bpe_dropout;
};

static Split write_split(const Part& part, const TextInput& input, const Tokenizer& tokenizer,
                         const std::string& directory, uint64_t shard_tokens, const ProgressLine& progress) {
    constexpr uint64_t kSeed = 1;
    const std::string name = part.name;
    Split split;
    split.name = name;
    Encoder encoder(tokenizer, part.bpe_dropout, kSeed);
    ShardWriter writer(directory, name, tokenizer.vocab_size(), shard_tokens);
    std::vector<int32_t> ids;
    for (int copy = 0; copy < part.copies; copy++)
        input.read(part.begin, part.end, [&](std::string_view text, bool starts_document) {
            ids.clear();
            if (starts_document) ids.push_back(tokenizer.eot());
            encoder.encode(text, ids);
            writer.append(ids);
            split.text_bytes += text.size();
            split.documents += starts_document;
        });
    writer.finish();
    split.tokens = writer.token_count();
    split.shards = writer.names();
    progress(format("%s: %llu bytes of text in %llu documents, %llu tokens in %zu shards", name.c_str(),
                    (unsigned long long)split.text_bytes, (unsigned long long)split.documents,
                    (unsigned long long)split.tokens, split.shards.size()));
    return split;
}

static std::string dataset_json(const PrepareOptions& options, const TextInput& input, uint64_t val_begin,
                                const Tokenizer& tokenizer, const std::vector<Split>& splits) {
    nlohmann::ordered_json sources = nlohmann::ordered_json::array(), parts = nlohmann::ordered_json::object();
    for (const MappedFile& file : input.files()) sources.push_back({{"path", file.path()}, {"bytes", file.size()}});
    for (const Split& split : splits)
        parts[split.name] = {{"tokens", split.tokens},
                             {"text_bytes", split.text_bytes},
                             {"documents", split.documents},
                             {"shards", split.shards}};
    nlohmann::ordered_json dataset = {
        {"format", "train_gpt data set 1"},
        {"tokenizer",
         {{"kind", options.tokenizer}, {"vocab_size", tokenizer.vocab_size()}, {"xxh3", tokenizer.digest()}}},
        {"sources", std::move(sources)},
        {"val_fraction", options.val_fraction},
        {"copies", options.copies},
        {"bpe_dropout", options.bpe_dropout},
        {"val_begin", val_begin},  // byte of the sources, put one after the other
        {"splits", std::move(parts)}};
    return dataset.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

// train_000000.bin and the like.
static bool is_shard_name(const std::string& name) {
    size_t digits = name.starts_with("train_") ? 6 : name.starts_with("val_") ? 4 : name.size();
    return name.size() == digits + 10 && name.ends_with(".bin") &&
           name.find_first_not_of("0123456789", digits) == digits + 6;
}

// dataset.json goes first and comes back last: a data set without it is not whole.
static void move_into_place(const std::string& unfinished, const std::string& out, const std::string& dataset) {
    remove_tree(out + "/" + kDatasetFile);
    sync_directory(out);
    for (const std::string& name : list_directory(out))
        if (is_shard_name(name)) remove_tree(out + "/" + name);
    for (const std::string& name : list_directory(unfinished)) rename_path(unfinished + "/" + name, out + "/" + name);
    sync_directory(out);
    write_file_atomically(out + "/" + kDatasetFile, dataset);
    remove_tree(unfinished);
}

void prepare(const PrepareOptions& options, const ProgressLine& progress) {
    check_options(options);
    check_out_dir(options.out_dir);
    TextInput input(options.inputs);
    uint64_t val_begin = input.held_out_begin(options.val_fraction);
    if (val_begin == 0)
        fail(Exit::data, "prepare: nothing is left to train on: %llu bytes of text in all",
             (unsigned long long)input.size());
    if (options.val_fraction > 0 && val_begin == input.size())
        fail(Exit::data, "prepare: no line begins in the last %g of the %llu bytes of text, so nothing can be held out",
             options.val_fraction, (unsigned long long)input.size());

    Tokenizer tokenizer = make_tokenizer(options, input, val_begin, progress);
    std::string unfinished = options.out_dir + "/" + kUnfinished;
    remove_tree(unfinished);
    make_directories(unfinished);
    try {
        std::vector<Split> splits;
        auto write = [&](const Part& part) {
            splits.push_back(write_split(part, input, tokenizer, unfinished, options.shard_tokens, progress));
        };
        write({"train", 0, val_begin, options.copies, options.bpe_dropout});
        if (val_begin < input.size()) write({"val", val_begin, input.size(), 1, 0});
        tokenizer.save(unfinished + "/" + kTokenizerFile);
        move_into_place(unfinished, options.out_dir, dataset_json(options, input, val_begin, tokenizer, splits));
    } catch (const Error&) {
        remove_tree(unfinished);
        throw;
    }
}
