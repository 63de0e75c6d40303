// The matrices of Muon: which there are, who owns them, and their orthogonalization.
#include <cmath>
#include <map>

#include "model/gpt.h"
#include "model/matrices.h"
#include "model/plan.h"
#include "model/update.h"
#include "test/support/catch.h"
#include "test/support/matrices.h"
#include "test/support/nano_gpt.h"

namespace {

double work_of(const Matrix& matrix) {
    const double small = matrix.smaller();
    return 4 * small * double(matrix.count()) + 2 * small * small * small;
}

}  // namespace

TEST_CASE("queries, keys, values, gates and ups are separate matrices", "[model]") {
    GptShape shape{1, 4, 2, 64, 32, 100};  // 2 key/value heads
    shape.gated_mlp = true;
    const TensorLayout layout = lay_out_tensors(shape);
    std::map<std::string, std::vector<std::pair<size_t, int>>> found;  // first element and rows, by tensor
    for (const Matrix& matrix : lay_out_matrices(layout)) {
        CHECK(matrix.cols == layout.tensors[size_t(matrix.tensor)].cols);
        found[layout.tensors[size_t(matrix.tensor)].name].push_back({matrix.first, matrix.rows});
    }
    const size_t hidden = size_t(shape.hidden());
    const std::map<std::string, std::vector<std::pair<size_t, int>>> expected = {
        {"h.0.qkv.weight", {{0, 64}, {64 * 64, 32}, {96 * 64, 32}}},
        {"h.0.attn_proj.weight", {{0, 64}}},
        {"h.0.fc.weight", {{0, int(hidden)}, {hidden * 64, int(hidden)}}},
        {"h.0.fc_proj.weight", {{0, 64}}}};
    CHECK(found == expected);
}

TEST_CASE("every matrix has an owner, and no rank has much more work than another", "[model]") {
    for (const int ranks : {1, 2, 3, 4, 7}) {
        const TensorLayout layout = lay_out_tensors({12, 12, 12, 768, 1024, 50257}, ranks);
        std::vector<double> load(size_t(ranks), 0.0);
        double largest = 0;
        for (const Matrix& matrix : lay_out_matrices(layout)) {
            REQUIRE((0 <= matrix.owner && matrix.owner < ranks));
            load[size_t(matrix.owner)] += work_of(matrix);
            largest = std::max(largest, work_of(matrix));
        }
        CHECK(std::ranges::max(load) - std::ranges::min(load) <= largest);
    }
}

TEST_CASE("ranks that divide the layers have parts of the same matrices", "[model]") {
    GptShape shape{2, 8, 4, 64, 32, 100};  // 4 key/value heads
    shape.gated_mlp = true;
    const std::vector<Matrix> whole = lay_out_matrices(lay_out_tensors(shape, 6));
    for (const int size : {2, 4})
        for (int rank = 0; rank < size; rank++) {
            const TensorLayout layout = lay_out_tensors(shape, 3, 0, {rank, size});
            const std::vector<Matrix> matrices = lay_out_matrices(layout);
            REQUIRE(matrices.size() == whole.size());
            std::map<int, size_t> next;  // by tensor: the first element after the matrices so far
            std::vector<double> load(size_t(3 * size), 0.0);
            double largest = 0;
            for (size_t i = 0; i < whole.size(); i++) {
                INFO(size << " " << whole[i].name);
                CHECK(matrices[i].name == whole[i].name);
                CHECK(matrices[i].rows == whole[i].rows);
                CHECK(matrices[i].cols == whole[i].cols);
                if (size == 2) CHECK(matrices[i].owner == whole[i].owner);  // 6 ranks, as in `whole`
                CHECK(part_elements(layout, matrices[i]) * size_t(size) == matrices[i].count());
                CHECK(matrices[i].first == next[matrices[i].tensor]);
                next[matrices[i].tensor] += part_elements(layout, matrices[i]);
                load.at(size_t(matrices[i].owner)) += work_of(matrices[i]);
                largest = std::max(largest, work_of(matrices[i]));
            }
            for (const auto& [tensor, end] : next) CHECK(end == layout.tensors[size_t(tensor)].count);
            CHECK(std::ranges::max(load) - std::ranges::min(load) <= largest);
        }
}

namespace {

GptOptions muon_options(Dtype precision) {
    GptOptions options = nano_options(precision);
    options.shape.given_kv_heads = 1;
    options.shape.gated_mlp = true;
    options.shape.given_hidden = 40;  // fewer than channels: gates and ups are wide, fc_proj is tall
    set_optimizer(options.optimizer, OptimizerKind::muon);
    options.optimizer.weight_decay = 0;
    options.optimizer.grad_clip = 0;
    return options;
}

// Runs one step from the initial weights and returns the masters before and after it, and the gradients.
struct Step {
    std::vector<float> before, after, gradients;
    TensorLayout layout;
};
Step one_step(const GptOptions& options, double learning_rate) {
    Gpt gpt(options, comm_single());
    gpt.initialize(42);
    Step step{.before = values_of(gpt.master_tensors()), .after = {}, .gradients = {}, .layout = gpt.layout()};
    const size_t tokens = size_t(options.batch) * size_t(options.seq_len);
    const std::vector<int> ids = nano_tokens(tokens + 1, options.shape.vocab_size);
    gpt.begin_step({.learning_rate = learning_rate});
    gpt.forward(ids.data());
    gpt.backward(ids.data() + 1, 1.0f / float(tokens));
    gpt.end_step();
    step.after = values_of(gpt.master_tensors());
    step.gradients = values_of(gpt.gradient_tensors());
    return step;
}

}  // namespace

// The direction is rounded to BF16 before and after the iteration. With FP32 only the second rounding makes a
// difference here. BF16 iterations amplify their roundings where a singular value is small, but the result has the same
// direction.
TEST_CASE("Muon's step is the orthogonalized gradient of each matrix", "[model]") {
    for (const Dtype precision : {Dtype::fp32, Dtype::bf16, Dtype::fp16})
        for (const MuonIteration iteration : {MuonIteration::newton_schulz, MuonIteration::polar_express})
            for (const MuonScale scale : {MuonScale::adamw_rms, MuonScale::shape}) {
                GptOptions options = muon_options(precision);
                options.optimizer.muon_iteration = iteration;
                options.optimizer.muon_scale = scale;
                const double rate = 0.125;
                const Step step = one_step(options, rate);
                for (const Matrix& matrix : lay_out_matrices(step.layout)) {
                    const size_t place = place_of(step.layout, matrix), count = matrix.count();
                    INFO(name_of(precision) << " " << name_of(iteration) << " " << name_of(scale) << " "
                                            << step.layout.tensors[size_t(matrix.tensor)].name << " " << matrix.first);
                    const double rows = matrix.rows, cols = matrix.cols;
                    const double factor = scale == MuonScale::shape ? std::sqrt(std::max(1.0, rows / cols))
                                                                    : 0.2 * std::sqrt(std::max(rows, cols));
                    // The first step's direction: momentum 0.95 leaves 0.05 of the gradient, and Nesterov's step is
                    // g + 0.95 (0.05 g - g), a multiple of it.
                    Doubles direction(count);
                    for (size_t i = 0; i < count; i++) {
                        const float g = step.gradients[place + i], m = 0.05f * g;
                        direction[i] = to_float(from_float<bf16>(g + 0.95f * (m - g)));
                    }
                    const Doubles expected =
                        orthogonalized(direction, matrix.rows, matrix.cols, iteration == MuonIteration::polar_express);
                    double error = 0, inner = 0, size = 0, expected_size = 0;
                    for (size_t i = 0; i < count; i++) {
                        const double change = (double(step.before[place + i]) - step.after[place + i]) / rate;
                        error += std::pow(change - factor * expected[i], 2);
                        inner += change * factor * expected[i];
                        size += change * change;
                        expected_size += std::pow(factor * expected[i], 2);
                    }
                    if (precision == Dtype::fp32) CHECK(std::sqrt(error / expected_size) < 0.02);
                    CHECK(inner / std::sqrt(size * expected_size) > 0.95);
                    CHECK(std::abs(std::sqrt(size / expected_size) - 1) < 0.05);
                }
            }
}

TEST_CASE("SOAP-Muon's first step is Muon's, except for the rounding of messages", "[model]") {
    for (const Dtype precision : {Dtype::fp32, Dtype::bf16, Dtype::fp16}) {
        INFO(name_of(precision));
        GptOptions options = muon_options(precision);
        const Step muon = one_step(options, 0.125);
        set_optimizer(options.optimizer, OptimizerKind::soap_muon);
        const Step soap = one_step(options, 0.125);
        for (const Matrix& matrix : lay_out_matrices(muon.layout)) {
            INFO(matrix.name);
            double inner = 0, of_muon = 0, of_soap = 0;
            for (size_t i = place_of(muon.layout, matrix), end = i + matrix.count(); i < end; i++) {
                const double a = double(muon.after[i]) - muon.before[i], b = double(soap.after[i]) - soap.before[i];
                inner += a * b, of_muon += a * a, of_soap += b * b;
            }
            CHECK(inner / std::sqrt(of_muon * of_soap) > 0.95);
            CHECK(std::abs(std::sqrt(of_soap / of_muon) - 1) < 0.05);
        }
    }
}

// The textbook: Li et al., "NorMuon: Making Muon more efficient and scalable", arXiv 2510.05491, algorithm 1, with
// Nesterov's momentum as in Muon. Small singular values amplify a direction's rounding to BF16, so the momentum is a
// float, as in the op. The result is rounded to BF16, by at most 2^-9; the limit leaves as much for FP32 iterations.
TEST_CASE("20 steps of NorMuon follow its paper", "[model]") {
    for (const MuonScale scale : {MuonScale::adamw_rms, MuonScale::shape}) {
        GptOptions options = muon_options(Dtype::fp32);
        set_optimizer(options.optimizer, OptimizerKind::normuon);
        options.optimizer.muon_scale = scale;
        options.optimizer.weight_decay = 0.1;
        const double rate = 0.01, decay = double(float(0.1));
        Gpt gpt(options, comm_single());
        gpt.initialize(42);
        const size_t tokens = size_t(options.batch) * size_t(options.seq_len);
        const std::vector<int> ids = nano_tokens(tokens + 1, options.shape.vocab_size);
        std::map<std::string, std::vector<float>> momentum;
        std::map<std::string, Doubles> row_v;
        for (int t = 1; t <= 20; t++) {
            const std::vector<float> before = values_of(gpt.master_tensors());
            gpt.begin_step({.learning_rate = rate, .update = t});
            gpt.forward(ids.data());
            gpt.backward(ids.data() + 1, 1.0f / float(tokens));
            gpt.end_step();
            const std::vector<float> after = values_of(gpt.master_tensors());
            const std::vector<float> gradients = values_of(gpt.gradient_tensors());
            for (const Matrix& matrix : lay_out_matrices(gpt.layout())) {
                INFO(name_of(scale) << " step " << t << " " << matrix.name);
                const size_t place = place_of(gpt.layout(), matrix), count = matrix.count();
                const size_t cols = size_t(matrix.cols);
                const double rows = matrix.rows;
                std::vector<float>& m = momentum[matrix.name];
                Doubles& v = row_v[matrix.name];
                m.resize(count), v.resize(size_t(matrix.rows));
                Doubles direction(count);
                for (size_t i = 0; i < count; i++) {
                    const float g = gradients[place + i];
                    m[i] = std::fma(1 - 0.95f, g - m[i], m[i]);
                    direction[i] = to_float(from_float<bf16>(std::fma(0.95f, m[i] - g, g)));
                }
                Doubles normalized = orthogonalized(direction, matrix.rows, matrix.cols, false);
                double squares = 0;
                for (size_t r = 0; r < v.size(); r++) {
                    double sum = 0;
                    for (size_t i = r * cols; i < (r + 1) * cols; i++) sum += normalized[i] * normalized[i];
                    v[r] = 0.95 * v[r] + 0.05 * sum / double(cols);
                    for (size_t i = r * cols; i < (r + 1) * cols; i++) normalized[i] /= std::sqrt(v[r]) + 1e-8;
                    for (size_t i = r * cols; i < (r + 1) * cols; i++) squares += normalized[i] * normalized[i];
                }
                const double norm = scale == MuonScale::adamw_rms
                                        ? 0.2 * std::sqrt(double(count))
                                        : std::sqrt(std::max(1.0, rows / double(cols)) * matrix.smaller());
                double error = 0;
                for (size_t i = 0; i < count; i++) {
                    const double expected = before[place + i] - rate * decay * before[place + i] -
                                            rate * norm / std::sqrt(squares) * normalized[i];
                    error += std::pow(after[place + i] - expected, 2);
                }
                CHECK(std::sqrt(error) / (rate * norm) < 0x1p-8);
            }
        }
    }
}

TEST_CASE("NorMuon's state of rows has the matrix's name", "[model]") {
    GptOptions options = muon_options(Dtype::bf16);
    set_optimizer(options.optimizer, OptimizerKind::normuon);
    Gpt gpt(options, comm_single());
    std::map<std::string, std::vector<size_t>> shapes;
    size_t saved = 0;
    for (const NamedTensor& tensor : gpt.saved_tensors()) saved += tensor.count * sizeof(float);
    CHECK(saved == saved_bytes(options));
    for (const NamedTensor& tensor : gpt.saved_tensors())
        if (tensor.name.starts_with("row_v.h.1.")) {
            shapes[tensor.name] = tensor.shape;
            CHECK(tensor.count == tensor.shape[0]);
            CHECK(tensor.values.data != nullptr);
        }
    const size_t channels = size_t(options.shape.n_embd), head = size_t(options.shape.head_size());
    CHECK(shapes == std::map<std::string, std::vector<size_t>>{{"row_v.h.1.qkv.weight.0", {channels}},
                                                               {"row_v.h.1.qkv.weight.1", {head}},
                                                               {"row_v.h.1.qkv.weight.2", {head}},
                                                               {"row_v.h.1.attn_proj.weight", {channels}},
                                                               {"row_v.h.1.fc.weight.0", {40}},
                                                               {"row_v.h.1.fc.weight.1", {40}},
                                                               {"row_v.h.1.fc_proj.weight", {channels}}});
}

TEST_CASE("Muon leaves embeddings, head and vectors to optim.scalar_name", "[model]") {
    GptOptions lion = muon_options(Dtype::fp32);
    lion.optimizer.scalar_name = OptimizerKind::lion;
    set_optimizer(lion.optimizer, OptimizerKind::muon);
    const Step with_lion = one_step(lion, 1e-3);
    size_t place = 0, others = 0;
    for (const Tensor& tensor : with_lion.layout.tensors) {
        if (tensor.row->role != TensorRole::matrix)
            for (size_t i = place; i < place + tensor.count; i++, others++) {
                const double change = with_lion.before[i] - double(with_lion.after[i]);
                const double sign = (with_lion.gradients[i] > 0) - (with_lion.gradients[i] < 0);
                if (!(std::abs(change - 1e-3 * sign) < 1e-6)) FAIL(tensor.name << " changes by " << change);
            }
        place += tensor.count;
    }
    CHECK(others > 0);
}

TEST_CASE("Muon's state is the momentum of matrices and the scalar optimizer's of the others", "[model]") {
    Gpt gpt(muon_options(Dtype::bf16), comm_single());
    std::map<std::string, int> states;
    for (const NamedTensor& tensor : gpt.state_tensors())
        if (tensor.name.find("qkv.weight") != std::string::npos || tensor.name.find(".wte") != std::string::npos)
            states[tensor.name]++;
    CHECK(states == std::map<std::string, int>{{"master.wte", 1},
                                               {"m.wte", 1},
                                               {"v.wte", 1},
                                               {"master.h.0.qkv.weight", 1},
                                               {"m.h.0.qkv.weight", 1},
                                               {"master.h.1.qkv.weight", 1},
                                               {"m.h.1.qkv.weight", 1},
                                               {"master.h.2.qkv.weight", 1},
                                               {"m.h.2.qkv.weight", 1}});
}
