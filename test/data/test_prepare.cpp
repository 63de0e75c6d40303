#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>

#include "data/tokenizer/encoder.h"
#include "runtime/io/files.h"
#include "runtime/io/lock.h"
#include "test/support/add_text.h"
#include "test/support/expect_error.h"
#include "test/support/prepare_fixture.h"
#include "test/support/random_values.h"

TEST_CASE_METHOD(PrepareFixture, "prepare: the shards hold the text, split where prepare reports") {
    prepare_quietly();
    std::string text = text_with_other_end();
    size_t position = size_t(std::floor((1 - 0.1) * double(text.size())));
    size_t cut = text.find('\n', position - 1) + 1;
    Tokenizer tokenizer = Tokenizer::load(out_ + "/tokenizer.json");
    BpeTrainer trainer;
    add_text(trainer, text.substr(0, cut));
    CHECK(tokenizer.digest() == trainer.train(300).digest());  // the tokenizer was trained without the held-out part

    std::vector<int32_t> train = tokens("train"), val = tokens("val");
    CHECK(tokenizer.decode(train) == kEndOfText + text.substr(0, cut));
    CHECK(tokenizer.decode(val) == kEndOfText + text.substr(cut));
    CHECK(train.size() > 2000);
    auto json = dataset();
    CHECK(json["val_begin"] == cut);
    CHECK(json["tokenizer"]["vocab_size"] == 300);
    CHECK(json["tokenizer"]["xxh3"] == tokenizer.digest());
    CHECK(json["sources"][0]["bytes"] == text.size());
    CHECK(json["splits"]["train"]["tokens"] == train.size());
    CHECK(json["splits"]["train"]["text_bytes"] == cut);
    CHECK(json["splits"]["train"]["documents"] == 1);
    CHECK(json["splits"]["train"]["shards"].size() == (train.size() + 999) / 1000);
    CHECK(json["splits"]["val"]["tokens"] == val.size());
    CHECK(progress_.size() == 3);
    CHECK(summary_.vocab_size == 300);
    CHECK(summary_.train.tokens == train.size());
    CHECK(summary_.train.text_bytes == cut);
    CHECK(summary_.train.documents == 1);
    CHECK(summary_.val.tokens == val.size());
    CHECK(summary_.val.text_bytes == text.size() - cut);
    CHECK(list_directory(out_).size() == 3 + json["splits"]["train"]["shards"].size() + 1);
}

TEST_CASE_METHOD(PrepareFixture, "prepare: every document begins with the end of text") {
    std::string jsonl;
    for (int i = 0; i < 50; i++) jsonl += format("{\"text\": \"document %d\"}\n", i);
    write_bytes(directory_ / "x.jsonl", jsonl);
    options_.inputs = {directory_ / "x.jsonl", directory_ / "text.txt"};
    options_.tokenizer = "bytes";
    options_.vocab_size = 0;
    options_.val_fraction = 0;
    prepare_quietly();
    std::vector<int32_t> train = tokens("train");
    CHECK(std::count(train.begin(), train.end(), 256) == 51);
    CHECK(train[0] == 256);
    CHECK(train[11] == 256);  // "document 0" has 10 bytes
    CHECK(dataset()["splits"]["train"]["documents"] == 51);
    CHECK_FALSE(dataset()["splits"].contains("val"));
    CHECK_FALSE(file_exists(out_ + "/val_000000.bin"));
}

TEST_CASE_METHOD(PrepareFixture, "prepare: copies of the training text have other tokens") {
    prepare_quietly();
    const std::vector<int32_t> once = tokens("train"), val = tokens("val");
    options_.copies = 3;
    options_.bpe_dropout = 0.1;
    prepare_quietly();
    const std::vector<int32_t> train = tokens("train");
    const Tokenizer tokenizer = Tokenizer::load(out_ + "/tokenizer.json");
    const std::string text = tokenizer.decode(once);
    CHECK(tokenizer.decode(train) == text + text + text);
    CHECK(train.size() > 3 * once.size());
    std::vector<std::vector<int32_t>> copies;
    for (int32_t id : train) {
        if (id == tokenizer.eot()) copies.emplace_back();
        copies.back().push_back(id);
    }
    REQUIRE(copies.size() == 3);
    CHECK(copies[0] != copies[1]);
    CHECK(copies[1] != copies[2]);
    CHECK(tokens("val") == val);
    CHECK(dataset()["copies"] == 3);
    CHECK(dataset()["bpe_dropout"] == 0.1);
}

TEST_CASE_METHOD(PrepareFixture, "prepare: the default number of copies depends on the tokenizer and the text") {
    options_.val_fraction = 0;
    auto check = [&](std::optional<int> copies, std::optional<double> dropout, int wanted, double wanted_dropout) {
        options_.copies = copies;
        options_.bpe_dropout = dropout;
        prepare_quietly();
        CAPTURE(options_.tokenizer, wanted, wanted_dropout);
        CHECK(summary_.copies == wanted);
        CHECK(summary_.train.text_bytes == uint64_t(wanted) * text_with_other_end().size());
        CHECK(dataset()["copies"] == wanted);
        CHECK(dataset()["bpe_dropout"] == wanted_dropout);
    };
    check({}, {}, 100, kDefaultBpeDropout);
    check({}, 0.1, 100, 0.1);
    check({}, 0, 1, 0);  // equal copies are of no use
    check(2, {}, 2, kDefaultBpeDropout);
    check(1, {}, 1, 0);
    options_.tokenizer = "bytes";
    options_.vocab_size = 0;
    check({}, {}, 1, 0);
    CHECK(default_copies(0) == 100);
    CHECK(default_copies(4'404'412) == 11);
    CHECK(default_copies(25'000'000) == 2);
    CHECK(default_copies(25'000'001) == 1);
    CHECK(default_copies(3'000'000'000) == 1);
}

TEST_CASE_METHOD(PrepareFixture, "prepare: with an existing tokenizer") {
    prepare_quietly();
    auto before = out_files();
    write_file_atomically(directory_ / "mine.json", before["tokenizer.json"]);
    options_.tokenizer = directory_ / "mine.json";
    options_.vocab_size = 0;
    prepare_quietly();
    auto after = out_files();
    CHECK(after["tokenizer.json"] == before["tokenizer.json"]);
    CHECK(after["train_000000.bin"] == before["train_000000.bin"]);
    options_.vocab_size = 301;
    expect_error(Exit::usage, {"301", "300", "mine.json"}, [&] { prepare_quietly(); });
    CHECK(out_files() == after);
}

TEST_CASE_METHOD(PrepareFixture, "prepare: with GPT-2's vocabulary") {
    options_.tokenizer = "gpt2";
    options_.vocab_size = 50257;
    prepare_quietly();
    Tokenizer gpt2 = Tokenizer::load("data/gpt2/vocab.json"), saved = Tokenizer::load(out_ + "/tokenizer.json");
    CHECK(saved.digest() == gpt2.digest());
    CHECK(dataset()["tokenizer"]["kind"] == "gpt2");
    CHECK(dataset()["tokenizer"]["vocab_size"] == 50257);
    TokenStream stream(expand_glob(out_ + "/train_*.bin", "train"), 50257);
    std::vector<int32_t> first(9);
    stream.read(0, first.size(), first.data());
    CHECK(first == std::vector<int32_t>{50256, 1370, 657, 286, 777, 7337, 3951, 198, 1370});

    options_.vocab_size = 50304;
    expect_error(Exit::usage, {"50304", "50257", "gpt2"}, [&] { prepare_quietly(); });
    options_.gpt2_directory = directory_ / "nowhere";
    expect_error(Exit::no_input, {"gpt2", directory_ / "nowhere", "vocab.json"}, [&] { prepare_quietly(); });
}

TEST_CASE_METHOD(PrepareFixture, "prepare: a second run replaces the first run's files and nothing else") {
    prepare_quietly();
    auto first = out_files();
    prepare_quietly();
    CHECK(out_files() == first);
    write_bytes(out_ + "/notes.txt", "mine");
    options_.shard_tokens = 100'000;  // fewer shards: the old ones must be deleted
    prepare_quietly();
    auto second = out_files();
    CHECK(second.count("notes.txt") == 1);
    CHECK(second.count("train_000000.bin") == 1);
    CHECK(second.count("train_000001.bin") == 0);
    CHECK(second.count("prepare.unfinished") == 0);
}

TEST_CASE_METHOD(PrepareFixture, "prepare: a data set is replaced only with --force") {
    options_.force = false;
    prepare_quietly();
    const auto first = out_files();
    options_.shard_tokens = 500;
    expect_error(Exit::cannot_create, {out_, "holds a data set", "--force"}, [&] { prepare_quietly(); });
    CHECK(out_files() == first);
    CHECK_FALSE(file_exists(out_ + "/lock"));
}

// The files of a prepare that is killed and restarted many times.
TEST_CASE_METHOD(PrepareFixture, "prepare: a killed process can be continued and writes the same files") {
    std::string json;
    for (int i = 0; i < 4000; i++) json += format("{\"text\": \"document %d of many, and %d\"}\n", i, i * i);
    write_bytes(directory_ / "x.jsonl", json);
    write_bytes(directory_ / "large.txt", lines(120'000));
    options_.inputs = {directory_ / "large.txt", directory_ / "x.jsonl"};
    options_.copies = 2;
    options_.bpe_dropout = 0.1;
    options_.shard_tokens = 300'000;
    options_.save_seconds = 0;
    prepare_quietly();
    const auto expected = out_files();
    options_.force = false;
    options_.out_dir = out_ = directory_ / "killed";
    int kills = 0, status = 1, continued = 0;
    for (size_t saves = 1; status != 0; saves += 2) {
        const pid_t child = ::fork();
        if (child == 0) {
            try {
                prepare_quietly();
                ::_exit(0);
            } catch (const Error& error) {
                ::_exit(int(error.code));
            }
        }
        // Killed after a number of saves, at an arbitrary later point.
        std::string last;
        for (size_t seen = 0; seen < saves && ::waitpid(child, &status, WNOHANG) == 0; ::usleep(200)) {
            const std::string path = out_ + "/prepare.unfinished/progress.json";
            std::error_code gone;
            const auto time = std::filesystem::last_write_time(path, gone);
            const std::string now = gone ? last : std::to_string(time.time_since_epoch().count());
            seen += now != last;
            last = now;
        }
        if (::kill(child, SIGKILL) != 0 || ::waitpid(child, &status, 0) != child) break;
        kills++;
        continued += file_exists(out_ + "/prepare.unfinished/train_000000.bin");
        REQUIRE(kills < 1000);
    }
    CHECK(WIFEXITED(status));
    // A process that is killed after it has moved the last file leaves a complete data set, which the next one keeps.
    if (WEXITSTATUS(status) == int(Exit::cannot_create)) {
        for (const char* rest : {"/prepare.unfinished", "/lock"}) remove_tree(out_ + rest);
    } else {
        CHECK(WEXITSTATUS(status) == 0);
    }
    CHECK(continued > 0);
    CHECK(out_files() == expected);

    // A different command line neither continues nor discards the unfinished data.
    make_directories(out_ + "2/prepare.unfinished");
    write_bytes(out_ + "2/prepare.unfinished/plan.json", "{}");
    options_.out_dir = out_ = out_ + "2";
    expect_error(Exit::cannot_create, {out_, "unfinished", "--force"}, [&] { prepare_quietly(); });
    CHECK(file_exists(out_ + "/prepare.unfinished/plan.json"));
    options_.force = true;
    prepare_quietly();
    CHECK(out_files() == expected);
}

TEST_CASE_METHOD(PrepareFixture, "prepare: the files do not depend on the number of threads") {
    write_bytes(directory_ / "large.txt", lines(150'000));
    options_.inputs = {directory_ / "large.txt"};
    options_.bpe_dropout = 0.1;
    options_.shard_tokens = 10'000'000;
    options_.threads = 1;
    prepare_quietly();
    const auto expected = out_files();
    for (int threads : {2, 5}) {
        options_.threads = threads;
        prepare_quietly();
        CHECK(out_files() == expected);
    }
}

TEST_CASE_METHOD(PrepareFixture, "prepare: bytes that are not clean text are kept, except a byte order mark") {
    std::string latin;
    for (int i = 0; i < 50; i++) latin += "\xc4pfel und \xd6l\n";
    const std::string nul = std::string(70'000, 'x') + "\n" + std::string("\0", 1) + "\n";
    write_bytes(directory_ / "latin.txt", latin);
    write_bytes(directory_ / "mark.txt", "\xef\xbb\xbfmarked\n");
    write_bytes(directory_ / "nul.txt", nul);
    options_.inputs = {directory_ / "latin.txt", directory_ / "mark.txt", directory_ / "nul.txt"};
    options_.tokenizer = "bytes";
    options_.vocab_size = 0;
    options_.val_fraction = 0;
    options_.shard_tokens = 1'000'000;
    prepare_quietly();
    TokenStream stream({out_ + "/train_000000.bin"}, 257);
    std::vector<int32_t> ids(size_t(stream.token_count()));
    stream.read(0, ids.size(), ids.data());
    const std::string eot = kEndOfText;
    CHECK(Tokenizer::bytes().decode(ids) == eot + latin + eot + "marked\n" + eot + nul);
}

TEST_CASE_METHOD(PrepareFixture, "prepare: imports nanoGPT's files of token ids") {
    auto raw = [](const std::vector<uint16_t>& ids) { return std::string((const char*)ids.data(), 2 * ids.size()); };
    write_bytes(directory_ / "train.bin", raw({50256, 1370, 657, 286, 777}));
    write_bytes(directory_ / "val.bin", raw({50256, 198}));
    options_.inputs = {directory_ / "val.bin", directory_ / "train.bin"};
    options_.vocab_size = 0;
    expect_error(Exit::usage, {"--tokenizer gpt2", "--vocab-size"}, [&] { prepare_quietly(); });
    options_.tokenizer = "gpt2";
    prepare_quietly();
    CHECK(summary_.train.tokens == 5);
    CHECK(summary_.train.documents == 1);
    CHECK(summary_.train.text_bytes == std::string("line 0 of these").size());
    CHECK(summary_.val.tokens == 2);
    CHECK(read_file(out_ + "/train_000000.bin").substr(1024) == raw({50256, 1370, 657, 286, 777}));
    CHECK(read_file(out_ + "/val_000000.bin").substr(1024) == raw({50256, 198}));
    CHECK(Tokenizer::load(out_ + "/tokenizer.json").vocab_size() == 50257);

    options_.tokenizer = "bpe";
    options_.vocab_size = 50256;
    expect_error(Exit::data, {"train.bin", "token 0 is 50256", "50256"}, [&] { prepare_quietly(); });
    write_bytes(directory_ / "all.bin", raw(std::vector<uint16_t>(100, 7)));
    options_.inputs = {directory_ / "all.bin"};
    options_.vocab_size = 300;
    prepare_quietly();
    CHECK(summary_.train.tokens == 90);
    CHECK(summary_.val.tokens == 10);
    CHECK_FALSE(dataset()["tokenizer"].contains("xxh3"));
    options_.inputs.push_back(directory_ / "text.txt");
    expect_error(Exit::usage, {".bin", "text"}, [&] { prepare_quietly(); });
    write_bytes(directory_ / "odd.bin", "abc");
    options_.inputs = {directory_ / "odd.bin"};
    expect_error(Exit::data, {"odd.bin", "3 bytes"}, [&] { prepare_quietly(); });
    options_.inputs = {out_ + "/train_000000.bin"};
    expect_error(Exit::data, {"train_000000.bin", "header"}, [&] { prepare_quietly(); });
}

TEST_CASE_METHOD(PrepareFixture, "prepare: only one process at a time writes a data set") {
    make_directories(out_);
    const DirectoryLock other(out_);
    expect_error(Exit::cannot_create, {out_, "in use", format("pid %d", int(::getpid()))}, [&] { prepare_quietly(); });
    CHECK(list_directory(out_) == std::vector<std::string>{"lock"});
}

TEST_CASE_METHOD(PrepareFixture, "prepare: an OUT that cannot be written is reported before the text is read") {
    write_bytes(directory_ / "file", "");
    options_.out_dir = directory_ / "file/out";
    expect_error(Exit::cannot_create, {directory_ / "file"}, [&] { prepare_quietly(); });
    CHECK(progress_.empty());
}

TEST_CASE_METHOD(PrepareFixture, "prepare: the tokenizer's default size depends on the text") {
    CHECK(default_vocab_size(0) == 512);
    CHECK(default_vocab_size(1'060'000) == 1024);
    CHECK(default_vocab_size(4'200'000) == 2048);
    CHECK(default_vocab_size(1'000'000'000) == 32768);
    CHECK(default_vocab_size(UINT64_MAX) == 32768);
    options_.vocab_size = 0;
    prepare_quietly();
    CHECK(summary_.vocab_size > 257);
    CHECK(summary_.vocab_size <= 512);
    CHECK_THAT(progress_.at(0), ContainsSubstring(format("%d tokens (default", summary_.vocab_size)));
    write_bytes(directory_ / "tiny.txt", "a bee\n");
    options_.inputs = {directory_ / "tiny.txt"};
    options_.val_fraction = 0;
    prepare_quietly();
    CHECK(summary_.vocab_size == 257);  // no pair occurs twice
}

TEST_CASE_METHOD(PrepareFixture, "prepare: a failed run leaves the data set unchanged") {
    prepare_quietly();
    auto before = out_files();
    write_bytes(directory_ / "bad.jsonl", lines(3));
    options_.inputs.push_back(directory_ / "bad.jsonl");
    options_.tokenizer = "bytes";
    options_.vocab_size = 0;
    expect_error(Exit::data, {"bad.jsonl", "line 1"}, [&] { prepare_quietly(); });
    CHECK(out_files() == before);
}

TEST_CASE_METHOD(PrepareFixture, "prepare: continues after a crash") {
    make_directories(out_ + "/prepare.unfinished");
    write_bytes(out_ + "/prepare.unfinished/train_000000.bin", "half a shard");
    write_bytes(out_ + "/train_000007.bin", "moved before the crash");
    prepare_quietly();
    CHECK_FALSE(file_exists(out_ + "/train_000007.bin"));
    CHECK_FALSE(directory_exists(out_ + "/prepare.unfinished"));
    CHECK(tokens("train").size() == dataset()["splits"]["train"]["tokens"]);
}

TEST_CASE_METHOD(PrepareFixture, "prepare: a directory with other contents is left unchanged") {
    make_directories(out_);
    write_bytes(out_ + "/thesis.tex", "precious");
    write_bytes(out_ + "/train_000000.bin", "from elsewhere");
    auto before = out_files();
    expect_error(Exit::cannot_create, {out_, "2 files", "thesis.tex", "dataset.json"}, [&] { prepare_quietly(); });
    CHECK(out_files() == before);
}

TEST_CASE_METHOD(PrepareFixture, "prepare: invalid options and texts are rejected") {
    auto expect = [&](Exit code, std::initializer_list<std::string> words, auto change) {
        PrepareOptions good = options_;
        change(options_);
        expect_error(code, words, [&] { prepare_quietly(); });
        options_ = good;
        CHECK_FALSE(directory_exists(out_));
    };
    expect(Exit::usage, {"--val-fraction is 1.5"}, [](PrepareOptions& o) { o.val_fraction = 1.5; });
    expect(Exit::usage, {"--val-fraction is nan"}, [](PrepareOptions& o) { o.val_fraction = NAN; });
    expect(Exit::usage, {"dropout", "1"}, [](PrepareOptions& o) { o.bpe_dropout = 1; });
    expect(Exit::usage, {"--copies is 0"}, [](PrepareOptions& o) { o.copies = 0; });
    expect(Exit::usage, {"--shard-tokens is 0"}, [](PrepareOptions& o) { o.shard_tokens = 0; });
    expect(Exit::usage, {"--vocab-size is 256", "257"}, [](PrepareOptions& o) { o.vocab_size = 256; });
    expect(Exit::usage, {"300", "257"}, [](PrepareOptions& o) { o.tokenizer = "bytes"; });
    expect(Exit::no_input, {"none.json"}, [&](PrepareOptions& o) { o.tokenizer = directory_ / "none.json"; });
    expect(Exit::no_input, {"none.txt"}, [&](PrepareOptions& o) { o.inputs = {directory_ / "none.txt"}; });
    write_bytes(directory_ / "empty.txt", "");
    expect(Exit::data, {"0 bytes"}, [&](PrepareOptions& o) { o.inputs = {directory_ / "empty.txt"}; });
    write_bytes(directory_ / "line.txt", "a single line");
    expect(Exit::data, {"13 bytes", "0.1", "--val-fraction 0"},
           [&](PrepareOptions& o) { o.inputs = {directory_ / "line.txt"}; });
}
