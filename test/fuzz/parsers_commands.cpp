// The parsers of commands/: other programs' model files, and a run's records as read by `report`.
#include <filesystem>

#include "commands/report_page.h"
#include "model/llmc.h"
#include "test/fuzz/inputs.h"
#include "test/fuzz/parsers.h"
#include "training/models/hf_config.h"
#include "training/models/llmc_files.h"

void read_llmc_model(std::string_view input) {
    constexpr size_t kMaxElements = 1 << 16;
    const LlmcModel model(path_of(input));
    model.values(0, std::min(kMaxElements, llmc_elements(model.shape, model.padded_vocab)));
}

void read_hf_config(std::string_view input) {
    const std::string text(input);
    const Config::Model model = hf_model(text, "config.json");
    check_hf_model(text, model, "config.json");
    if (input.size() % 16 == 0) hf_config(model, 0, Dtype::fp32);  // takes as long as the rest
}

void read_run_records(std::string_view input) {
    const char* const names[] = {"metrics.jsonl", "samples.jsonl", "run.json", "config.json"};
    const auto parts = parts_of(input, std::size(names));
    const std::string directory = scratch_directory() / "run";
    std::filesystem::create_directory(directory);
    for (size_t i = 0; i < std::size(names); i++) scratch_file(std::string("run/") + names[i], parts[i]);
    std::vector<RunRecords> runs;
    const RunRecords& run = runs.emplace_back(directory);
    summary_of(run);
    if (input.size() % 64 == 0) report_page(runs);  // takes many times longer than the rest
}
