// Wrappers that forward to NCCL's functions. The first call loads the library. So the program starts and trains on one
// GPU without NCCL, and its build needs only nccl.h.
//
// If the library cannot be used, every call returns ncclSystemError, and ncclGetLastError() returns the reason.
#include <dlfcn.h>
#include <link.h>
#include <nccl.h>

#include <vector>

#include "kernels/base/check.h"

namespace {

constexpr const char* kFile = "libnccl.so.2";  // the name contains the major version
constexpr int kOldest = 21400;                 // 2.14.0, the first version with ncclCommInitRankConfig

struct Library {
    void* handle = nullptr;
    std::string problem;  // why the library cannot be used, or empty
};

// The directories that the loader searches: LD_LIBRARY_PATH, the program's rpath and the system's directories.
std::string searched_folders() {
    void* const program = dlopen(nullptr, RTLD_LAZY);
    Dl_serinfo size{};
    if (!program || dlinfo(program, RTLD_DI_SERINFOSIZE, &size) != 0) return "the loader's directories";
    std::vector<char> memory(size.dls_size);
    auto* const found = reinterpret_cast<Dl_serinfo*>(memory.data());
    *found = size;
    if (dlinfo(program, RTLD_DI_SERINFO, found) != 0) return "the loader's directories";
    std::string text;
    for (unsigned i = 0; i < found->dls_cnt; i++) text += std::string(i ? ", " : "") + found->dls_serpath[i].dls_name;
    return text;
}

std::string text_of(int version) { return format("%d.%d.%d", version / 10000, version / 100 % 100, version % 100); }

Library load() {
    Library library{dlopen(kFile, RTLD_NOW | RTLD_LOCAL), ""};
    if (!library.handle) {
        const std::string error = dlerror();  // before the next loader call clears it
        library.problem = format(
            "%s; searched %s and the system's library cache: install NCCL %d (NVIDIA's package libnccl2, or "
            "python3 -m pip install nvidia-nccl-cu%d) and add its directory to LD_LIBRARY_PATH",
            error.c_str(), searched_folders().c_str(), NCCL_MAJOR, CUDART_VERSION / 1000);
        return library;
    }
    const auto get_version = reinterpret_cast<decltype(&ncclGetVersion)>(dlsym(library.handle, "ncclGetVersion"));
    link_map* file = nullptr;
    const char* path = dlinfo(library.handle, RTLD_DI_LINKMAP, &file) == 0 ? file->l_name : kFile;
    int version = 0;
    if (!get_version || get_version(&version) != ncclSuccess)
        library.problem = format("%s does not report a version, so it is not NCCL", path);
    else if (version / 10000 != NCCL_MAJOR || version < kOldest)  // before 2.9, the factor was 1000: also too old
        library.problem =
            format("%s has version code %d, but this program, built with NCCL %s, needs %s or a later %d.x", path,
                   version, text_of(NCCL_VERSION_CODE).c_str(), text_of(kOldest).c_str(), NCCL_MAJOR);
    return library;
}

const Library& library() {
    static const Library loaded = load();  // stays open until the process ends
    return loaded;
}

// Returns NCCL's function with this type and name, or null.
template <class Function> Function* find(const char* name) {
    if (!library().problem.empty()) return nullptr;
    return reinterpret_cast<Function*>(dlsym(library().handle, name));
}

// Calls NCCL's `function`, which is looked up once.
template <auto function, class... Args> ncclResult_t forward(const char* name, Args... args) {
    static const auto found = find<std::remove_pointer_t<decltype(function)>>(name);
    return found ? found(args...) : ncclSystemError;
}

}  // namespace

ncclResult_t ncclGetVersion(int* version) { return forward<ncclGetVersion>("ncclGetVersion", version); }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) { return forward<ncclGetUniqueId>("ncclGetUniqueId", id); }

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
    return forward<ncclCommInitRankConfig>("ncclCommInitRankConfig", comm, ranks, id, rank, config);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part, ncclConfig_t* config) {
    return forward<ncclCommSplit>("ncclCommSplit", comm, color, key, part, config);
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) { return forward<ncclCommFinalize>("ncclCommFinalize", comm); }

ncclResult_t ncclCommDestroy(ncclComm_t comm) { return forward<ncclCommDestroy>("ncclCommDestroy", comm); }

ncclResult_t ncclCommAbort(ncclComm_t comm) { return forward<ncclCommAbort>("ncclCommAbort", comm); }

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    return forward<ncclCommGetAsyncError>("ncclCommGetAsyncError", comm, error);
}

const char* ncclGetErrorString(ncclResult_t result) {
    static const auto found = find<decltype(ncclGetErrorString)>("ncclGetErrorString");
    return found ? found(result) : "NCCL cannot be used";
}

const char* ncclGetLastError(ncclComm_t comm) {
    static const auto found = find<decltype(ncclGetLastError)>("ncclGetLastError");
    return found ? found(comm) : library().problem.c_str();
}

ncclResult_t ncclGroupStart() { return forward<ncclGroupStart>("ncclGroupStart"); }

ncclResult_t ncclGroupEnd() { return forward<ncclGroupEnd>("ncclGroupEnd"); }

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    return forward<ncclSend>("ncclSend", from, count, type, peer, comm, stream);
}

ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return forward<ncclRecv>("ncclRecv", to, count, type, peer, comm, stream);
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    return forward<ncclAllReduce>("ncclAllReduce", from, to, count, type, op, comm, stream);
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    return forward<ncclReduceScatter>("ncclReduceScatter", from, to, count, type, op, comm, stream);
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    return forward<ncclAllGather>("ncclAllGather", from, to, count, type, comm, stream);
}
