// Models of each family, and of combinations of parts that no family has, against transformers' and PyTorch's outputs
// (test/recorded/torch/families; make_family_reference.py, which made them, describes the files). The import functions
// read the configuration and the weights.

#include "model/huggingface.h"
#include "model/inference.h"
#include "model/sample.h"
#include "runtime/checkpoint/safetensors.h"
#include "runtime/io/files.h"
#include "test/support/catch.h"
#include "training/models/hf_config.h"
#include "training/models/model_io.h"

namespace {

constexpr double kTolerance = 1e-5;      // relative in norm, per tensor, in fp32
constexpr double kStepTolerance = 2e-5;  // of losses and gradient norms in five steps
constexpr int kGradientStride = 5, kSteps = 5;

const std::vector<std::string> kModels = {"llama_3to1",  "llama_mqa_tied",  "qwen2_windows", "qwen3_yarn",
                                          "gpt2_untied", "custom_speedrun", "custom_mixed"};

struct FamilyReference {
    std::string name, directory = "test/recorded/torch/families/" + name;
    Safetensors outputs{directory + "/outputs.safetensors"};
    Safetensors weights{directory + "/model.safetensors"};
    Config config = configuration("config.json");

    bool is_custom() const { return name.starts_with("custom"); }

    // The model that the file describes, with the recorded batches' sizes.
    Config configuration(const std::string& file) const {
        const std::string path = directory + "/" + file, text = read_file(path);
        Config read = is_custom() ? parse_config(text, path) : Config{};
        if (!is_custom()) read.model = hf_model(text, path);
        const std::vector<size_t>& shape = outputs.at("tokens").shape;  // steps, batch, seq_len
        read.train.batch_size = int(shape[1]), read.train.seq_len = int(shape[2]);
        read.train.total_batch_tokens = int64_t(shape[1] * shape[2]);
        read.train.precision = Precision::fp32;
        read.train.head_rows = 40;  // less than the number of rows, and not a divisor of it
        check_config(read, path, 1);
        return read;
    }

    size_t batch_tokens() const { return size_t(config.train.total_batch_tokens); }
    std::vector<int> batch(const char* what, int step) const {
        std::vector<int> ids(batch_tokens());
        std::memcpy(ids.data(), outputs.at(what).data + size_t(step) * ids.size() * sizeof(int),
                    ids.size() * sizeof(int));
        return ids;
    }

    // Tensors by the files' names.
    std::vector<NamedTensor> named(const Gpt& gpt, const std::vector<NamedTensor>& ours, const char* prefix) const {
        if (!is_custom())
            return hf_tensors(gpt.layout(), ours, [&](const std::string& tensor) { return weights.find(tensor); });
        std::vector<NamedTensor> tensors = ours;
        for (NamedTensor& tensor : tensors) tensor.name = tensor.name.substr(std::strlen(prefix));
        return tensors;
    }

    Gpt load(Recompute recompute = Recompute::none, Dtype precision = Dtype::fp32) const {
        GptOptions options = gpt_options(config);
        options.recompute = recompute;
        options.precision = precision;
        options.optimizer = {.weight_decay = 0.1f, .grad_clip = 1.0f};
        return load(options);
    }
    Gpt load(const GptOptions& options) const {
        Gpt gpt(options, comm_single());
        size_t used = 0;
        weights.load(named(gpt, gpt.master_tensors(), "master."), [&](const Safetensors::Entry& entry) {
            UNSCOPED_INFO(entry.name << " is not used");
            used++;
        });
        REQUIRE(used == 0);
        gpt.masters_changed();
        return gpt;
    }

    void accumulate(Gpt& gpt, int step, float scale = 1) const {
        gpt.begin_step({.loss_scale = scale, .learning_rate = 1e-3, .update = step + 1});
        gpt.forward(batch("tokens", step).data());
        gpt.backward(batch("targets", step).data(), 1.0f / float(batch_tokens()));
    }
};

double relative_error(const std::vector<float>& ours, const std::vector<float>& theirs, size_t stride = 1) {
    REQUIRE(theirs.size() == (ours.size() + stride - 1) / stride);
    double difference = 0, size = 0;
    for (size_t i = 0; i < theirs.size(); i++) {
        difference += std::pow(double(ours[i * stride]) - double(theirs[i]), 2);
        size += std::pow(double(theirs[i]), 2);
    }
    return std::sqrt(difference / size);
}

// The largest error of any gradient, in its recorded elements and in its norm.
double gradient_error(const FamilyReference& reference, const Gpt& gpt, float scale = 1) {
    double worst = 0;
    for (const NamedTensor& tensor : reference.named(gpt, gpt.gradient_tensors(), "grad.")) {
        std::vector<float> values = file_values(tensor);
        double squares = 0;
        for (float& value : values) value /= scale, squares += double(value) * double(value);
        const double norm = double(reference.outputs.at("norm/" + tensor.name).floats()[0]);
        const double error =
            relative_error(values, reference.outputs.at("gradient/" + tensor.name).floats(), kGradientStride) +
            std::abs(std::sqrt(squares) - norm) / norm;
        UNSCOPED_INFO("gradient of " << tensor.name << " " << error);
        if (!(error <= worst)) worst = error;  // keeps a NaN
    }
    return worst;
}

}  // namespace

TEST_CASE("model families: logits and every gradient equal transformers'", "[model][families]") {
    for (const std::string& name : kModels) {
        INFO(name);
        const FamilyReference reference{name};
        Gpt gpt = reference.load();
        reference.accumulate(gpt, 0);
        const size_t vocab = size_t(reference.config.model.vocab_size);
        std::vector<float> logits(reference.batch_tokens() * vocab);
        for (size_t row = 0; row < reference.batch_tokens(); row++)
            logits_of_row(gpt, int(row), logits.data() + row * vocab);
        CHECK(relative_error(logits, reference.outputs.at("logits").floats()) <= kTolerance);
        CHECK(gradient_error(reference, gpt) <= kTolerance);
    }
}

TEST_CASE("model families: five steps of AdamW", "[model][families]") {
    for (const std::string& name : kModels) {
        INFO(name);
        const FamilyReference reference{name};
        Gpt gpt = reference.load();
        const std::vector<float> losses = reference.outputs.at("loss").floats();
        const std::vector<float> norms = reference.outputs.at("grad_norm").floats();
        for (int step = 0; step < kSteps; step++) {
            reference.accumulate(gpt, step);
            const StepResult result = gpt.end_step();
            const double loss = double(losses[size_t(step)]), norm = double(norms[size_t(step)]);
            INFO("step " << step + 1);
            CHECK(std::abs(result.loss_sum / double(reference.batch_tokens()) - loss) <= kStepTolerance * loss);
            CHECK(std::abs(double(result.grad_norm) - norm) <= kStepTolerance * norm);
        }
    }
}

TEST_CASE("model families: every level of recomputation gives the same bits", "[model][families]") {
    for (const std::string& name : kModels)
        for (const Dtype precision : {Dtype::fp32, Dtype::bf16}) {
            const FamilyReference reference{name};
            std::vector<std::vector<float>> expected;
            for (const Recompute level : {Recompute::none, Recompute::gelu, Recompute::norm, Recompute::block}) {
                INFO(name << " " << name_of(precision) << " " << name_of(level));
                Gpt gpt = reference.load(level, precision);
                for (int step = 0; step < 2; step++) reference.accumulate(gpt, step), gpt.end_step();
                std::vector<std::vector<float>> values;
                for (const NamedTensor& tensor : gpt.master_tensors()) values.push_back(file_values(tensor));
                if (expected.empty()) expected = values;
                CHECK(values == expected);
            }
        }
}

TEST_CASE("model families: transformers 4 and 5 describe the same model", "[model][families]") {
    for (const std::string& name : kModels) {
        const FamilyReference reference{name};
        if (reference.is_custom()) continue;
        INFO(name);
        CHECK(model_differences(reference.configuration("config_4.json").model, reference.config.model).empty());
    }
}

using Texts = std::vector<std::vector<int>>;

// The texts that sample() generates from the prompts; some end early.
static Texts continued(Gpt& gpt, const Texts& prompts, const SampleOptions& options) {
    Texts texts(prompts.size());
    std::vector<int> ends(prompts.size());
    sample(
        gpt, prompts, options,
        [&](size_t prompt, int token) {
            REQUIRE(ends[prompt] == 0);
            texts[prompt].push_back(token);
            return prompt != 2 || texts[prompt].size() < 7;
        },
        [&](size_t prompt) { ends[prompt]++; });
    REQUIRE(ends == std::vector<int>(prompts.size(), 1));
    return texts;
}

TEST_CASE("model families: generation with and without a KV cache gives the same text", "[model][families]") {
    for (const std::string& name : kModels)
        for (const bool document_mask : {false, true}) {
            INFO(name << ", document_mask " << document_mask);
            const FamilyReference reference{name};
            GptOptions options = gpt_options(reference.config);
            options.batch = 1;
            options.training = false;
            options.document_mask = document_mask;
            const std::vector<int> ids = reference.batch("tokens", 0);
            options.document_token = ids[2];
            Gpt plain = reference.load(options);
            options.cached_sequences = 3;
            options.head_rows = 2;
            Gpt cached = reference.load(options);

            // Texts of many lengths; one starts longer than a sequence, and all of them grow longer than one.
            const auto length = size_t(options.seq_len);
            Texts prompts;
            for (const size_t size : {size_t(1), size_t(6), size_t(3), length - 1, length + 3, length, size_t(4)})
                prompts.emplace_back(ids.begin(), ids.begin() + ptrdiff_t(size));
            for (const SampleOptions& how : {SampleOptions{.tokens = int(length) + 20, .temperature = 0},
                                             SampleOptions{.tokens = 30, .top_p = 0.9, .seed = 5}}) {
                const Texts texts = continued(plain, prompts, how);
                REQUIRE(texts[2].size() == 7);
                REQUIRE(texts[0].size() == size_t(how.tokens));
                REQUIRE(continued(cached, prompts, how) == texts);
                for (size_t i : {0, 3}) REQUIRE(continued(cached, {prompts[i]}, how)[0] == texts[i]);
            }
        }
}

TEST_CASE("model families: logits with and without a KV cache are equal", "[model][families]") {
    for (const std::string& name : kModels) {
        INFO(name);
        const FamilyReference reference{name};
        GptOptions options = gpt_options(reference.config);
        options.training = false;
        options.cached_sequences = 2;
        Gpt gpt = reference.load(options);
        size_t planned = 0;
        for (const MemoryRegion& region : plan_memory(options))
            if (region.category == std::string("KV cache")) planned += region.bytes;
        const size_t head_bytes = size_t(options.shape.head_size()) * sizeof(float);  // 2 sequences, keys and values
        const size_t layer = 2 * size_t(options.seq_len) * 2 * size_t(options.shape.kv_heads()) * head_bytes;
        REQUIRE(planned / 256 == (size_t(options.shape.n_layer) * layer + 255) / 256);
        const std::vector<int> ids = reference.batch("tokens", 1);
        const auto vocab = size_t(options.shape.vocab_size);
        std::vector<float> cached(2 * vocab), expected(vocab);
        // One sequence is three tokens ahead of the other: it is second in memory but first in the op.
        auto check = [&](int count, const float* logits) {
            next_token_logits(gpt, ids.data(), count, expected.data());
            REQUIRE(relative_error({logits, logits + vocab}, expected) < kTolerance);
        };
        prefill(gpt, 0, ids.data(), 4, cached.data());
        check(4, cached.data());
        prefill(gpt, 1, ids.data(), 1, cached.data());
        check(1, cached.data());
        for (int t = 1; t + 3 < options.seq_len; t++) {
            const NextToken next[] = {{1, ids[size_t(t)]}, {0, ids[size_t(t) + 3]}};
            decode(gpt, next, cached.data());
            check(t + 1, cached.data());
            check(t + 4, cached.data() + vocab);
        }
        REQUIRE(sequence_length(gpt, 0) == options.seq_len);
        REQUIRE(sequence_length(gpt, 1) == options.seq_len - 3);
    }
}
