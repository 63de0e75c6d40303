// Conversion to 8 bits for GEMMs.
#include <atomic>
#include <cmath>
#include <cstring>

#include "kernels/cpu/parallel.h"
#include "kernels/ops.h"
#include "kernels/shared/dispatch.h"
#include "kernels/shared/fp8_scale.h"

namespace ops {

namespace {

constexpr size_t kBlock = 1 << 15;  // elements
constexpr int kTile = 64;           // rows, and columns, that are transposed together

template <class T> struct Quantizer {
    const Quantize& op;
    float inverse;

    // Converts `count` numbers of a row. Returns how many are too large.
    template <class Out> int convert(Out* out, int row, int col, int count) const {
        const T* inp = op.inp.as<T>() + size_t(row) * op.cols + col;
        int saturated = 0;
#pragma omp simd reduction(+ : saturated)
        for (int i = 0; i < count; i++) {
            const float value = to_float(inp[i]) * inverse;
            saturated += std::abs(value) > largest_of<Out>;
            out[i] = from_float<Out>(value);
        }
        return saturated;
    }
    template <class Out> int convert_tile(int row, int col) const {
        const int rows = std::min(kTile, op.rows - row), cols = std::min(kTile, op.cols - col);
        Out tile[kTile][kTile];
        int saturated = 0;
        for (int r = 0; r < rows; r++) saturated += convert(tile[r], row + r, col, cols);
        Out* const out = op.out.as<Out>();
        Out* const transposed = op.transposed.as<Out>();
        for (int r = 0; out && r < rows; r++)
            std::memcpy(out + size_t(row + r) * op.cols + col, tile[r], size_t(cols) * sizeof(Out));
        for (int c = 0; transposed && c < cols; c++)
            for (int r = 0; r < rows; r++) transposed[size_t(col + c) * op.rows + row + r] = tile[r][c];
        return saturated;
    }
};

}  // namespace

// The bits of magnitudes have the order of the magnitudes, and a NaN is above infinity.
void abs_max(const AbsMax& op, Stream) {
    dispatch("abs_max", {op.inp}, [&]<class T>() {
        const T* inp = op.inp.as<T>();
        std::atomic<uint32_t> most = 0;
        parallel_blocks(op.count, kBlock, [&](size_t begin, size_t end) {
            uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
            for (size_t i = begin; i < end; i++)
                largest = std::max(largest, std::bit_cast<uint32_t>(to_float(inp[i])) & 0x7fffffffu);
            uint32_t before = most;
            while (largest > before && !most.compare_exchange_weak(before, largest)) {}
        });
        *op.out = std::bit_cast<float>(most.load());
    });
}

void quantize(const Quantize& op, Stream) {
    const Dtype to = storage_type("quantize", {op.out, op.transposed});
    dispatch_fp8("quantize", to, [&]<class Out>() {
        *op.scale = fp8_scale<Out>(*op.amax);
        dispatch("quantize", {op.inp}, [&]<class T>() {
            const Quantizer<T> quantizer{op, inverse_of_scale(*op.scale)};
            const int across = (op.cols + kTile - 1) / kTile, down = (op.rows + kTile - 1) / kTile;
            std::atomic<int64_t> saturated = 0;
            parallel_blocks(size_t(across) * size_t(down), 1, [&](size_t begin, size_t end) {
                for (size_t i = begin; i < end; i++)
                    saturated += quantizer.template convert_tile<Out>(int(i) / across * kTile, int(i) % across * kTile);
            });
            if (op.saturated) *op.saturated += double(saturated);
        });
    });
}

}  // namespace ops
