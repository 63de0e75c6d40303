// Chooses the algorithm of each GEMM once, then looks it up. Host code; no kernel.
#include <map>
#include <utility>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul/matmul.h"
#include "kernels/cuda/matmul/matmul_library.h"
#include "kernels/cuda/matmul/matmul_plan.h"

namespace {

int& unordered_gemms() {
    static int count = 0;  // GEMMs whose bits may differ from run to run
    return count;
}

struct Plan {
    std::unique_ptr<ProductDescription> description;
    std::vector<MatmulAlgorithm> proposals;  // in the library's order, without those that failed; the first one is used
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

Plan& plan_for(Library& lib, const Product& product) {
    const ProductKey key = key_of(product, matmul_settings().tf32);
    const auto known = lib.plans.find(key);
    if (known != lib.plans.end()) return known->second;
    Plan plan;
    if (!library_lacks(key)) {
        plan.description = std::make_unique<ProductDescription>(key);
        plan.proposals = proposals_of(lib, *plan.description, product);
    }
    return lib.plans.emplace(key, std::move(plan)).first->second;
}

}  // namespace

bool multiply(const Product& product, Stream stream) {
    Library& lib = library();
    Plan& plan = plan_for(lib, product);
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

MatmulSettings& matmul_settings() {
    static MatmulSettings the_settings;
    return the_settings;
}

std::string cuda_matmul_path() {
    const size_t version = cublasLtGetVersion();
    std::string path =
        format("cuBLASLt %zu.%zu.%zu, float sums; fp32 %s; %sthe library's first proposals", version / 10000,
               version / 100 % 100, version % 100, matmul_settings().tf32 ? "as TF32" : "without TF32",
               matmul_settings().gelu_epilogue ? "gelu_new in the GEMM; " : "");
    if (unordered_gemms() > 0)
        path += format("; the bits of %d GEMMs may differ from run to run, because no algorithm sums in a fixed order",
                       unordered_gemms());
    return path;
}
