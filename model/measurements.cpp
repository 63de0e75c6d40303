#include "model/measurements.h"

#include <cmath>
#include <numeric>

#include "kernels/base/exact_squares.h"
#include "kernels/device.h"
#include "kernels/op_stream.h"
#include "kernels/ops.h"
#include "model/sharding.h"
#include "model/tensors.h"

// The rows' mean and rstd are already on the device: the mean square of a row is mean^2 + 1 / rstd^2 - eps, for RMSNorm
// without the mean.
void measure_residual(GptState& s, const NormActivations& norm, size_t place) {
    const size_t rows = s.options.part().rows() / size_t(s.group.comm.size);
    std::vector<float>& host = s.host_statistics;
    host.assign(2 * rows, 0.0f);
    if (norm.mean.view) copy_to_host(host.data(), norm.mean.view.data, rows * sizeof(float), s.stream);
    copy_to_host(host.data() + rows, norm.rstd.view.data, rows * sizeof(float), s.stream);
    synchronize(s.stream);
    double sum = 0;
    for (size_t row = 0; row < rows; row++) {
        const double mean = host[row], rstd = host[rows + row];
        sum += mean * mean + 1 / (rstd * rstd) - double(float(s.options.shape.norm_eps));
    }
    s.residual_rms[place] = std::sqrt(sum < 0 ? 0 : sum / double(rows));  // rounding can make it negative
}

// Returns the sum of squares of each tensor's gradient.
static std::vector<double> tensor_squares(const GptState& s) {
    std::vector<double> sums(step_sums(s).squares), squares;
    copy_to_host(sums.data(), s.sums, sums.size() * sizeof(double), s.stream);
    synchronize(s.stream);
    for (size_t i = 0; i < sums.size(); i += ops::kSquareEntries) squares.push_back(ops::sum_of_bins(&sums[i]));
    return squares;
}

std::vector<double> tensor_norms(const GptState& s) {
    std::vector<double> norms = tensor_squares(s);
    for (double& norm : norms) norm = std::sqrt(norm) / double(s.step.loss_scale);
    return norms;
}

// Returns the whole gradients of the first micro-step, with both parts of a tied embedding's.
static const float* first_gradients(GptState& s) {
    if (s.head_levels.empty()) return s.grad;
    float* const sum = s.levels[1];  // of the next micro-step
    const Bucket& tied = s.layout.buckets[size_t(s.layout.tied_bucket)];
    copy_on_device(sum, s.grad, s.layout.elements * sizeof(float), s.stream);
    run(s.stream, ops::add,
        {.out = sum + tied.begin, .inp = s.head_levels[0], .count = s.layout.bucket_elements(s.layout.tied_bucket)});
    return sum;
}

double gradients_squared(GptState& s) {
    wait_shards(s);
    if (!s.options.keeps_whole_gradients())
        add_squares(s);
    else
        run(s.stream, ops::squared_sums,
            {.out = s.sums, .values = first_gradients(s), .chunks = s.grid, .n_chunks = int(chunk_count(s.layout))},
            {.elements = s.layout.elements});
    const std::vector<double> squares = tensor_squares(s);
    clear(s.sums, step_sums(s).squares, s.stream);
    return std::accumulate(squares.begin(), squares.end(), 0.0) /
           (double(s.step.loss_scale) * double(s.step.loss_scale));
}
