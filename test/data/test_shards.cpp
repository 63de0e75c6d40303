#include <algorithm>
#include <cstring>
#include <numeric>

#include "data/shards/shards.h"
#include "runtime/io/files.h"
#include "test/support/data_files.h"
#include "test/support/expect_error.h"
#include "test/support/temporary_directory.h"

// A header of these words, followed by ids of `width` bytes each.
static std::string shard_bytes(std::vector<int32_t> words, const std::vector<int32_t>& ids, size_t width) {
    std::string bytes(kShardHeaderBytes, '\0');
    std::memcpy(bytes.data(), words.data(), words.size() * 4);
    for (int32_t id : ids) bytes.append(reinterpret_cast<const char*>(&id), width);
    return bytes;
}

static std::vector<int32_t> all_tokens(const TokenShard& shard) {
    std::vector<uint32_t> ids(size_t(shard.token_count()));
    shard.read(0, ids.size(), ids.data());
    return {ids.begin(), ids.end()};
}

static std::vector<int32_t> all_tokens(const TokenStream& stream) {
    std::vector<int32_t> ids(size_t(stream.token_count()));
    stream.read(0, ids.size(), ids.data());
    return ids;
}

static std::vector<int32_t> counting(int count, int start = 0) {
    std::vector<int32_t> ids(static_cast<size_t>(count));
    std::iota(ids.begin(), ids.end(), start);
    return ids;
}

static void write_shard(const std::string& path, const std::vector<int32_t>& ids) {
    write_bytes(path, shard_bytes({20240520, 1, int32_t(ids.size())}, ids, 2));
}

TEST_CASE("shards: every known format is read") {
    TemporaryDirectory directory;
    std::string path = directory / "x.bin";
    std::vector<int32_t> ids = {0, 1, 50256, 65535, 7};
    int32_t llmq_magic[2];
    std::memcpy(llmq_magic, "BIN.TOK\n", 8);
    std::string masked = shard_bytes({llmq_magic[0], llmq_magic[1], 2, 4, 5, 65536, 1}, ids, 4) + '\x1f';
    for (const std::string& bytes :
         {shard_bytes({20240520, 1, 5}, ids, 2), shard_bytes({20240801, 7, 5}, ids, 4),
          shard_bytes({278895051, 1, 5, 2}, ids, 2), shard_bytes({278895051, 1, 5, 4}, ids, 4),
          shard_bytes({llmq_magic[0], llmq_magic[1], 2, 4, 5, 65536, 0}, ids, 4), masked}) {
        write_bytes(path, bytes);
        TokenShard shard(path);
        CHECK(all_tokens(shard) == ids);
        CHECK(shard_header(bytes));
    }
    write_bytes(path, shard_bytes({20240801, 7, 1}, {-5}, 4));
    CHECK(all_tokens(TokenShard(path)) == std::vector<int32_t>{-5});
    write_bytes(path, shard_bytes({20240520, 1, 0}, {}, 2));
    CHECK(TokenShard(path).token_count() == 0);
}

TEST_CASE("shards: a file of another kind is identified") {
    TemporaryDirectory directory;
    std::string path = directory / "x.bin";
    auto open = [&] { TokenShard shard(path); };
    write_bytes(path, "<!DOCTYPE html><html><body>404</body></html>");
    expect_error(Exit::data, {path, "44 bytes", "HTML"}, open);
    write_bytes(path, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 200001024\n");
    expect_error(Exit::data, {path, "LFS"}, open);
    write_bytes(path, "");
    expect_error(Exit::data, {path, "empty"}, open);
    write_bytes(path, shard_bytes({20240520, 2, 1}, {1}, 2));
    expect_error(Exit::data, {path, "version 2", "version 1"}, open);
    write_bytes(path, shard_bytes({278895051, 1, 1, 3}, {1}, 3));
    expect_error(Exit::data, {path, "3 bytes per token"}, open);
    write_bytes(path, shard_bytes({20240520, 1, -3}, {1}, 2));
    expect_error(Exit::data, {path, "-3 tokens"}, open);
    write_bytes(path, shard_bytes({20240520, 1, 2}, {1}, 2));
    expect_error(Exit::data, {path, "2 tokens", "1028 bytes", "1026", "cut short"}, open);
    write_bytes(path, shard_bytes({20240520, 1, 0x7fffffff}, {1}, 2));
    expect_error(Exit::data, {path, "2147483647 tokens", "4294968318 bytes"}, open);
    expect_error(Exit::no_input, {directory / "none.bin"}, [&] { TokenShard shard(directory / "none.bin"); });
    expect_error(Exit::no_input, {directory.path(), "directory"}, [&] { TokenShard shard(directory.path()); });
}

TEST_CASE("shards: rejected at every length but the right one") {
    TemporaryDirectory directory;
    std::string path = directory / "x.bin";
    std::string whole = shard_bytes({20240520, 1, 40}, counting(40), 2);
    for (size_t length = 0; length <= whole.size() + 2; length++) {
        write_bytes(path,
                    length <= whole.size() ? whole.substr(0, length) : whole + std::string(length - whole.size(), 0));
        if (length == whole.size())
            CHECK(all_tokens(TokenShard(path)) == counting(40));
        else
            expect_error(Exit::data, {path}, [&] { TokenShard shard(path); });
    }
}

TEST_CASE("shards: a flipped bit of the header is rejected or changes no token") {
    TemporaryDirectory directory;
    std::string path = directory / "x.bin";
    for (const std::string& whole :
         {shard_bytes({20240520, 1, 8}, counting(8), 2), shard_bytes({20240801, 7, 8}, counting(8), 4),
          shard_bytes({278895051, 1, 8, 2}, counting(8), 2)}) {
        int refused = 0;
        for (size_t bit = 0; bit < 8 * 32; bit++) {  // later words are not read
            std::string flipped = whole;
            flipped[bit / 8] = char(flipped[bit / 8] ^ 1 << bit % 8);
            write_bytes(path, flipped);
            try {
                std::vector<int32_t> ids = all_tokens(TokenShard(path));
                CHECK(ids == counting(8));
            } catch (const Error& error) {
                CHECK(error.code == Exit::data);
                refused++;
            }
        }
        CHECK(refused >= 3 * 32);  // magic, version, count
    }
}

TEST_CASE("shards: written tokens can be read back") {
    TemporaryDirectory directory;
    struct Case {
        int vocab_size;
        uint64_t shard_tokens;
        size_t count, shards;
        const char* kind;
    };
    for (const Case& c : {Case{65536, 10, 35, 4, "GPT-2"}, Case{65537, 10, 30, 3, "Llama"}, Case{300, 1, 3, 3, "GPT-2"},
                          Case{300, 700'000, 1'500'000, 3, "GPT-2"}, Case{300, 5, 0, 0, "GPT-2"}}) {
        std::vector<int32_t> ids(c.count);
        for (size_t i = 0; i < ids.size(); i++) ids[i] = int32_t((i * 7919 + 3) % size_t(c.vocab_size));
        if (!ids.empty()) ids.back() = c.vocab_size - 1;
        std::string folder = directory / format("%d_%zu", c.vocab_size, c.count);
        make_directories(folder);

        ShardWriter writer(folder, "val", c.vocab_size, c.shard_tokens);
        std::span<const int32_t> rest = ids;
        for (size_t part = 1; !rest.empty(); part = part * 2 + 1) {
            writer.append(rest.subspan(0, std::min(part, rest.size())));
            rest = rest.subspan(std::min(part, rest.size()));
        }
        writer.finish();

        CHECK(writer.token_count() == c.count);
        CHECK(writer.names() == list_directory(folder));
        REQUIRE(writer.names().size() == c.shards);
        std::vector<std::string> paths;
        for (const std::string& name : writer.names()) paths.push_back(folder + "/" + name);
        TokenStream stream(paths, c.vocab_size);
        CHECK(all_tokens(stream) == ids);
        if (c.shards > 0) {
            CHECK(writer.names().front() == "val_000000.bin");
            CHECK_THAT(stream.shards().front().header().name, ContainsSubstring(c.kind));
        }
    }
    ShardWriter writer(directory.path(), "train", 100);
    std::vector<int32_t> beyond = {100}, negative = {-1};
    expect_error(Exit::internal, {"100"}, [&] { writer.append(beyond); });
    expect_error(Exit::internal, {"-1"}, [&] { writer.append(negative); });
}

TEST_CASE("shards: an unfinished shard is rejected") {
    TemporaryDirectory directory;
    {
        ShardWriter writer(directory.path(), "train", 100, 1'000'000);
        writer.append(counting(100));
        std::vector<int32_t> many(600'000, 5);
        writer.append(many);  // more than the buffer holds
    }
    REQUIRE(list_directory(directory.path()).size() == 1);
    expect_error(Exit::data, {"not a token shard"}, [&] { TokenShard shard(directory / "train_000000.bin"); });
}

TEST_CASE("token stream: any range, across shards") {
    TemporaryDirectory directory;
    std::vector<std::string> paths;
    int next = 0;
    for (int size : {3, 1, 0, 5, 0, 2}) {
        paths.push_back(directory / format("s%zu.bin", paths.size()));
        write_shard(paths.back(), counting(size, next));
        next += size;
    }
    TokenStream stream(paths, 11);
    REQUIRE(stream.token_count() == 11);
    CHECK(stream.description() == "s0.bin and 5 more");
    for (int begin = 0; begin <= 11; begin++)
        for (int end = begin; end <= 11; end++) {
            std::vector<int32_t> ids(size_t(end - begin) + 1, -7);
            stream.read(uint64_t(begin), size_t(end - begin), ids.data());
            CHECK(ids.back() == -7);
            ids.pop_back();
            CHECK(ids == counting(end - begin, begin));
        }
    int32_t id;
    expect_error(Exit::internal, {"11"}, [&] { stream.read(11, 1, &id); });
}

TEST_CASE("token stream: a token beyond the vocabulary is reported with file and position") {
    TemporaryDirectory directory;
    std::string first = directory / "first.bin", second = directory / "second.bin";
    write_shard(first, {1, 2, 3});
    write_shard(second, {4, 5, 50, 6});
    TokenStream stream({first, second}, 50);
    std::vector<int32_t> ids(7);
    stream.read(0, 5, ids.data());
    expect_error(Exit::data, {second, "token 2 ", "50", "vocabulary has 50 tokens"},
                 [&] { stream.read(2, 5, ids.data()); });
    write_bytes(second, shard_bytes({20240801, 7, 2}, {1, -1}, 4));
    TokenStream wide({first, second}, 50);
    expect_error(Exit::data, {second, "token 1 ", "4294967295"}, [&] { wide.read(0, 5, ids.data()); });
}

TEST_CASE("token stream: different data sets have different digests") {
    TemporaryDirectory directory;
    std::string a = directory / "a.bin", b = directory / "b.bin", c = directory / "c.bin";
    write_shard(a, counting(100));
    write_shard(b, counting(100));
    write_shard(c, counting(99));
    auto digest = [](std::vector<std::string> paths) { return TokenStream(paths, 1 << 16).digest(); };
    std::string original = digest({a, b});
    CHECK(original.size() == 32);
    CHECK(digest({a, b}) == original);
    make_directories(directory / "elsewhere");
    write_shard(directory / "elsewhere/a.bin", counting(100));
    CHECK(digest({directory / "elsewhere/a.bin", b}) == original);
    std::vector<std::string> others = {digest({b, a}), digest({a}), digest({a, b, c}), digest({a, c}), digest({})};
    std::vector<int32_t> changed = counting(100);
    changed[50] = 7;
    write_shard(b, changed);
    others.push_back(digest({a, b}));
    for (size_t i = 0; i < others.size(); i++) {
        CHECK(others[i] != original);
        for (size_t j = 0; j < i; j++) CHECK(others[i] != others[j]);
    }
}

TEST_CASE("token stream: a large shard's digest covers its ends and samples in between") {
    TemporaryDirectory directory;
    std::string path = directory / "big.bin";
    std::string bytes = shard_bytes({20240520, 1, 4'000'000}, {}, 2) + std::string(8'000'000, '\0');
    auto digest = [&](size_t changed_byte, size_t count) {
        std::string changed = bytes;
        for (size_t i = 0; i < count; i++) changed[changed_byte + i] = 1;
        write_bytes(path, changed);
        return TokenStream({path}, 1 << 16).digest();
    };
    std::string original = digest(0, 0);
    CHECK(digest(kShardHeaderBytes, 1) != original);
    CHECK(digest(1'000'000, 1) != original);
    CHECK(digest(bytes.size() - 1, 1) != original);
    CHECK(digest(4'000'000, 100'000) != original);  // longer than the distance between samples
}
