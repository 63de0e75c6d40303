// The text formats that prepare reads: detection, documents, compression, and errors.
#include <isa-l.h>
#include <zstd.h>

#include <map>
#include <nlohmann/json.hpp>

#include "data/text/input_paths.h"
#include "data/text/text_input.h"
#include "runtime/io/files.h"
#include "test/support/data_files.h"
#include "test/support/expect_error.h"
#include "test/support/random_values.h"
#include "test/support/temporary_directory.h"

using Texts = std::vector<std::string>;

static Texts read_texts(const TextInput& input, uint64_t begin, uint64_t end) {
    Texts texts;
    input.read(begin, end, [&](std::string_view text, bool starts_document) {
        if (starts_document) texts.emplace_back();
        texts.back() += text;
    });
    return texts;
}

static Texts read_file_texts(const std::string& path, const std::string& field = "",
                             std::optional<TextFormat> format = std::nullopt) {
    TextInput input({path}, format, field);
    input.count();
    return read_texts(input, 0, input.size());
}

static std::string gzip(std::string_view bytes) {
    isal_zstream stream;
    std::vector<uint8_t> level_buffer(ISAL_DEF_LVL1_DEFAULT), out(bytes.size() + 1000);
    isal_deflate_init(&stream);
    stream.level = 1;
    stream.level_buf = level_buffer.data();
    stream.level_buf_size = uint32_t(level_buffer.size());
    stream.gzip_flag = IGZIP_GZIP;
    stream.end_of_stream = 1;
    stream.next_in = (uint8_t*)bytes.data();
    stream.avail_in = uint32_t(bytes.size());
    stream.next_out = out.data();
    stream.avail_out = uint32_t(out.size());
    REQUIRE(isal_deflate(&stream) == COMP_OK);
    return {(const char*)out.data(), stream.total_out};
}

static std::string zstd(std::string_view bytes) {
    std::string out(ZSTD_compressBound(bytes.size()), '\0');
    const std::unique_ptr<ZSTD_CCtx, size_t (*)(ZSTD_CCtx*)> context(ZSTD_createCCtx(), ZSTD_freeCCtx);
    ZSTD_CCtx_setParameter(context.get(), ZSTD_c_checksumFlag, 1);
    out.resize(ZSTD_compress2(context.get(), out.data(), out.size(), bytes.data(), bytes.size()));
    return out;
}

// The same documents in every format, with everything that a format must escape.
struct Corpus {
    Texts texts;
    std::map<std::string, std::string> files;

    explicit Corpus(int count) {
        using Json = nlohmann::ordered_json;
        for (int i = 0; i < count; i++) {
            texts.push_back(format("document %d,\nwith \"quotes\", [brackets}, \\ and caf\u00e9\t%d", i, i * i));
            if (i % 7 == 0) texts.back() = "";
            Json object = {{"id", i}, {"deep", {{"text", {1, "]"}}}}, {"text", texts.back()}};
            files["lines.jsonl"] += object.dump() + "\n";
            files["lines.json"] += object.dump() + "\n";
            files["lines.txt"] += object.dump() + "\r\n";
        }
        files["marked.txt"] = "\xef\xbb\xbf " + files["lines.jsonl"];
    }
};

TEST_CASE("text formats: the same documents from every format, however they are split and compressed") {
    TemporaryDirectory directory;
    const Corpus corpus(60);
    for (const auto& [name, content] : corpus.files) {
        for (const auto& [suffix, bytes] :
             {std::pair<std::string, std::string>{"", content}, {".gz", gzip(content)}, {".zst", zstd(content)}}) {
            INFO(name << suffix);
            const std::string path = directory / (name + suffix);
            write_bytes(path, bytes);
            TextInput input({path});
            input.count();
            CHECK(input.size() == content.size());
            CHECK(read_texts(input, 0, input.size()) == corpus.texts);
            for (int k = 0; k < 40; k++) {
                const uint64_t begin = input.held_out_begin(k / 40.0);
                CHECK(begin >= uint64_t((1 - k / 40.0) * double(input.size())));
                Texts both = read_texts(input, 0, begin), rest = read_texts(input, begin, input.size());
                both.insert(both.end(), rest.begin(), rest.end());
                CHECK(both == corpus.texts);
            }
        }
    }
}

TEST_CASE("text formats: reading from any block's start gives the same blocks") {
    TemporaryDirectory directory;
    const Corpus corpus(20'000);  // several blocks each
    std::vector<std::string> paths;
    for (const char* name : {"lines.jsonl", "lines.json", "lines.txt", "marked.txt"}) {
        paths.push_back(directory / (std::string(name) + ".zst"));
        write_bytes(paths.back(), zstd(corpus.files.at(name)));
    }
    TextInput input(paths);
    input.count();
    std::vector<std::pair<uint64_t, std::string>> blocks;
    TextReader reader(input, 0, input.size(), 0);
    Texts all;
    for (TextBlock block; reader.next(block);) {
        blocks.emplace_back(block.begin, block.bytes());
        input.visit(block, [&](std::string_view text, bool) { all.emplace_back(text); });
    }
    CHECK(all.size() == 4 * corpus.texts.size());
    REQUIRE(blocks.size() > 8);
    for (size_t first = 0; first < blocks.size(); first += 3) {
        TextReader later(input, 0, input.size(), blocks[first].first);
        for (size_t i = first; i < blocks.size(); i++) {
            TextBlock block;
            REQUIRE(later.next(block));
            CHECK(block.begin == blocks[i].first);
            CHECK((block.bytes() == blocks[i].second));
        }
    }
}

TEST_CASE("text formats: compressed files may have several members, and must be whole") {
    TemporaryDirectory directory;
    std::string text;
    for (int i = 0; i < 200'000; i++) text += format("%x line\n", unsigned(i) * 2654435761u);
    const std::string_view half = std::string_view(text).substr(0, text.size() / 2),
                           rest = std::string_view(text).substr(half.size());
    const std::string path = directory / "x.txt";
    for (const std::string& bytes :
         {gzip(half) + gzip(rest), zstd(half) + zstd(rest), gzip(text) + std::string(100, '\0')}) {
        write_bytes(path, bytes);
        CHECK((read_file_texts(path) == Texts{text}));
    }
    for (auto compress : {gzip, zstd}) {
        const std::string bytes = compress(text);
        for (size_t cut : {bytes.size() / 2, bytes.size() - 1}) {
            write_bytes(path, bytes.substr(0, cut));
            expect_error(Exit::data, {path, "cut short"}, [&] { read_file_texts(path); });
        }
        std::string damaged = bytes;
        damaged[bytes.size() / 2] = char(damaged[bytes.size() / 2] ^ 0x55);
        write_bytes(path, damaged);
        expect_error(Exit::data, {path}, [&] { read_file_texts(path); });
    }
    write_bytes(path, gzip(text) + "more");
    expect_error(Exit::data, {path, "the 4 bytes after the end of the gzip data"}, [&] { read_file_texts(path); });
}

TEST_CASE("text formats: the field can be chosen, and a missing field is explained") {
    TemporaryDirectory directory;
    auto expect = [&](const std::string& name, const std::string& content, const std::string& field,
                      const Texts& texts) {
        INFO(name);
        write_bytes(directory / name, content);
        CHECK(read_file_texts(directory / name, field) == texts);
    };
    auto refuse = [&](const std::string& name, const std::string& content, std::initializer_list<std::string> words) {
        INFO(name << ": " << content);
        write_bytes(directory / name, content);
        expect_error(Exit::data, words, [&] { read_file_texts(directory / name); });
    };
    expect("a.json", "{\"body\": \"x\"}\n{\"body\": \"y\"}", "body", {"x", "y"});
    expect("a.txt", "{not JSON}\n", "", {"{not JSON}\n"});
    expect("a.txt", "[Illustration]\n\"Hello\"\n", "", {"[Illustration]\n\"Hello\"\n"});
    refuse("a.json", "{\"title\": \"x\", \"body\": []}", {"line 1", "\"text\"", "--field", "\"title\", \"body\""});
    refuse("a.json", "{\"data\": [{\"text\": \"x\"}]}", {"line 1", "\"data\""});
    write_bytes(directory / "a.json", "{\"text\": \"x\"}\n");
    CHECK((read_file_texts(directory / "a.json", "", TextFormat::text) == Texts{"{\"text\": \"x\"}\n"}));
}

TEST_CASE("text formats: tables and other JSON are not read as text") {
    TemporaryDirectory directory;
    for (const auto& [name, content] : {std::pair<std::string, std::string>{"a.csv", "id,text\n1,two\n"},
                                        {"a.csv.gz", gzip("id,text\n1,two\n")},
                                        {"a.csv", "{\"text\": \"x\"}\n"},
                                        {"a.tsv", "id\ttext\n1\ttwo\n"},
                                        {"a.json", "[{\"text\": \"x\"}]"},
                                        {"a.json", "{\n\"text\": \"x\"}"},
                                        {"a.txt", "\xef\xbb\xbf [\n {\"text\": \"x\"}, {\"text\": "},
                                        {"a.txt", "[\"one\"]"}}) {
        INFO(name << ": " << content);
        write_bytes(directory / name, content);
        expect_error(Exit::data, {name, "convert the file to JSONL or Parquet"},
                     [&] { read_file_texts(directory / name); });
    }
    const std::string rows = "id,text\n1,two\n";
    write_bytes(directory / "a.csv", rows);
    CHECK(read_file_texts(directory / "a.csv", "", TextFormat::text) == Texts{rows});
    for (const std::string text : {"[\"Hello\" is all he said.]\n", "[[1, 2], 3]", "[12, 13]", "[{not JSON}]", "["}) {
        write_bytes(directory / "a.txt", text);
        CHECK(read_file_texts(directory / "a.txt") == Texts{text});
    }
}

TEST_CASE("text formats: directories are read in the order of their paths") {
    TemporaryDirectory directory;
    make_directories(directory / "in/b/deep");
    make_directories(directory / "in/.git");
    make_directories(directory / "in/out");
    for (const char* name :
         {"z.txt", "b/y.jsonl.gz", "b/deep/x.md", "a.json", "rows.csv", ".hidden.txt", ".git/c.txt", "out/val.txt"})
        write_bytes(directory / (std::string("in/") + name), "x");
    const InputPaths found = expand_inputs({directory / "in", "-", "none.txt"}, directory / "in/out");
    const std::string in = directory / "in/";
    CHECK(found.files == Texts{in + "a.json", in + "b/deep/x.md", in + "b/y.jsonl.gz", in + "z.txt", "-", "none.txt"});
    REQUIRE(found.warnings.size() == 1);
    CHECK_THAT(found.warnings[0], ContainsSubstring("4 files") && ContainsSubstring("rows.csv"));
    make_directories(directory / "empty");
    expect_error(Exit::no_input, {"empty", ".jsonl"}, [&] { expand_inputs({directory / "empty"}, "out"); });
}
