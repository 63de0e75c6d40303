// Which algorithm was chosen for which product: as a map, as text, and in a file that several processes share.
//
// The text is made of lines: a header with the GPU and the library's version, one line a choice, and a last line with
// a checksum of all before it. A product is named by its words, an algorithm by the library's eight numbers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

// A cublasLtMatmulAlgo_t, which may be stored for use by the same version of the library.
using MatmulAlgorithm = std::array<uint64_t, 8>;

struct MatmulChoice {
    bool by_library = false;  // false: the library has no such product, or separate kernels are faster
    MatmulAlgorithm algorithm{};
    float ms = -1;  // as timed; negative: taken untimed
};

// By the product's words.
using MatmulChoices = std::map<std::string, MatmulChoice>;

struct MatmulOwner {
    std::string gpu;
    size_t version = 0;  // cublasLtGetVersion()
};

std::string choices_to_text(const MatmulChoices& choices, const MatmulOwner& owner);

// Adds the text's choices to `choices`; returns an empty string. Or adds nothing and returns why: damaged, or made by
// another GPU or version.
std::string choices_from_text(MatmulChoices& choices, const std::string& text, const MatmulOwner& owner);

// The same for a file. A missing file is no error.
std::string read_choices(MatmulChoices& choices, const std::string& path, const MatmulOwner& owner);

// Replaces the file as a whole. Returns an empty string, or why it failed; then the old file is unchanged.
std::string write_choices(const MatmulChoices& choices, const std::string& path, const MatmulOwner& owner);

// Excludes other processes for its lifetime. Waits at most `patience_s` for the lock.
class MatmulLock {
public:
    MatmulLock(const std::string& path, int patience_s);
    MatmulLock(const MatmulLock&) = delete;
    MatmulLock& operator=(const MatmulLock&) = delete;
    ~MatmulLock();
    bool held() const { return held_; }

private:
    int descriptor_ = -1;
    bool held_ = false;
};
