#include "training/models/llmc_files.h"

#include <map>

#include "model/llmc.h"
#include "model/tensors.h"
#include "runtime/checkpoint/checkpoint.h"
#include "runtime/io/header_word.h"
#include "runtime/io/reject_file.h"

namespace {

constexpr size_t kHeaderBytes = 256 * sizeof(int32_t);
constexpr int32_t kModelMagic = 20240326, kLlama3Magic = 20240803;
constexpr int32_t kFp32Version = 3, kBf16Version = 5;

// Fails. If the file is a model of another format, the message says how to use it.
[[noreturn]] void reject_other_file(const MappedFile& file) {
    const std::string content = describe_content(file.text().substr(0, kHeaderBytes), file.size());
    std::string remedy;
    if (content == "a safetensors file") remedy = "; give its directory, " + directory_of(file.path());
    if (content == "a PyTorch file" || content == "a Python pickle")
        remedy = "; convert it to a Hugging Face directory, see docs/coming_from_nanogpt.md#weights";
    reject_file(file.path(), "not a model of llm.c: the file has %zu bytes and looks like %s%s", file.size(), content,
                remedy);
}

// Fails unless the file has the header of a GPT-2 model.
void check_header(const MappedFile& file) {
    const std::string& path = file.path();
    const int32_t magic = header_word(file.text(), 0);
    if (magic == kLlama3Magic) reject_file(path, "llm.c Llama 3 model; only llm.c's GPT-2 models are supported");
    if (magic != kModelMagic) reject_other_file(file);
    if (file.size() < kHeaderBytes)
        reject_file(path, "the header of a model has %zu bytes, but the file ends after %zu", kHeaderBytes,
                    file.size());
}

// Returns a header word, which must be from 1 to `most`.
int checked_word(const MappedFile& file, size_t index, const char* name, int most) {
    const int32_t value = header_word(file.text(), index);
    if (value < 1 || value > most)
        reject_file(file.path(), "word %zu of the header, %s, is %d, but must be from 1 to %d", index, name, value,
                    most);
    return value;
}

}  // namespace

bool is_llmc_model(std::string_view first_bytes) {
    const int32_t magic = header_word(first_bytes, 0);
    return magic == kModelMagic || magic == kLlama3Magic;
}

LlmcModel::LlmcModel(const std::string& path) : file(path) {
    check_header(file);
    const int32_t version = header_word(file.text(), 1);
    if (version != kFp32Version && version != kBf16Version)
        reject_file(path, "llm.c model of version %d; only versions 3 (fp32) and 5 (bf16) are supported", version);
    type = version == kFp32Version ? Dtype::fp32 : Dtype::bf16;
    shape.n_positions = checked_word(file, 2, "max_seq_len", 1 << 24);
    shape.vocab_size = checked_word(file, 3, "vocab_size", 1 << 24);
    shape.n_layer = checked_word(file, 4, "num_layers", 10000);
    shape.n_head = checked_word(file, 5, "num_heads", 65536);
    shape.n_embd = checked_word(file, 6, "channels", 65536);
    padded_vocab = checked_word(file, 7, "padded_vocab_size", 1 << 25);
    if (shape.n_embd % shape.n_head != 0)
        reject_file(path, "words 6 and 5 of the header: channels (%d) must be a multiple of num_heads (%d)",
                    shape.n_embd, shape.n_head);
    if (padded_vocab < shape.vocab_size)
        reject_file(path, "words 7 and 3 of the header: padded_vocab_size (%d) must be at least vocab_size (%d)",
                    padded_vocab, shape.vocab_size);
    const size_t bytes = kHeaderBytes + llmc_elements(shape, padded_vocab) * size_of(type);
    if (file.size() != bytes)
        reject_file(path,
                    "max_seq_len %d, vocab_size %d, num_layers %d, num_heads %d, channels %d, padded_vocab_size %d and "
                    "%s make %zu bytes, but the file has %zu%s",
                    shape.n_positions, shape.vocab_size, shape.n_layer, shape.n_head, shape.n_embd, padded_vocab,
                    name_of(type), bytes, file.size(), file.size() < bytes ? ": it is truncated" : "");
}

std::vector<float> LlmcModel::values(size_t first, size_t count) const {
    return host_floats(ConstView(file.data() + kHeaderBytes, type).from(first), count);
}

void LlmcModel::load(const Gpt& gpt) const {
    const GptShape& wanted = gpt.options().shape;
    for (const auto& [name, has, needs] : {std::tuple{"n_layer", shape.n_layer, wanted.n_layer},
                                           {"n_head", shape.n_head, wanted.n_head},
                                           {"n_embd", shape.n_embd, wanted.n_embd},
                                           {"n_positions", shape.n_positions, wanted.n_positions},
                                           {"vocab_size", shape.vocab_size, wanted.vocab_size}})
        if (has != needs) fail(Exit::config, "%s: %s is %d, but this run needs %d", file.path(), name, has, needs);
    std::map<std::string_view, NamedTensor> own;
    const std::vector<NamedTensor> masters = gpt.master_tensors();
    for (size_t i = 0; i < masters.size(); i++) own.emplace(gpt.layout().tensors[i].name, masters[i]);
    const TensorLayout layout = lay_out_tensors(shape);
    size_t begin = 0;
    for (const LlmcTensor& entry : llmc_tensors(layout, whole_tensors(layout), padded_vocab)) {
        if (const auto found = own.find(entry.tensor.name); found != own.end()) {
            const bool is_padded = found->second.shape != entry.tensor.shape;
            set_file_values(is_padded ? without_padding(found->second, shape) : found->second,
                            values(begin, elements_of(entry.tensor)));
        }
        begin += entry.file_elements;
    }
}
