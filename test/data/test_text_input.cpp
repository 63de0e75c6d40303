#include <cmath>
#include <map>

#include "data/text/text_input.h"
#include "test/support/data_files.h"
#include "test/support/expect_error.h"
#include "test/support/temporary_directory.h"

struct Document {
    std::string text;
    size_t pieces = 0;
};

static std::vector<Document> read_documents(const TextInput& input, uint64_t begin, uint64_t end) {
    std::vector<Document> documents;
    input.read(begin, end, [&](std::string_view text, bool starts_document) {
        if (starts_document) documents.emplace_back();
        documents.back().text += text;
        documents.back().pieces++;
    });
    return documents;
}

static std::vector<std::string> texts(const std::vector<Document>& documents) {
    std::vector<std::string> result;
    for (const Document& document : documents) result.push_back(document.text);
    return result;
}

TEST_CASE("text input: the held-out part begins at the first line start at or after its fraction") {
    TemporaryDirectory directory;
    std::vector<std::string> contents = {"one\ntwo\n\nthree", "", "four\n", "five, which has no end of line"};
    std::vector<std::string> paths;
    std::string all;
    std::vector<uint64_t> line_starts;
    for (const std::string& content : contents) {
        paths.push_back(directory / format("%zu.txt", paths.size()));
        write_bytes(paths.back(), content);
        for (size_t i = 0; i < content.size(); i++)
            if (i == 0 || content[i - 1] == '\n') line_starts.push_back(all.size() + i);
        all += content;
    }
    line_starts.push_back(all.size());
    TextInput input(paths);
    REQUIRE(input.size() == all.size());
    std::map<uint64_t, int> seen;
    for (int k = 0; k < 1000; k++) {
        double fraction = k / 1000.0;
        uint64_t position = uint64_t(std::floor((1 - fraction) * double(all.size())));
        uint64_t expected = *std::lower_bound(line_starts.begin(), line_starts.end(), position);
        CHECK(input.held_out_begin(fraction) == expected);
        seen[expected]++;
    }
    CHECK(seen.size() == line_starts.size());
}

TEST_CASE("text input: files are documents, wherever they are split") {
    TemporaryDirectory directory;
    write_bytes(directory / "a.txt", "alpha\nbeta\n");
    write_bytes(directory / "b.txt", "gamma");
    write_bytes(directory / "c.txt", "");
    TextInput input({directory / "a.txt", directory / "b.txt", directory / "c.txt"});
    using Texts = std::vector<std::string>;
    CHECK(texts(read_documents(input, 0, 16)) == Texts{"alpha\nbeta\n", "gamma"});
    CHECK(texts(read_documents(input, 0, 6)) == Texts{"alpha\n"});
    CHECK(texts(read_documents(input, 6, 16)) == Texts{"beta\n", "gamma"});
    CHECK(texts(read_documents(input, 11, 16)) == Texts{"gamma"});
    CHECK(texts(read_documents(input, 16, 16)).empty());
}

TEST_CASE("text input: reading large documents in pieces changes no token") {
    TemporaryDirectory directory;
    std::string text = lines(150'000);
    write_bytes(directory / "large.txt", text);
    std::vector<Document> documents = read_documents(TextInput({directory / "large.txt"}), 0, text.size());
    REQUIRE(documents.size() == 1);
    CHECK(documents[0].text == text);
    CHECK(documents[0].pieces >= text.size() / kTextPieceBytes);
    CHECK(documents[0].pieces <= text.size() / kTextPieceBytes + 2);

    std::string unbroken(3 * kTextPieceBytes, 'x');
    write_bytes(directory / "unbroken.txt", unbroken + " end");
    documents = read_documents(TextInput({directory / "unbroken.txt"}), 0, unbroken.size() + 4);
    CHECK(documents[0].text == unbroken + " end");
    CHECK(documents[0].pieces == 1);
}

TEST_CASE("text input: JSON lines are documents") {
    TemporaryDirectory directory;
    std::string path = directory / "x.jsonl";
    std::string first = "{\"id\": 1, \"text\": \"caf\\u00e9\\nand \\\"more\\\"\"}\r\n",
                second = "\n  \n{\"text\": \"\"}\n";
    write_bytes(path, first + second + "{\"text\": \"last\"}");
    TextInput input({path});
    using Texts = std::vector<std::string>;
    CHECK(texts(read_documents(input, 0, input.size())) == Texts{"café\nand \"more\"", "", "last"});
    CHECK(texts(read_documents(input, first.size(), input.size())) == Texts{"", "last"});
    CHECK(texts(read_documents(input, 0, first.size())) == Texts{"café\nand \"more\""});

    auto expect_bad_line = [&](const std::string& line, std::initializer_list<std::string> words) {
        write_bytes(path, first + second + line + "\n" + first);
        TextInput bad({path});
        for (uint64_t begin : {size_t(0), first.size(), first.size() + second.size()})
            expect_error(Exit::data, words, [&] { read_documents(bad, begin, bad.size()); });
    };
    expect_bad_line("{\"text\": \"x\"", {"line 5 of " + path});
    expect_bad_line("{\"text\": \"\xff\"}", {"line 5 of " + path});
    expect_bad_line("{\"text\": \"\\ud800\"}", {"line 5 of " + path});
    expect_bad_line("{\"Text\": \"x\"}", {path, "line 5", "\"text\""});
    expect_bad_line("{\"text\": 5}", {path, "line 5", "\"text\""});
    expect_bad_line("[\"text\"]", {path, "line 5", "\"text\""});
    expect_bad_line("{\"text\": \"" + std::string(kMaxRecordBytes, 'x') + "\"}",
                    {path, "line 5", std::to_string(kMaxRecordBytes)});
}

TEST_CASE("text input: files that are not text are rejected") {
    TemporaryDirectory directory;
    write_bytes(directory / "x.txt", std::string("\x1f\x8b\x08\x00\x00\x00", 6));
    expect_error(Exit::data, {"x.txt", "gzip"}, [&] { TextInput input({directory / "x.txt"}); });
    write_bytes(directory / "x.txt", std::string("PK\3\4\0\0", 6));
    expect_error(Exit::data, {"x.txt", "byte 4 is 0", "zip"}, [&] { TextInput input({directory / "x.txt"}); });
    write_bytes(directory / "x.txt", std::string("\xff\xfeh\0i\0", 6));
    expect_error(Exit::data, {"x.txt", "byte 3 is 0", "UTF-16", "iconv"}, [&] { TextInput({directory / "x.txt"}); });
    expect_error(Exit::no_input, {"none.txt"}, [&] { TextInput input({directory / "none.txt"}); });
}
