#include "model/fp8.h"

#include <algorithm>
#include <array>

#include "kernels/base/check.h"
#include "kernels/op_stream.h"
#include "model/layers.h"

namespace {

constexpr size_t kMultiple = 16;  // of the sizes of a GEMM

// The linear layers of a block: (output channels, input channels).
std::array<std::pair<int, int>, 4> linear_layers(const GptShape& part) {
    return {{{part.computed_qkv_channels(), part.n_embd},
             {part.n_embd, part.attention_channels()},
             {part.fc_channels(), part.n_embd},
             {part.n_embd, part.hidden()}}};
}

}  // namespace

std::string fp8_problem(const GptOptions& options) {
    if (!options.fp8) return "";
    const int terms = terms_of_sums(options);
    // Tensor parallelism computes a micro-batch in two parts, and sums with terms compute each part of the channels.
    const size_t rows = options.part().rows() / size_t(options.context.own_segments()), bands = terms > 1 ? 2 : 1;
    if (rows % (kMultiple * bands) != 0)
        return format(
            "train.precision \"fp8\" computes %zu tokens at a time, which must be a multiple of %zu: change "
            "train.batch_size or train.seq_len",
            rows, kMultiple * bands);
    for (const auto& [n, k] : linear_layers(options.shape.part(terms)))
        for (const int channels : {n, k})
            if (channels % int(kMultiple) != 0)
                return format("train.precision \"fp8\" needs multiples of %zu channels%s, but a linear layer has %d",
                              kMultiple, terms > 1 ? format(" in each of %d parts", terms).c_str() : "", channels);
    return "";
}

Fp8Buffers place_fp8(const GptOptions& options, const GptShape& part, Arena& arena) {
    Fp8Buffers buffers;
    if (!options.fp8) return buffers;
    const size_t tokens = options.part().rows();
    size_t inputs = 0, outputs = 0, weights = 0;
    for (const auto& [n, k] : linear_layers(part)) {
        inputs = std::max(inputs, tokens * size_t(k));
        outputs = std::max(outputs, tokens * size_t(n));
        weights = std::max(weights, size_t(n) * size_t(k));
    }
    const auto place = [&](Fp8Matrix& matrix, const char* name, size_t count, Dtype type) {
        float* const numbers = arena.take<float>(kFp8Operands, format("%s_scale", name), 2);
        matrix.amax = numbers, matrix.scale = numbers ? numbers + 1 : nullptr;
        const auto take = [&](const char* form) {
            View values = arena.take(kFp8Operands, format("%s_%s", name, form), count, type);
            values.scale = matrix.scale;
            return values;
        };
        matrix.rows = take("rows");
        matrix.columns = take("columns");
    };
    place(buffers.input, "fp8_input", inputs, Dtype::e4m3);
    place(buffers.weight, "fp8_weight", weights, Dtype::e4m3);
    place(buffers.gradient, "fp8_gradient", outputs, options.fp8_gradients);
    return buffers;
}

bool keeps_amax(const GptOptions& options) {
    return options.fp8 && terms_of_sums(options) == 1 && options.tensor_parallel.size == 1 &&
           options.pipeline.size == 1 && !options.context.is_divided();
}

static void convert(const LayerContext& x, const Fp8Matrix& to, View by_rows, View by_columns, ConstView from, int rows,
                    int cols) {
    if (!from.amax) {
        run(x.stream, ops::abs_max, {.out = to.amax, .inp = from, .count = size_t(rows) * size_t(cols)});
        from.amax = to.amax;
    }
    run(x.stream, ops::quantize,
        {.out = by_rows,
         .transposed = by_columns,
         .scale = to.scale,
         .inp = from,
         .amax = from.amax,
         .rows = rows,
         .cols = cols,
         .saturated = x.fp8->saturated});
}

ConstView fp8_rows(const LayerContext& x, const Fp8Matrix& to, ConstView from, int rows, int cols) {
    convert(x, to, to.rows, nullptr, from, rows, cols);
    return to.rows;
}

ConstView fp8_columns(const LayerContext& x, const Fp8Matrix& to, ConstView from, int rows, int cols, bool with_rows) {
    convert(x, to, with_rows ? to.rows : View(), to.columns, from, rows, cols);
    return to.columns;
}
