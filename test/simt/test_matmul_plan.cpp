// How GEMMs are executed: which algorithm, which epilogue, on which stream, and what happens if the library rejects
// them. The tests also check all results. All shapes differ, because the plan of a GEMM is final.
#include <cuda_runtime.h>

#include <bit>
#include <functional>
#include <set>

#include "kernels/cuda/matmul/matmul_library.h"
#include "test/simt/device_memory.h"
#include "test/simt/fault.h"
#include "test/simt/matmul_layer.h"
#include "test/simt/sanitizers.h"
#include "test/support/expect_error.h"

namespace {

using simt::cublas_lt;

int uses_of(cublasLtEpilogue_t epilogue) {
    int uses = 0;
    for (const auto& product : cublas_lt().products) uses += product.epilogue == epilogue;
    return uses;
}

std::set<int> algorithms_used() {
    std::set<int> used;
    for (const auto& product : cublas_lt().products) used.insert(product.algorithm);
    return used;
}

int last_algorithm() { return cublas_lt().products.back().algorithm; }

Stream stream_of(cudaStream_t stream) { return {.handle = stream}; }

}  // namespace

TEST_CASE("products: described and chosen once, without later allocations", "[matmul]") {
    const WithDefaults defaults;
    Layer<bf16> layer({24, 40, 56});
    layer.check_all();
    const int heuristics = cublas_lt().heuristics, descriptions = cublas_lt().descriptions;
    const size_t products = cublas_lt().products.size(), bytes = simt::used_device_bytes();
    for (int again = 0; again < 3; again++) layer.check_all();
    CHECK(cublas_lt().heuristics == heuristics);
    CHECK(cublas_lt().descriptions == descriptions);
    CHECK(cublas_lt().alive >= descriptions);
    CHECK(cublas_lt().products.size() == 4 * products);
    CHECK(simt::used_device_bytes() == bytes);
}

TEMPLATE_TEST_CASE("products: the library's epilogues if it has them", "[matmul]", bf16, fp16) {
    const WithDefaults defaults;
    const int n = std::is_same_v<TestType, bf16> ? 48 : 40;
    Layer<TestType> layer({32, n, 64});
    layer.check_forward(true, true);
    CHECK(uses_of(CUBLASLT_EPILOGUE_BIAS) == 1);
    layer.check_backward_input(true);
    CHECK(uses_of(CUBLASLT_EPILOGUE_DGELU) == 1);
    layer.check_backward_weight(true, true);
    CHECK(uses_of(CUBLASLT_EPILOGUE_BGRADB) == 1);
    CHECK(cublas_lt().products.size() == 3);
    CHECK(cublas_lt().products[2].out == CUDA_R_32F);
    CHECK(cublas_lt().products[2].beta == 1);
}

// Each epilogue that the library may lack, alone and together with all others.
TEMPLATE_TEST_CASE("products: the program's kernels if the library has no epilogue", "[matmul]", float, bf16, fp16) {
    const cublasLtEpilogue_t epilogues[] = {CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_DGELU, CUBLASLT_EPILOGUE_BGRADB};
    int k = 64 + int(sizeof(TestType)) * 16 + (std::is_same_v<TestType, bf16> ? 8 : 0);
    for (cublasLtEpilogue_t epilogue : epilogues) {
        const WithDefaults defaults;
        cublas_lt().lacking_epilogues = epilogue == CUBLASLT_EPILOGUE_DGELU ? 64 : unsigned(epilogue);
        INFO("without epilogue " << epilogue);
        Layer<TestType>({40, 72, k += 8 * 16}).check_all();
        CHECK(uses_of(epilogue) == 0);
    }
    const WithDefaults defaults;
    cublas_lt().lacking_epilogues = ~0u;
    Layer<TestType>({300, 72, k + 8}).check_all();
    CHECK(uses_of(CUBLASLT_EPILOGUE_DEFAULT) == int(cublas_lt().products.size()));
}

TEST_CASE("products: no float sums with an epilogue", "[matmul]") {
    const WithDefaults defaults;
    cublas_lt().lacks_float_output = true;
    Layer<bf16>({48, 24, 88}).check_all();
    CHECK(uses_of(CUBLASLT_EPILOGUE_BGRADB) == 0);
    CHECK(uses_of(CUBLASLT_EPILOGUE_DGELU) == 1);
}

// Sizes that the library's documentation excludes, and the smallest size.
TEMPLATE_TEST_CASE("products: odd sizes", "[matmul]", float, bf16, fp16) {
    const WithDefaults defaults;
    for (const LayerShape& s : {LayerShape{1, 1, 1}, {1, 8, 9}, {9, 1, 8}, {8, 9, 1}, {5, 7, 3}, {257, 9, 31}}) {
        INFO("rows " << s.rows << ", n " << s.n << ", k " << s.k);
        Layer<TestType>(s).check_all();
    }
    cublas_lt().is_careless = true;  // its heuristic may contradict its documentation
    for (const LayerShape& s : {LayerShape{1, 4, 5}, {1, 8, 7}, {6, 1, 8}, {6, 1, 16}, {8, 3, 1}, {3, 5, 12}}) {
        INFO("rows " << s.rows << ", n " << s.n << ", k " << s.k);
        Layer<TestType>(s).check_all();
    }
}

TEMPLATE_TEST_CASE("products: addresses that are only aligned to elements", "[matmul]", float, bf16, fp16) {
    const WithDefaults defaults;
    const LayerShape s{16, 24, 48};
    Layer<TestType>(s).check_all();
    CHECK(algorithms_used().count(1));
    cublas_lt().products.clear();
    for (size_t shift : {1, 3}) {
        INFO("shift " << shift);
        Layer<TestType>(s, shift).check_all();
    }
    CHECK_FALSE(algorithms_used().count(1));
    Layer<TestType>(s).check_all();
    CHECK(algorithms_used().count(1));
}

TEST_CASE("products: addresses are announced as aligned to up to 256 bytes", "[matmul]") {
    const WithDefaults defaults;
    cublas_lt().prefers_256 = true;
    const LayerShape s{16, 24, 80};
    Layer<bf16>(s).check_all();
    CHECK(algorithms_used() == std::set{1});
    cublas_lt().products.clear();
    Layer<bf16>(s, 64).check_all();
    CHECK_FALSE(algorithms_used().count(1));
}

// More float sums than their memory can hold at once: 4 of these rows.
TEST_CASE("products: sums finished in several pieces", "[matmul]") {
    if (simt::tsan() || simt::asan()) return;  // fifteen million elements
    const WithDefaults defaults;
    cublas_lt().lacking_epilogues = ~0u;
    const int wide = int(kMatmulSumsBytes / sizeof(float) / 4) - 1;
    Layer<bf16>({6, wide, 2}).check_forward(true, false);
    CHECK(cublas_lt().products.size() == 2);
    cublas_lt().products.clear();
    Layer<bf16>({9, 2, wide}).check_backward_input(true);
    CHECK(cublas_lt().products.size() == 3);
}

TEST_CASE("products: an algorithm that fails in the call is skipped", "[matmul]") {
    const WithDefaults defaults;
    cublas_lt().refuses_in_call[1] = true;
    Layer<bf16> layer({32, 64, 72});
    layer.check_forward(true, false);
    CHECK(last_algorithm() == 0);
    const int heuristics = cublas_lt().heuristics;
    layer.check_forward(true, false);
    CHECK(last_algorithm() == 0);
    CHECK(cublas_lt().heuristics == heuristics);

    // If all fail, an epilogue is computed by the program's kernel, and a plain GEMM fails with an error message.
    for (bool& refuses : cublas_lt().refuses_in_call) refuses = true;
    Layer<bf16> other({32, 64, 104});
    expect_error(Exit::os, {"cuBLASLt", "m 64 n 32 k 104", "fp32"}, [&] { other.check_forward(true, false); });
}

TEST_CASE("products: fp32 is TF32 only on request", "[matmul]") {
    const WithDefaults defaults;
    Layer<float> layer({24, 32, 40});
    layer.check_forward(true, false);
    CHECK(cublas_lt().products.back().compute == CUBLAS_COMPUTE_32F);
    const std::string exact = layer.result();
    const bool same_words = cuda_matmul_path().find("without TF32") != std::string::npos;
    CHECK(same_words);

    matmul_settings().tf32 = true;
    CHECK(cuda_matmul_path().find("as TF32") != std::string::npos);
    Stored<float> one("one", Role::input, std::vector<double>{1 + 0x1p-12});
    Stored<float> out("out", Role::output, nans(1));
    const OnDevice<float> device;
    ops::matmul_forward({out.on(device), nullptr, one.on(device), one.on(device), nullptr, 1, 1, 1}, {});
    CHECK(out.fetch()[0] == 1.0f);
    CHECK(cublas_lt().products.back().compute == CUBLAS_COMPUTE_32F_FAST_TF32);
    Layer<bf16>({24, 32, 40}).check_forward(true, false);
    CHECK(cublas_lt().products.back().compute == CUBLAS_COMPUTE_32F);

    matmul_settings().tf32 = false;
    layer.check_forward(true, false);
    CHECK(layer.result() == exact);
}

TEMPLATE_TEST_CASE("products: the library's GELU only on request, in 16 bits and with a bias", "[matmul]", float, bf16,
                   fp16) {
    const WithDefaults defaults;
    const auto uses_of_gelu = [] {
        return uses_of(CUBLASLT_EPILOGUE_GELU_AUX_BIAS) + uses_of(CUBLASLT_EPILOGUE_GELU_AUX);
    };
    const bool is_half = sizeof(TestType) == 2;
    Layer<TestType> layer({40, 64, 96});
    layer.check_forward(true, true);
    CHECK(uses_of_gelu() == 0);
    const std::string rounded_first = layer.result();
    matmul_settings().gelu_epilogue = true;
    CHECK(cuda_matmul_path().find("gelu_new in the GEMM") != std::string::npos);
    layer.check_forward(true, true);
    CHECK(uses_of(CUBLASLT_EPILOGUE_GELU_AUX_BIAS) == is_half);
    CHECK((layer.result() != rounded_first) == is_half);
    layer.check_forward(false, true);
    layer.check_forward(true, false);
    CHECK(uses_of_gelu() == is_half);
    cublas_lt().lacking_epilogues = CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    Layer<TestType> other({40, 64, 104});
    other.check_forward(true, true);
    CHECK(uses_of_gelu() == is_half);
}

TEST_CASE("products: each stream has its own workspace", "[matmul]") {
    const WithDefaults defaults;
    Layer<bf16> layer({32, 40, 112});
    layer.check_forward(true, false);
    cudaStream_t stream = nullptr;
    REQUIRE(cudaStreamCreate(&stream) == cudaSuccess);
    const size_t bytes = simt::used_device_bytes();
    layer.check_forward(true, false, stream_of(stream));
    CHECK(simt::used_device_bytes() >= bytes + kMatmulWorkspaceBytes);
    const size_t with_workspace = simt::used_device_bytes();
    layer.check_forward(true, false, stream_of(stream));
    CHECK(simt::used_device_bytes() == with_workspace);
}

TEST_CASE("products: the first proposal is used, even if it is slow", "[matmul]") {
    const WithDefaults defaults;
    cublas_lt().ms[1] = 20;
    Layer<bf16>({24, 32, 136}).check_forward(true, false);
    CHECK(cublas_lt().products.size() == 1);
    CHECK(last_algorithm() == 1);
}

// The times differ much from the library's order. 4, 5 and 6 would be the fastest, but have no fixed order of sums or
// need too much memory.
TEST_CASE("choices: the fastest allowed algorithm, also from the text", "[matmul]") {
    const WithDefaults defaults;
    matmul_settings().time_gemms = true;
    cublas_lt().ignores_mask = true;
    const float ms[] = {20, 30, 2, 10, 0, 0, 0};
    std::copy_n(ms, simt::kCublasLtAlgorithms, cublas_lt().ms);
    Layer<bf16> layer({24, 32, 120});
    layer.check_backward_weight(false, false);
    CHECK(last_algorithm() == 2);
    CHECK(algorithms_used() == std::set<int>{0, 1, 2, 3});
    const std::string first = layer.result(), text = matmul_choices();
    CHECK(text.find("m 120 n 32 k 24 plain =") != std::string::npos);
    CHECK(text.find(" ms instead of 30.") != std::string::npos);
    matmul_settings().time_gemms = false;
    for (const bool has_choice : {true, false}) {
        use_matmul_choices(has_choice ? text : "");
        const std::string path = cuda_matmul_path();
        CHECK(path.find(has_choice ? "1 chosen algorithm" : "the library's first proposals") != std::string::npos);
        cublas_lt().products.clear();
        layer.check_backward_weight(false, false);
        CHECK(cublas_lt().products.size() == 1);
        CHECK(last_algorithm() == (has_choice ? 2 : 1));
        CHECK((layer.result() == first) == has_choice);
    }
    std::string unordered = text;
    const std::string id = "7472616e73706f73 2 ";
    unordered.replace(unordered.find(id), id.size(), "7472616e73706f73 4 ");
    use_matmul_choices(unordered);
    layer.check_backward_weight(false, false);
    CHECK(last_algorithm() == 1);
}

TEST_CASE("choices: the first proposal wins unless another one is more than 1 % faster", "[matmul]") {
    const WithDefaults defaults;
    matmul_settings().time_gemms = true;
    for (float& ms : cublas_lt().ms) ms = 2;
    cublas_lt().ms[1] = 2.01f;
    Layer<bf16>({24, 32, 160}).check_forward(true, false);
    CHECK(last_algorithm() == 1);
    CHECK(matmul_choices().find("instead of") == std::string::npos);
    cublas_lt().ms[1] = 2.1f;
    Layer<bf16>({24, 32, 168}).check_forward(true, false);
    CHECK(last_algorithm() == 0);
}

TEST_CASE("choices: an algorithm that fails, or that the library no longer has, is not used", "[matmul]") {
    const WithDefaults defaults;
    matmul_settings().time_gemms = true;
    cublas_lt().refuses_in_call[0] = cublas_lt().refuses_in_call[2] = true;
    cublas_lt().ms[1] = 6;
    Layer<bf16> layer({24, 32, 128});
    layer.check_forward(true, false);
    CHECK(last_algorithm() == 3);
    matmul_settings().time_gemms = false;
    cublas_lt().gone[3] = true;
    use_matmul_choices(matmul_choices());
    layer.check_forward(true, false);
    CHECK(last_algorithm() == 1);
}

// Times the GEMMs of `run` with a slow epilogue or a fast one, and then uses the choices. Returns whether one is a
// separate kernel, which takes 0.001 ms here.
static bool choose_apart(cublasLtEpilogue_t epilogue, bool is_slow, const std::function<void()>& run) {
    matmul_settings().time_gemms = true;
    for (float& ms : cublas_lt().ms) ms = 1;
    cublas_lt().extra_ms = {{epilogue, is_slow ? 0.1f : 0.0005f}};
    run();
    matmul_settings().time_gemms = false;
    const std::string text = matmul_choices();
    use_matmul_choices(text);
    cublas_lt().products.clear();
    return text.find(": apart, ") != std::string::npos;
}

TEST_CASE("choices: separate kernels instead of a slow bias gradient", "[matmul]") {
    const WithDefaults defaults;
    for (const bool is_slow : {true, false}) {
        Layer<bf16> layer({24, 32, is_slow ? 144 : 152});
        CHECK(choose_apart(CUBLASLT_EPILOGUE_BGRADB, is_slow, [&] { layer.check_backward_weight(true, false); }) ==
              is_slow);
        layer.check_backward_weight(true, true);
        layer.check_backward_weight(true, false);
        CHECK(uses_of(CUBLASLT_EPILOGUE_BGRADB) == (is_slow ? 1 : 2));  // += was not timed
        use_matmul_choices("");
    }
}

TEST_CASE("choices: a separate kernel instead of a slow GELU", "[matmul]") {
    const WithDefaults defaults;
    matmul_settings().gelu_epilogue = true;
    for (const bool is_slow : {true, false}) {
        Layer<bf16> layer({24, 32, is_slow ? 176 : 184});
        const auto forward = [&] { layer.check_forward(true, true); };
        CHECK(choose_apart(CUBLASLT_EPILOGUE_GELU_AUX_BIAS, is_slow, forward) == is_slow);
        const std::string timed = layer.result();
        forward();
        CHECK(uses_of(CUBLASLT_EPILOGUE_GELU_AUX_BIAS) == !is_slow);
        CHECK(uses_of(CUBLASLT_EPILOGUE_BIAS) == is_slow);
        CHECK(layer.result() == timed);
        use_matmul_choices("");
    }
}

TEST_CASE("choices: the text of another machine, and damaged lines", "[matmul]") {
    const WithDefaults defaults;
    const std::string header = matmul_choices();
    use_matmul_choices(header + "a gemm: 1 2 3 4 5 6 7 f, 1.0000 ms\n");
    CHECK(matmul_choices() == header + "a gemm: 1 2 3 4 5 6 7 f, 1.0000 ms\n");
    expect_error(Exit::config, {"device.gemm_choices begins with", "cuBLASLt 1,", "run train_gpt tune"},
                 [] { use_matmul_choices("train_gpt GEMM choices 1, cuBLASLt 1, some GPU\n"); });
    for (const char* line : {"a gemm", "a gemm: 1 2 3", "a gemm: 1 2 3 4 5 6 7, 1 ms",
                             "a gemm: 1 2 3 4 5 6 7 8 9, 1 ms", "a gemm: 1 2 3 4 5 6 7 x, 1 ms", "a gemm: , 1 ms"})
        expect_error(Exit::config, {"invalid line", line}, [&] { use_matmul_choices(header + line); });
    CHECK(matmul_choices() != header);  // an error changes nothing
}

TEST_CASE("products: proposed and excluded algorithms", "[matmul]") {
    const WithDefaults defaults;
    void* memory = nullptr;
    REQUIRE(cudaMalloc(&memory, 4096) == cudaSuccess);
    const Product product{.d = {memory, Dtype::fp32},
                          .a = {memory, Dtype::bf16},
                          .b = {memory, Dtype::bf16},
                          .transpose_a = false,
                          .transpose_b = true,
                          .m = 8,
                          .n = 8,
                          .k = 8};
    cublasLtHandle_t handle = nullptr;
    cublasLtCreate(&handle);
    ProductDescription description(key_of(product, false));
    auto ids_of = [](const std::vector<MatmulAlgorithm>& algorithms) {
        std::vector<int> ids;
        for (const MatmulAlgorithm& stored : algorithms) {
            const auto algorithm = std::bit_cast<cublasLtMatmulAlgo_t>(stored);
            size_t bytes = 0;
            ids.push_back(-1);
            cublasLtMatmulAlgoConfigGetAttribute(&algorithm, CUBLASLT_ALGO_CONFIG_ID, &ids.back(), sizeof(int), &bytes);
        }
        return ids;
    };
    for (const bool ignores_mask : {false, true}) {
        cublas_lt().ignores_mask = ignores_mask;
        CHECK(ids_of(description.proposals(handle, product)) == std::vector{1, 0, 2, 3});
        CHECK(ids_of(description.excluded_proposals(handle, product, kMatmulWorkspaceBytes)) == std::vector{4, 5});
        const auto all = ids_of(description.excluded_proposals(handle, product, size_t(256) << 20));
        CHECK(std::set<int>(all.begin(), all.end()) == std::set<int>{4, 5, 6});
        CHECK(all.size() == 3);
    }
    REQUIRE(cudaFree(memory) == cudaSuccess);
}

// Products that differ in a single field have different keys, order and texts.
TEST_CASE("product keys: every field counts", "[matmul]") {
    const ProductKey base{.a = Dtype::bf16,
                          .b = Dtype::bf16,
                          .d = Dtype::bf16,
                          .transpose_a = false,
                          .transpose_b = false,
                          .m = 8,
                          .n = 16,
                          .k = 24,
                          .epilogue = Epilogue::none,
                          .accumulate = false,
                          .tf32 = false,
                          .a_alignment = 16,
                          .b_alignment = 16,
                          .d_alignment = 16,
                          .bias_alignment = 0,
                          .aux_alignment = 0};
    std::vector<ProductKey> keys(17, base);
    keys[1].a = Dtype::fp16, keys[2].d = Dtype::fp32, keys[16].b = Dtype::fp16, keys[3].transpose_a = true,
    keys[4].transpose_b = true;
    keys[5].m = 9, keys[6].n = 9, keys[7].k = 9, keys[8].epilogue = Epilogue::bias, keys[9].accumulate = true;
    keys[10].tf32 = true, keys[11].a_alignment = 2, keys[12].b_alignment = 2, keys[13].d_alignment = 2;
    keys[14].bias_alignment = 2, keys[15].aux_alignment = 2;
    std::set<std::string> words;
    for (const ProductKey& key : keys) words.insert(text_key(key));
    CHECK(words.size() == keys.size());
    CHECK(std::set(keys.begin(), keys.end()).size() == keys.size());
    for (Epilogue epilogue : {Epilogue::dgelu, Epilogue::bias_gradient}) {
        ProductKey key = base;
        key.epilogue = epilogue;
        CHECK(words.insert(text_key(key)).second);
    }
}

TEST_CASE("product keys: the alignment of every used address", "[matmul]") {
    alignas(512) char memory[512];
    const Product base{.d = {memory, Dtype::bf16},
                       .a = {memory, Dtype::bf16},
                       .b = {memory, Dtype::bf16},
                       .bias = memory,
                       .aux = memory,
                       .transpose_a = false,
                       .transpose_b = false,
                       .m = 8,
                       .n = 8,
                       .k = 8};
    auto differs = [&](auto change, Epilogue epilogue = Epilogue::none) {
        Product product = base, changed = base;
        product.epilogue = changed.epilogue = epilogue;
        change(changed);
        return !(key_of(product, false) == key_of(changed, false));
    };
    const View moved(memory + 2, Dtype::bf16);
    auto move_bias = [&](Product& p) { p.bias = memory + 2; };
    auto move_aux = [&](Product& p) { p.aux = memory + 2; };
    CHECK(differs([&](Product& p) { p.d = moved; }));
    CHECK(differs([&](Product& p) { p.a = moved; }));
    CHECK(differs([&](Product& p) { p.b = moved; }));
    CHECK(differs(move_bias, Epilogue::bias));
    CHECK(differs(move_bias, Epilogue::bias_gradient));
    CHECK(differs(move_aux, Epilogue::dgelu));
    CHECK_FALSE(differs(move_aux, Epilogue::bias));
    CHECK_FALSE(differs([&](Product& p) { p.d.data = memory + 256, p.bias = memory + 256; }, Epilogue::bias));
}

// The stand-in itself rejects what the library rejects.
TEST_CASE("cuBLASLt's stand-in: rules", "[matmul]") {
    const WithDefaults defaults;
    void* memory = nullptr;
    REQUIRE(cudaMalloc(&memory, 4096) == cudaSuccess);
    auto proposals = [&](Product product) {
        cublasLtHandle_t handle = nullptr;
        cublasLtCreate(&handle);
        return ProductDescription(key_of(product, false)).proposals(handle, product).size();
    };
    const Product plain{.d = {memory, Dtype::bf16},
                        .a = {memory, Dtype::bf16},
                        .b = {memory, Dtype::bf16},
                        .bias = memory,
                        .aux = memory,
                        .transpose_a = false,
                        .transpose_b = false,
                        .m = 8,
                        .n = 8,
                        .k = 8};
    CHECK(proposals(plain) > 0);
    auto with = [&](auto change) {
        Product product = plain;
        change(product);
        return proposals(product);
    };
    CHECK(with([](Product& p) { p.epilogue = Epilogue::bias; }) > 0);
    CHECK(with([](Product& p) { p.epilogue = Epilogue::bias, p.bias = nullptr; }) == 0);
    CHECK(with([](Product& p) { p.epilogue = Epilogue::dgelu; }) > 0);
    CHECK(with([](Product& p) { p.epilogue = Epilogue::dgelu, p.m = 12; }) == 0);
    CHECK(with([](Product& p) { p.epilogue = Epilogue::dgelu, p.aux = nullptr; }) == 0);
    CHECK(with([](Product& p) { p.epilogue = Epilogue::bias_gradient; }) == 0);
    CHECK(with([](Product& p) { p.epilogue = Epilogue::bias_gradient, p.transpose_b = true; }) > 0);
    CHECK(with([](Product& p) { p.a.dtype = p.b.dtype = Dtype::fp32; }) == 0);
    CHECK(with([](Product& p) { p.b.dtype = Dtype::fp16; }) == 0);
    CHECK(with([](Product& p) { p.d.dtype = Dtype::fp16; }) == 0);
    CHECK(with([](Product& p) { p.d.dtype = Dtype::fp32; }) > 0);

    // A matrix that ends outside its allocation is a fault of the product.
    Product beyond = plain;
    beyond.n = 8 * 1024;
    CHECK(multiply(beyond, {}));
    const auto faults = simt::take_faults();
    REQUIRE(!faults.empty());
    CHECK(faults[0].what.find("cublasLtMatmul: b") != std::string::npos);
    REQUIRE(cudaFree(memory) == cudaSuccess);
}
