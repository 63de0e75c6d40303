// safetensors, the exchange format with PyTorch and Hugging Face (github.com/huggingface/safetensors, "Format"): 8
// bytes of header length, a JSON header of names, types, shapes and offsets, then the tensors' bytes.
#pragma once

#include <unordered_map>

#include "kernels/tensor.h"
#include "runtime/io/io.h"

// One model's tensors, memory-mapped. Nothing in a file is trusted: header length, JSON depth and size, duplicate
// names, offsets that overlap, leave gaps or do not add up to the file, and shapes that overflow are refused with
// Exit::data, naming the file and the tensor.
class Safetensors {
public:
    // `path`: a .safetensors file; a model.safetensors.index.json, whose files must lie beside it (plain names, no
    // links) and hold exactly what it lists; or a directory with either of the two. Exit::no_input if it has neither.
    explicit Safetensors(const std::string& path);

    // A tensor as the file's header describes it, of any type that the format has.
    struct Entry {
        std::string name;
        std::string type;                 // "F32", "BF16", "I64", ...
        std::vector<size_t> shape;        // outermost first
        const std::byte* data = nullptr;  // little-endian; other programs' files may leave it unaligned: memcpy it
        size_t bytes = 0;
        std::string file;  // that holds it, for error messages

        // The elements of an F32, BF16 or F16 tensor, exactly, and of an F64 tensor, rounded to the nearest.
        // Exit::data, naming file and tensor, for another type.
        std::vector<float> floats() const;
    };

    const std::vector<Entry>& entries() const { return entries_; }  // in the order of their bytes
    const Entry* find(const std::string& name) const;               // nullptr if it is not there
    // Exit::data, naming the file and what it has instead, if the tensor is missing or has another shape.
    const Entry& at(const std::string& name) const;
    const Entry& at(const std::string& name, const std::vector<size_t>& shape) const;

    // Copies to the device the part of each FP32 tensor that is here, from any type that floats() reads. Same errors.
    // other(entry) is called for each tensor of the file that is not requested.
    void load(const std::vector<NamedTensor>& tensors, const std::function<void(const Entry&)>& other) const;

private:
    void add_file(const std::string& path);
    void add_index(const std::string& path);

    std::string path_;
    std::vector<MappedFile> files_;
    std::vector<Entry> entries_;
    std::unordered_map<std::string, size_t> by_name_;  // -> position in entries_
};

// Writes whole FP32 tensors into one file, as `type` (fp32, bf16 or fp16, rounded to nearest even); holds one of them
// in host memory at a time. The file is replaced as a whole. Exit::io, Exit::cannot_create; Exit::data, naming the
// tensor, for a finite number beyond the type's range.
void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors, Dtype type = Dtype::fp32);

// The same into DIRECTORY/model.safetensors, or, if the tensors have more than `most_bytes` together, into files of at
// most that size, a larger tensor alone, and model.safetensors.index.json. Returns the names of the files.
inline constexpr size_t kMostSafetensorsBytes = 5'000'000'000;  // transformers' default
std::vector<std::string> write_safetensors_directory(const std::string& directory,
                                                     const std::vector<NamedTensor>& tensors, Dtype type = Dtype::fp32,
                                                     size_t most_bytes = kMostSafetensorsBytes);

// The numbers in `type`, rounded to nearest even, as a file has them.
std::string bytes_of(const std::vector<float>& values, Dtype type);

// The whole FP32 tensor in the order of a file, from the device and to it. Setting copies the part that is here;
// getting requires all of it.
std::vector<float> file_values(const NamedTensor& tensor);
void set_file_values(const NamedTensor& tensor, std::vector<float> values);
