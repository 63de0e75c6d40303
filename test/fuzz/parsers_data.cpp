// The parsers of data/: tokens, tokenizers, texts and questions.
#include <filesystem>

#include "data/evaluation/questions.h"
#include "data/shards/dataset.h"
#include "data/text/byte_source.h"
#include "data/text/parquet.h"
#include "data/text/text_input.h"
#include "data/tokenizer/encoder.h"
#include "runtime/io/files.h"
#include "test/fuzz/inputs.h"
#include "test/fuzz/parsers.h"

namespace {

constexpr int kVocabulary = 50257;
constexpr size_t kLongText = 128 << 10;  // bytes; two blocks of decoder output

// Uses a tokenizer like a run. An encoder's tables take many times longer than the rest.
void use(const Tokenizer& tokenizer, size_t input_bytes) {
    tokenizer.digest();
    tokenizer.json();
    if (input_bytes % 16 != 0) return;
    const std::vector<int32_t> ids =
        Encoder(tokenizer).encode("It's 1,234 words:\n\n  na\xc3\xafve <|endoftext|> \xe2\x82\xac\t.");
    tokenizer.decode(ids, true);
}

std::string sound_shard() {
    const int32_t words[3] = {20240520, 1, 4};
    std::string file(reinterpret_cast<const char*>(words), sizeof(words));
    file.resize(kShardHeaderBytes);
    return file + std::string("\1\0\2\0\3\0\4\0", 8);
}

}  // namespace

void read_token_shard(std::string_view input) {
    const TokenStream stream({path_of(input)}, kVocabulary);
    std::vector<int32_t> tokens(64);
    for (uint64_t at = 0; at < stream.token_count(); at += tokens.size())
        stream.read(at, size_t(std::min<uint64_t>(tokens.size(), stream.token_count() - at)), tokens.data());
    stream.digest();
    stream.description();
}

void read_dataset_record(std::string_view input) {
    std::filesystem::create_directory(scratch_directory() / "dataset");
    scratch_file("dataset/train_000000.bin", sound_shard());
    scratch_file("dataset/dataset.json", input);
    const std::string shards = scratch_directory() / "dataset/train_*.bin";
    open_dataset({{shards, 1}}, "", "", kVocabulary);
    std::vector<int32_t> tokens(4);
    TokenStream(find_shards(shards, "data.train"), kVocabulary).read(0, tokens.size(), tokens.data());
}

void read_tokenizer(std::string_view input) { use(Tokenizer::load(path_of(input)), input.size()); }

void read_vocabulary(std::string_view input) {
    const auto parts = parts_of(input, 2);
    scratch_file("merges.txt", parts[1]);
    use(Tokenizer::load(scratch_file("vocab.json", parts[0])), input.size());
}

void read_parquet(std::string_view input) {
    ParquetColumn column(MappedFile(path_of(input)), "text");
    while (column.next()) {}
}

void read_texts(std::string_view input) {
    constexpr TextFormat kFormats[] = {TextFormat::text, TextFormat::json_lines, TextFormat::parquet};
    if (input.empty()) return;
    const size_t choice = uint8_t(input[0]) % (std::size(kFormats) + 1);
    const auto format = choice < std::size(kFormats) ? std::make_optional(kFormats[choice]) : std::nullopt;
    const std::string path = path_of(input.substr(1));
    // A few compressed bytes may expand to megabytes, which take as long as a thousand other inputs.
    if (input.size() % 64 != 0 && ByteSource(MappedFile(path)).peek(kLongText).size() >= kLongText) return;
    TextInput texts({path}, format);
    texts.count();
    size_t bytes = 0;
    const auto visit = [&](std::string_view text, bool) { bytes += text.size(); };
    texts.read(0, texts.size(), visit);
    const size_t whole = std::exchange(bytes, 0);
    const uint64_t cut = texts.held_out_begin(0.5);
    texts.read(0, cut, visit);
    texts.read(cut, texts.size(), visit);
    require(bytes == whole, "the two parts have %zu bytes of text, the whole has %zu", bytes, whole);
}

void read_question_file(std::string_view input) {
    static const Tokenizer tokenizer = Tokenizer::bytes();
    static QuestionReader reader(tokenizer);  // its encoder takes many times longer than the rest
    for (const MultipleChoice& question : reader.read(path_of(input), 0).questions)
        require(question.label >= 0 && size_t(question.label) < question.completions.size(), "label %d of %zu choices",
                question.label, question.completions.size());
}
