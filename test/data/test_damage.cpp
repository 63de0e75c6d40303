// Damaged token shards, shards that change while they are read, and the checksums in dataset.json that reveal it.
#include <fcntl.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>
#include <numeric>

#include "data/shards/dataset_record.h"
#include "data/shards/loader.h"
#include "runtime/io/files.h"
#include "test/support/data_files.h"
#include "test/support/expect_error.h"
#include "test/support/temporary_directory.h"

namespace {

using Json = nlohmann::ordered_json;

// A data set of one shard with five blocks, the last one partial, and its dataset.json.
class DamageFixture {
protected:
    explicit DamageFixture(int vocab_size = 60'000) {
        std::vector<int32_t> ids(kTokens);
        std::iota(ids.begin(), ids.end(), 0);
        for (int32_t& id : ids) id = id * 7 % 60'000;
        ShardWriter writer(directory_.path(), "train", vocab_size);
        writer.append(ids);
        writer.finish();
        shard_ = directory_ / "train_000000.bin";
        record_ = {{"format", DatasetRecord::kFormat},
                   {"tokenizer", {{"kind", "bytes"}, {"vocab_size", 60'000}, {"xxh3", "0123"}}},
                   {"sources", {{{"path", "a.jsonl"}, {"bytes", 5}, {"format", "jsonl"}, {"field", "text"}}}},
                   {"val_fraction", 0.1},
                   {"copies", 1},
                   {"bpe_dropout", 0},
                   {"val_begin", 7},
                   {"splits",
                    {{"train",
                      {{"tokens", kTokens},
                       {"text_bytes", 9},
                       {"documents", 1},
                       {"shards", writer.names()},
                       {DatasetRecord::kChecksums, writer.checksums()}}}}}};
        write_record();
    }

    void write_record() const { write_bytes(directory_ / "dataset.json", record_.dump()); }
    TokenStream stream() const { return TokenStream({shard_}, 60'000); }

    // Changes a byte in place and keeps the file's modification time.
    void flip(size_t offset) const {
        const auto time = std::filesystem::last_write_time(shard_);
        std::fstream file(shard_, std::ios::in | std::ios::out | std::ios::binary);
        file.seekg(std::streamoff(offset));
        const int byte = file.get();
        file.seekp(std::streamoff(offset));
        file.put(char(byte ^ 1));
        file.close();
        std::filesystem::last_write_time(shard_, time);
    }

    static constexpr int kTokens = 4 * 32768 + 100;
    TemporaryDirectory directory_;
    std::string shard_;
    Json record_;
};

}  // namespace

TEST_CASE_METHOD(DamageFixture, "shards: the first read of a block finds a flipped byte and reports its place") {
    for (const size_t block : {0, 1, 3, 4}) {
        const size_t begin = kShardHeaderBytes + block * 65536, bytes = block == 4 ? 200 : 65536;
        for (const size_t place : {size_t(0), bytes / 2 + 1, bytes - 1}) {
            INFO("block " << block << ", byte " << place);
            const TokenStream tokens = stream();
            std::vector<int32_t> ids(3 * 32768);
            flip(begin + place);
            const uint64_t other = (block + 2) % 4 * 32768;
            tokens.read(other, 100, ids.data());  // in another block, which the damage does not affect
            for (int again = 0; again < 2; again++)
                expect_error(Exit::data,
                             {shard_, format("damaged in the %zu bytes from offset %zu: their CRC32C", bytes, begin),
                              "dataset.json records"},
                             [&] { tokens.read(block * 32768 + bytes / 2 - 2, 2, ids.data()); });
            if (block > 0 && place == 0)  // at the end of a range that begins in the previous block
                expect_error(Exit::data, {shard_}, [&] { tokens.read(block * 32768 - 50, 51, ids.data()); });
            if (block == 1)  // within a read of several blocks
                expect_error(Exit::data, {shard_}, [&] { tokens.read(100, 2 * 32768, ids.data()); });
            flip(begin + place);
            tokens.read(block * 32768 + bytes / 2 - 2, 2, ids.data());
        }
    }
}

TEST_CASE_METHOD(DamageFixture, "shards: checksums that do not cover the shard's length are rejected") {
    Json& checksums = record_["splits"]["train"][DatasetRecord::kChecksums][0];
    const std::string good = checksums;
    CHECK(good.size() == 8 * 5);
    for (const std::string& bad : {good.substr(8), good + "00000000", good.substr(1), good.substr(1) + "G"}) {
        checksums = bad;
        write_record();
        expect_error(Exit::data, {shard_, "131172 tokens", "digits of checksums"}, [&] { stream(); });
    }
}

TEST_CASE_METHOD(DamageFixture, "shards: a writer that resumes writes the checksums of an uninterrupted one") {
    std::vector<int32_t> ids(1000);
    std::iota(ids.begin(), ids.end(), 0);
    const std::span<const int32_t> all(ids);
    for (const size_t stop : {1, 299, 300, 301, 999}) {
        TemporaryDirectory straight, resumed;
        ShardWriter writer(straight.path(), "x", 60'000, 300);
        writer.append(all);
        writer.finish();
        std::vector<std::string> checksums;
        {
            ShardWriter first(resumed.path(), "x", 60'000, 300);
            first.append(all.first(stop));
            first.sync();
            checksums = first.checksums();
            first.append(all.subspan(stop));
        }
        for (const std::string& name : list_directory(resumed.path()))
            if (name > format("x_%06zu.bin", (stop - 1) / 300)) std::filesystem::remove(resumed / name);
        ShardWriter second(resumed.path(), "x", 60'000, 300, stop, checksums);
        second.append(all.subspan(stop));
        second.finish();
        CHECK(second.checksums() == writer.checksums());
        checksums.back() += "0";
        expect_error(Exit::data, {"checksums"},
                     [&] { ShardWriter(resumed.path(), "x", 60'000, 300, stop, checksums); });
    }
}

TEST_CASE_METHOD(DamageFixture, "dataset.json: any value of the wrong type is reported by name") {
    CHECK(find_dataset_record(directory_.path())->checksums_of("train_000000.bin").size() == 40);
    CHECK(find_dataset_record(directory_.path())->checksums_of("other.bin").empty());
    CHECK_FALSE(find_dataset_record(directory_ / "none"));
    const Json good = record_.flatten();
    const std::string path = directory_ / "dataset.json";
    auto refuse = [&](const std::string& word) {
        INFO(record_.dump());
        write_record();
        expect_error(Exit::data, {path, word}, [&] { stream(); });
    };
    for (const auto& [pointer, value] : good.items())
        for (const Json& bad : {Json(nullptr), Json(-5), Json("x"), Json::object(), Json::array({1}), Json(5u)}) {
            const bool is_number = value.is_number();
            if (is_number ? bad.is_number_unsigned() : bad.is_string() && pointer != "/format") continue;
            if (bad.is_number() && (pointer == "/val_fraction" || pointer == "/copies" || pointer == "/bpe_dropout" ||
                                    pointer == "/val_begin"))
                continue;
            record_ = good.unflatten();
            record_[Json::json_pointer(pointer)] = bad;
            refuse(pointer.substr(1));
        }
    for (const char* key : {"/tokenizer", "/sources", "/splits", "/splits/train", "/splits/train/shards"})
        for (const Json& bad : {Json(5), Json("x"), Json(nullptr)}) {
            record_ = good.unflatten();
            record_[Json::json_pointer(key)] = bad;
            refuse(std::string(key).substr(1));
        }
    for (const char* key : {"format", "tokenizer", "splits", "sources"}) {
        record_ = good.unflatten();
        record_.erase(key);
        refuse(key);
    }
    for (const Json& bad : {Json(5), Json::array(), Json("x")}) {
        record_ = bad;
        refuse("the file is");
    }
    record_ = good.unflatten();
    record_["splits"]["a~b"] = record_["splits"]["train"];
    refuse("splits");
    record_ = good.unflatten();
    record_["splits"]["train"]["shards"][0] = "../train_000000.bin";
    refuse("splits/train/shards/0");
    write_bytes(path, "{\"format\": ");
    expect_error(Exit::data, {path, "line 1"}, [&] { stream(); });
}

TEST_CASE_METHOD(DamageFixture, "loader: a shard that changes is found before its tokens are returned") {
    struct Change {
        const char* message;
        Exit code;
        std::function<void()> make;
    };
    const std::string copy = directory_ / "copy";
    const std::vector<Change> changes = {
        {"had 263368", Exit::data, [&] { std::filesystem::resize_file(shard_, 2000); }},
        {"has 263369 bytes", Exit::data, [&] { std::ofstream(shard_, std::ios::app) << 'x'; }},
        {"written to", Exit::data, [&] { ::utimensat(AT_FDCWD, shard_.c_str(), nullptr, 0); }},
        {"replaced", Exit::data,
         [&] { std::filesystem::copy_file(copy, copy + "2"), std::filesystem::rename(copy + "2", shard_); }},
        {"No such file", Exit::no_input, [&] { std::filesystem::remove(shard_); }}};
    std::filesystem::copy_file(shard_, copy);
    for (const Change& change : changes) {
        INFO(change.message);
        const TokenStream tokens = stream();
        // The loader reads at most three steps ahead, so a later read meets the change.
        Loader loader(tokens, {.seq_len = 100, .batch = 2, .seed = 5, .micro_steps = 2});
        CHECK_FALSE(loader.wait_for_step());
        change.make();
        std::exception_ptr error;
        int good = 0;
        for (; !error && good < 10; good++) {
            for (int micro = 0; micro < 2; micro++) loader.next();
            error = loader.wait_for_step();
        }
        REQUIRE(error);
        CHECK(good <= 3);
        for (int again = 0; again < 2; again++) CHECK(loader.wait_for_step() == error);
        try {
            std::rethrow_exception(error);
        } catch (const Error& e) {
            CHECK(e.code == change.code);
            CHECK_THAT(e.what(), ContainsSubstring(shard_));
            const bool is_short = ContainsSubstring("ends at offset").match(e.what());
            CHECK((is_short || ContainsSubstring(change.message).match(e.what())));
        }
        expect_error(change.code, {shard_}, [&] {
            for (int micro = 0; micro < 2; micro++) loader.next();
        });
        std::filesystem::remove(shard_);
        std::filesystem::copy_file(copy, shard_);
    }
}

TEST_CASE_METHOD(DamageFixture, "loader: a shard that changes is found even if a window only begins in it") {
    const std::string next = directory_ / "next.bin";
    std::filesystem::copy_file(shard_, next);
    const TokenStream tokens({shard_, next}, 60'000);
    Loader loader(tokens, {.seq_len = 2 * kTokens - 1, .batch = 1});  // a single window
    loader.next();
    ::utimensat(AT_FDCWD, shard_.c_str(), nullptr, 0);
    expect_error(Exit::data, {shard_, "written to"}, [&] {
        for (int read_ahead = 0; read_ahead < 5; read_ahead++) loader.next();
    });
}

TEST_CASE_METHOD(DamageFixture, "loader: wait_for_step waits for all micro-batches of a step") {
    const TokenStream tokens = stream();
    const LoaderOptions options{.seq_len = 100, .batch = 2, .seed = 5, .micro_steps = 50};
    Loader loader(tokens, options), reference(tokens, options);
    for (int step = 0; step < 3; step++) {
        CHECK_FALSE(loader.wait_for_step());
        for (int micro = 0; micro < 50; micro++) {
            const int32_t first = loader.next().inputs[0];
            CHECK(first == reference.next().inputs[0]);
        }
    }
    flip(kShardHeaderBytes);
    TokenStream damaged = stream();
    Loader other(damaged, options);
    CHECK(other.wait_for_step());
}
