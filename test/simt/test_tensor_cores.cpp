// The twins of the tensor cores' instructions compared with plain loops over matrices. The positions of elements in
// fragments are written here independently, in the other direction: from the lane's registers to rows and columns.
#include <cmath>
#include <random>

#include "test/simt/planted.h"

namespace {

struct Product {
    float* out;      // (16, 8)
    const void* a;   // (16, 16)
    const void* b;   // (16, 8), or (8, 16) if b_is_transposed
    const float* c;  // (16, 8)
    bool b_is_transposed;
};

template <class T> struct ProductShared { T a[16 * 16], b[16 * 8]; };

template <class T> void product_kernel(Product op) {
    auto& s = shared_memory<ProductShared<T>>();
    const int lane = int(threadIdx.x), group = lane / 4, pair = lane % 4 * 2;
    ptx::cp_async<16>(ptx::shared_address(&s.a[lane * 8]), static_cast<const T*>(op.a) + lane * 8);
    ptx::cp_async<8>(ptx::shared_address(&s.b[lane * 4]), static_cast<const T*>(op.b) + lane * 4);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    uint32_t a[4], b[4];  // b: the lower half of the lanes loads its two registers, the upper half the same again
    float c[4];
    ptx::ldmatrix_x4(a, ptx::shared_address(&s.a[lane % 16 * 16 + lane / 16 * 8]));
    if (op.b_is_transposed)
        ptx::ldmatrix_x4(b, ptx::shared_address(&s.b[lane % 8 * 16 + lane / 8 % 2 * 8]));
    else
        ptx::ldmatrix_x4<true>(b, ptx::shared_address(&s.b[lane % 16 * 8]));
    for (int i = 0; i < 4; i++) c[i] = op.c[(group + i / 2 * 8) * 8 + pair + i % 2];
    ptx::mma_m16n8k16<T>(c, a, b, c);
    for (int i = 0; i < 4; i++) op.out[(group + i / 2 * 8) * 8 + pair + i % 2] = c[i];
}

template <class T> std::vector<T> random_stored(size_t count, unsigned seed) {
    std::mt19937 generator(seed);
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<T> values(count);
    for (T& value : values) value = from_float<T>(uniform(generator));
    return values;
}

}  // namespace

TEMPLATE_TEST_CASE("mma, ldmatrix and cp.async give the product of matrices", "[simt]", bf16, fp16) {
    using T = TestType;
    for (bool transposed : {false, true}) {
        const auto a = random_stored<T>(256, 1), b = random_stored<T>(128, 2);
        const auto c = random_stored<float>(128, 3);
        DeviceArray<T> a_device(a), b_device(b);
        DeviceArray<float> c_device(c), out(128);
        CHECK(sentences(faults_of(
                  product_kernel<T>,
                  {.name = "product", .blocks = dim3(1), .threads = 32, .shared_bytes = sizeof(ProductShared<T>)},
                  {out.data(), a_device.data(), b_device.data(), c_device.data(), transposed})) == "");
        const std::vector<float> got = out.fetch();
        for (size_t row = 0; row < 16; row++)
            for (size_t column = 0; column < 8; column++) {
                double sum = c[row * 8 + column];
                for (size_t k = 0; k < 16; k++)
                    sum += double(to_float(a[row * 16 + k])) *
                           double(to_float(b[transposed ? column * 16 + k : k * 8 + column]));
                CHECK(std::abs(got[row * 8 + column] - sum) <= 17 * 17 * 0x1p-24);
            }
    }
}

namespace {

void missing_wait_kernel(Planted op) {
    auto& s = shared_memory<ProductShared<float>>();
    ptx::cp_async<16>(ptx::shared_address(&s.a[threadIdx.x * 4]), op.out + threadIdx.x * 4);
    ptx::cp_async_commit();
    if (!op.fault) ptx::cp_async_wait<0>();
    __syncthreads();
    op.out[1024 + threadIdx.x] = s.a[threadIdx.x * 4];
}

void uncommitted_copy_kernel(Planted op) {
    auto& s = shared_memory<ProductShared<float>>();
    ptx::cp_async<4>(ptx::shared_address(&s.a[threadIdx.x]), op.out + threadIdx.x);
    if (!op.fault) ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
}

void misaligned_copy_kernel(Planted op) {
    auto& s = shared_memory<ProductShared<float>>();
    ptx::cp_async<8>(ptx::shared_address(&s.a[threadIdx.x * 2]), op.out + threadIdx.x * 2 + (op.fault ? 1 : 0));
    ptx::cp_async_wait_all();
}

void misaligned_row_kernel(Planted op) {
    auto& s = shared_memory<ProductShared<float>>();
    uint32_t r[4];
    s.a[threadIdx.x] = 1;
    __syncwarp();
    ptx::ldmatrix_x4(r, ptx::shared_address(&s.a[threadIdx.x % 8 * 4 + (op.fault ? 1 : 0)]));
    op.out[threadIdx.x] = float(r[0] != 0);
}

void row_outside_kernel(Planted op) {
    uint32_t r[4];
    auto& s = shared_memory<ProductShared<float>>();
    s.a[threadIdx.x] = 1;
    __syncwarp();
    ptx::ldmatrix_x4(r, op.fault ? 0x40000u : ptx::shared_address(s.a));
}

void mma_in_half_a_warp_kernel(Planted op) {
    uint32_t a[4] = {}, b[2] = {};
    float c[4] = {};
    if (!op.fault || threadIdx.x < 16) ptx::mma_m16n8k16<bf16>(c, a, b, c);
}

struct Zeros {
    float* out;
    const float* inp;
};
void padded_copy_kernel(Zeros op) {
    auto& s = shared_memory<ProductShared<float>>();
    ptx::cp_async<16>(ptx::shared_address(&s.a[threadIdx.x * 4]), op.inp, int(threadIdx.x % 5) * 4);
    ptx::cp_async_wait_all();
    for (int i = 0; i < 4; i++) op.out[threadIdx.x * 4 + unsigned(i)] = s.a[threadIdx.x * 4 + unsigned(i)];
}

}  // namespace

TEST_CASE("asynchronous copies that are not waited for, misaligned, or in flight at the end", "[simt]") {
    const Launch config{
        .name = "copies", .blocks = dim3(1), .threads = 32, .shared_bytes = sizeof(ProductShared<float>)};
    check_planted(missing_wait_kernel, config, "32 copies by cp.async are in flight when the block ends");
    check_planted(uncommitted_copy_kernel, config, "in flight when the block ends");
    check_planted(misaligned_copy_kernel, config, "cp.async of 8 bytes");
    check_planted(misaligned_row_kernel, config, "is not aligned to 16 bytes");
    check_planted(row_outside_kernel, config, "is no shared address");
    check_planted(mma_in_half_a_warp_kernel, config, "mma.sync with mask 0xffffffff");
}

TEST_CASE("an asynchronous copy lands at the wait and not before", "[simt]") {
    DeviceArray<float> out(std::vector<float>(4096, 3));
    const Launch config{
        .name = "copies", .blocks = dim3(1), .threads = 32, .shared_bytes = sizeof(ProductShared<float>)};
    faults_of(missing_wait_kernel, config, {out.data(), true});
    CHECK(std::isnan(out.fetch()[1024]));
    faults_of(missing_wait_kernel, config, {out.data(), false});
    CHECK(out.fetch()[1024] == 3);
}

TEST_CASE("the unused bytes of an asynchronous copy become zeros", "[simt]") {
    DeviceArray<float> inp(std::vector<float>(4, 2)), out(128);
    launch(padded_copy_kernel,
           {.name = "padded", .blocks = dim3(1), .threads = 32, .shared_bytes = sizeof(ProductShared<float>)}, Stream(),
           Zeros{out.data(), inp.data()});
    const std::vector<float> got = out.fetch();
    for (size_t i = 0; i < 128; i++) CHECK(got[i] == (i % 4 < i / 4 % 5 ? 2 : 0));
}

TEST_CASE("packs round like from_float", "[simt]") {
    for (float low : {0.0f, -0.0f, 1.0f, 1.00390625f, 1e-40f, 65504.0f, 65520.0f, 3e38f, INFINITY})
        for (float high : {-1.5f, 6e-8f, 3.0078125f}) {
            CHECK(ptx::pack<bf16>(low, high) ==
                  (from_float<bf16>(low).bits | uint32_t(from_float<bf16>(high).bits) << 16));
            CHECK(ptx::pack<fp16>(low, high) ==
                  (from_float<fp16>(low).bits | uint32_t(from_float<fp16>(high).bits) << 16));
        }
    CHECK(ptx::pack<bf16>(NAN, 0) == 0x7fff);
    CHECK(ptx::exp2_approx(3) == 8);
    CHECK(ptx::exp2_approx(-INFINITY) == 0);
    CHECK(ptx::exp2_approx(-140) == 0);
}
