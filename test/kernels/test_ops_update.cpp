// squared_sums, grad_norm_finish, adamw_update and sgd_update against ref::.
#include <cstddef>

#include "test/support/device_array.h"
#include "test/support/random_values.h"
#include "test/support/tolerance.h"

namespace {

// Sizes of tensors: one element, odd, a whole chunk, slightly more than a chunk, and three chunks. The whole chunk and
// the one after it begin at addresses of whole packs, others do not.
constexpr size_t kTensorSizes[] = {
    1, 39, ops::kChunkElements, ops::kChunkElements + 7, 1000, 2 * ops::kChunkElements + 130};
constexpr int kTensors = int(std::size(kTensorSizes));

std::vector<ops::Chunk> chunks_of_all_tensors() {
    std::vector<ops::Chunk> chunks;
    size_t begin = 0;
    for (int tensor = 0; tensor < kTensors; tensor++)
        for (size_t left = kTensorSizes[tensor]; left > 0; left -= chunks.back().count, begin += chunks.back().count)
            chunks.push_back({.begin = begin,
                              .count = int(std::min<size_t>(left, ops::kChunkElements)),
                              .tensor = tensor,
                              .decayed = tensor % 2,
                              .index = int(chunks.size())});
    return chunks;
}

size_t element_count() {
    size_t count = 0;
    for (size_t size : kTensorSizes) count += size;
    return count;
}

// Index of each tensor's first element.
size_t begin_of(int tensor) {
    size_t begin = 0;
    for (int t = 0; t < tensor; t++) begin += kTensorSizes[t];
    return begin;
}

// A rank owns only some chunks: every third is left out, and its elements must not change.
std::vector<ops::Chunk> chunks_of_one_rank() {
    std::vector<ops::Chunk> some;
    for (const ops::Chunk& chunk : chunks_of_all_tensors())
        if (some.size() % 3 != 1 || chunk.tensor % 2 == 0) some.push_back(chunk);
    return some;
}

ops::GradNorm grad_norm_of(const std::vector<float>& gradients, float loss_scale, float clip) {
    Array<float> values("values", Role::input, gradients);
    Array<ops::Chunk> chunks("chunks", Role::input, chunks_of_all_tensors());
    int n_chunks = int(chunks.host.size());
    Array<double> sums("sums", Role::output, nans(n_chunks));
    Array<float> scale("loss_scale", Role::input, std::vector<float>{loss_scale});
    Array<ops::GradNorm> out("out", Role::output, std::vector<ops::GradNorm>(1));
    OnDevice<float> device;
    std::vector<ops::Chunk> reversed = chunks_of_all_tensors();
    std::reverse(reversed.begin(), reversed.end());
    Array<ops::Chunk> any_order("chunks in another order", Role::input, reversed);
    ops::squared_sums({sums.on(device), values.on(device), any_order.on(device), n_chunks}, Stream());
    ops::grad_norm_finish({out.on(device), sums.on(device), chunks.on(device), scale.on(device), n_chunks, clip},
                          Stream());
    ref::squared_sums({sums.host.data(), values.host.data(), chunks.host.data(), n_chunks});
    ref::grad_norm_finish({out.host.data(), sums.host.data(), chunks.host.data(), scale.host.data(), n_chunks, clip});
    ops::GradNorm got = out.fetch()[0];
    CHECK(got.non_finite_tensor == out.host[0].non_finite_tensor);
    if (out.host[0].non_finite_tensor < 0) {
        // Sums in double have negligible errors; a root, two divisions and a minimum in float or wider.
        CHECK(std::abs(got.norm - out.host[0].norm) <= 4 * kRoundoff * out.host[0].norm);
        CHECK(std::abs(got.scale - out.host[0].scale) <= 8 * kRoundoff * out.host[0].scale);
        check_close(sums, [&](size_t i) { return 2 * (chunks.host[i].count + 1) * 0x1p-53 * sums.host[i]; });
    }
    return got;
}

std::vector<float> random_gradients(double width) {
    std::vector<double> values = random_values(element_count(), 1, width);
    return {values.begin(), values.end()};
}

}  // namespace

// Squares of 1e30 and of 1e-30 are beyond float's range on either side; for a norm of 3e-6 the 1e-6 that torch adds
// to it matters.
TEST_CASE("squared_sums and grad_norm_finish", "[ops]") {
    for (double width : {1.0, 1e30, 1e-30, 1e-8})
        for (float clip : {0.0f, 1.0f, 1e6f, 1e-6f})
            for (float loss_scale : {1.0f, 65536.0f}) {
                INFO("width " << width << ", clip " << clip << ", loss_scale " << loss_scale);
                ops::GradNorm norm = grad_norm_of(random_gradients(width), loss_scale, clip);
                double expected = width * std::sqrt(double(element_count()) / 3) / loss_scale;  // of uniform numbers
                CHECK(std::abs(norm.norm / expected - 1) < 0.01);
                bool is_clipped = clip > 0 && norm.norm > clip;
                CHECK((norm.scale * loss_scale < 0.9999f) == is_clipped);
                CHECK(norm.non_finite_tensor == -1);
            }
}

// The sums do not depend on the gradients' address: a shard begins at another address than the whole.
TEST_CASE("squared_sums: the same bits at every address", "[ops]") {
    std::vector<double> sums[2];
    for (int shift : {0, 1}) {
        Array<float> values("values", Role::input, random_gradients(1), shift);
        Array<ops::Chunk> chunks("chunks", Role::input, chunks_of_all_tensors());
        Array<double> out("out", Role::output, nans(chunks.host.size()));
        OnDevice<float> device;
        ops::squared_sums({out.on(device), values.on(device), chunks.on(device), int(chunks.host.size())}, Stream());
        sums[shift] = out.fetch();
    }
    CHECK(sums[0] == sums[1]);
}

TEST_CASE("grad_norm_finish: gradients that are all zero", "[ops]") {
    ops::GradNorm norm = grad_norm_of(std::vector<float>(element_count(), 0.0f), 8, 1);
    CHECK(norm.norm == 0);
    CHECK(norm.scale == 0.125f);
    CHECK(norm.non_finite_tensor == -1);
}

TEST_CASE("grad_norm_finish: reports the first tensor that is not finite", "[ops]") {
    for (float bad : {NAN, INFINITY, -INFINITY})
        for (int tensor = 0; tensor < kTensors; tensor++) {
            INFO("a gradient of " << bad << " in tensor " << tensor);
            std::vector<float> gradients = random_gradients(1);
            gradients[begin_of(tensor) + kTensorSizes[tensor] - 1] = bad;
            CHECK(grad_norm_of(gradients, 1, 1).non_finite_tensor == tensor);
            gradients[begin_of(kTensors - 1)] = -bad;
            CHECK(grad_norm_of(gradients, 1, 1).non_finite_tensor == tensor);
        }
}

namespace {

// The state that an update changes. `param` is null if T is float.
template <class T> struct UpdateArrays {
    size_t count = element_count();
    Array<float> master{"master", Role::output, random_values(count, 1)};
    Array<float> m{"m", Role::output, random_values(count, 2, 0.1)};
    Array<float> v{"v", Role::output, random_values(count, 3, 0.01, 0.01)};
    Stored<T> param{"param", Role::output, nans(count)};
    Array<float> grad{"grad", Role::input, random_values(count, 4, 2048)};
    Array<ops::Chunk> chunks{"chunks", Role::input, chunks_of_one_rank()};
    Array<ops::GradNorm> grad_norm;
    Array<ops::StepScalars> scalars{
        "scalars", Role::input,
        std::vector<ops::StepScalars>{
            {.loss_scale = 1024, .learning_rate = 0.01f, .bias_correction1 = 0.271f, .bias_correction2 = 0.0297f}}};

    explicit UpdateArrays(int non_finite_tensor = -1)
        : grad_norm("grad_norm", Role::input,
                    std::vector<ops::GradNorm>{
                        {.norm = 3, .scale = 1.0f / 1024 / 3, .non_finite_tensor = non_finite_tensor, .reserved = 0}}) {
    }

    static constexpr bool kHasParam = !std::is_same_v<T, float>;
    template <class Side> auto param_on(Side side) { return kHasParam ? param.on(side) : nullptr; }

    template <class Side> ops::UpdateArrays arrays(Side side) {
        return {.master = master.on(side),
                .param = param_on(side),
                .m = m.on(side),
                .grad = grad.on(side),
                .chunks = chunks.on(side),
                .grad_norm = grad_norm.on(side),
                .scalars = scalars.on(side),
                .n_chunks = int(chunks.host.size())};
    }
    template <class Side> auto adamw(Side side) {
        return ops::AdamwUpdate{arrays(side), v.on(side), 0.9f, 0.95f, 1e-8f, 0.1f};
    }
    template <class Side> auto sgd(Side side) { return ops::SgdUpdate{arrays(side), 0.9f, 0.1f}; }

    // Chunks outside the update are unchanged.
    void check_others_untouched(const std::vector<float>& master_before, const std::vector<T>& param_before) {
        std::vector<float> expected_master = master.fetch();
        std::vector<T> expected_param = param_before;
        std::vector<bool> given(count);
        for (const ops::Chunk& chunk : chunks.host)
            for (int e = 0; e < chunk.count; e++) given[chunk.begin + e] = true;
        for (size_t e = 0; e < count; e++) {
            if (!given[e]) expected_master[e] = master_before[e];
            // The parameter is the master as the device stored it, rounded to T.
            if (given[e] && kHasParam) expected_param[e] = from_float<T>(expected_master[e]);
        }
        check_same_bits(master, expected_master);
        check_same_bits(param, expected_param);
    }
};

}  // namespace

// The new first moment may cancel, so its error is relative to its terms; the second is a sum of positive numbers. The
// square root passes half of the second moment's relative error on to the step.
TEMPLATE_TEST_CASE("adamw_update", "[ops]", float, bf16, fp16) {
    using T = TestType;
    UpdateArrays<T> arrays;
    std::vector<float> master = arrays.master.host, m = arrays.m.host;
    std::vector<T> param = arrays.param.fetch();
    ops::adamw_update(arrays.adamw(OnDevice<T>()), Stream());
    ref::adamw_update(arrays.adamw(OnHost()));

    ops::StepScalars scalars = arrays.scalars.host[0];
    double lr = scalars.learning_rate;
    auto m_error = [&](size_t e) {
        double g = double(arrays.grad.host[e]) * arrays.grad_norm.host[0].scale;
        return 4 * kRoundoff * (0.9 * std::abs(m[e]) + 0.1 * std::abs(g));
    };
    check_close(arrays.m, [&](size_t e) { return m_error(e) + stored_error_fp32(arrays.m.host[e]); });
    check_close(arrays.v,
                [&](size_t e) { return 6 * kRoundoff * arrays.v.host[e] + stored_error_fp32(arrays.v.host[e]); });
    check_close(arrays.master, [&](size_t e) {
        double denominator = std::sqrt(arrays.v.host[e] / scalars.bias_correction2) + 1e-8;
        double step = std::abs(arrays.m.host[e]) / scalars.bias_correction1 / denominator;
        double step_error =
            (m_error(e) + kRoundoff * std::abs(arrays.m.host[e])) / scalars.bias_correction1 / denominator +
            step * (4 * kRoundoff + kFunctionError + 4 * kRoundoff);
        double decay_error = 0.1 * std::abs(master[e]) * 4 * kRoundoff;
        return lr * (step_error + decay_error) + kRoundoff * (std::abs(master[e]) + lr * step) +
               stored_error_fp32(arrays.master.host[e]);
    });
    arrays.check_others_untouched(master, param);
}

TEMPLATE_TEST_CASE("sgd_update", "[ops]", float, bf16, fp16) {
    using T = TestType;
    UpdateArrays<T> arrays;
    std::vector<float> master = arrays.master.host, m = arrays.m.host;
    std::vector<T> param = arrays.param.fetch();
    ops::sgd_update(arrays.sgd(OnDevice<T>()), Stream());
    ref::sgd_update(arrays.sgd(OnHost()));

    double lr = arrays.scalars.host[0].learning_rate;
    auto m_error = [&](size_t e) {
        double g = double(arrays.grad.host[e]) * arrays.grad_norm.host[0].scale;
        return 3 * kRoundoff * (0.9 * std::abs(m[e]) + std::abs(g));
    };
    check_close(arrays.m, [&](size_t e) { return m_error(e) + stored_error_fp32(arrays.m.host[e]); });
    check_close(arrays.master, [&](size_t e) {
        double terms = std::abs(arrays.m.host[e]) + 0.1 * std::abs(master[e]);
        return lr * (m_error(e) + 4 * kRoundoff * terms) + kRoundoff * std::abs(master[e]) +
               stored_error_fp32(arrays.master.host[e]);
    });
    arrays.check_others_untouched(master, param);
}

TEMPLATE_TEST_CASE("adamw_update and sgd_update do nothing when a gradient is not finite", "[ops]", float, bf16, fp16) {
    using T = TestType;
    for (int tensor : {0, 3}) {
        UpdateArrays<T> arrays(tensor);
        std::vector<float> master = arrays.master.fetch(), m = arrays.m.fetch(), v = arrays.v.fetch();
        std::vector<T> param = arrays.param.fetch();
        ops::adamw_update(arrays.adamw(OnDevice<T>()), Stream());
        ops::sgd_update(arrays.sgd(OnDevice<T>()), Stream());
        check_same_bits(arrays.master, master);
        check_same_bits(arrays.m, m);
        check_same_bits(arrays.v, v);
        check_same_bits(arrays.param, param);
    }
}

namespace {

// An offset into the flat arrays that needs more than 32 bits. Only the part of such long arrays that the chunks cover
// exists: an op gets that part's addresses minus this many elements.
constexpr size_t kFar = size_t(3) << 31;

std::vector<ops::Chunk> far(std::vector<ops::Chunk> chunks) {
    for (ops::Chunk& chunk : chunks) chunk.begin += kFar;
    return chunks;
}

template <class T, class Op> Op far(Op op, const ops::Chunk* far_chunks) {
    op.master -= kFar, op.m -= kFar, op.grad -= kFar;
    if (op.param) op.param = op.param.template as<T>() - kFar;
    if constexpr (requires { op.v; }) op.v -= kFar;
    op.chunks = far_chunks;
    return op;
}

template <class T> void check_same_state(const UpdateArrays<T>& arrays, const UpdateArrays<T>& expected) {
    check_same_bits(arrays.master, expected.master.fetch());
    check_same_bits(arrays.m, expected.m.fetch());
    check_same_bits(arrays.v, expected.v.fetch());
    check_same_bits(arrays.param, expected.param.fetch());
}

}  // namespace

TEST_CASE("squared_sums beyond 2^32 elements", "[ops]") {
    Array<float> values("values", Role::input, random_gradients(1));
    Array<ops::Chunk> near_chunks("chunks", Role::input, chunks_of_all_tensors());
    Array<ops::Chunk> far_chunks("far chunks", Role::input, far(chunks_of_all_tensors()));
    const int n_chunks = int(near_chunks.host.size());
    Array<double> out("out", Role::output, nans(size_t(n_chunks)));
    Array<double> expected("expected", Role::output, nans(size_t(n_chunks)));
    OnDevice<float> device;
    ops::squared_sums({expected.on(device), values.on(device), near_chunks.on(device), n_chunks}, Stream());
    ops::squared_sums({out.on(device), values.on(device) - kFar, far_chunks.on(device), n_chunks}, Stream());
    check_same_bits(out, expected.fetch());
}

TEMPLATE_TEST_CASE("adamw_update and sgd_update beyond 2^32 elements", "[ops]", float, bf16) {
    using T = TestType;
    const OnDevice<T> device;
    UpdateArrays<T> arrays, expected;
    Array<ops::Chunk> far_chunks("far chunks", Role::input, far(chunks_of_one_rank()));
    ops::adamw_update(expected.adamw(device), Stream());
    ops::adamw_update(far<T>(arrays.adamw(device), far_chunks.on(device)), Stream());
    check_same_state(arrays, expected);
    ops::sgd_update(expected.sgd(device), Stream());
    ops::sgd_update(far<T>(arrays.sgd(device), far_chunks.on(device)), Stream());
    check_same_state(arrays, expected);
}
