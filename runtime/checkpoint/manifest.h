// The manifest of a checkpoint: MANIFEST.json, as a struct and as text.
//
// A shard file is the concatenation of its pieces. Each piece has the name of its tensor and its place in the whole
// tensor, so the number of ranks and how they divide the tensors may differ between writing and reading. The pieces of
// all shard files together cover every element of every tensor exactly once.
#pragma once

#include "kernels/base/check.h"
#include "kernels/tensor.h"            // IWYU pragma: export
#include "runtime/checkpoint/boxes.h"  // IWYU pragma: export
#include "runtime/config/config.h"
#include "runtime/config/divergence.h"
#include "runtime/config/loss_scale.h"
#include "runtime/config/schedule.h"

inline constexpr int kCheckpointVersion = 2;            // version 1 had no boxes
inline constexpr size_t kBlockBytes = size_t(1) << 20;  // covered by one CRC32C; the last block of a file is shorter
inline constexpr size_t kCrcDigits = 8;                 // hexadecimal digits of a CRC32C in the manifest

// The number of elements and bytes of the whole tensor. Fails with Exit::data, naming the tensor, if the number of
// bytes does not fit into 63 bits.
size_t elements_of(const NamedTensor& tensor);
size_t bytes_of(const NamedTensor& tensor);

// Whether a text is a valid name of a tensor or file: it is not empty and has no control characters.
bool is_name(const std::string& text);

// "(2, 3)"
std::string shape_text(const std::vector<size_t>& shape);

// The shard file that one rank wrote.
struct ShardFile {
    std::string name;  // shard_name(rank)
    size_t bytes = 0;
    std::string xxh3_128 = {};       // of the whole file
    std::string block_crc32cs = {};  // of each block, 8 hexadecimal digits each
    bool finite = true;              // no NaN and no infinity among the values
    std::vector<Piece> pieces = {};  // by ascending file_offset, without gaps
};

// The lowest validation loss of a run.
struct BestValidation {
    double loss = 0;
    int step = 0;         // after which it was measured; 0: no validation yet
    int worse_since = 0;  // validations since then
    bool operator==(const BestValidation&) const = default;

    // Records the loss after a step and returns whether it is the lowest so far. A non-finite loss never is.
    bool note(double new_loss, int new_step);
};

// The gradient noise scale of McCandlish et al., arXiv 1812.06162, appendix A.1: moving averages of unbiased estimates.
struct NoiseScale {
    static constexpr double kDecay = 0.95;  // per measurement

    double noise = 0;   // of the trace of the covariance of one token's gradient
    double signal = 0;  // of the squared norm of the expected gradient; both begin at 0, which cancels in the ratio
    bool operator==(const NoiseScale&) const = default;

    // Adds the squared gradient norms of a batch and of a smaller one from the same distribution.
    void add(double small_squared, double small_tokens, double squared, double tokens);
    // B_simple = noise / signal; nothing if there is no measurement or the averaged signal is not positive.
    std::optional<double> tokens() const;
};

// The state of a run between two steps, except its tensors; stored with them.
struct TrainState {
    int step = 0;              // optimizer steps done
    int64_t parent_step = -1;  // the checkpoint that this process resumed from or saved before; -1: none
    std::string run_id = {};   // 32 random hexadecimal digits
    std::string config = {};   // the effective configuration, as printed
    std::string config_digest = {};
    std::string dataset_digest = {};  // of the files of data.train
    bool healthy = true;  // an unhealthy one never displaces a healthy one; a save with non-finite values clears this
    struct Progress {
        int64_t updates = 0;  // steps whose update was applied: AdamW's t
        uint64_t cursor = 0;  // the next sample, counted over all ranks and epochs
        LossScaleState loss_scale = {};
        double trained_s = 0;           // seconds of all steps so far; 0: not recorded
        RunLength course_by_time = {};  // once train.max_minutes has determined it
        BestValidation best = {};       // with eval.patience or checkpoint.keep_best
        DivergenceState divergence = {};
        NoiseScale noise = {};           // with log.noise_scale_every_steps
        bool evaluation_is_due = false;  // a stop request interrupted the evaluation of this step
    } progress = {};
};

struct Manifest {
    TrainState info;
    int world_size = 1;
    std::vector<NamedTensor> tensors;  // names, types and shapes, the same on every rank
    std::vector<ShardFile> shards;     // shards[r] was written by rank r
    bool is_finite() const;            // no value of any tensor is NaN or infinite
};

std::string shard_name(int rank);  // "shard_0003.bin"

// Converts a shard file's record to text and back; each rank passes its record to rank 0 in this form.
std::string shard_to_text(const ShardFile& shard);
ShardFile shard_from_text(std::string_view text, const std::string& path);

// The manifest needs a newer version of the program: a reason to stop, not a sign of damage.
struct NewerVersion : Error {
    using Error::Error;
};

// Converts the manifest to text and back. Reading checks everything that does not need the shard files: the version,
// the set of keys and their types, plain file names, and that the pieces fill each file and each tensor exactly. Fails
// with Exit::data, naming `path` and the key; throws NewerVersion if the version is higher.
std::string manifest_to_text(const Manifest& manifest);
Manifest manifest_from_text(std::string_view text, const std::string& path);
