// A benchmark's JSON file, replaced atomically after every figure, so that figures survive if the program is killed.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

class Report {
public:
    using Json = nlohmann::ordered_json;

    // An empty path: no file.
    explicit Report(std::string path) : path_(std::move(path)) {}

    Json& json() { return json_; }
    // Fails as write_file_atomically() does.
    void write();
    // The same, but at most once a second, for frequent figures.
    void write_now_and_then();

private:
    std::string path_;
    Json json_;
    double written_ms_ = 0;
};
