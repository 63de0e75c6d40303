// A text and the options to prepare it, for tests.
#pragma once

#include <map>
#include <nlohmann/json.hpp>

#include "data/prepare/prepare.h"
#include "runtime/io/files.h"
#include "test/support/data_files.h"
#include "test/support/temporary_directory.h"

// The words of the last tenth do not occur in the rest.
inline std::string text_with_other_end() {
    std::string text = lines(400);
    for (int i = 0; i < 40; i++) text += "zyx wvu tsr qpo\n";
    return text;
}

class PrepareFixture {
protected:
    PrepareFixture() : out_(directory_ / "out") {
        write_bytes(directory_ / "text.txt", text_with_other_end());
        options_.vocab_size = 300;
        options_.inputs = {directory_ / "text.txt"};
        options_.out_dir = out_;
        options_.val_fraction = 0.1;
        options_.copies = 1;
        options_.shard_tokens = 1000;
        options_.force = true;
    }
    void prepare_quietly() {
        progress_.clear();
        summary_ = prepare(options_, [&](const std::string& line) { progress_.push_back(line); });
    }
    std::vector<int32_t> tokens(const std::string& split) const {
        TokenStream stream(expand_glob(out_ + "/" + split + "_*.bin", split), 300);
        std::vector<int32_t> ids(size_t(stream.token_count()));
        stream.read(0, ids.size(), ids.data());
        return ids;
    }
    nlohmann::ordered_json dataset() const { return nlohmann::ordered_json::parse(read_file(out_ + "/dataset.json")); }
    std::map<std::string, std::string> out_files() const {
        std::map<std::string, std::string> files;
        for (const std::string& name : list_directory(out_))
            files[name] = directory_exists(out_ + "/" + name) ? "directory" : read_file(out_ + "/" + name);
        return files;
    }

    TemporaryDirectory directory_;
    std::string out_;
    PrepareOptions options_;
    PrepareSummary summary_;
    std::vector<std::string> progress_;
};
