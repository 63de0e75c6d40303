#include "data/shards/dataset_record.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "runtime/io/files.h"
#include "runtime/io/json.h"
#include "runtime/io/reject_file.h"

namespace {

using Json = nlohmann::ordered_json;

// Reads values of dataset.json by JSON pointer, such as "/splits/train/tokens". Rejects a value of the wrong type.
class Reader {
public:
    Reader(const std::string& path, const std::string& content)
        : path_(path), json_(parse_json(content, path, Exit::data)) {}

    const Json* find(const std::string& pointer) const {
        const Json::json_pointer place(pointer);
        return json_.contains(place) ? &json_[place] : nullptr;
    }

    [[noreturn]] void reject(const std::string& pointer, const char* expected) const {
        const Json* value = find(pointer);
        reject_file(path_, "%s is %s, but must be %s", pointer.empty() ? "the file" : pointer.substr(1),
                    value ? printed(*value) : "missing", expected);
    }

    // Returns the value, for which `is_expected` must hold.
    const Json& read(const std::string& pointer, bool (Json::*is_expected)() const, const char* expected) const {
        const Json* value = find(pointer);
        if (!value || !(value->*is_expected)()) reject(pointer, expected);
        return *value;
    }

    const Json& list(const std::string& pointer) const { return read(pointer, &Json::is_array, "a list"); }
    const Json& object(const std::string& pointer) const { return read(pointer, &Json::is_object, "an object"); }
    const Json& number(const std::string& pointer) const { return read(pointer, &Json::is_number, "a number"); }
    std::string text(const std::string& pointer) const { return read(pointer, &Json::is_string, "text"); }
    uint64_t count(const std::string& pointer) const {
        return read(pointer, &Json::is_number_unsigned, "a nonnegative integer");
    }

    std::vector<std::string> texts(const std::string& pointer) const {
        std::vector<std::string> values;
        for (size_t i = 0; i < list(pointer).size(); i++) values.push_back(text(pointer + "/" + std::to_string(i)));
        return values;
    }

private:
    const std::string path_;
    const Json json_;
};

DatasetRecord::Split read_split(const Reader& reader, const std::string& name) {
    const std::string split = "/splits/" + name, checksums = split + "/" + DatasetRecord::kChecksums;
    DatasetRecord::Split record{.name = name,
                                .tokens = reader.count(split + "/tokens"),
                                .text_bytes = reader.count(split + "/text_bytes"),
                                .documents = reader.count(split + "/documents"),
                                .shards = reader.texts(split + "/shards"),
                                .checksums = {}};
    for (size_t i = 0; i < record.shards.size(); i++)
        if (record.shards[i].find('/') != std::string::npos)
            reader.reject(split + "/shards/" + std::to_string(i), "the name of a file in the same directory");
    if (!reader.find(checksums)) return record;  // written by an earlier version
    record.checksums = reader.texts(checksums);
    if (record.checksums.size() != record.shards.size()) reader.reject(checksums, "a list with one text per shard");
    return record;
}

// Checks the types of the values that no program uses.
void check_remarks(const Reader& reader) {
    for (const char* key : {"/val_fraction", "/copies", "/bpe_dropout", "/val_begin"})
        if (reader.find(key)) reader.number(key);
    for (size_t i = 0; i < reader.list("/sources").size(); i++) {
        const std::string source = "/sources/" + std::to_string(i);
        reader.text(source + "/path");
        reader.count(source + "/bytes");
        for (const char* key : {"/format", "/field"})
            if (reader.find(source + key)) reader.text(source + key);
    }
}

}  // namespace

const std::string& DatasetRecord::checksums_of(const std::string& shard) const {
    static const std::string none;
    for (const Split& split : splits) {
        const size_t index = size_t(std::ranges::find(split.shards, shard) - split.shards.begin());
        if (index < split.checksums.size()) return split.checksums[index];
    }
    return none;
}

std::optional<DatasetRecord> find_dataset_record(const std::string& directory) {
    const std::string path = directory + "/" + DatasetRecord::kName;
    if (!file_exists(path)) return std::nullopt;
    const Reader reader(path, read_file(path));
    reader.object("");
    if (reader.text("/format") != DatasetRecord::kFormat) reader.reject("/format", DatasetRecord::kFormat);
    reader.object("/tokenizer");
    DatasetRecord record{.tokenizer_kind = reader.text("/tokenizer/kind"),
                         .tokenizer_digest = reader.find("/tokenizer/xxh3") ? reader.text("/tokenizer/xxh3") : "",
                         .vocab_size = reader.count("/tokenizer/vocab_size"),
                         .splits = {}};
    if (record.vocab_size > INT32_MAX) reader.reject("/tokenizer/vocab_size", "a 32-bit integer");
    for (const auto& [name, split] : reader.object("/splits").items()) {
        if (name != "train" && name != "val") reader.reject("/splits", "an object with the keys \"train\" and \"val\"");
        record.splits.push_back(read_split(reader, name));
    }
    check_remarks(reader);
    return record;
}
