// Chooses the algorithm of each GEMM once, then looks it up. Host code; no kernel.
#include <map>
#include <utility>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul/matmul.h"
#include "kernels/cuda/matmul/matmul_choices.h"
#include "kernels/cuda/matmul/matmul_epilogue.h"
#include "kernels/cuda/matmul/matmul_library.h"
#include "kernels/cuda/matmul/matmul_plan.h"
#include "kernels/cuda/matmul/matmul_timing.h"
#include "kernels/ops.h"

namespace {

int& unordered_gemms() {
    static int count = 0;  // GEMMs whose bits may differ from run to run
    return count;
}

struct Plan {
    std::unique_ptr<ProductDescription> description;
    // The chosen algorithm, then the library's proposals in its order, without those that failed. The first one is
    // used.
    std::vector<MatmulAlgorithm> proposals;
    double ms = 0;  // of the chosen algorithm, if it was timed
};

struct StreamMemory {
    DeviceBuffer workspace, sums;
};

struct Library {
    cublasLtHandle_t handle = nullptr;
    std::map<ProductKey, Plan> plans;
    std::map<void*, StreamMemory> memory;  // keyed by the stream's handle

    Library() { check_cublas(cublasLtCreate(&handle), "cublasLtCreate"); }
};

// Never destroyed, because CUDA may be unloaded first at process exit.
Library& library() {
    static Library& the_library = *new Library;
    return the_library;
}

// Apart from the library, which cannot be created without a GPU.
MatmulChoices& choices() {
    static MatmulChoices the_choices;
    return the_choices;
}

MatmulWorkspace workspace_of(Library& lib, Stream stream) {
    DeviceBuffer& workspace = lib.memory[stream.handle].workspace;
    if (!workspace.data()) workspace = DeviceBuffer(kMatmulWorkspaceBytes);
    return {.memory = workspace.data(), .bytes = workspace.bytes()};
}

// Returns deterministic proposals. A plain GEMM has no substitute, so if it has none, returns any proposals.
std::vector<MatmulAlgorithm> proposals_of(const Library& lib, ProductDescription& description, const Product& product) {
    std::vector<MatmulAlgorithm> found = description.proposals(lib.handle, product);
    if (!found.empty() || product.epilogue != Epilogue::none) return found;
    found = description.proposals(lib.handle, product, ProductDescription::Order::unknown);
    if (found.empty()) found = description.excluded_proposals(lib.handle, product, kMatmulWorkspaceBytes);
    if (!found.empty()) unordered_gemms()++;
    return found;
}

Plan& plan_for(Library& lib, const Product& product, Stream stream);

// Milliseconds of the GEMM without its GELU or its bias gradient, and of our GELU or our sums of columns.
double ms_apart(Library& lib, const Product& product, Stream stream) {
    Product plain = product;
    if (product.epilogue == Epilogue::gelu) {
        plain.epilogue = Epilogue::bias;
        plain.d.data = std::exchange(plain.aux, nullptr);
        const ops::ActivationForward gelu{.out = product.d, .inp = plain.d, .count = size_t(product.m) * product.n};
        return plan_for(lib, plain, stream).ms + time_turns([&] { ops::activation_forward(gelu, stream); }, stream);
    }
    plain.epilogue = Epilogue::none;
    plain.bias = nullptr;
    const DeviceBuffer sums(size_t(product.n) * sizeof(float)),
        scratch(column_sums_scratch_bytes(product.k, product.n));
    const ColumnSums columns{.out = static_cast<float*>(sums.data()),
                             .scratch = static_cast<float*>(scratch.data()),
                             .values = product.b,
                             .rows = product.k,
                             .cols = product.n,
                             .accumulate = false};
    return plan_for(lib, plain, stream).ms + time_turns([&] { column_sums(columns, stream); }, stream);
}

// Times the proposals on the product's arrays, and separate kernels instead of GELU or a bias gradient.
MatmulChoice timed_choice(Library& lib, Plan& plan, const Product& product, Stream stream) {
    const auto run = [&](const MatmulAlgorithm& algorithm) {
        return plan.description->run(lib.handle, algorithm, product, workspace_of(lib, stream), stream);
    };
    const std::vector<TimedAlgorithm> timed = time_algorithms(plan.proposals, run, stream);
    if (timed.empty()) return {plan.proposals.front(), "not timed"};
    const double first_ms = timed.front().ms;
    const auto described = [&](double ms) {
        return format("%.4f ms", ms) + (ms == first_ms ? "" : format(" instead of %.4f ms", first_ms));
    };
    const TimedAlgorithm& fastest = fastest_of(timed);
    plan.ms = fastest.ms;
    const bool may_be_apart = product.epilogue == Epilogue::gelu || product.epilogue == Epilogue::bias_gradient;
    if (!may_be_apart) return {fastest.algorithm, described(fastest.ms)};
    const double apart_ms = ms_apart(lib, product, stream);
    return apart_ms < fastest.ms ? MatmulChoice{{}, described(apart_ms)}
                                 : MatmulChoice{fastest.algorithm, described(fastest.ms)};
}

// Moves the chosen algorithm to the front, or removes all if separate kernels are faster.
void choose(Library& lib, Plan& plan, const std::string& gemm, const Product& product, Stream stream) {
    const bool is_timed = matmul_settings().time_gemms && !choices().contains(gemm) && !plan.proposals.empty() &&
                          plan.description->accepts(lib.handle, product, plan.proposals.front());
    if (is_timed) choices()[gemm] = timed_choice(lib, plan, product, stream);
    const auto chosen = choices().find(gemm);
    if (chosen == choices().end()) return;
    const std::optional<MatmulAlgorithm>& algorithm = chosen->second.algorithm;
    if (!algorithm)
        plan.proposals.clear();
    else if (plan.description->accepts(lib.handle, product, *algorithm))
        plan.proposals.insert(plan.proposals.begin(), *algorithm);
}

Plan& plan_for(Library& lib, const Product& product, Stream stream) {
    const ProductKey key = key_of(product, matmul_settings().tf32);
    const auto known = lib.plans.find(key);
    if (known != lib.plans.end()) return known->second;
    Plan plan;
    if (!library_lacks(key)) {
        plan.description = std::make_unique<ProductDescription>(key);
        plan.proposals = proposals_of(lib, *plan.description, product);
        choose(lib, plan, text_key(key), product, stream);
    }
    return lib.plans.emplace(key, std::move(plan)).first->second;
}

}  // namespace

bool multiply(const Product& product, Stream stream) {
    Library& lib = library();
    Plan& plan = plan_for(lib, product, stream);
    while (!plan.proposals.empty()) {
        const cublasStatus_t status =
            plan.description->run(lib.handle, plan.proposals.front(), product, workspace_of(lib, stream), stream);
        if (status == CUBLAS_STATUS_SUCCESS) return true;
        if (!is_refusal(status)) check_cublas(status, "cublasLtMatmul");
        plan.proposals.erase(plan.proposals.begin());
    }
    return false;
}

void multiply_plain(const Product& product, Stream stream) {
    if (!multiply(product, stream))
        fail(Exit::os, "cuBLASLt has no algorithm for the GEMM %s", text_key(key_of(product, matmul_settings().tf32)));
}

float* matmul_sums(Stream stream) {
    DeviceBuffer& sums = library().memory[stream.handle].sums;
    if (!sums.data()) sums = DeviceBuffer(kMatmulSumsBytes);
    return static_cast<float*>(sums.data());
}

std::string matmul_choices() { return text_of(choices()); }

void use_matmul_choices(const std::string& text) {
    if (text.empty() && choices().empty()) return;
    choices() = text.empty() ? MatmulChoices() : matmul_choices_of(text);
    library().plans.clear();
}

MatmulSettings& matmul_settings() {
    static MatmulSettings the_settings;
    return the_settings;
}

std::string cuda_matmul_path() {
    const size_t version = cublasLtGetVersion();
    std::string path = format("cuBLASLt %zu.%zu.%zu, float sums; fp32 %s; %s%s", version / 10000, version / 100 % 100,
                              version % 100, matmul_settings().tf32 ? "as TF32" : "without TF32",
                              matmul_settings().gelu_epilogue ? "gelu_new in the GEMM; " : "",
                              choices().empty() ? "the library's first proposals"
                                                : format("%zu chosen algorithms", choices().size()).c_str());
    if (unordered_gemms() > 0)
        path += format("; the bits of %d GEMMs may differ from run to run, because no algorithm sums in a fixed order",
                       unordered_gemms());
    return path;
}
