// safetensors, the exchange format with PyTorch and Hugging Face (github.com/huggingface/safetensors, "Format"): 8
// bytes of header length, a JSON header of names, types, shapes and offsets, then the tensors' bytes.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/numeric.h"
#include "runtime/io/io.h"

// Bytes of one element of "F32", "BF16", "F16", "I64", ...; 0 for a name that is not known.
size_t safetensors_element_bytes(const std::string& dtype);
const char* safetensors_dtype(Dtype dtype);  // "F32", "BF16", "F16"

// A tensor in a mapped file.
struct SafetensorsView {
    std::string name;
    std::string dtype;                // "F32", "BF16", ...
    std::vector<size_t> shape;        // outermost first
    const std::byte* data = nullptr;  // little-endian; other programs' files may leave it unaligned: memcpy it
    size_t bytes = 0;
    std::string file;  // that holds it, for error sentences
};

// The elements of an F32, BF16 or F16 tensor, exactly. Exit::data, naming file and tensor, for another type.
std::vector<float> float_values(const SafetensorsView& view);

// One model's tensors, memory-mapped. Nothing in a file is trusted: header length, JSON depth and size, names that
// stand twice, offsets that overlap, leave gaps or do not add up to the file, and shapes that overflow are refused with
// Exit::data and a sentence that names the file and the tensor.
class Safetensors {
public:
    // `path`: a .safetensors file; a model.safetensors.index.json, whose shards must lie beside it (plain names, no
    // links) and hold exactly what it lists; or a directory with either of the two. Exit::no_input if it has neither.
    explicit Safetensors(const std::string& path);

    const std::string& path() const { return path_; }
    const std::vector<SafetensorsView>& tensors() const { return tensors_; }  // in the order of their bytes
    const SafetensorsView* find(const std::string& name) const;               // nullptr if it is not there
    // Exit::data, naming the file and what it has instead, if the tensor is missing or has another shape.
    const SafetensorsView& at(const std::string& name) const;
    const SafetensorsView& at(const std::string& name, const std::vector<size_t>& shape) const;

private:
    void add_file(const std::string& path);
    void add_index(const std::string& path);

    std::string path_;
    std::vector<MappedFile> files_;
    std::vector<SafetensorsView> tensors_;
    std::unordered_map<std::string, size_t> by_name_;  // -> position in tensors_
};

// A tensor to be written.
struct SafetensorsItem {
    std::string name;
    std::string dtype;          // "F32", "BF16", ...
    std::vector<size_t> shape;  // outermost first
    // Puts elements [first, first + count) of the flattened tensor to host memory. Called with ascending, adjoining
    // ranges of a few MiB.
    std::function<void(void* to, size_t first, size_t count)> fill;
};

// Writes one file in constant memory: temporary file, sync, rename, so that `path` is never half-written. Tensors with
// larger elements come first, so that each is aligned to its element type. Exit::io, Exit::cannot_create.
void write_safetensors(const std::string& path, const std::vector<SafetensorsItem>& items,
                       const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

// A tensor of a model as files of floats see it.
struct FloatTensor {
    std::string name;
    std::vector<size_t> shape;
    std::function<std::vector<float>()> get;
    std::function<void(const std::vector<float>&)> set;
};

// Every tensor from the file, of any type that is exact in float; Exit::data, naming file and tensor, where one is
// missing or has another shape. other(view) is asked about each tensor of the file that is not wanted.
void read_float_tensors(const Safetensors& file, const std::vector<FloatTensor>& tensors,
                        const std::function<void(const SafetensorsView&)>& other);

// One F32 file of all of them; holds one tensor in memory at a time.
void write_float_tensors(const std::string& path, const std::vector<FloatTensor>& tensors);
