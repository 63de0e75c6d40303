// Replays the corpora: each input, whole and truncated.
#include <algorithm>
#include <filesystem>

#include "runtime/io/files.h"
#include "test/fuzz/mutations.h"
#include "test/fuzz/parsers.h"
#include "test/support/catch.h"

static const std::string kCorpora = "test/fuzz/corpus/";

TEST_CASE("corpora: every parser has one, and there is no other folder", "[fuzz]") {
    for (const Parser& parser : parsers()) {
        INFO(parser.name);
        CHECK((directory_exists(kCorpora + parser.name) && !list_directory(kCorpora + parser.name).empty()));
    }
    CHECK(list_directory(kCorpora).size() == parsers().size());
}

// Seeds of an earlier format would be rejected at their first key, and the code after this check never be reached.
TEST_CASE("corpora: every parser reads its seeds, except unsupported formats", "[fuzz]") {
    for (const Parser& parser : parsers()) {
        const std::string directory = kCorpora + parser.name;
        for (const std::string& name : list_directory(directory)) {
            if (!name.starts_with("seed_") || name == "seed_brotli" || name == "seed_nested") continue;
            INFO(directory << "/" << name);
            CHECK_NOTHROW(parser.read(read_file(directory + "/" + name)));
        }
    }
}

TEST_CASE("corpora: each input, whole and cut, is read or rejected as documented", "[fuzz]") {
    constexpr size_t kCuts = 16;
    for (const Parser& parser : parsers()) {
        const std::string directory = kCorpora + parser.name;
        if (!directory_exists(directory)) continue;
        for (const std::string& name : list_directory(directory)) {
            INFO(directory << "/" << name);
            const std::string input = read_file(directory + "/" + name);
            CHECK(finding(parser, input) == "");
            for (size_t i = 0; i < kCuts; i++)
                for (const size_t size : {input.size() * i / kCuts, input.size() - std::min(i + 1, input.size())}) {
                    INFO("truncated to " << size << " of " << input.size() << " bytes");
                    CHECK(finding(parser, std::string_view(input).substr(0, size)) == "");
                }
        }
    }
}

// Otherwise no mutation of a header would pass the check of its length or the check of the offsets against the file's
// size.
TEST_CASE("mutations: many changed safetensors headers and manifests are still read, and many are not", "[fuzz]") {
    constexpr int kChanges = 1000, kFew = kChanges / 50;
    for (const char* name : {"safetensors", "manifest"}) {
        const Parser& parser = *find_parser(name);
        const bool is_safetensors = parser.name == std::string("safetensors");
        const std::string seed = read_file(kCorpora + name + (is_safetensors ? "/seed_small" : "/seed_one_shard"));
        Random random(1);
        int read = 0;
        for (int i = 0; i < kChanges; i++) {
            const std::optional<std::string> changed = with_changed_json(seed, is_safetensors, random);
            REQUIRE(changed);
            try {
                parser.read(*changed);
                read++;
            } catch (const Error& error) {
                CHECK((error.code == Exit::data));
            }
        }
        INFO(name << ": " << read << " of " << kChanges << " are read");
        CHECK((read > kFew && read < kChanges - kFew));
    }
}
