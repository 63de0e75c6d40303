// safetensors, the exchange format with PyTorch and Hugging Face (github.com/huggingface/safetensors, "Format"): 8
// bytes of header length, a JSON header of names, types, shapes and offsets, then the tensors' bytes.
#pragma once

#include <unordered_map>

#include "kernels/tensor.h"
#include "runtime/io/files.h"

// The tensors of one model, memory-mapped. Files are untrusted input: fails with Exit::data, naming the file and the
// tensor, for a bad header length, JSON that is too deep or too large, duplicate names, shapes that overflow, and
// offsets that overlap, leave gaps or do not match the file size.
class Safetensors {
public:
    // `path`: a .safetensors file; a model.safetensors.index.json, whose files must be in the same directory (plain
    // names, no links) and contain exactly the listed tensors; or a directory with either of the two. Fails with
    // Exit::no_input if the directory has neither.
    explicit Safetensors(const std::string& path);

    // A tensor as described by the file's header, of any type of the format.
    struct Entry {
        std::string name;
        std::string type;                 // "F32", "BF16", "I64", ...
        std::vector<size_t> shape;        // outermost first
        const std::byte* data = nullptr;  // little-endian; may be unaligned in files of other programs: use memcpy
        size_t bytes = 0;
        std::string file;  // the file that contains it, for error messages

        // The elements of an F32, BF16, F16 or F64 tensor; F64 is rounded to nearest. Fails with Exit::data, naming the
        // file and the tensor, for any other type and for F64 values beyond the range of FP32.
        std::vector<float> floats() const;
    };

    const std::vector<Entry>& entries() const { return entries_; }  // in the order of their bytes
    const Entry* find(const std::string& name) const;               // nullptr if it does not exist
    // Fails with Exit::data, naming the file and the actual shape, if the tensor is missing or has another shape.
    const Entry& at(const std::string& name) const;
    const Entry& at(const std::string& name, const std::vector<size_t>& shape) const;

    // Copies this rank's part of each FP32 tensor to the device, from any type that floats() reads. Fails as at() and
    // floats() do. Calls other(entry) for each tensor of the file that is not requested.
    void load(const std::vector<NamedTensor>& tensors, const std::function<void(const Entry&)>& other) const;

private:
    void add_file(const std::string& path);
    void add_index(const std::string& path);

    std::string path_;
    std::vector<MappedFile> files_;
    std::vector<Entry> entries_;
    std::unordered_map<std::string, size_t> by_name_;  // -> position in entries_
};

// Writes whole FP32 tensors to one file as `type` (fp32, bf16 or fp16, rounded to nearest even), with one tensor in
// host memory at a time. Replaces the file atomically. Fails with Exit::io or Exit::cannot_create; with Exit::data,
// naming the tensor, for a finite number beyond the type's range.
void write_safetensors(const std::string& path, const std::vector<NamedTensor>& tensors, Dtype type = Dtype::fp32);

// Writes DIRECTORY/model.safetensors, or, if the tensors exceed `most_bytes`, several files of at most that size (a
// larger tensor gets its own file) and model.safetensors.index.json. Returns the names of the files. Fails as above.
inline constexpr size_t kMaxSafetensorsBytes = 5'000'000'000;  // the default of transformers
std::vector<std::string> write_safetensors_directory(const std::string& directory,
                                                     const std::vector<NamedTensor>& tensors, Dtype type = Dtype::fp32,
                                                     size_t most_bytes = kMaxSafetensorsBytes);

// Reads and writes the values of an FP32 tensor on the device, in the element order of a file. Reading requires the
// whole tensor on this rank; writing takes the whole tensor and copies this rank's part.
std::vector<float> file_values(const NamedTensor& tensor);
void set_file_values(const NamedTensor& tensor, std::vector<float> values);
