// A benchmark's JSON file, replaced as a whole after every figure: what was measured before a program is killed stays.
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
    // The same at most once a second, for figures that come faster.
    void write_now_and_then();

private:
    std::string path_;
    Json json_;
    double written_ms_ = 0;
};
