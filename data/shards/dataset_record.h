// dataset.json: what prepare records of the data set that it has written.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

struct DatasetRecord {
    static constexpr const char* kName = "dataset.json";
    static constexpr const char* kFormat = "train_gpt data set 1";
    static constexpr const char* kChecksums = "crc32c_of_each_64_kib";  // the key in a split

    struct Split {
        std::string name;  // "train" or "val"
        uint64_t tokens = 0, text_bytes = 0, documents = 0;
        std::vector<std::string> shards;     // file names
        std::vector<std::string> checksums;  // BlockChecksums::hex() of each; empty: none were recorded
    };
    std::string tokenizer_kind;
    std::string tokenizer_digest;  // "": the tokenizer is not known
    uint64_t vocab_size = 0;
    std::vector<Split> splits;

    // Of the shard with this file name; "" if none were recorded.
    const std::string& checksums_of(const std::string& shard) const;
};

// DIRECTORY/dataset.json; nullopt if there is none. Fails with Exit::data, naming the key and the value, unless every
// key that prepare writes has the right type.
std::optional<DatasetRecord> find_dataset_record(const std::string& directory);
