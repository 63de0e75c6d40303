// Windows of a text for its perplexity, questions as tokens, and Python's definition of white space.
#include <algorithm>

#include "data/evaluation/questions.h"
#include "data/evaluation/rolling_text.h"
#include "data/tokenizer/white_space.h"
#include "test/support/catch.h"
#include "test/support/data_files.h"
#include "test/support/temporary_directory.h"

TEST_CASE("rolling text: each token is predicted once, with the context that the stride guarantees", "[data]") {
    TemporaryDirectory directory;
    const Tokenizer bytes = Tokenizer::bytes();
    const std::vector<std::string> documents = {"one", "", "a longer document, of more than one window", "0123456789"};
    std::string lines;
    for (const std::string& document : documents) lines += "{\"text\":\"" + document + "\"}\n";
    write_bytes(directory / "text.jsonl", lines);
    for (const int T : {1, 2, 7, 10, 64})
        for (const int stride : {0, 1, 3, 7}) {
            if (stride > T) continue;
            INFO("T " << T << ", stride " << stride);
            RollingText text(TextInput({directory / "text.jsonl"}), bytes, T, stride);
            CHECK(text.tokens() == 3 + 42 + 10);
            const int rows = 3;
            std::string predicted;
            std::string before(1, '\n');  // kEndOfText and the document so far
            for (uint64_t number = 0; number * rows < text.windows(); number++) {
                const Batch batch = text.batch(number, rows);
                for (int row = 0; row < rows; row++) {
                    std::string read;
                    bool is_first = true;
                    for (int i = row * T; i < (row + 1) * T; i++) {
                        if (batch.inputs[i] == 256) before = read = "\n";
                        if (batch.inputs[i] != 256) read += char(batch.inputs[i]);
                        if (batch.targets[i] < 0) continue;
                        // The context is the text so far, at least as long as guaranteed.
                        CHECK(before.ends_with(read));
                        const size_t least = size_t(T - (stride > 0 ? stride : T)) + 1;
                        CHECK(read.size() >= std::min(before.size(), least));
                        if (is_first && number + uint64_t(row) > 0 && before.size() > size_t(T))
                            CHECK(read.size() == size_t(i - row * T + 1));
                        is_first = false;
                        before += char(batch.targets[i]);
                        predicted += char(batch.targets[i]);
                    }
                }
            }
            CHECK(predicted == "onea longer document, of more than one window0123456789");
        }
    // The last window ends the text.
    RollingText text(TextInput({directory / "text.jsonl"}), bytes, 7, 0);
    const Batch batch = text.batch(text.windows(), 1);
    CHECK(std::all_of(batch.targets, batch.targets + 7, [](int target) { return target == -1; }));
    // The last window of the document of 10 bytes: targets 7 to 9, with 4 inputs before them.
    const Batch last = text.batch(text.windows() - 1, 1);
    CHECK(std::vector(last.inputs, last.inputs + 7) == std::vector<int>{'2', '3', '4', '5', '6', '7', '8'});
    CHECK(std::vector(last.targets, last.targets + 7) == std::vector<int>{-1, -1, -1, -1, '7', '8', '9'});
}

// Python: [c for c in map(chr, range(0x110000)) if c.isspace()]
TEST_CASE("white space is Python's", "[data]") {
    std::string found;
    for (unsigned code = 1; code < 0x10000; code++) {
        if (code >= 0xd800 && code < 0xe000) continue;
        std::string text;
        if (code < 0x80)
            text = {char(code)};
        else if (code < 0x800)
            text = {char(0xc0 | code >> 6), char(0x80 | (code & 63))};
        else
            text = {char(0xe0 | code >> 12), char(0x80 | (code >> 6 & 63)), char(0x80 | (code & 63))};
        const size_t length = white_space_length(text);
        if (length > 0) found += format("%x ", code);
        CHECK((length == 0 || length == text.size()));
    }
    CHECK(found ==
          "9 a b c d 1c 1d 1e 1f 20 85 a0 1680 2000 2001 2002 2003 2004 2005 2006 2007 2008 2009 200a 2028 2029 202f "
          "205f 3000 ");
    CHECK(stripped("\u3000\t a b\u00a0\n") == "a b");
    CHECK(right_stripped(" \xe3\x80") == " \xe3\x80");
    CHECK(stripped(" \n").empty());
}

TEST_CASE("questions: texts have the tokens of lm-evaluation-harness", "[data]") {
    TemporaryDirectory directory;
    const Tokenizer bytes = Tokenizer::bytes();
    auto read = [&](const std::string& name, const std::string& content, size_t limit) {
        write_bytes(directory / name, content);
        return QuestionReader(bytes).read(directory / name, limit);
    };
    auto text = [&](const std::vector<int32_t>& ids) { return bytes.decode(ids); };
    const QuestionSet general =
        read("a b.x.jsonl",
             "{\"query\":\"Is it?\\t\\u3000 \",\"choices\":[\"y\\u00e9s\",\"\"],\"gold\":1}\r\n\n"
             "{\"query\":\" \\n\",\"choices\":[\"a\",\"b\"],\"gold\":0}",
             0);
    CHECK(general.name == "a_b");
    REQUIRE(general.questions.size() == 2);
    CHECK(text(general.questions[0].context) == "Is it?");
    CHECK(text(general.questions[0].completions[0]) == "\t\u3000  y\u00e9s");
    CHECK(text(general.questions[0].completions[1]) == "\t\u3000  ");
    CHECK(general.questions[0].characters == std::vector<int>{3, 0});
    CHECK(general.questions[0].label == 1);
    CHECK(general.completion_tokens == 10);
    CHECK(text(general.questions[1].context) == kEndOfText);
    CHECK(text(general.questions[1].completions[1]) == " \n b");

    const std::string hellaswag =
        "{\"activity_label\":\" A\",\"ctx_a\":\"x  [head er] [title]Y[a\\n] [] z\",\"ctx_b\":\"\\u00e9COLE Is\","
        "\"endings\":[\" [x] a  b   c \",\"d\"],\"label\":\"1\"}\n";
    const QuestionSet swag = read("swag.jsonl", hellaswag + hellaswag + hellaswag, 2);
    REQUIRE(swag.questions.size() == 2);
    CHECK(text(swag.questions[0].context) == "A: x . Y[a\n] z \u00c9cole is");
    CHECK(text(swag.questions[0].completions[0]) == "  a b  c");  // two of three spaces remain
    CHECK(swag.questions[0].label == 1);
}
