// dataset.json, which describes a data set that prepare has written.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

struct DatasetRecord {
    static constexpr const char* kName = "dataset.json";
    static constexpr const char* kFormat = "train_gpt data set 1";
    static constexpr const char* kChecksums = "crc32c_of_each_64_kib";  // the key in a split

    struct Split {
        std::string name;  // "train" or "val"
        uint64_t tokens = 0, text_bytes = 0, documents = 0;
        std::vector<std::string> shards;     // file names
        std::vector<std::string> checksums;  // BlockChecksums::hex() of each shard; empty: not recorded
    };
    std::string tokenizer_kind;
    std::string tokenizer_digest;  // "": unknown tokenizer
    uint64_t vocab_size = 0;
    std::vector<Split> splits;

    // Returns the checksums of the shard with this file name; "" if not recorded.
    const std::string& checksums_of(const std::string& shard) const;
};

// Reads DIRECTORY/dataset.json; returns nullopt if it does not exist. Fails with Exit::data, naming the key and the
// value, if a key is missing or has the wrong type.
std::optional<DatasetRecord> find_dataset_record(const std::string& directory);
