// SOAP and SOAP-Muon: their steps, bases and state.
#include <array>
#include <map>
#include <numeric>
#include <random>

#include "model/gpt.h"
#include "model/matrices.h"
#include "model/plan.h"
#include "model/soap.h"
#include "test/support/catch.h"
#include "test/support/matrices.h"
#include "test/support/nano_gpt.h"
#include "test/support/tolerance.h"

namespace {

GptOptions soap_options(OptimizerKind kind = OptimizerKind::soap) {
    GptOptions options = nano_options(Dtype::fp32);
    options.shape.given_kv_heads = 1;
    options.shape.gated_mlp = true;
    options.shape.given_hidden = 40;  // fewer than channels: gates and ups are wide, fc_proj is tall
    set_optimizer(options.optimizer, kind);
    if (kind == OptimizerKind::soap) options.optimizer.soap_interval = 5;
    options.optimizer.grad_clip = 0;
    return options;
}

// One step with new tokens. loss_scale: infinite gradients if it is.
void take_step(Gpt& gpt, int update, double rate, float loss_scale = 1) {
    const GptOptions& options = gpt.options();
    const size_t tokens = size_t(options.batch) * size_t(options.seq_len);
    const std::vector<int> ids = nano_tokens(tokens + 1, options.shape.vocab_size, unsigned(update));
    gpt.begin_step({.loss_scale = loss_scale, .learning_rate = rate, .update = update});
    gpt.forward(ids.data());
    gpt.backward(ids.data() + 1, 1.0f / float(tokens));
    gpt.end_step();
}

Doubles state_of(const Gpt& gpt, const std::string& name) {
    for (const NamedTensor& tensor : gpt.saved_tensors())
        if (tensor.name == name) {
            const std::vector<float> values = values_of({tensor});
            return {values.begin(), values.end()};
        }
    FAIL("no state " << name);
    return {};
}

double norm_of(const double* values, size_t count) {
    return std::sqrt(std::inner_product(values, values + count, values, 0.0));
}
double norm_of(const Doubles& values) { return norm_of(values.data(), values.size()); }

// One iteration of the power method, and how far it amplifies errors of each row: 1 / the smallest norm so far of a
// row's part that is orthogonal to the rows before it, relative to the norm of the matrix. A row whose part is below
// 1e-6 keeps its direction in the basis before.
struct Basis {
    Doubles rows, amplification;
};
Basis next_basis(const Doubles& before, const Doubles& average, int side) {
    const size_t n = size_t(side);
    const Doubles image = product(before, average, side, side, side);
    const double norm = norm_of(image);
    Basis next{Doubles(n * n), Doubles(n)};
    double smallest = 1;
    for (size_t r = 0; r < n; r++) {
        double* x = next.rows.data() + r * n;
        double size = 0;
        for (const Doubles* source : {&image, &before}) {
            std::copy_n(source->begin() + ptrdiff_t(r * n), n, x);
            for (size_t other = 0; other < 2 * r; other++) {
                const double* q = next.rows.data() + other % r * n;
                const double component = std::inner_product(x, x + n, q, 0.0);
                for (size_t c = 0; c < n; c++) x[c] -= component * q[c];
            }
            size = norm_of(x, n);
            if (source == &before) smallest = std::min(smallest, size);
            if (size > 1e-6 * norm) {
                if (source == &image) smallest = std::min(smallest, size / norm);
                break;
            }
        }
        for (size_t c = 0; c < n; c++) x[c] /= size;
        next.amplification[r] = 1 / smallest;
    }
    return next;
}

// The textbook's state of a matrix.
struct Soap {
    Doubles m, v, left, right, left_basis, right_basis;
    Doubles v_noise;  // the mean square of the noise in the gradients of v
};

// A matrix x (rows, cols) in the bases of a state, and the standard deviation of FP32's rounding in it. A product of
// vectors a and b with n terms has n roundings of partial sums. If these grow linearly to |a| |b|, which is more than a
// random walk, and a rounding is uniform in +-kRoundoff of its sum, the deviation is kRoundoff |a| |b| sqrt(n) / 3. The
// noise of the first product is rotated by the second.
struct Rotated {
    Doubles values, noise;

    Rotated(const Soap& s, const Doubles& x, int rows, int cols) : noise(x.size()) {
        const Doubles half = product(s.left_basis, x, rows, rows, cols);
        values = product(half, transposed(s.right_basis, cols, cols), rows, cols, cols);
        Doubles row_norms = Doubles(size_t(rows)), column_squares = Doubles(size_t(cols));
        Doubles rotation_squares = s.right_basis;
        for (size_t i = 0; i < x.size(); i++) column_squares[i % size_t(cols)] += x[i] * x[i];
        for (double& value : rotation_squares) value *= value;
        const Doubles rotated = product(rotation_squares, column_squares, cols, cols, 1);
        for (size_t i = 0; i < x.size(); i++) {
            const size_t row = i / size_t(cols);
            row_norms[row] = norm_of(half.data() + row * size_t(cols), size_t(cols));
            noise[i] =
                kRoundoff / 3 *
                std::hypot(std::sqrt(rows * rotated[i % size_t(cols)]), std::sqrt(double(cols)) * row_norms[row]);
        }
    }
};

void accumulate(Doubles& average, const Doubles& value, double decay) {
    average.resize(value.size());
    for (size_t i = 0; i < value.size(); i++) average[i] = decay * average[i] + (1 - decay) * value[i];
}

// Compares a basis of the program with the textbook's, which continues with the program's, so that errors do not grow
// from step to step. Products and sums of n terms round a row by at most summation_error(n) of the matrix's norm. After
// a row's components along other panels are near 0, it is rounded to float at most four times.
void check_basis(const Gpt& gpt, const std::string& name, Doubles& basis, const Doubles& average, int side,
                 int iterations) {
    const size_t n = size_t(side);
    INFO(name);
    if (basis.empty()) {
        basis.resize(n * n);
        for (size_t i = 0; i < n * n; i += n + 1) basis[i] = 1;
    }
    Doubles amplification(n);
    for (int i = 0; i < iterations; i++) {
        const Basis next = next_basis(basis, average, side);
        basis = next.rows;
        for (size_t r = 0; r < n; r++) amplification[r] += next.amplification[r];
    }
    const Doubles found = state_of(gpt, name);
    const Doubles squares = product(found, transposed(found, side, side), side, side, side);
    double orthogonality = 0, worst = 0;
    for (size_t i = 0; i < n * n; i++)
        orthogonality = std::max(orthogonality, std::abs(squares[i] - double(i % (n + 1) == 0)));
    for (size_t r = 0; r < n; r++) {
        Doubles difference(n);
        for (size_t c = 0; c < n; c++) difference[c] = found[r * n + c] - basis[r * n + c];
        worst = std::max(worst, norm_of(difference) / amplification[r]);
    }
    CHECK(std::isfinite(norm_of(found)));  // std::max ignores NaN
    CHECK(orthogonality < 5 * kRoundoff);
    CHECK(worst < summation_error(double(n)));
    basis = found;
}

}  // namespace

namespace {

// The textbook: Vyas et al., arXiv 2409.11321, algorithm 3, with Adam's bias corrections. The first step only finds the
// bases. In double, from the program's gradients. Checks each update and returns the
// median of the relative errors.
double follow_paper(double rate, float eps) {
    GptOptions options = soap_options();
    options.optimizer.weight_decay = 0.1;
    options.optimizer.eps = eps;
    const double decay = double(float(0.1)), beta1 = 0.95, beta2 = 0.95;
    Gpt gpt(options, comm_single());
    gpt.initialize(42);
    std::map<std::string, Soap> states;
    Doubles errors;
    for (int t = 1; t <= 20; t++) {
        const std::vector<float> before = values_of(gpt.master_tensors());
        take_step(gpt, t, rate);
        const std::vector<float> after = values_of(gpt.master_tensors()), gradients = values_of(gpt.gradient_tensors());
        for (const Matrix& matrix : lay_out_matrices(gpt.layout())) {
            INFO("step " << t << " " << matrix.name);
            const size_t place = place_of(gpt.layout(), matrix), count = matrix.count();
            const int rows = matrix.rows, cols = matrix.cols;
            Soap& s = states[matrix.name];
            const Doubles g(gradients.begin() + ptrdiff_t(place), gradients.begin() + ptrdiff_t(place + count));
            const Doubles g_transposed = transposed(g, rows, cols);
            if (t == 1) {
                CHECK(std::equal(before.begin() + ptrdiff_t(place), before.begin() + ptrdiff_t(place + count),
                                 after.begin() + ptrdiff_t(place)));
            } else {
                accumulate(s.m, g, beta1);
                const Rotated g_rotated(s, g, rows, cols), m_rotated(s, s.m, rows, cols);
                Doubles squares(count), noise_squares(count), direction(count), error(count);
                for (size_t i = 0; i < count; i++) {
                    squares[i] = std::pow(g_rotated.values[i], 2);
                    noise_squares[i] = std::pow(g_rotated.noise[i], 2);
                }
                accumulate(s.v, squares, beta2);
                accumulate(s.v_noise, noise_squares, beta2);
                // The noise of sqrt(v), a norm, is at most that norm of the noise.
                const double correction1 = 1 - std::pow(beta1, t - 1), correction2 = 1 - std::pow(beta2, t - 1);
                double noise = 0;
                for (size_t i = 0; i < count; i++) {
                    const double root = std::sqrt(s.v[i] / correction2) + eps;
                    direction[i] = m_rotated.values[i] / correction1 / root;
                    noise += std::pow(m_rotated.noise[i] / correction1 / root, 2) +
                             std::pow(direction[i] / root, 2) * s.v_noise[i] / correction2;
                }
                const Doubles step = product(product(transposed(s.left_basis, rows, rows), direction, rows, rows, cols),
                                             s.right_basis, rows, cols, cols);
                for (size_t i = 0; i < count; i++) {
                    const double w = before[place + i];
                    error[i] = after[place + i] - (w - rate * decay * w - rate * step[i]);
                }
                // Without the rounding of the master weights.
                const double stored = kRoundoff * norm_of(Doubles(after.begin() + ptrdiff_t(place),
                                                                  after.begin() + ptrdiff_t(place + count)));
                const double relative = (norm_of(error) - stored) / (rate * norm_of(step));
                const double amplified = 3 * std::sqrt(noise) / norm_of(step);  // three standard deviations
                INFO("amplified rounding " << amplified);
                CHECK(relative < 1e-6 + amplified);
                errors.push_back(relative);
            }
            accumulate(s.left, product(g, g_transposed, rows, cols, rows), beta2);
            accumulate(s.right, product(g_transposed, g, cols, rows, cols), beta2);
            if ((t - 1) % options.optimizer.soap_interval != 0) continue;
            const int iterations = t == 1 ? kSoapInitialIterations : 1;
            check_basis(gpt, "left_basis." + matrix.name, s.left_basis, s.left, rows, iterations);
            check_basis(gpt, "right_basis." + matrix.name, s.right_basis, s.right, cols, iterations);
        }
    }
    std::ranges::sort(errors);
    return errors[errors.size() / 2];
}

}  // namespace

TEST_CASE("20 steps of SOAP follow its paper", "[model]") {
    CHECK(follow_paper(0.0625, 1e-8f) < 1e-6);
    CHECK(follow_paper(1, 1e-2f) < 1e-6);  // eps is above most roots of V
}

namespace {

// A normally distributed matrix with the same numbers in every run.
Doubles normal_numbers(size_t count) {
    std::mt19937 generator(1);
    std::normal_distribution<double> normal;
    Doubles numbers(count);
    for (double& number : numbers) number = normal(generator);
    return numbers;
}

// The textbook of SOAP-Muon: github.com/KellerJordan/modded-nanogpt, records/track_3_optimization, record 44, with
// Adam's eps and without sorting the bases. In double, from the program's gradients. The tolerance of a step is three
// times the effect of the noise of the rotations and of a relative noise of 1e-6, both on the orthogonalization.
// Returns the median of the relative errors.
double follow_soap_muon(const GptOptions& options, double rate) {
    const OptimizerSettings& settings = options.optimizer;
    const double momentum = settings.momentum, beta2 = settings.muon_beta2;
    Gpt gpt(options, comm_single());
    gpt.initialize(42);
    std::map<std::string, Soap> states;
    Doubles errors;
    for (int t = 1; t <= 12; t++) {
        const std::vector<float> before = values_of(gpt.master_tensors());
        take_step(gpt, t, rate);
        const std::vector<float> after = values_of(gpt.master_tensors()), gradients = values_of(gpt.gradient_tensors());
        for (const Matrix& matrix : lay_out_matrices(gpt.layout())) {
            INFO("step " << t << " " << matrix.name);
            const size_t place = place_of(gpt.layout(), matrix), count = matrix.count();
            const int rows = matrix.rows, cols = matrix.cols;
            Soap& s = states[matrix.name];
            const Doubles g(gradients.begin() + ptrdiff_t(place), gradients.begin() + ptrdiff_t(place + count));
            accumulate(s.m, g, momentum);
            Doubles direction = s.m;
            for (size_t i = 0; settings.nesterov && i < count; i++)
                direction[i] = (1 - momentum) * g[i] + momentum * s.m[i];
            Doubles noise = normal_numbers(count);
            const double size = norm_of(direction) / std::sqrt(double(count));
            for (double& value : noise) value *= 1e-6 * size;
            if (t > 1) {
                const Rotated rotated(s, direction, rows, cols);
                Doubles squares(count), noise_squares(count), error(count);
                for (size_t i = 0; i < count; i++) {
                    squares[i] = std::pow(rotated.values[i], 2);
                    noise_squares[i] = std::pow(rotated.noise[i], 2);
                }
                accumulate(s.v, squares, beta2);
                accumulate(s.v_noise, noise_squares, beta2);
                for (size_t i = 0; i < count; i++) {
                    const double root = std::sqrt(s.v[i]) + settings.eps;
                    direction[i] = rotated.values[i] / root;
                    error[i] = noise[i] / size *
                               std::hypot(1, rotated.noise[i] / root / 1e-6,
                                          direction[i] / root * std::sqrt(s.v_noise[i]) / 1e-6);
                }
                const Doubles back = transposed(s.left_basis, rows, rows);
                direction = product(product(back, direction, rows, rows, cols), s.right_basis, rows, cols, cols);
                noise = product(product(back, error, rows, rows, cols), s.right_basis, rows, cols, cols);
            }
            for (size_t i = 0; i < count; i++) noise[i] += direction[i];
            const Doubles step = orthogonalized(direction, rows, cols, false);
            const Doubles noisy = orthogonalized(noise, rows, cols, false);
            const double scale = 0.2 * std::sqrt(std::max(rows, cols));
            Doubles error(count), shift(count);
            for (size_t i = 0; i < count; i++) {
                const double w = before[place + i];
                error[i] = (after[place + i] - w) / (rate * scale) + step[i];
                shift[i] = noisy[i] - step[i];
            }
            // Without the rounding of the master weights.
            const double stored =
                kRoundoff / (rate * scale) *
                norm_of(Doubles(after.begin() + ptrdiff_t(place), after.begin() + ptrdiff_t(place + count)));
            const double relative = (norm_of(error) - stored) / norm_of(step);
            CHECK(relative < 1e-6 + 3 * norm_of(shift) / norm_of(step));
            errors.push_back(relative);
            const Doubles g_transposed = transposed(g, rows, cols);
            accumulate(s.left, product(g, g_transposed, rows, cols, rows), beta2);
            accumulate(s.right, product(g_transposed, g, cols, rows, cols), beta2);
            if ((t - 1) % settings.soap_interval != 0) continue;
            const int iterations = t == 1 ? kSoapInitialIterations : 1;
            check_basis(gpt, "left_basis." + matrix.name, s.left_basis, s.left, rows, iterations);
            check_basis(gpt, "right_basis." + matrix.name, s.right_basis, s.right, cols, iterations);
        }
    }
    std::ranges::sort(errors);
    return errors[errors.size() / 2];
}

}  // namespace

TEST_CASE("12 steps of SOAP-Muon follow its source", "[model]") {
    GptOptions options = soap_options(OptimizerKind::soap_muon);
    options.optimizer.weight_decay = 0;
    CHECK(options.optimizer.soap_interval == 1);
    CHECK(follow_soap_muon(options, 0.125) < 1e-3);
    options.optimizer.soap_interval = 3;
    options.optimizer.nesterov = false;
    options.optimizer.eps = 1e-3f;  // above many roots of V
    CHECK(follow_soap_muon(options, 0.125) < 1e-3);
}

TEST_CASE("SOAP changes nothing when a gradient is not finite", "[model]") {
    for (int i = 0; i < 6; i++) {
        const int skipped = std::array{1, 2, 6}[size_t(i % 3)];  // 1 and 6 would change the bases
        const GptOptions options = soap_options(i < 3 ? OptimizerKind::soap : OptimizerKind::soap_muon);
        INFO(name_of(options.optimizer.name) << " before update " << skipped);
        Gpt clean(options, comm_single()), interrupted(options, comm_single());
        clean.initialize(42), interrupted.initialize(42);
        for (int t = 1; t <= 7; t++) {
            if (t == skipped) {
                const std::vector<float> before = values_of(interrupted.saved_tensors());
                take_step(interrupted, t, 1e-2, INFINITY);
                CHECK(same_bits(values_of(interrupted.saved_tensors()), before));
            }
            take_step(clean, t, 1e-2), take_step(interrupted, t, 1e-2);
        }
        CHECK(same_bits(values_of(interrupted.saved_tensors()), values_of(clean.saved_tensors())));
    }
}

TEST_CASE("SOAP's state has the matrix's name", "[model]") {
    const GptOptions options = soap_options();
    Gpt gpt(options, comm_single());
    std::map<std::string, std::vector<size_t>> shapes;
    size_t saved = 0;
    for (const NamedTensor& tensor : gpt.saved_tensors()) {
        saved += tensor.count * sizeof(float);
        const std::string matrix = ".h.1.fc_proj.weight";
        if (tensor.name.ends_with(matrix))
            shapes[tensor.name.substr(0, tensor.name.size() - matrix.size())] = tensor.shape;
    }
    CHECK(saved == saved_bytes(options));
    const size_t rows = size_t(options.shape.n_embd), cols = 40;
    CHECK(shapes == std::map<std::string, std::vector<size_t>>{{"master", {rows, cols}},
                                                               {"m", {rows, cols}},
                                                               {"v", {rows, cols}},
                                                               {"left", {rows, rows}},
                                                               {"right", {cols, cols}},
                                                               {"left_basis", {rows, rows}},
                                                               {"right_basis", {cols, cols}}});
    // The plan counts what the owners keep: with several ranks each matrix once.
    for (const int ranks : {1, 3}) {
        size_t planned = 0, expected = 0;
        GptOptions of_rank = options;
        of_rank.ranks = ranks;
        for (of_rank.rank = 0; of_rank.rank < ranks; of_rank.rank++)
            for (const MemoryRegion& region : plan_memory(of_rank))
                if (region.name == std::string("left") || region.name == std::string("right_basis"))
                    planned += region.bytes;
        for (const Matrix& matrix : lay_out_matrices(gpt.layout()))
            for (const int side : {matrix.rows, matrix.cols}) expected += size_t(side) * size_t(side) * sizeof(float);
        CHECK(planned >= expected);
        CHECK(planned < expected + size_t(ranks) * 2 * 256 + 2 * 30 * kTensorAlignment * sizeof(float));
    }
}
