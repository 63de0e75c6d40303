// Kernels for one compute capability: the list, its check, and the arguments that each kernel takes.
#include "kernels/cuda/arch_check.h"
#include "kernels/cuda/hopper/cross_entropy_sm90.h"
#include "test/simt/planted.h"
#include "test/simt/sanitizers.h"
#include "test/support/arch_kernels.h"
#include "test/support/expect_error.h"

TEST_CASE("kernels for compute capability 9.0 are listed on such GPUs", "[arch]") {
    CHECK(arch_kernels() ==
          std::vector<std::string>{"attention_backward_sm90", "attention_forward_sm90", "cross_entropy_sm90"});
    for (const int capability : {80, 89, 100, 120}) {
        const simt::WithOptions gpu(simt::with_capability(capability));
        CHECK(arch_kernels().empty());
        expect_error(Exit::usage, {"this GPU has no kernel cross_entropy_sm90"},
                     [] { check_arch_kernel("cross_entropy_sm90"); });
    }
    expect_error(Exit::usage, {"this GPU has no kernel attention"}, [] { check_arch_kernel("attention"); });
}

TEST_CASE("operands of 8 bits need compute capability 8.9", "[simt]") {
    for (const int capability : {80, 86}) {
        const simt::WithOptions gpu(simt::with_capability(capability));
        expect_error(Exit::config, {"train.precision is \"fp8\"", format("%.1f", capability / 10.0), "8.9 or later"},
                     [] { configure_device({.fp8 = true}); });
        configure_device({});
    }
    for (const int capability : {89, 90, 120}) {
        const simt::WithOptions gpu(simt::with_capability(capability));
        configure_device({.fp8 = true});
    }
    configure_device({});
}

TEST_CASE("every kernel for this GPU passes its check", "[arch]") {
    for (const std::string& name : arch_kernels()) {
        INFO(name);
        CHECK(check_arch_kernel(name) == "");
    }
}

TEST_CASE("a check compares every element", "[arch]") {
    const CheckArray expected = random_array(Dtype::bf16, 1000, 1);
    const auto changed = [&](size_t at, float by) {
        CheckArray actual = random_array(Dtype::bf16, 1000, 1);
        bf16 value{};
        bf16* const place = static_cast<bf16*>(actual.memory.data()) + at;
        copy_to_host(&value, place, sizeof value, {});
        synchronize({});
        value = from_float<bf16>(to_float(value) + by);
        copy_to_device(place, &value, sizeof value, {});
        return difference("sums", actual, expected, 0, 0.01);
    };
    CHECK(changed(0, 0) == "");
    CHECK(changed(0, 0.005f) == "");
    for (const size_t at : {0, 501, 999})
        for (const float by : {0.1f, -0.1f, INFINITY, NAN})
            CHECK(changed(at, by).find(format("sums: element %zu is", at)) == 0);
}

// ---- cross_entropy_sm90 ----

namespace {

struct Rows {
    CheckArray logits, loss;
    DeviceBuffer targets;
    ops::CrossEntropy op;

    Rows(Dtype dtype, int rows, int vocab, int padded_vocab, int shift = 0)
        : logits(random_array(dtype, size_t(rows) * padded_vocab + shift, 7)),
          loss(Dtype::fp32, size_t(rows)),
          targets(device_ints(std::vector<int>(size_t(rows), vocab - 1))),
          op{.logits = logits.view().from(size_t(shift)),
             .loss = loss.view().as<float>(),
             .targets = static_cast<const int*>(targets.data()),
             .loss_scale = nullptr,
             .rows = rows,
             .vocab = vocab,
             .padded_vocab = padded_vocab,
             .grad_scale = 1,
             .write_dlogits = true} {}
};

bool takes(const Rows& rows) {
    const bool is_taken = ops::cross_entropy_sm90(rows.op, {});
    synchronize({});
    return is_taken;
}

}  // namespace

TEST_CASE("cross_entropy_sm90 takes rows of two to eight blocks", "[arch]") {
    constexpr int kOfBlock = 50'624;  // 16-bit columns in the shared memory of a block
    CHECK_FALSE(takes({Dtype::bf16, 1, kOfBlock, kOfBlock}));
    CHECK(takes({Dtype::bf16, 1, kOfBlock + 1, kOfBlock + 8}));
    if (!simt::tsan()) CHECK(takes({Dtype::fp16, 1, 8 * kOfBlock, 8 * kOfBlock}));  // too many threads for it
    CHECK_FALSE(takes({Dtype::fp16, 1, 8 * kOfBlock + 1, 8 * kOfBlock + 8}));
    CHECK(takes({Dtype::fp32, 1, kOfBlock, kOfBlock}));
    CHECK_FALSE(takes({Dtype::bf16, 1, kOfBlock + 1, kOfBlock + 2}));     // rows are not aligned
    CHECK_FALSE(takes({Dtype::bf16, 1, kOfBlock + 1, kOfBlock + 8, 1}));  // nor is the first
    Rows part(Dtype::bf16, 1, kOfBlock + 1, kOfBlock + 8);
    const ops::VocabularySums sums{};
    part.op.sums = &sums, part.op.parts = 1;
    CHECK_FALSE(takes(part));
}

TEST_CASE("cross_entropy runs cross_entropy_sm90 if it is used", "[arch]") {
    Rows direct(Dtype::fp32, 2, 51'000, 51'000), by_op(Dtype::fp32, 2, 51'000, 51'000),
        portable(Dtype::fp32, 2, 51'000, 51'000);
    CHECK(takes(direct));
    ops::cross_entropy(portable.op, {});
    {
        const WithArchKernels used({"cross_entropy_sm90"});
        ops::cross_entropy(by_op.op, {});
    }
    CHECK(difference("loss", by_op.loss, direct.loss, 0, 1e-30) == "");
    CHECK(difference("gradient", by_op.logits, direct.logits, 0, 1e-30) == "");
    // The order of a row's sum differs, so some last bit does.
    CHECK(difference("loss", portable.loss, direct.loss, 0, 1e-30) +
              difference("gradient", portable.logits, direct.logits, 0, 1e-30) !=
          "");
}
