// The chosen algorithm of each GEMM: as a map, as text, and in a file that processes can share.
//
// The text consists of a header with the GPU and the library's version, one line per choice, and a last line with the
// checksum of the previous lines. words_of(key) identifies a GEMM, the library's eight numbers an algorithm.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

// A cublasLtMatmulAlgo_t. It may be stored and reused with the same version of the library.
using MatmulAlgorithm = std::array<uint64_t, 8>;

struct MatmulChoice {
    bool by_library = false;  // false: the library does not support the GEMM, or separate kernels are faster
    MatmulAlgorithm algorithm{};
    float ms = -1;  // measured time; negative: not timed
};

// Keyed by words_of() the product.
using MatmulChoices = std::map<std::string, MatmulChoice>;

struct MatmulOwner {
    std::string gpu;
    size_t version = 0;  // cublasLtGetVersion()
};

std::string choices_to_text(const MatmulChoices& choices, const MatmulOwner& owner);

// Adds the choices in the text to `choices` and returns an empty string. If the text is damaged or comes from another
// GPU or version, adds nothing and returns the reason.
std::string choices_from_text(MatmulChoices& choices, const std::string& text, const MatmulOwner& owner);

// The same for a file. A missing file is not an error.
std::string read_choices(MatmulChoices& choices, const std::string& path, const MatmulOwner& owner);

// Replaces the file atomically. Returns an empty string, or the reason of a failure; then the old file is unchanged.
std::string write_choices(const MatmulChoices& choices, const std::string& path, const MatmulOwner& owner);

// Locks out other processes during its lifetime. Waits at most `patience_s` seconds for the lock.
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
