#include <algorithm>
#include <cmath>
#include <filesystem>

#include "commands/command_line.h"
#include "commands/run_records.h"
#include "model/huggingface.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/io/files.h"
#include "runtime/io/joined.h"
#include "training/models/hf_config.h"
#include "training/models/model_io.h"

namespace {

struct Options {
    bool as_huggingface = false;  // must be set: the only format
    std::string checkpoint;
    std::string directory;
    std::string dtype = name_of(Dtype::fp32);
    uint64_t most_bytes = kMaxSafetensorsBytes;  // maximum size of a file of weights
};

// "step 20, loss 3.1" of the last record of a kind; empty if there is none.
std::string last_result(const RunRecords& records, const char* kind) {
    const RecordTable& table = records.table(kind);
    if (table.steps.empty()) return "";
    std::string text = format("step %.0f", table.steps.back());
    for (const auto& [column, name] : {std::pair{"loss", "loss"}, {"bits_per_byte", "bits per byte"}})
        if (const std::vector<double>* values = table.column(column))
            if (std::isfinite(values->back())) text += format(", %s %.4f", name, values->back());
    return text;
}

// Part of the model card; %d: the number of tokens to generate.
constexpr const char* kUsage = R"(```python
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer, model = AutoTokenizer.from_pretrained("."), AutoModelForCausalLM.from_pretrained(".")
tokens = model.generate(tokenizer.encode("The", return_tensors="pt"), do_sample=True, max_length=%d)
print(tokenizer.decode(tokens[0]))
```

)";

// README.md, the model card on the Hugging Face Hub.
std::string model_card(const LoadedModel& model, const std::string& run, const std::string& architecture) {
    const Config& config = model.config;
    const Config::Model& m = config.model;
    std::string card = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- train_gpt\n---\n\n";
    card += format("# %s\n\nTrained with train_gpt. Loads as `%s`.\n\n", std::filesystem::path(run).filename().c_str(),
                   architecture.c_str());
    if (model.tokenizer) card += format(kUsage, std::min(m.n_positions, 100));
    card += "| | |\n|---|---|\n";
    auto row = [&](const char* name, const std::string& value) {
        if (!value.empty()) card += format("| %s | %s |\n", name, value.c_str());
    };
    row("parameters", std::to_string(without_vocabulary_padding(model.gpt.layout())));
    row("model", format("%d layers, %d heads (%d of keys and values) of %d, %d channels, %d inside the MLP", m.n_layer,
                        m.n_head, m.kv_heads(), m.head_size(), m.n_embd, m.hidden()));
    row("longest sequence", format("%d tokens", m.n_positions));
    row("vocabulary", format("%d tokens", m.vocab_size));
    if (!file_exists(run + "/metrics.jsonl")) return card;
    const RunRecords records(run);
    const RecordTable& steps = records.table("train");
    const double tokens = steps.steps.empty() ? 0 : double(tokens_of_steps(config, int(steps.steps.back())));
    row("training", tokens > 0 ? format("%.4g tokens, %s per step, %s", tokens, batch_text(config).c_str(),
                                        name_of(config.train.precision))
                               : "");
    row("optimizer", format("%s, learning rate %g, schedule %s", name_of(config.optim.name), config.optim.learning_rate,
                            name_of(config.schedule.name)));
    row("last training step", last_result(records, "train"));
    row("last validation", last_result(records, "val"));
    return card;
}

void export_huggingface(const Options& options) {
    const ModelSource source(options.checkpoint);
    const LoadedModel model = load_model(source, 1, comm_single());
    const std::string& directory = options.directory;
    if (directory_exists(directory) && !list_directory(directory).empty())
        fail(Exit::cannot_create, "%s is not empty; nothing was written", directory);
    const Config::Model& described = model.config.model;
    const int eot = model.tokenizer ? model.tokenizer->eot() : described.vocab_size - 1;
    const Dtype dtype = choice_named<Dtype>(options.dtype).value();
    const std::string config = hf_config(described, eot, dtype);
    make_directories(directory);
    const std::vector<NamedTensor> tensors = hf_tensors(model.gpt);
    std::vector<std::string> written = write_safetensors_directory(directory, tensors, dtype, options.most_bytes);
    auto write = [&](const char* name, const std::string& content) {
        write_file_atomically(directory + "/" + name, content);
        written.push_back(name);
    };
    write("config.json", config);
    write("generation_config.json", hf_generation_config(eot));
    if (model.tokenizer) {
        write("tokenizer.json", model.tokenizer->json());
        write("tokenizer_config.json", hf_tokenizer_config(described, eot, model.tokenizer->token(eot)));
    }
    const std::string run = source.checkpoint ? run_directory_of(source.checkpoint->directory()) : source.path;
    write("README.md", model_card(model, run, hf_architecture(described)));
    std::printf("wrote %s: %s (%zu tensors)\n", directory.c_str(), joined(written).c_str(), tensors.size());
}

}  // namespace

void add_export(CLI::App& app) {
    auto options = std::make_shared<Options>();
    const Command command(app, "export", "write a model for transformers");
    command.add("--hf", &options->as_huggingface, "as a Hugging Face directory").required();
    command.add("CHECKPOINT", &options->checkpoint, "run directory or RUN/checkpoints/step_N").required();
    command.add("OUT", &options->directory, "new or empty directory").required();
    command.add("--dtype", &options->dtype, "fp32 (exact, the default), bf16 or fp16")
        .one_of({name_of(Dtype::fp32), name_of(Dtype::bf16), name_of(Dtype::fp16)});
    command.add("--max-shard-bytes", &options->most_bytes, "maximum bytes of weights per file")
        .show_default()
        .integer_in(1, std::numeric_limits<int64_t>::max());
    command.on_parsed([options] { export_huggingface(*options); });
}
