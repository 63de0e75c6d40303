#include "data/prepare.h"

#include <algorithm>
#include <cmath>
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
    check(o.tokenizer != "bpe" || o.vocab_size == 0 || (o.vocab_size >= 257 && o.vocab_size <= 1 << 20),
          "prepare: --vocab-size is %d, but a \"bpe\" tokenizer has 257 to %d tokens", o.vocab_size, 1 << 20);
}

int default_vocab_size(uint64_t train_bytes) {
    return 1 << std::clamp(int(std::lround(std::log2(double(std::max<uint64_t>(train_bytes, 1))) / 2)), 9, 15);
}

// OUT while it is being written: created if it is absent and locked. What prepare() does not want to keep after an
// error goes away with this object, and so does OUT if it was created here and is empty.
class OutDirectory {
public:
    // Fails with Exit::cannot_create before anything is touched if OUT holds something that must not be replaced.
    OutDirectory(const std::string& path, bool force) : path_(path), is_new_(!directory_exists(path)) {
        check_content(force);
        make_directories(path);
        lock_ = lock_directory(path);
        check_content(force);  // again, for another process may have had the lock until just now
        remove_tree(unfinished());
        make_directories(unfinished());
    }
    OutDirectory(const OutDirectory&) = delete;
    ~OutDirectory() {
        std::error_code ignored;
        std::filesystem::remove_all(unfinished(), ignored);
        std::filesystem::remove(path_ + "/" + kLockName, ignored);
        if (is_new_) std::filesystem::remove(path_, ignored);  // fails unless it is empty
    }

    std::string unfinished() const { return path_ + kUnfinished; }

    // dataset.json is removed first and written last: a data set without it is incomplete.
    void move_into_place(const std::string& dataset) {
        static const std::regex shard_name("(train|val)_[0-9]{6}\\.bin");
        remove_tree(path_ + kDatasetFile);
        sync_directory(path_);
        for (const std::string& name : list_directory(path_))
            if (std::regex_match(name, shard_name)) remove_tree(path_ + "/" + name);
        for (const std::string& name : list_directory(unfinished()))
            rename_path(unfinished() + "/" + name, path_ + "/" + name);
        sync_directory(path_);
        write_file_atomically(path_ + kDatasetFile, dataset);
    }

private:
    void check_content(bool force) const {
        if (!directory_exists(path_)) return;
        if (file_exists(path_ + kDatasetFile)) {
            if (force) return;
            fail(Exit::cannot_create, "%s holds a data set already; --force replaces it", path_);
        }
        std::vector<std::string> names = list_directory(path_);
        std::erase(names, kLockName);
        if (names.empty() || directory_exists(unfinished())) return;
        fail(Exit::cannot_create,
             "%s: has %zu files, the first named %s, but no dataset.json, so it is not from an earlier prepare; "
             "nothing was written",
             path_, names.size(), names.front());
    }

    std::string path_;
    bool is_new_;
    FileDescriptor lock_;
};

static Tokenizer make_tokenizer(const PrepareOptions& options, const TextInput& input, uint64_t train_end,
                                const ProgressLine& progress) {
    if (options.tokenizer == "bpe") {
        BpeTrainer trainer;
        input.read(0, train_end, [&](std::string_view text, bool) { trainer.add(text); });
        const int wanted = options.vocab_size ? options.vocab_size : default_vocab_size(trainer.text_bytes());
        Tokenizer tokenizer = trainer.train(wanted);
        progress(format("trained a tokenizer of %d tokens%s", tokenizer.vocab_size(),
                        options.vocab_size ? "" : ", chosen by the amount of text (--vocab-size)"));
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
                        const std::string& directory, uint64_t shard_tokens, const ProgressLine& progress,
                        PrepareSummary::Split& counts) {
    constexpr uint64_t kSeed = 1;
    Encoder encoder(tokenizer, split.bpe_dropout, kSeed);
    ShardWriter writer(directory, split.name, tokenizer.vocab_size(), shard_tokens);
    for (int copy = 0; copy < split.copies; copy++)
        input.read(split.begin, split.end, [&](std::string_view text, bool starts_document) {
            std::vector<int32_t> ids = encoder.encode(text);
            if (starts_document) ids.insert(ids.begin(), tokenizer.eot());
            writer.append(ids);
            counts.text_bytes += text.size();
            counts.documents += starts_document;
        });
    writer.finish();
    counts.tokens = writer.token_count();
    progress(format("%s: %zu bytes of text in %zu documents, %zu tokens in %zu shards", split.name, counts.text_bytes,
                    counts.documents, counts.tokens, writer.names().size()));
    return {{"tokens", counts.tokens},
            {"text_bytes", counts.text_bytes},
            {"documents", counts.documents},
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

PrepareSummary prepare(const PrepareOptions& options, const ProgressLine& progress) {
    check_options(options);
    const TextInput input(options.inputs);
    const uint64_t val_begin = input.held_out_begin(options.val_fraction);
    if (input.size() == 0) fail(Exit::data, "prepare: the input has 0 bytes of text");
    if (val_begin == 0 || (options.val_fraction > 0 && val_begin == input.size()))
        fail(Exit::data,
             "prepare: the %zu bytes of text cannot be split at the start of a line into text to train on and %g of it "
             "to hold out; --val-fraction 0 holds nothing out",
             input.size(), options.val_fraction);

    OutDirectory out(options.out_dir, options.force);
    const Tokenizer tokenizer = make_tokenizer(options, input, val_begin, progress);
    Json splits;
    PrepareSummary summary{.vocab_size = tokenizer.vocab_size(), .train = {}, .val = {}};
    auto write = [&](const Split& split, PrepareSummary::Split& counts) {
        splits[split.name] =
            write_split(split, input, tokenizer, out.unfinished(), options.shard_tokens, progress, counts);
    };
    write({"train", 0, val_begin, options.copies, options.bpe_dropout}, summary.train);
    if (val_begin < input.size()) write({"val", val_begin, input.size(), 1, 0}, summary.val);
    write_file_atomically(out.unfinished() + "/tokenizer.json", tokenizer.json());
    out.move_into_place(dataset_json(options, input, val_begin, tokenizer, splits));
    return summary;
}
