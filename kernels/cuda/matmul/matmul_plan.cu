// Chooses the algorithm of each GEMM once, then looks it up. Host code; no kernel.
//
// Sources of a choice, in this order: this process or a checkpoint's text, the file on disk, autotuning if enabled, the
// library's first proposal. A process takes the file's lock, reads the file and only then times a GEMM, so one process
// times it and the others use its choice. The lock holder must not wait for other processes. Its GPU may have a pending
// collective with ranks that wait for the lock, and cudaFree waits for all pending work, so it finishes pending work
// before it takes the lock.
#include <set>
#include <utility>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul/matmul.h"
#include "kernels/cuda/matmul/matmul_tune.h"

namespace {

constexpr int kLockPatienceSeconds = 300;  // much longer than timing one GEMM takes

struct Settings {
    bool tf32 = false, tuning = false;
    std::string cache, note;
    std::set<std::string> untimed, unordered;  // words of GEMMs: memory was insufficient; bits may differ
};

Settings& settings() {
    static Settings the_settings;
    return the_settings;
}

struct Plan {
    std::unique_ptr<ProductDescription> description;
    MatmulChoice choice;
    std::vector<MatmulAlgorithm> others;  // fallbacks if the choice fails; empty after its first run
};

struct StreamMemory {
    DeviceBuffer workspace, sums;
};

struct Library {
    cublasLtHandle_t handle = nullptr;
    MatmulOwner owner;
    MatmulChoices choices;
    std::map<ProductKey, Plan> plans;
    std::map<void*, StreamMemory> memory;  // keyed by the stream's handle

    Library() {
        check_cublas(cublasLtCreate(&handle), "cublasLtCreate");
        owner = {.gpu = device_info().name, .version = cublasLtGetVersion()};
    }
};

// Never destroyed, because CUDA may be unloaded first at process exit.
Library& library() {
    static Library& the_library = *new Library;
    return the_library;
}

MatmulChoice choice_of(const MatmulAlgorithm& algorithm, float ms) {
    return {.by_library = true, .algorithm = algorithm, .ms = ms};
}

MatmulWorkspace workspace_of(Library& lib, Stream stream) {
    DeviceBuffer& workspace = lib.memory[stream.handle].workspace;
    if (!workspace.data()) workspace = DeviceBuffer(kMatmulWorkspaceBytes);
    return {.memory = workspace.data(), .bytes = workspace.bytes()};
}

// Uses a known choice if the library still accepts the algorithm.
bool find_choice(const Library& lib, const std::string& words, const Plan& plan, const Product& product,
                 MatmulChoice& choice) {
    const auto known = lib.choices.find(words);
    if (known == lib.choices.end()) return false;
    if (known->second.by_library && !plan.description->accepts(lib.handle, product, known->second.algorithm))
        return false;
    choice = known->second;
    return true;
}

// Adds choices that other processes have written to the file; existing ones take precedence.
void look_into_cache(Library& lib) {
    MatmulChoices on_disk;
    settings().note = read_choices(on_disk, settings().cache, lib.owner);
    lib.choices.merge(on_disk);
}

// Writes only timed choices, because the library would propose the others again.
void write_cache(const Library& lib) {
    MatmulChoices timed;
    for (const auto& [words, choice] : lib.choices)
        if (choice.ms >= 0) timed[words] = choice;
    const std::string reason = write_choices(timed, settings().cache, lib.owner);
    if (!reason.empty()) settings().note = reason;
}

Plan& plan_for(Library& lib, const Product& product, Stream stream);

// Returns deterministic proposals. A plain GEMM has no substitute, so if it has none, returns any proposals.
std::vector<MatmulAlgorithm> proposals_of(const Library& lib, const Plan& plan, const std::string& words,
                                          const Product& product) {
    std::vector<MatmulAlgorithm> found = plan.description->proposals(lib.handle, product);
    if (!found.empty() || product.epilogue != Epilogue::none) return found;
    found = plan.description->proposals(lib.handle, product, ProductDescription::Order::unknown);
    if (found.empty()) found = plan.description->excluded_proposals(lib.handle, product, kMatmulWorkspaceBytes);
    if (!found.empty()) settings().unordered.insert(words);
    return found;
}

// Chooses the fastest proposal, or separate kernels if the library's bias gradient is slower than our pass over dout.
MatmulChoice time_proposals(Library& lib, Plan& plan, const std::string& words, const Product& product, float plain_ms,
                            Stream stream) {
    const TimedAlgorithm best =
        fastest_of(plan.others, *plan.description, product, lib.handle, workspace_of(lib, stream), stream);
    if (best.is_short_of_memory) settings().untimed.insert(words);
    if (best.index < 0) return choice_of(plan.others.front(), -1);
    const bool apart = plain_ms >= 0 && best.apart_ms >= 0 && best.ms > plain_ms + best.apart_ms;
    if (apart) return {.by_library = false, .ms = best.ms};
    return choice_of(plan.others[static_cast<size_t>(best.index)], best.ms);
}

MatmulChoice choose(Library& lib, Plan& plan, const std::string& words, const Product& product, Stream stream) {
    MatmulChoice choice;
    if (find_choice(lib, words, plan, product, choice)) return choice;
    plan.others = proposals_of(lib, plan, words, product);
    if (plan.others.empty()) return {};
    if (!settings().tuning || settings().unordered.contains(words)) return choice_of(plan.others.front(), -1);

    float plain_ms = -1;
    if (product.epilogue == Epilogue::bias_gradient) {
        Product plain = product;
        plain.epilogue = Epilogue::none;
        plain_ms = plan_for(lib, plain, stream).choice.ms;
    }
    if (settings().cache.empty()) return time_proposals(lib, plan, words, product, plain_ms, stream);
    check_cuda(cudaDeviceSynchronize(), "waiting before autotuning");
    const MatmulLock lock(settings().cache + ".lock", kLockPatienceSeconds);
    look_into_cache(lib);
    if (find_choice(lib, words, plan, product, choice)) return choice;
    choice = time_proposals(lib, plan, words, product, plain_ms, stream);
    lib.choices[words] = choice;
    write_cache(lib);
    return choice;
}

Plan& plan_for(Library& lib, const Product& product, Stream stream) {
    const ProductKey key = key_of(product, settings().tf32);
    const auto known = lib.plans.find(key);
    if (known != lib.plans.end()) return known->second;
    Plan plan;
    const std::string words = words_of(key);
    if (!library_lacks(key)) {
        plan.description = std::make_unique<ProductDescription>(key);
        plan.choice = choose(lib, plan, words, product, stream);
    }
    lib.choices[words] = plan.choice;
    return lib.plans.emplace(key, std::move(plan)).first->second;
}

// Chooses the next proposal after the chosen algorithm failed, or none.
void choose_next(Library& lib, Plan& plan, const Product& product) {
    const std::string words = words_of(key_of(product, settings().tf32));
    if (plan.others.empty()) plan.others = proposals_of(lib, plan, words, product);
    std::erase(plan.others, plan.choice.algorithm);
    plan.choice = plan.others.empty() ? MatmulChoice() : choice_of(plan.others.front(), -1);
    lib.choices[words] = plan.choice;
}

}  // namespace

bool multiply(const Product& product, Stream stream) {
    Library& lib = library();
    Plan& plan = plan_for(lib, product, stream);
    while (plan.choice.by_library) {
        const cublasStatus_t status =
            plan.description->run(lib.handle, plan.choice.algorithm, product, workspace_of(lib, stream), stream);
        if (status == CUBLAS_STATUS_SUCCESS) {
            plan.others = {};
            return true;
        }
        if (!is_refusal(status)) check_cublas(status, "cublasLtMatmul");
        choose_next(lib, plan, product);
    }
    return false;
}

void multiply_plain(const Product& product, Stream stream) {
    if (!multiply(product, stream))
        fail(Exit::os, "cuBLASLt has no algorithm for the GEMM %s", words_of(key_of(product, settings().tf32)));
}

float* matmul_sums(Stream stream) {
    DeviceBuffer& sums = library().memory[stream.handle].sums;
    if (!sums.data()) sums = DeviceBuffer(kMatmulSumsBytes);
    return static_cast<float*>(sums.data());
}

void set_tf32(bool on) { settings().tf32 = on; }
void set_matmul_tuning(bool on) { settings().tuning = on; }

void set_matmul_cache(const std::string& path) {
    settings().cache = path;
    settings().note.clear();
    if (!path.empty()) look_into_cache(library());
}

std::string matmul_choices() { return choices_to_text(library().choices, library().owner); }

std::string load_matmul_choices(const std::string& text) {
    Library& lib = library();
    MatmulChoices loaded;
    const std::string reason = choices_from_text(loaded, text, lib.owner);
    if (!reason.empty()) return settings().note = "the GEMM algorithm choices are ignored: " + reason;
    loaded.merge(lib.choices);
    lib.choices = std::move(loaded);
    lib.plans.clear();
    return {};
}

std::string cuda_matmul_path() {
    const Settings& set = settings();
    const size_t version = cublasLtGetVersion();
    std::string path = format("cuBLASLt %zu.%zu.%zu, float sums; fp32 %s; %s", version / 10000, version / 100 % 100,
                              version % 100, set.tf32 ? "as TF32" : "without TF32",
                              set.tuning ? "autotuned algorithms" : "the library's first proposals");
    if (!set.cache.empty()) path += ", saved in " + set.cache;
    if (!set.note.empty()) path += " (" + set.note + ")";
    if (!set.untimed.empty()) path += format("; %zu GEMMs not timed for lack of memory", set.untimed.size());
    if (!set.unordered.empty())
        path += format("; the bits of %zu GEMMs may differ from run to run, because no algorithm sums in a fixed order",
                       set.unordered.size());
    return path;
}
