// The specification checked by mathematics: every backward op of ref:: is the derivative of its forward op.
//
// With double storage only the fp32 statistics and gradients are rounded, so central differences are accurate. The
// objective is always the sum of dout times out, whose gradient the backward op must return.
#include <tuple>

#include "test/support/finite_differences.h"

TEST_CASE("ref::embedding_backward is the derivative of ref::embedding_forward", "[reference]") {
    const int batch = 2, seq_len = 4, channels = 3, vocab = 5, n_positions = 6;
    for (auto [accumulate, accumulate_dwte, with_wpe] :
         {std::tuple(false, true, true), {true, true, true}, {true, false, true}, {false, false, false}}) {
        std::vector<int> tokens = {3, 1, 3, 3, 0, 1, 4, 3};  // without token 2
        std::vector<double> wte = random_values(vocab * channels, 1), wpe = random_values(n_positions * channels, 2);
        std::vector<double> out(tokens.size() * channels), dout = random_values(out.size(), 3);
        std::vector<double> dwte_before = random_values(wte.size(), 4), dwpe_before = random_values(wpe.size(), 5);
        auto dwte = held_before<float>(dwte_before, accumulate_dwte),
             dwpe = held_before<float>(dwpe_before, accumulate);
        ref::embedding_backward(ops::EmbeddingBackward{.dwte = dwte.data(),
                                                       .dwpe = with_wpe ? dwpe.data() : nullptr,
                                                       .scratch = nullptr,
                                                       .dout = dout.data(),
                                                       .tokens = tokens.data(),
                                                       .batch = batch,
                                                       .seq_len = seq_len,
                                                       .channels = channels,
                                                       .vocab = vocab,
                                                       .n_positions = n_positions,
                                                       .accumulate = accumulate,
                                                       .accumulate_dwte = accumulate_dwte});
        Objective objective = [&] {
            ref::embedding_forward(ops::EmbeddingForward{.out = out.data(),
                                                         .tokens = tokens.data(),
                                                         .wte = wte.data(),
                                                         .wpe = with_wpe ? wpe.data() : nullptr,
                                                         .batch = batch,
                                                         .seq_len = seq_len,
                                                         .channels = channels});
            return sum_of_products(out, dout);
        };
        check_gradient("dwte", wte, dwte, if_added(dwte_before, accumulate_dwte), objective);
        if (with_wpe) check_gradient("dwpe", wpe, dwpe, if_added(dwpe_before, accumulate), objective);
    }
}

namespace {

// LayerNorm, or RMSNorm without a mean, with or without a weight and a bias.
void check_norm_gradients(int rows, int cols, bool accumulate_dinp, bool accumulate, bool has_mean, bool has_weight,
                          bool has_bias) {
    INFO("rows " << rows << ", cols " << cols << ", mean " << has_mean << ", weight " << has_weight << ", bias "
                 << has_bias);
    size_t count = size_t(rows) * cols;
    std::vector<double> inp = random_values(count, 1, 2, 1), weight = random_values(cols, 2, 0.5, 1);
    std::vector<double> bias = random_values(cols, 3), out(count), dout = random_values(count, 4);
    std::vector<float> mean(rows), rstd(rows);
    Objective objective = [&] {
        ref::residual_norm_forward(ops::ResidualNormForward{.residual = nullptr,
                                                            .out = out.data(),
                                                            .mean = has_mean ? mean.data() : nullptr,
                                                            .rstd = rstd.data(),
                                                            .inp = inp.data(),
                                                            .branch = nullptr,
                                                            .weight = has_weight ? weight.data() : nullptr,
                                                            .bias = has_bias ? bias.data() : nullptr,
                                                            .rows = rows,
                                                            .cols = cols,
                                                            .eps = 1e-3f});
        return sum_of_products(out, dout);
    };
    objective();
    std::vector<double> dinp_before = random_values(count, 5), other_before = random_values(cols, 6);
    auto dinp = held_before<double>(dinp_before, accumulate_dinp);
    auto dweight = held_before<float>(other_before, accumulate), dbias = dweight;
    ref::norm_backward(ops::NormBackward{.dinp = dinp.data(),
                                         .dweight = has_weight ? dweight.data() : nullptr,
                                         .dbias = has_bias ? dbias.data() : nullptr,
                                         .scratch = nullptr,
                                         .dout = dout.data(),
                                         .inp = inp.data(),
                                         .weight = has_weight ? weight.data() : nullptr,
                                         .mean = has_mean ? mean.data() : nullptr,
                                         .rstd = rstd.data(),
                                         .rows = rows,
                                         .cols = cols,
                                         .accumulate_dinp = accumulate_dinp,
                                         .accumulate = accumulate});
    check_gradient("dinp", inp, dinp, if_added(dinp_before, accumulate_dinp), objective);
    if (has_weight) check_gradient("dweight", weight, dweight, if_added(other_before, accumulate), objective);
    if (has_bias) check_gradient("dbias", bias, dbias, if_added(other_before, accumulate), objective);
}

}  // namespace

TEST_CASE("ref::norm_backward is the derivative of ref::residual_norm_forward", "[reference]") {
    for (int rows : {1, 4})
        for (int cols : {1, 3, 8})
            for (bool accumulate_dinp : {false, true})
                for (bool accumulate : {false, true})
                    for (int parts = 0; parts < 8; parts++)
                        check_norm_gradients(rows, cols, accumulate_dinp, accumulate, parts & 1, parts & 2, parts & 4);
}

// By hand: (3, 4) has a mean square of 12.5; with an eps of 12.5 the root mean square is 5.
TEST_CASE("ref::residual_norm_forward without a mean is RMSNorm", "[reference]") {
    std::vector<double> inp = {3, 4}, weight = {2, -1}, out(2);
    float rstd = 0;
    ops::ResidualNormForward op{.residual = nullptr,
                                .out = out.data(),
                                .mean = nullptr,
                                .rstd = &rstd,
                                .inp = inp.data(),
                                .branch = nullptr,
                                .weight = weight.data(),
                                .bias = nullptr,
                                .rows = 1,
                                .cols = 2,
                                .eps = 12.5f};
    ref::residual_norm_forward(op);
    CHECK(std::abs(out[0] - 1.2) < 1e-14);
    CHECK(std::abs(out[1] + 0.8) < 1e-14);
    CHECK(rstd == 0.2f);
}

// A residual block: the gradient of the sum inp + branch equals the gradient of both terms, and the norm's is added.
TEST_CASE("ref::norm_backward plus the residual's gradient is residual_norm_forward's derivative", "[reference]") {
    const int rows = 3, cols = 5;
    std::vector<double> inp = random_values(rows * cols, 1), branch = random_values(inp.size(), 2);
    std::vector<double> weight = random_values(cols, 3), bias = random_values(cols, 4);
    std::vector<double> residual(inp.size()), out(inp.size());
    std::vector<double> dresidual = random_values(inp.size(), 5), dout = random_values(inp.size(), 6);
    std::vector<float> mean(rows), rstd(rows), dweight(cols), dbias(cols);
    Objective objective = [&] {
        ref::residual_norm_forward(ops::ResidualNormForward{.residual = residual.data(),
                                                            .out = out.data(),
                                                            .mean = mean.data(),
                                                            .rstd = rstd.data(),
                                                            .inp = inp.data(),
                                                            .branch = branch.data(),
                                                            .weight = weight.data(),
                                                            .bias = bias.data(),
                                                            .rows = rows,
                                                            .cols = cols,
                                                            .eps = 1e-3f});
        return sum_of_products(out, dout) + sum_of_products(residual, dresidual);
    };
    objective();
    std::vector<double> dinp = dresidual;
    ref::norm_backward(ops::NormBackward{.dinp = dinp.data(),
                                         .dweight = dweight.data(),
                                         .dbias = dbias.data(),
                                         .scratch = nullptr,
                                         .dout = dout.data(),
                                         .inp = residual.data(),
                                         .weight = weight.data(),
                                         .mean = mean.data(),
                                         .rstd = rstd.data(),
                                         .rows = rows,
                                         .cols = cols,
                                         .accumulate_dinp = true,
                                         .accumulate = false});
    check_gradient("dinp", inp, dinp, {}, objective);
    check_gradient("dbranch", branch, dinp, {}, objective);
}

namespace {

struct AttentionCase {
    int batch, seq_len, n_head, n_kv_head, head_size;
    double dropped = 0;
    int window = 0;
    float softcap = 0;
    std::vector<int> first_key = {};  // or empty
};

struct AttentionResults {
    std::vector<double> out, dqkv;
};

// Both ops of ref:: on random values, or the forward op on given values.
class ReferenceAttention {
public:
    explicit ReferenceAttention(const AttentionCase& attention) : s(attention) {
        if (s.dropped > 0)
            mask = {.keys = keys.data(), .threshold = ops::dropout_threshold(s.dropped), .place = 1 << 16};
    }

    void forward() {
        ref::attention_forward(ops::AttentionForward{.out = out.data(),
                                                     .lse = lse.data(),
                                                     .qkv = qkv.data(),
                                                     .batch = s.batch,
                                                     .seq_len = s.seq_len,
                                                     .n_head = s.n_head,
                                                     .n_kv_head = s.n_kv_head,
                                                     .head_size = s.head_size,
                                                     .scale = 0.7f,
                                                     .window = s.window,
                                                     .softcap = s.softcap,
                                                     .first_key = first_key(),
                                                     .dropout = mask});
    }
    void backward() {
        ref::attention_backward(ops::AttentionBackward{.dqkv = dqkv.data(),
                                                       .scratch = nullptr,
                                                       .dout = dout.data(),
                                                       .qkv = qkv.data(),
                                                       .out = out.data(),
                                                       .lse = lse.data(),
                                                       .batch = s.batch,
                                                       .seq_len = s.seq_len,
                                                       .n_head = s.n_head,
                                                       .n_kv_head = s.n_kv_head,
                                                       .head_size = s.head_size,
                                                       .scale = 0.7f,
                                                       .window = s.window,
                                                       .softcap = s.softcap,
                                                       .first_key = first_key(),
                                                       .dropout = mask});
    }

    AttentionCase s;
    size_t positions = size_t(s.batch) * s.seq_len;
    std::vector<double> qkv = random_values(positions * (s.n_head + 2 * s.n_kv_head) * s.head_size, 1, 2);
    std::vector<double> out = std::vector<double>(positions * s.n_head * s.head_size),
                        dout = random_values(out.size(), 2);
    std::vector<double> dqkv = std::vector<double>(qkv.size(), NAN);
    std::vector<float> lse = std::vector<float>(positions * s.n_head);

private:
    const int* first_key() const { return s.first_key.empty() ? nullptr : s.first_key.data(); }

    std::vector<uint64_t> keys = {11, 12};
    ops::DropoutMask mask;
};

// Requires that every number of `a` is within `error` of the corresponding number of `b`.
void check_near(const std::vector<double>& a, const std::vector<double>& b, double error) {
    REQUIRE(a.size() == b.size());
    double largest = 0;
    for (size_t i = 0; i < a.size(); i++) {
        if (!(std::abs(a[i] - b[i]) <= largest)) largest = std::abs(a[i] - b[i]);
    }
    CHECK(largest <= error);
}

}  // namespace

TEST_CASE("ref::attention_backward is the derivative of ref::attention_forward", "[reference]") {
    for (const AttentionCase& s :
         std::initializer_list<AttentionCase>{{1, 1, 1, 1, 2},
                                              {2, 5, 2, 2, 3},
                                              {1, 6, 4, 2, 3},
                                              {1, 4, 3, 1, 2},
                                              {2, 6, 4, 2, 3, 0.4},
                                              {1, 6, 2, 1, 3, 0, 1},
                                              {1, 7, 2, 2, 3, 0, 3},
                                              {1, 6, 2, 1, 3, 0, 0, 1.5f},
                                              {2, 4, 2, 1, 3, 0, 0, 0, {0, 0, 2, 3, 0, 1, 1, 1}},
                                              {2, 5, 3, 1, 3, 0.4, 3, 1.5f, {0, 0, 0, 0, 3, 0, 1, 1, 1, 1}}}) {
        INFO("seq_len " << s.seq_len << ", n_head " << s.n_head << ", n_kv_head " << s.n_kv_head << ", window "
                        << s.window << ", softcap " << s.softcap << ", dropout " << s.dropped);
        ReferenceAttention attention(s);
        Objective objective = [&] {
            attention.forward();
            return sum_of_products(attention.out, attention.dout);
        };
        objective();
        attention.backward();
        check_gradient("dqkv", attention.qkv, attention.dqkv, {}, objective);
    }
}

// In a sequence split into documents, each document has the results that it has as a separate sequence. lse, a float,
// is the only value rounded in the backward pass.
TEST_CASE("ref::attention separates documents", "[reference]") {
    const std::vector<int> ends = {3, 4, 9};
    ReferenceAttention whole({1, 9, 3, 1, 2, 0, 2, 1.5f, {0, 0, 0, 3, 4, 4, 4, 4, 4}});
    whole.forward();
    whole.backward();
    int begin = 0;
    for (const int end : ends) {
        ReferenceAttention part({1, end - begin, 3, 1, 2, 0, 2, 1.5f});
        const auto cut = [&](std::vector<double>& values, const std::vector<double>& from) {
            const size_t step = from.size() / 9;
            values.assign(from.begin() + ptrdiff_t(begin * step), from.begin() + ptrdiff_t(end * step));
        };
        cut(part.qkv, whole.qkv), cut(part.dout, whole.dout);
        part.forward();
        part.backward();
        std::vector<double> out, dqkv;
        cut(out, whole.out), cut(dqkv, whole.dqkv);
        check_near(part.out, out, 1e-14);
        check_near(part.dqkv, dqkv, 1e-14);
        begin = end;
    }
}

// A window of w keys is the sum over the keys t - w + 1 .. t: with one key the output is the value; a window of all
// positions is attention without a window. A soft cap far above the scores changes nothing, to second order in
// score / softcap.
TEST_CASE("ref::attention with the widest and the narrowest window, and with a high soft cap", "[reference]") {
    ReferenceAttention plain({2, 6, 3, 3, 2}), wide({2, 6, 3, 3, 2, 0, 6}), short_of_one({2, 6, 3, 3, 2, 0, 5});
    ReferenceAttention narrow({2, 6, 3, 3, 2, 0, 1}), high({2, 6, 3, 3, 2, 0, 0, 1e5f});
    for (ReferenceAttention* attention : {&plain, &wide, &short_of_one, &narrow, &high}) {
        attention->forward();
        attention->backward();
    }
    CHECK(wide.out == plain.out);
    CHECK(wide.dqkv == plain.dqkv);
    CHECK(short_of_one.out != plain.out);
    check_near(high.out, plain.out, 1e-7);
    check_near(high.dqkv, plain.dqkv, 1e-7);
    std::vector<double> values;
    for (size_t position = 0; position < 12; position++)
        for (size_t c = 12; c < 18; c++) values.push_back(narrow.qkv[position * 18 + c]);
    CHECK(narrow.out == values);
}

// The objective is written out to compare the op's terms with their definitions: the capped logits, and the square of
// their log-sum-exp.
TEST_CASE("ref::cross_entropy writes the derivative of its loss", "[reference]") {
    const int rows = 4, vocab = 5, padded_vocab = 7;
    const float loss_scale = 3, grad_scale = 0.5f;
    for (auto [softcap, z_loss] : {std::pair(0.0f, 0.0f), {2.5f, 0.0f}, {0.0f, 0.25f}, {4.0f, 0.125f}}) {
        INFO("softcap " << softcap << ", z_loss " << z_loss);
        std::vector<double> logits = random_values(rows * padded_vocab, 1, 3);
        std::vector<int> targets = {4, -1, 0, 2};
        std::vector<float> loss(rows);
        double cross_entropies = 0;
        Objective objective = [&] {
            double sum = 0;
            cross_entropies = 0;
            for (int row = 0; row < rows; row++) {
                std::vector<double> x(logits.begin() + row * padded_vocab, logits.begin() + row * padded_vocab + vocab);
                for (double& value : x) value = softcap > 0 ? softcap * std::tanh(value / softcap) : value;
                const double lse = ref::log_sum_exp(x.data(), vocab);
                if (targets[row] < 0) continue;
                cross_entropies += lse - x[targets[row]];
                sum += lse - x[targets[row]] + z_loss * lse * lse;
            }
            return sum * loss_scale * grad_scale;
        };
        objective();
        std::vector<double> dlogits = logits;
        ref::cross_entropy(ops::CrossEntropy{.logits = dlogits.data(),
                                             .loss = loss.data(),
                                             .targets = targets.data(),
                                             .loss_scale = &loss_scale,
                                             .rows = rows,
                                             .vocab = vocab,
                                             .padded_vocab = padded_vocab,
                                             .grad_scale = grad_scale,
                                             .write_dlogits = true,
                                             .softcap = softcap,
                                             .z_loss = z_loss});
        double sum = 0;
        for (float value : loss) sum += value;
        CHECK(std::abs(sum - cross_entropies) <= rows * 0x1p-24 * sum);
        check_gradient("dlogits", logits, dlogits, {}, objective);
    }
}

// The sums of parts are rounded to float. The last part has only padding.
TEST_CASE("ref::cross_entropy of parts of the vocabulary equals that of the whole", "[reference]") {
    const int rows = 4, vocab = 7, parts = 3, width = 4;
    std::vector<double> whole = random_values(rows * vocab, 1, 3);
    const std::vector<double> logits = whole;
    std::vector<int> targets = {4, -1, 0, 6};
    std::vector<float> loss(rows), loss_of_part(rows);
    auto op = [&](std::vector<double>& values, std::vector<float>& losses) {
        return ops::CrossEntropy{.logits = values.data(),
                                 .loss = losses.data(),
                                 .targets = targets.data(),
                                 .loss_scale = nullptr,
                                 .rows = rows,
                                 .vocab = vocab,
                                 .padded_vocab = vocab,
                                 .grad_scale = 0.5f,
                                 .write_dlogits = true,
                                 .softcap = 4,
                                 .z_loss = 0.125f};
    };
    ref::cross_entropy(op(whole, loss));
    std::vector<ops::VocabularySums> sums(parts * rows);
    std::vector<std::vector<double>> of_parts(parts, std::vector<double>(rows * width, NAN));
    auto tokens = [&](int part) { return std::clamp(vocab - part * width, 0, width); };
    for (int part = 0; part < parts; part++) {
        for (int i = 0; i < rows * tokens(part); i++) {
            const int row = i / tokens(part), column = i % tokens(part);
            of_parts[part][row * width + column] = logits[row * vocab + part * width + column];
        }
        ref::vocabulary_sums({.out = sums.data() + part * rows,
                              .logits = of_parts[part].data(),
                              .targets = targets.data(),
                              .rows = rows,
                              .vocab = tokens(part),
                              .padded_vocab = width,
                              .first_token = part * width,
                              .softcap = 4});
    }
    for (int part = 0; part < parts; part++) {
        ops::CrossEntropy of_part = op(of_parts[part], loss_of_part);
        of_part.vocab = tokens(part), of_part.padded_vocab = width;
        of_part.sums = sums.data(), of_part.parts = parts, of_part.first_token = part * width;
        ref::cross_entropy(of_part);
        for (int row = 0; row < rows; row++) {
            CHECK(std::abs(loss_of_part[row] - loss[row]) <= 1e-6);
            for (int column = 0; column < width; column++) {
                const double expected = column < tokens(part) ? whole[row * vocab + part * width + column] : 0;
                CHECK(std::abs(of_parts[part][row * width + column] - expected) <= 1e-6);
            }
        }
    }
}

// clip_grad_norm_ by hand: the norm of (3, 4) 1e-6 is 5e-6, 1e-6 is added, and the limit is 1e-6. Gradients have a
// loss scale of 2.
TEST_CASE("ref::grad_norm_finish clips like PyTorch", "[reference]") {
    std::vector<float> gradients = {6e-6f, 8e-6f};
    std::vector<ops::Chunk> chunks = {{.begin = 0, .count = 1, .tensor = 0, .index = 0, .group = 0, .state_begin = 0},
                                      {.begin = 1, .count = 1, .tensor = 1, .index = 1, .group = 0, .state_begin = 1}};
    std::vector<double> sums(2);
    float loss_scale = 2;
    ops::GradNorm norm;
    ref::squared_sums({.out = sums.data(), .values = gradients.data(), .chunks = chunks.data(), .n_chunks = 2});
    for (auto [clip, expected_scale] : {std::pair(1e-6f, 0.5 / 6), std::pair(1.0f, 0.5), std::pair(0.0f, 0.5)}) {
        ref::grad_norm_finish(
            {.out = &norm, .sums = sums.data(), .loss_scale = &loss_scale, .n_tensors = 2, .clip = clip});
        INFO("clip " << clip << ", norm " << norm.norm << ", scale " << norm.scale);
        CHECK(std::abs(norm.norm - 5e-6) <= 4 * 0x1p-24 * 5e-6);
        CHECK(std::abs(norm.scale - expected_scale) <= 4 * 0x1p-24 * expected_scale);
        CHECK(norm.non_finite_tensor == -1);
    }
}

// The first four moments of N(0, 1), and no correlation between neighbors. A sum of 2^16 independent numbers of
// variance s^2 stays within 6 s / 2^8 of its expectation except with a probability of 10^-9; the numbers are the same
// in every run anyway.
TEST_CASE("ref::normal_fill gives normally distributed numbers", "[reference]") {
    const size_t count = 1 << 16;
    std::vector<float> numbers(count), others(count);
    ref::normal_fill({.out = numbers.data(), .count = count, .seed = 42, .subsequence = 3, .deviation = 1, .first = 0});
    ref::normal_fill({.out = others.data(), .count = count, .seed = 42, .subsequence = 4, .deviation = 1, .first = 0});
    double mean = 0, square = 0, cube = 0, fourth = 0, neighbours = 0, subsequences = 0;
    for (size_t i = 0; i < count; i++) {
        double x = numbers[i];
        mean += x / count, square += x * x / count, cube += x * x * x / count, fourth += x * x * x * x / count;
        neighbours += x * numbers[(i + 1) % count] / count, subsequences += x * others[i] / count;
    }
    auto within = [](double value, double expected, double variance) {
        return std::abs(value - expected) <= 6 * std::sqrt(variance) / 256;
    };
    CHECK(within(mean, 0, 1));
    CHECK(within(square, 1, 2));
    CHECK(within(cube, 0, 15));
    CHECK(within(fourth, 3, 96));
    CHECK(within(neighbours, 0, 1));
    CHECK(within(subsequences, 0, 1));
}
