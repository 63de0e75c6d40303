#include "data/prepare/prepare.h"

#include <sys/stat.h>

#include <cmath>
#include <filesystem>

#include "data/prepare/ordered_parallel.h"
#include "data/prepare/out_directory.h"
#include "data/prepare/prepare_options.h"
#include "data/prepare/raw_tokens.h"
#include "data/shards/dataset_record.h"
#include "data/text/input_paths.h"
#include "data/text/text_formats.h"
#include "data/text/text_input.h"
#include "data/tokenizer/bpe_trainer.h"
#include "data/tokenizer/encoder.h"
#include "data/tokenizer/pretokenizer.h"
#include "data/tokenizer/text_rules.h"
#include "data/tokenizer/tokenizer.h"
#include "runtime/io/files.h"
#include "runtime/io/process.h"
#include "runtime/io/utf8.h"

using Json = nlohmann::ordered_json;

static bool is_raw(const PrepareOptions& options, const std::vector<std::string>& files) {
    const auto is_bin = [](const std::string& path) { return path.ends_with(".bin"); };
    if (options.format != "auto") return options.format == kRawFormat;
    const auto count = std::ranges::count_if(files, is_bin);
    if (count > 0 && size_t(count) < files.size())
        fail(Exit::usage, "prepare: a data set cannot mix token id files (.bin) and text files");
    return count > 0;
}

// Returns the options and the size and time of each input. A later process resumes only with an equal plan.
static Json make_plan(const PrepareOptions& o, const std::vector<std::string>& files) {
    Json inputs = Json::array();
    auto add_file = [&](const std::string& path) {
        struct stat status;
        if (::stat(path.c_str(), &status) != 0) return;
        inputs.push_back({path, status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec});
    };
    for (const std::string& path : files) add_file(path);
    add_file(o.tokenizer);
    return {{"version", 4},
            {"tokenizer", o.tokenizer},
            {"end_of_text", o.end_of_text},
            {"vocab_size", o.vocab_size},
            {"format", o.format},
            {"field", o.field},
            {"val_fraction", o.val_fraction},
            {"copies", o.copies.value_or(0)},
            {"shard_tokens", o.shard_tokens},
            {"bpe_dropout", o.bpe_dropout.value_or(-1)},
            {"inputs", inputs}};
}

// "1 shard", "2 shards"
static std::string counted(uint64_t count, const char* noun) {
    return format("%zu %s%s", count, noun, count == 1 ? "" : "s");
}

namespace {

// A byte range of the input and its tokenization options.
struct Split {
    const char* name;
    uint64_t begin, end;
    int copies;
    double bpe_dropout;
};

struct EncodedBlock {
    std::vector<int32_t> ids;
    uint64_t begin = 0, end = 0;  // byte range of the block in the input
    uint64_t text_bytes = 0, documents = 0;
};

// Returns the record of a finished split for dataset.json. The token count comes from `writer`.
Json split_record(const ShardWriter& writer, const PrepareSummary::Split& counts) {
    return {{"tokens", writer.token_count()},
            {"text_bytes", counts.text_bytes},
            {"documents", counts.documents},
            {"shards", writer.names()},
            {DatasetRecord::kChecksums, writer.checksums()}};
}

PrepareSummary::Split summary_of(const Json& record) {
    return {record["tokens"], record["text_bytes"], record["documents"]};
}

PrepareSummary summary_of(int vocab_size, const Json& splits, int copies = 1) {
    PrepareSummary summary{.vocab_size = vocab_size, .copies = copies, .train = summary_of(splits["train"]), .val = {}};
    if (splits.contains("val")) summary.val = summary_of(splits["val"]);
    return summary;
}

std::vector<std::string> shards_of(const Json& splits) {
    std::vector<std::string> names;
    for (const Json& split : splits)
        for (const Json& name : split["shards"]) names.push_back(name);
    return names;
}

// Prepares text in several passes over the input: count compressed files, train the tokenizer, write each split.
class Preparation {
public:
    Preparation(const PrepareOptions& options, OutDirectory& out, TextInput input, const ProgressLine& line)
        : options_(options),
          out_(out),
          input_(std::move(input)),
          line_(line),
          threads_(options.threads > 0 ? options.threads : int(std::max(1u, std::thread::hardware_concurrency()))) {}

    PrepareSummary run();

private:
    void find_splits();
    Tokenizer learn_tokenizer();
    Tokenizer collect_characters();
    Tokenizer make_tokenizer();
    void write_split(const Split& split, const Tokenizer& tokenizer);
    void write_copy(const Split& split, const Tokenizer& tokenizer, ShardWriter& writer, Json& state);
    void save(const Json& state);
    std::string dataset_json(const Tokenizer& tokenizer) const;

    const PrepareOptions& options_;
    OutDirectory& out_;
    TextInput input_;
    const ProgressLine& line_;
    const int threads_;
    uint64_t val_begin_ = 0;
    // progress.json: source "sizes", "val_begin", "copies" and "bpe_dropout" of the train split, completed "splits",
    // and the "state" of the split being written.
    Json progress_;
    double saved_ms_ = now_ms();
};

void Preparation::find_splits() {
    if (progress_.contains("sizes")) {
        input_.set_sizes(progress_["sizes"].get<std::vector<uint64_t>>());
        val_begin_ = progress_["val_begin"];
        return;
    }
    PassProgress pass("reading the input", 0, 0, line_);
    input_.count([&](uint64_t bytes) { pass.advance(bytes); });
    val_begin_ = input_.held_out_begin(options_.val_fraction);
    if (input_.size() == 0) fail(Exit::data, "prepare: the input has no text (0 bytes)");
    if (val_begin_ == 0 || (options_.val_fraction > 0 && val_begin_ == input_.size()))
        fail(Exit::data,
             "prepare: the %zu bytes of input cannot be split at a line or record into a train split and a validation "
             "split of %g; add text, or pass --val-fraction 0 for no validation split",
             input_.size(), options_.val_fraction);
    std::vector<uint64_t> sizes;
    for (const TextSource& source : input_.sources()) sizes.push_back(source.size);
    const bool can_differ = options_.tokenizer == "bpe" && options_.bpe_dropout != 0.0;
    const int copies = options_.copies.value_or(can_differ ? default_copies(val_begin_) : 1);
    const double bpe_dropout = options_.bpe_dropout.value_or(copies > 1 ? kDefaultBpeDropout : 0);
    progress_ = {{"sizes", sizes},           {"val_begin", val_begin_},
                 {"copies", copies},         {"bpe_dropout", bpe_dropout},
                 {"splits", Json::object()}, {"state", nullptr}};
    out_.save_progress(progress_);
}

Tokenizer Preparation::learn_tokenizer() {
    BpeTrainer trainer;
    PassProgress pass("training the tokenizer", val_begin_, 0, line_);
    TextReader reader(input_, 0, val_begin_, 0);
    struct Counts {
        WordMap<int64_t> words;
        uint64_t text_bytes = 0, input_bytes = 0;
    };
    ordered_parallel<TextBlock>(
        threads_, [&](TextBlock& block) { return reader.next(block); },
        [&] {
            return [&, counter = std::make_shared<WordCounter>()](const TextBlock& block) {
                input_.visit(block, [&](std::string_view text, bool) { counter->add(text); });
                Counts counts{counter->counts(), counter->text_bytes(), block.end - block.begin};
                counter->clear();
                return counts;
            };
        },
        [&](const Counts& counts) {
            trainer.add(counts.words, counts.text_bytes);
            pass.advance(counts.input_bytes);
        });
    const int wanted = options_.vocab_size ? options_.vocab_size : default_vocab_size(trainer.text_bytes());
    Tokenizer tokenizer = trainer.train(wanted);
    line_(format("trained a tokenizer of %d tokens%s", tokenizer.vocab_size(),
                 options_.vocab_size ? "" : " (default for this amount of text; --vocab-size changes it)"));
    if (tokenizer.vocab_size() < options_.vocab_size)
        line_(
            format("fewer tokens than the requested %d: no other pair occurs twice in the text", options_.vocab_size));
    return tokenizer;
}

// Collects the characters of the whole text, as nanoGPT does, so that the validation split loses none.
Tokenizer Preparation::collect_characters() {
    std::set<std::string, std::less<>> characters;
    PassProgress pass("collecting the characters", input_.size(), 0, line_);
    input_.read(0, input_.size(), [&](std::string_view text, bool) {
        pass.advance(text.size());
        for (size_t length; !text.empty(); text.remove_prefix(length)) {
            length = std::max<size_t>(utf8_length(text), 1);
            const std::string_view character = text.substr(0, length);
            if (!characters.contains(character)) characters.emplace(character);
        }
    });
    Tokenizer tokenizer = Tokenizer::characters(characters);
    check_vocab_size(options_, tokenizer);
    line_(format("the text has %zu distinct characters; with %s, the vocabulary has %d tokens", characters.size(),
                 kEndOfText, tokenizer.vocab_size()));
    return tokenizer;
}

Tokenizer Preparation::make_tokenizer() {
    const std::string path = out_.unfinished("tokenizer.json");
    if (is_made_from_text(options_.tokenizer) && file_exists(path)) return Tokenizer::load(path);  // saved earlier
    Tokenizer tokenizer = options_.tokenizer == "bpe"     ? learn_tokenizer()
                          : options_.tokenizer == "chars" ? collect_characters()
                                                          : load_tokenizer(options_);
    tokenizer.save(out_.unfinished());
    if (const std::string warning = tokenizer.warning(); !warning.empty()) line_("tokenizer: " + warning);
    input_.set_cut(safe_cut_of(tokenizer.rules()));
    return tokenizer;
}

void Preparation::save(const Json& state) {
    progress_["state"] = state;
    out_.save_progress(progress_);
    saved_ms_ = now_ms();
}

// Writes the rest of a copy, starting at state["position"].
void Preparation::write_copy(const Split& split, const Tokenizer& tokenizer, ShardWriter& writer, Json& state) {
    constexpr uint64_t kSeed = 1;
    const uint64_t start = state["position"], copy = state["copy"];
    TextReader reader(input_, split.begin, split.end, start);
    PassProgress pass(
        split.copies > 1 ? format("%s, copy %d of %d", split.name, int(copy) + 1, split.copies) : split.name,
        split.end - split.begin, start - split.begin, line_);
    ordered_parallel<TextBlock>(
        threads_, [&](TextBlock& block) { return reader.next(block); },
        [&] {
            auto encoder = std::make_shared<Encoder>(tokenizer, split.bpe_dropout, kSeed);
            return [&, encoder](const TextBlock& block) {
                EncodedBlock encoded{.ids = {}, .begin = block.begin, .end = block.end};
                encoded.ids.reserve(block.bytes().size() / 3);
                input_.visit(block, [&](std::string_view text, bool starts_document) {
                    const std::span<const int32_t> prefix = tokenizer.document_prefix();
                    if (starts_document) encoded.ids.insert(encoded.ids.end(), prefix.begin(), prefix.end());
                    encoder->append(text, encoded.ids, (copy << 48) + block.begin + encoded.text_bytes,
                                    starts_document);
                    encoded.text_bytes += text.size();
                    encoded.documents += starts_document;
                });
                return encoded;
            };
        },
        [&](const EncodedBlock& encoded) {
            writer.append(encoded.ids);
            state["position"] = encoded.end;
            state["text_bytes"] = state["text_bytes"].get<uint64_t>() + encoded.text_bytes;
            state["documents"] = state["documents"].get<uint64_t>() + encoded.documents;
            if (stop_signal() || now_ms() - saved_ms_ >= 1000 * options_.save_seconds) {
                writer.sync();
                state["tokens"] = writer.token_count();
                state["checksums"] = writer.checksums();
                save(state);
            }
            pass.advance(encoded.end - encoded.begin);
        });
}

// Writes the remaining shards of a split.
void Preparation::write_split(const Split& split, const Tokenizer& tokenizer) {
    Json& done = progress_["splits"];
    if (!done.contains(split.name)) {
        Json state = progress_["state"];
        if (state.is_null())
            state = {{"copy", 0},       {"position", split.begin}, {"tokens", 0},
                     {"text_bytes", 0}, {"documents", 0},          {"checksums", Json::array()}};
        ShardWriter writer(out_.unfinished(), split.name, tokenizer.vocab_size(), options_.shard_tokens,
                           state["tokens"], state["checksums"]);
        std::vector<std::string> kept = writer.names();
        for (const auto& [name, record] : done.items())
            for (const std::string shard : record["shards"]) kept.push_back(shard);
        out_.remove_other_shards(kept);
        for (int copy = state["copy"]; copy < split.copies; copy++) {
            state["copy"] = copy;
            write_copy(split, tokenizer, writer, state);
            state["position"] = split.begin;
        }
        writer.finish();
        done[split.name] = split_record(writer, {0, state["text_bytes"], state["documents"]});
        save(nullptr);
    }
    const Json& record = done[split.name];
    const PrepareSummary::Split counts = summary_of(record);
    const std::string copies =
        split.copies > 1 ? format(", %d copies with BPE-dropout %g", split.copies, split.bpe_dropout) : "";
    line_(format("%s%s: %zu bytes of text in %s, %zu tokens in %s", split.name, copies.c_str(), counts.text_bytes,
                 counted(counts.documents, "document").c_str(), counts.tokens,
                 counted(record["shards"].size(), "shard").c_str()));
}

std::string Preparation::dataset_json(const Tokenizer& tokenizer) const {
    Json sources = Json::array();
    for (const TextSource& source : input_.sources()) {
        const bool is_stdin = source.file.path() == out_.unfinished("stdin");
        Json record = {{"path", is_stdin ? "-" : source.file.path()}, {"bytes", source.file.size()}};
        if (source.format != TextFormat::text) record["format"] = kTextFormats[size_t(source.format)];
        if (source.format != TextFormat::text) record["field"] = source.field;
        sources.push_back(record);
    }
    const Json dataset = {
        {"format", DatasetRecord::kFormat},
        {"tokenizer",
         {{"kind", options_.tokenizer}, {"vocab_size", tokenizer.vocab_size()}, {"xxh3", tokenizer.digest()}}},
        {"sources", sources},
        {"val_fraction", options_.val_fraction},
        {"copies", progress_["copies"]},
        {"bpe_dropout", progress_["bpe_dropout"]},
        {"val_begin", val_begin_},  // byte offset in the concatenated sources
        {"splits", progress_["splits"]}};
    return dataset.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

PrepareSummary Preparation::run() {
    progress_ = out_.progress();
    if (!progress_.empty()) line_("resuming an unfinished prepare");
    if (progress_.value("complete", false)) {
        out_.move_into_place(read_file(out_.unfinished("dataset.json")), shards_of(progress_["splits"]));
        return summary_of(progress_["vocab_size"], progress_["splits"], progress_["copies"]);
    }
    find_splits();
    const Tokenizer tokenizer = make_tokenizer();
    progress_["vocab_size"] = tokenizer.vocab_size();
    write_split({"train", 0, val_begin_, progress_["copies"], progress_["bpe_dropout"]}, tokenizer);
    if (val_begin_ < input_.size()) write_split({"val", val_begin_, input_.size(), 1, 0}, tokenizer);
    out_.move_into_place(dataset_json(tokenizer), shards_of(progress_["splits"]));
    return summary_of(tokenizer.vocab_size(), progress_["splits"], progress_["copies"]);
}

// Converts files of token ids. Files named val* are the val split; without them, the last val_fraction is.
PrepareSummary convert_tokens(const PrepareOptions& o, const std::vector<std::string>& paths, OutDirectory& out,
                              const ProgressLine& line) {
    const bool has_tokenizer = o.tokenizer != "bpe";
    if (!has_tokenizer && o.vocab_size == 0)
        fail(Exit::usage,
             "prepare: token ids without a header require a vocabulary: pass --tokenizer gpt2 (or a tokenizer file), "
             "or --vocab-size");
    const std::optional<Tokenizer> tokenizer = has_tokenizer ? std::optional(load_tokenizer(o)) : std::nullopt;
    const int vocab_size = tokenizer ? tokenizer->vocab_size() : o.vocab_size, eot = tokenizer ? tokenizer->eot() : -1;
    std::vector<MappedFile> files;
    Json sources = Json::array(), splits;
    uint64_t all = 0, train_end = 0;
    auto is_val = [](const MappedFile& file) {
        return std::filesystem::path(file.path()).filename().string().starts_with("val");
    };
    for (const std::string& path : paths) {
        files.emplace_back(path);
        sources.push_back({{"path", path}, {"bytes", files.back().size()}, {"format", kRawFormat}});
        all += raw_token_count(files.back());
        if (!is_val(files.back())) train_end += raw_token_count(files.back());
    }
    std::ranges::stable_partition(files, [&](const MappedFile& file) { return !is_val(file); });
    if (train_end == all) train_end = uint64_t(std::floor((1 - o.val_fraction) * double(all)));
    if (train_end == 0) fail(Exit::data, "prepare: the train split is empty: the input has %zu tokens", all);
    auto write = [&](const char* name, uint64_t begin, uint64_t end) {
        if (begin == end) return;
        PrepareSummary::Split counts;
        ShardWriter writer(out.unfinished(""), name, vocab_size, o.shard_tokens);
        PassProgress pass(name, 2 * (end - begin), 0, line);
        uint64_t position = 0;
        for (const MappedFile& file : files) {
            const uint64_t count = raw_token_count(file), first = std::clamp(begin, position, position + count);
            counts.documents +=
                append_raw_tokens(file, first - position, std::clamp(end, position, position + count) - position,
                                  vocab_size, eot, writer, [&](std::span<const int32_t> ids) {
                                      if (tokenizer)
                                          for (int32_t id : ids)
                                              counts.text_bytes += uint64_t(tokenizer->token_bytes(id));
                                      pass.advance(2 * ids.size());
                                  });
            position += count;
        }
        writer.finish();
        splits[name] = split_record(writer, counts);
        line(format("%s: %zu tokens in %s", name, writer.token_count(),
                    counted(writer.names().size(), "shard").c_str()));
    };
    write("train", 0, train_end);
    write("val", train_end, all);
    Json kind = {{"kind", has_tokenizer ? o.tokenizer : "unknown"}, {"vocab_size", vocab_size}};
    if (tokenizer) {
        kind["xxh3"] = tokenizer->digest();
        tokenizer->save(out.unfinished());
    }
    const Json dataset = {
        {"format", DatasetRecord::kFormat}, {"tokenizer", kind}, {"sources", sources}, {"splits", splits}};
    out.move_into_place(dataset.dump(2, ' ', false, Json::error_handler_t::replace) + "\n", shards_of(splits));
    return summary_of(vocab_size, splits);
}

}  // namespace

PrepareSummary prepare(const PrepareOptions& options, const ProgressLine& line) {
    InputPaths paths = expand_inputs(options.inputs, options.out_dir);
    const bool raw = is_raw(options, paths.files), has_stdin = std::ranges::count(paths.files, "-") > 0;
    check_options(options, raw);
    const Json plan = raw || has_stdin ? Json() : make_plan(options, paths.files);
    for (const std::string& path : paths.files)
        if (path != "-" && !file_exists(path)) MappedFile{path};  // throws the specific error
    OutDirectory out(options.out_dir, options.force);
    try {
        out.begin(plan);
        for (const std::string& warning : paths.warnings) line(warning);
        for (std::string& path : paths.files) {
            if (path != "-") continue;
            path = out.unfinished("stdin");
            PassProgress pass("reading standard input", 0, 0, line);
            copy_stdin(path, [&](uint64_t bytes) { pass.advance(bytes); });
        }
        if (raw) return convert_tokens(options, paths.files, out, line);
        return Preparation(options, out, TextInput(paths.files, text_format(options.format), options.field), line)
            .run();
    } catch (const Error& error) {
        // A prepare that was interrupted or failed on a full disk can be resumed.
        const bool is_interrupted = error.code == Exit::again || error.code == Exit::io || error.code == Exit::os;
        const bool can_continue = is_interrupted && !plan.is_null();
        if (can_continue) out.keep_unfinished();
        if (!is_interrupted) throw;
        fail(error.code, "%s; %s", error.what(),
             can_continue ? "run the same command again to resume" : "run the same command again to start over");
    }
}
