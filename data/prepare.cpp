#include "data/prepare.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>

#include "data/bpe_trainer.h"
#include "data/encoder.h"
#include "data/text_input.h"

using Json = nlohmann::ordered_json;

// Everything is written to this folder inside OUT and moved when it is complete. After a crash the folder shows that
// OUT belongs to prepare.
static const char* const kUnfinished = "/prepare.unfinished";
static const char* const kDatasetFile = "/dataset.json";

static void check_options(const PrepareOptions& o) {
    auto check = [](bool holds, const char* pattern, auto... values) {
        if (!holds) fail(Exit::usage, pattern, values...);
    };
    auto is_fraction = [](double value) { return value >= 0 && value < 1; };
    check(is_fraction(o.val_fraction), "prepare: the held-out fraction is %g, but must be in [0, 1)", o.val_fraction);
    check(o.shard_tokens >= 1 && o.shard_tokens <= INT32_MAX,
          "prepare: shards are to have %zu tokens, but must have 1 to %d", o.shard_tokens, INT32_MAX);
    check(is_fraction(o.bpe_dropout), "prepare: the BPE-dropout is %g, but must be in [0, 1)", o.bpe_dropout);
    check(o.copies >= 1 && o.copies <= 1000, "prepare: %d copies of the training text, but 1 to 1000 are allowed",
          o.copies);
    check(o.tokenizer != "bpe" || (o.vocab_size >= 257 && o.vocab_size <= 1 << 20),
          "prepare: vocab_size is %d, but a \"bpe\" tokenizer has 257 to %d tokens", o.vocab_size, 1 << 20);
}

static void check_out_dir(const std::string& out) {
    if (!directory_exists(out) || file_exists(out + kDatasetFile) || directory_exists(out + kUnfinished)) return;
    const std::vector<std::string> names = list_directory(out);
    if (!names.empty())
        fail(Exit::cannot_create,
             "%s: has %zu files, the first named %s, but no dataset.json, so it is not from an earlier prepare; "
             "nothing was written",
             out, names.size(), names.front());
}

static Tokenizer make_tokenizer(const PrepareOptions& options, const TextInput& input, uint64_t train_end,
                                const ProgressLine& progress) {
    if (options.tokenizer == "bpe") {
        BpeTrainer trainer;
        input.read(0, train_end, [&](std::string_view text, bool) { trainer.add(text); });
        Tokenizer tokenizer = trainer.train(options.vocab_size);
        progress(format("trained a tokenizer of %d tokens", tokenizer.vocab_size()));
        if (tokenizer.vocab_size() < options.vocab_size)
            progress(format("that is fewer than the requested %d: no other pair occurs twice in the text",
                            options.vocab_size));
        return tokenizer;
    }
    const std::filesystem::path gpt2 = options.gpt2_directory;
    if (options.tokenizer == "gpt2" && !file_exists(gpt2 / "vocab.json"))
        fail(Exit::no_input,
             "prepare: the tokenizer \"gpt2\" is read from the folder %s, which has no vocab.json; copy data/gpt2 of "
             "the source tree there, or pass --tokenizer PATH/vocab.json",
             gpt2.lexically_normal().string());
    Tokenizer tokenizer = options.tokenizer == "bytes"  ? Tokenizer::bytes()
                          : options.tokenizer == "gpt2" ? Tokenizer::load(gpt2 / "vocab.json")
                                                        : Tokenizer::load(options.tokenizer);
    if (options.vocab_size != 0 && options.vocab_size != tokenizer.vocab_size())
        fail(Exit::usage, "prepare: vocab_size is %d, but the tokenizer \"%s\" has %d tokens", options.vocab_size,
             options.tokenizer, tokenizer.vocab_size());
    return tokenizer;
}

// A part of the input and how it is tokenized.
struct Split {
    const char* name;
    uint64_t begin, end;
    int copies;
    double bpe_dropout;
};

// Writes the shards of a split; returns their record in dataset.json.
static Json write_split(const Split& split, const TextInput& input, const Tokenizer& tokenizer,
                        const std::string& directory, uint64_t shard_tokens, const ProgressLine& progress) {
    constexpr uint64_t kSeed = 1;
    Encoder encoder(tokenizer, split.bpe_dropout, kSeed);
    ShardWriter writer(directory, split.name, tokenizer.vocab_size(), shard_tokens);
    uint64_t text_bytes = 0, documents = 0;
    for (int copy = 0; copy < split.copies; copy++)
        input.read(split.begin, split.end, [&](std::string_view text, bool starts_document) {
            std::vector<int32_t> ids = encoder.encode(text);
            if (starts_document) ids.insert(ids.begin(), tokenizer.eot());
            writer.append(ids);
            text_bytes += text.size();
            documents += starts_document;
        });
    writer.finish();
    progress(format("%s: %zu bytes of text in %zu documents, %zu tokens in %zu shards", split.name, text_bytes,
                    documents, writer.token_count(), writer.names().size()));
    return {{"tokens", writer.token_count()},
            {"text_bytes", text_bytes},
            {"documents", documents},
            {"shards", writer.names()}};
}

static std::string dataset_json(const PrepareOptions& options, const TextInput& input, uint64_t val_begin,
                                const Tokenizer& tokenizer, const Json& splits) {
    Json sources = Json::array();
    for (const MappedFile& file : input.files()) sources.push_back({{"path", file.path()}, {"bytes", file.size()}});
    const Json dataset = {
        {"format", "train_gpt data set 1"},
        {"tokenizer",
         {{"kind", options.tokenizer}, {"vocab_size", tokenizer.vocab_size()}, {"xxh3", tokenizer.digest()}}},
        {"sources", sources},
        {"val_fraction", options.val_fraction},
        {"copies", options.copies},
        {"bpe_dropout", options.bpe_dropout},
        {"val_begin", val_begin},  // byte of the concatenated sources
        {"splits", splits}};
    return dataset.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

// dataset.json is removed first and written last: a data set without it is incomplete.
static void move_into_place(const std::string& unfinished, const std::string& out, const std::string& dataset) {
    static const std::regex shard_name("(train|val)_[0-9]{6}\\.bin");
    remove_tree(out + kDatasetFile);
    sync_directory(out);
    for (const std::string& name : list_directory(out))
        if (std::regex_match(name, shard_name)) remove_tree(out + "/" + name);
    for (const std::string& name : list_directory(unfinished)) rename_path(unfinished + "/" + name, out + "/" + name);
    sync_directory(out);
    write_file_atomically(out + kDatasetFile, dataset);
    remove_tree(unfinished);
}

void prepare(const PrepareOptions& options, const ProgressLine& progress) {
    check_options(options);
    check_out_dir(options.out_dir);
    const TextInput input(options.inputs);
    const uint64_t val_begin = input.held_out_begin(options.val_fraction);
    if (val_begin == 0)
        fail(Exit::data, "prepare: no text is left for training: the input has %zu bytes", input.size());
    if (options.val_fraction > 0 && val_begin == input.size())
        fail(Exit::data, "prepare: no line begins in the last %g of the %zu bytes of text, so nothing can be held out",
             options.val_fraction, input.size());

    const Tokenizer tokenizer = make_tokenizer(options, input, val_begin, progress);
    const std::string unfinished = options.out_dir + kUnfinished;
    remove_tree(unfinished);
    make_directories(unfinished);
    try {
        Json splits;
        auto write = [&](const Split& split) {
            splits[split.name] = write_split(split, input, tokenizer, unfinished, options.shard_tokens, progress);
        };
        write({"train", 0, val_begin, options.copies, options.bpe_dropout});
        if (val_begin < input.size()) write({"val", val_begin, input.size(), 1, 0});
        write_file_atomically(unfinished + "/tokenizer.json", tokenizer.json());
        move_into_place(unfinished, options.out_dir, dataset_json(options, input, val_begin, tokenizer, splits));
    } catch (const Error&) {
        remove_tree(unfinished);
        throw;
    }
}
