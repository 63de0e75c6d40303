#include <nlohmann/json.hpp>

#include "data/text/parquet.h"
#include "runtime/io/files.h"
#include "test/support/data_files.h"
#include "test/support/expect_error.h"
#include "test/support/random_values.h"
#include "test/support/temporary_directory.h"

// Made by test/recorded/parquet/make_parquet.py with pyarrow.
static const char* const kFiles[] = {"plain",           "plain_v2",      "dictionary", "dictionary_v2_zstd",
                                     "fallback_snappy", "required_gzip", "snappy_v2"};

static std::string recorded(const std::string& name) { return "test/recorded/parquet/" + name + ".parquet"; }

static std::vector<std::string> read_column(const std::string& path, const std::string& name = "text") {
    ParquetColumn column(MappedFile(path), name);
    std::vector<std::string> values;
    while (const auto value = column.next()) values.emplace_back(*value);
    return values;
}

TEST_CASE("parquet: files by pyarrow are read in every encoding and codec") {
    const auto expected =
        nlohmann::json::parse(read_file("test/recorded/parquet/parquet_texts.json")).get<std::vector<std::string>>();
    REQUIRE(expected.size() > 300);
    for (const char* name : kFiles) {
        INFO(name);
        CHECK(read_column(recorded(name)) == expected);
    }
}

TEST_CASE("parquet: unsupported features are reported by name") {
    auto refuse = [](const std::string& name, const std::string& column, std::initializer_list<std::string> words) {
        expect_error(Exit::data, words, [&] { read_column(recorded(name), column); });
    };
    refuse("plain", "body", {"plain.parquet", "\"body\"", "--field", "id, text, score"});
    refuse("plain", "id", {"\"id\"", "INT64"});
    refuse("plain", "score", {"\"score\"", "FLOAT"});
    refuse("refused_brotli", "text", {"Brotli", "zstd"});
    refuse("refused_lz4", "text", {"LZ4"});
    refuse("refused_delta", "text", {"DELTA_LENGTH_BYTE_ARRAY"});
    refuse("refused_nested", "text", {"\"text\"", "nested"});
    refuse("refused_nested", "deep", {"\"deep\"", "nested"});
    refuse("refused_nested", "none", {"text, deep"});
    TemporaryDirectory directory;
    const std::string path = directory / "x.parquet", whole = read_file(recorded("plain"));
    auto refuse_bytes = [&](const std::string& bytes, std::initializer_list<std::string> words) {
        write_bytes(path, bytes);
        expect_error(Exit::data, words, [&] { read_column(path); });
    };
    refuse_bytes("text", {"x.parquet", "plain text"});
    refuse_bytes(whole.substr(0, whole.size() - 1), {"cut short"});
    refuse_bytes(whole.substr(0, whole.size() - 4) + "PARE", {"encrypted"});
    refuse_bytes("PAR1" + whole.substr(whole.size() - 8), {"metadata", "12"});
}

// Found by fuzzing: a level of 117 was not counted as a present value but treated as one, so an index of another page
// was used.
TEST_CASE("parquet: a run's value may not exceed its bit width") {
    expect_error(Exit::data, {"found_wide_level", "definition levels", "more than 1 bits"},
                 [] { read_column("test/fuzz/corpus/parquet/found_wide_level"); });
}

TEST_CASE("parquet: a column chunk has only its own dictionary") {
    TemporaryDirectory directory;
    std::string bytes = read_file(recorded("dictionary"));
    // The type of the third chunk's dictionary page is changed to INDEX_PAGE, which is skipped.
    const size_t page = bytes.rfind("\x15\x04\x15\x86");
    REQUIRE(page != bytes.npos);
    bytes[page + 1] = 0x02;
    write_bytes(directory / "x.parquet", bytes);
    expect_error(Exit::data, {"x.parquet", "refers to a dictionary, but the column chunk has none"},
                 [&] { read_column(directory / "x.parquet"); });
}

TEST_CASE("parquet: a page with only nulls needs no index width after its levels") {
    using namespace std::string_literals;
    const std::string dictionary = "\x15\x04\x15\x00\x15\x00\x4c\x15\x00\x15\x00\x00\x00"s;  // without values
    const std::string levels = "\x02\x00\x00\x00\x06\x00"s;                                  // a run of three zeros
    const std::string page = "\x15\x00\x15\x0c\x15\x0c\x2c\x15\x06\x15\x10\x15\x06\x15\x06\x00\x00"s + levels;
    REQUIRE(dictionary.size() == 13);
    REQUIRE(page.size() == 23);
    const std::string schema = "\x19\x2c\x48\x04root\x15\x02\x00\x15\x0c\x25\x02\x18\x04text\x00"s;
    // Uncompressed, 3 values, 36 bytes, the page at 17, the dictionary at 4.
    const std::string chunk = "\x26\x08\x1c\x45\x00\x16\x06\x26\x48\x26\x22\x26\x08\x00\x00"s;
    const std::string metadata = "\x15\x02"s + schema + "\x16\x06\x19\x1c\x19\x1c"s + chunk + "\x00\x00"s;
    TemporaryDirectory directory;
    write_bytes(directory / "x.parquet", "PAR1" + dictionary + page + metadata + char(metadata.size()) + "\0\0\0PAR1"s);
    CHECK(read_column(directory / "x.parquet").empty());
}

TEST_CASE("parquet: damaged files are read or rejected, and nothing else happens") {
    TemporaryDirectory directory;
    const std::string path = directory / "x.parquet";
    size_t refused = 0, read = 0;
    for (const char* name : kFiles) {
        const std::string whole = read_file(recorded(name));
        for (uint64_t round = 0; round < 400; round++) {
            // Most of the damage hits the lengths: in the metadata and at the beginnings of pages.
            const std::vector<int> random = random_integers(8, round, 1 << 30);
            std::string bytes = whole;
            for (int i = 0; i < 1 + random[0] % 3; i++) {
                const size_t from = random[1] % 2 ? whole.size() - std::min<size_t>(whole.size(), 700) : 0;
                bytes[from + size_t(random[2 + i]) % (whole.size() - from)] = char(random[5 + i]);
            }
            if (random[0] % 16 == 0) bytes.erase(size_t(random[1]) % bytes.size(), 1 + size_t(random[2]) % 5);
            write_bytes(path, bytes);
            try {
                read_column(path);
                read++;
            } catch (const Error& error) {
                refused++;
                INFO(error.what());
                CHECK(error.code == Exit::data);
                CHECK_THAT(error.what(), ContainsSubstring(path));
            }
        }
    }
    CHECK(refused > 500);
    CHECK(read > 100);  // the damage is inside a text or in another column
}
