// Measures GEMMs one at a time, on random numbers: zeros would draw less power and so run at a higher clock.
#include <bit>

#include "dev/bench_arrays.h"
#include "dev/bench_matmul.h"
#include "dev/bench_timing.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul/matmul.h"
#include "kernels/cuda/matmul/matmul_epilogue.h"
#include "kernels/cuda/matmul/matmul_library.h"
#include "kernels/cuda/matmul/matmul_products.h"
#include "kernels/cuda/matmul/matmul_timing.h"

namespace {

// The largest workspace for algorithms that are excluded only for the size of their workspace.
constexpr size_t kLargeWorkspaceBytes = size_t(512) << 20;

// ---- comparing bits -------------------------------------------------------------------------------------------------

struct CountDifferences {
    int* out;  // (1)  +=
    const uint32_t *left, *right;
    size_t words;
};

// Reads 8 bytes per word. Results are nearly always equal, so atomics are rare.
__global__ void count_differences_kernel(CountDifferences op) {
    const uint32_t* __restrict__ left = op.left;
    const uint32_t* __restrict__ right = op.right;
    int differing = 0;
    for (size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x; i < op.words; i += size_t(gridDim.x) * blockDim.x)
        differing += left[i] != right[i];
    if (differing) atomicAdd(op.out, differing);
}

struct Bytes {
    void* data = nullptr;
    size_t count = 0;
};

// The output of a GEMM, and its content before.
class Outputs {
public:
    Outputs(const Product& product, Arrays& arrays) : accumulate_(product.accumulate) {
        const size_t element = size_of(product.d.dtype);
        outputs_.push_back({product.d.data, size_t(product.m) * size_t(product.n) * element});
        if (product.epilogue == Epilogue::bias_gradient)
            outputs_.push_back({product.bias, size_t(product.n) * element});
        for (const Bytes& output : outputs_) {
            require(output.count % sizeof(uint32_t) == 0, "bench_matmul: %zu bytes are not whole words", output.count);
            first_.push_back({arrays.make_scratch(output.count), output.count});
        }
        if (!accumulate_) return;
        before_ = {arrays.make_scratch(outputs_[0].count), outputs_[0].count};
        copy_on_device(before_.data, product.d.data, before_.count, Stream{});
    }

    void reset() const {
        if (accumulate_) copy_on_device(outputs_[0].data, before_.data, before_.count, Stream{});
    }
    void keep_as_first() const {
        for (size_t i = 0; i < outputs_.size(); i++)
            copy_on_device(first_[i].data, outputs_[i].data, outputs_[i].count, Stream{});
    }
    void count_differences(int* out) const {
        constexpr int kThreads = 256;
        constexpr size_t kMaxBlocks = 1024;
        for (size_t i = 0; i < outputs_.size(); i++) {
            const size_t words = outputs_[i].count / sizeof(uint32_t);
            const size_t blocks = std::min(kMaxBlocks, (words + kThreads - 1) / kThreads);
            launch(count_differences_kernel,
                   {.name = "count_differences", .blocks = dim3(unsigned(blocks)), .threads = kThreads}, Stream{},
                   CountDifferences{.out = out,
                                    .left = static_cast<const uint32_t*>(outputs_[i].data),
                                    .right = static_cast<const uint32_t*>(first_[i].data),
                                    .words = words});
        }
    }

private:
    bool accumulate_;
    std::vector<Bytes> outputs_, first_;
    Bytes before_;
};

// The number of runs after the first that give different bits.
template <class Run> int mismatches_of(int repeats, const Product& product, Run run) {
    Arrays arrays;
    const Outputs outputs(product, arrays);
    std::vector<int> counts(static_cast<size_t>(repeats));
    int* differences = arrays.put(counts);
    for (int i = 0; i < repeats; i++) {
        outputs.reset();
        run();
        i == 0 ? outputs.keep_as_first() : outputs.count_differences(differences + i);
    }
    copy_to_host(counts.data(), differences, counts.size() * sizeof(int), Stream{});
    synchronize(Stream{});
    return int(std::count_if(counts.begin(), counts.end(), [](int words) { return words != 0; }));
}

// ---- the library ----------------------------------------------------------------------------------------------------

cublasLtHandle_t library() {
    static const cublasLtHandle_t handle = [] {
        cublasLtHandle_t made = nullptr;
        check_cublas(cublasLtCreate(&made), "cublasLtCreate");
        return made;
    }();
    return handle;
}

// Never freed: CUDA may shut down before the destructor would run.
MatmulWorkspace workspace() {
    static const DeviceBuffer& memory = *new DeviceBuffer(kLargeWorkspaceBytes);
    return {.memory = memory.data(), .bytes = memory.bytes()};
}

// An attribute of an algorithm, of the library's type for it; -1 if the library does not know it.
template <class Value>
long attribute(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t which) {
    Value value{};
    size_t bytes = 0;
    const cublasStatus_t status =
        cublasLtMatmulAlgoConfigGetAttribute(&algorithm, which, &value, sizeof(value), &bytes);
    return status == CUBLAS_STATUS_SUCCESS ? long(value) : -1;
}

std::string words_of_reduction(long scheme) {
    switch (scheme) {
        case CUBLASLT_REDUCTION_SCHEME_NONE: return "none";
        case CUBLASLT_REDUCTION_SCHEME_INPLACE: return "in place";
        case CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: return "compute type";
        case CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE: return "output type";
    }
    return std::to_string(scheme);
}

// Numbers as in cublasLt.h's enumerations.
std::string text_key(const MatmulAlgorithm& stored) {
    const auto algorithm = std::bit_cast<cublasLtMatmulAlgo_t>(stored);
    return format("id %ld tile %ld stages %ld cluster %ld split-k %ld reduction %s swizzle %ld custom %ld inner %ld",
                  attribute<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_ID),
                  attribute<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_TILE_ID),
                  attribute<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_STAGES_ID),
                  attribute<uint16_t>(algorithm, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID),
                  attribute<int32_t>(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
                  words_of_reduction(attribute<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME)).c_str(),
                  attribute<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING),
                  attribute<uint32_t>(algorithm, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION),
                  attribute<uint16_t>(algorithm, CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID));
}

// ---- one product ----------------------------------------------------------------------------------------------------

double flops_of(const Product& product) { return 2.0 * product.m * product.n * product.k; }

class Measurement {
public:
    explicit Measurement(const Product& product) : product_(product), description_(key_of(product, false)) {}

    std::vector<MatmulAlgorithm> candidates() { return description_.proposals(library(), product_); }

    // Times both kinds, one after the other.
    void measure(ProductResult& result, int repeats) {
        const std::vector<MatmulAlgorithm> candidates = this->candidates();
        const auto excluded = description_.excluded_proposals(library(), product_, kLargeWorkspaceBytes);
        result.candidates = int(candidates.size());
        result.excluded_candidates = int(excluded.size());
        if (const auto times = timed(candidates); !times.empty()) {
            result.chosen = result_of(times.front(), repeats);
            result.fastest = result_of(fastest_of(times), repeats);
        }
        if (const auto times = timed(excluded); !times.empty()) result.excluded = result_of(fastest_of(times), repeats);
    }

    // Milliseconds of the algorithm that training uses.
    std::optional<double> chosen_ms() {
        const std::vector<TimedAlgorithm> times = timed(candidates(), 1);
        return times.empty() ? std::nullopt : std::optional<double>(times.front().ms);
    }

private:
    cublasStatus_t run(const MatmulAlgorithm& algorithm) {
        return description_.run(library(), algorithm, product_, workspace(), Stream{});
    }

    std::vector<TimedAlgorithm> timed(const std::vector<MatmulAlgorithm>& algorithms, size_t most = SIZE_MAX) {
        return time_algorithms(
            algorithms, [&](const MatmulAlgorithm& one) { return run(one); }, Stream{}, most);
    }

    AlgorithmResult result_of(const TimedAlgorithm& timed, int repeats) {
        const int mismatches =
            mismatches_of(repeats, product_, [&] { check_cublas(run(timed.algorithm), "cublasLtMatmul"); });
        return {.algorithm = text_key(timed.algorithm),
                .ms = timed.ms,
                .tflops = flops_of(product_) / timed.ms * 1e-9,
                .repeats = repeats,
                .mismatches = mismatches};
    }

    Product product_;
    ProductDescription description_;
};

constexpr Timing kPass{.warm_up = 2, .batch_ms = 5, .total_ms = 50, .least = 3};

// `product` with the library's GELU, and our GELU pass after the product without it.
void measure_gelu(ProductResult& result, Product product) {
    Arrays arrays;
    const size_t count = size_t(product.m) * size_t(product.n);
    const ops::ActivationForward pass{
        .out = View(arrays.make_scratch(count * size_of(product.d.dtype)), product.d.dtype),
        .inp = product.d,
        .count = count};
    result.gelu_pass_ms = time_calls([&] { ops::activation_forward(pass, Stream{}); }, kPass).median;
    product.epilogue = Epilogue::gelu;
    product.aux = arrays.make_scratch(count * size_of(product.d.dtype));
    result.gelu_ms = Measurement(product).chosen_ms();
}

// The product without its bias gradient, and our column sums.
void measure_apart(ProductResult& result, Product product) {
    Arrays arrays;
    const ColumnSums sums{
        .out = static_cast<float*>(product.bias),
        .scratch = static_cast<float*>(arrays.make_scratch(column_sums_scratch_bytes(product.k, product.n))),
        .values = product.b,
        .rows = product.k,
        .cols = product.n,
        .accumulate = false};
    result.column_sums_ms = time_calls([&] { column_sums(sums, Stream{}); }, kPass).median;
    product.epilogue = Epilogue::none;
    product.bias = nullptr;
    result.plain_ms = Measurement(product).chosen_ms();
}

ProductResult measure_product(const std::string& name, double calls, const Product& product, bool has_gelu,
                              int repeats) {
    ProductResult result{.name = name,
                         .m = product.m,
                         .n = product.n,
                         .k = product.k,
                         .epilogue = name_of(product.epilogue),
                         .in = name_of(product.a.dtype),
                         .out = name_of(product.d.dtype),
                         .accumulate = product.accumulate,
                         .calls = calls};
    Measurement(product).measure(result, repeats);
    if (product.epilogue == Epilogue::bias_gradient) measure_apart(result, product);
    if (has_gelu) measure_gelu(result, product);
    return result;
}

// ---- the products of a step -----------------------------------------------------------------------------------------

struct Linear {
    std::string name;
    double calls;  // of each GEMM per micro-step
    int rows, n, k;
    bool has_bias = true, gelu_behind = false, gelu_before = false;
    bool adds_at_once = false;  // in several parts; all except the first accumulate into the weight's gradient
};

void add_case(std::vector<ProductCase>& cases, const std::string& name, double calls, const Linear& l,
              std::function<Product(Arrays&)> make, bool has_gelu = false) {
    cases.push_back({name, calls, 2.0 * l.rows * l.n * l.k, [=](int repeats) {
                         Arrays arrays;
                         return measure_product(name, calls, make(arrays), has_gelu, repeats);
                     }});
}

ActivationFunction activation_if(bool gelu) { return gelu ? ActivationFunction::gelu_new : ActivationFunction::none; }

void add_products(std::vector<ProductCase>& cases, const Linear& l) {
    const size_t R = size_t(l.rows), N = size_t(l.n), K = size_t(l.k);
    auto forward = [=](Arrays& arrays) {
        return product_of(ops::MatmulForward{.out = arrays.make<bf16>(R * N),
                                             .pre_activation = l.gelu_behind ? arrays.make<bf16>(R * N) : nullptr,
                                             .inp = arrays.make<bf16>(R * K),
                                             .weight = arrays.make<bf16>(N * K, 0.02f),
                                             .bias = l.has_bias ? arrays.make<bf16>(N, 0.02f) : nullptr,
                                             .rows = l.rows,
                                             .n = l.n,
                                             .k = l.k,
                                             .activation = activation_if(l.gelu_behind)});
    };
    add_case(cases, l.name + " forward", l.calls, l, forward, l.gelu_behind);
    add_case(cases, l.name + " backward input", l.calls, l, [=](Arrays& arrays) {
        return product_of(ops::MatmulBackwardInput{.dinp = arrays.make<bf16>(R * K),
                                                   .dout = arrays.make<bf16>(R * N),
                                                   .weight = arrays.make<bf16>(N * K, 0.02f),
                                                   .kept = l.gelu_before ? arrays.make<bf16>(R * K) : nullptr,
                                                   .rows = l.rows,
                                                   .n = l.n,
                                                   .k = l.k,
                                                   .activation = activation_if(l.gelu_before)});
    });
    for (const bool accumulate : {false, true}) {
        const double calls = !l.adds_at_once ? l.calls : accumulate ? l.calls - 1 : 1;
        const std::string name = l.name + (accumulate ? " backward weight, adding" : " backward weight");
        add_case(cases, name, calls, l, [=](Arrays& arrays) {
            return product_of(ops::MatmulBackwardWeight{.dweight = arrays.make<float>(N * K),
                                                        .dbias = l.has_bias ? arrays.make<float>(N) : nullptr,
                                                        .scratch = arrays.make_scratch(N * sizeof(float)),
                                                        .dout = arrays.make<bf16>(R * N),
                                                        .inp = arrays.make<bf16>(R * K),
                                                        .rows = l.rows,
                                                        .n = l.n,
                                                        .k = l.k,
                                                        .accumulate = accumulate});
        });
    }
}

}  // namespace

std::vector<ProductCase> product_cases(const Workload& work) {
    const GptShape& s = work.shape;
    const int tokens = work.tokens(), C = s.n_embd, head_rows = work.rows_of_head();
    const double L = s.n_layer, head_passes = double(tokens) / head_rows;
    std::vector<ProductCase> cases;
    add_products(cases, {.name = "qkv", .calls = L, .rows = tokens, .n = s.qkv_channels(), .k = C});
    add_products(cases, {.name = "attn_proj", .calls = L, .rows = tokens, .n = C, .k = C});
    add_products(cases, {.name = "fc", .calls = L, .rows = tokens, .n = s.hidden(), .k = C, .gelu_behind = true});
    add_products(cases, {.name = "fc_proj", .calls = L, .rows = tokens, .n = C, .k = s.hidden(), .gelu_before = true});
    add_products(cases, {.name = "head",
                         .calls = head_passes,
                         .rows = head_rows,
                         .n = s.padded_vocab(),
                         .k = C,
                         .has_bias = false,
                         .adds_at_once = head_passes > 1});
    std::stable_sort(cases.begin(), cases.end(), [](const ProductCase& left, const ProductCase& right) {
        return left.calls * left.flops > right.calls * right.flops;
    });
    return cases;
}

std::string library_name() {
    const size_t version = cublasLtGetVersion();
    return format("cuBLASLt %zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
}
