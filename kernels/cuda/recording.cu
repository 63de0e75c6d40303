// Recording on a GPU: a CUDA graph. A launch costs the host one call instead of one per kernel. Host code; no kernel.
#include "kernels/cuda/launch.cuh"

namespace {

// Captures what `queue` queues on the stream, without running it.
cudaGraphExec_t record(cudaStream_t stream, const std::function<void()>& queue) {
    constexpr const char* kWhat = "recording a CUDA graph, which device.graphs=false avoids,";
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), kWhat);
    cudaGraph_t graph = nullptr;
    try {
        queue();
    } catch (...) {  // the stream must end its capture to be usable
        cudaStreamEndCapture(stream, &graph);
        if (graph) cudaGraphDestroy(graph);
        throw;
    }
    check_cuda(cudaStreamEndCapture(stream, &graph), kWhat);
    cudaGraphExec_t executable = nullptr;
    const cudaError_t instantiated = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    check_cuda(instantiated, kWhat);
    return executable;
}

}  // namespace

struct Recording::Graph {
    cudaGraphExec_t executable = nullptr;

    Graph() = default;
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;
    ~Graph() {
        if (executable) cudaGraphExecDestroy(executable);
    }
};

void Recording::run(Stream stream, const std::function<void()>& queue) {
    if (!graphs_are_on()) return queue();
    if (!graph_) {
        graph_ = std::make_shared<Graph>();
        return queue();
    }
    if (!graph_->executable) graph_->executable = record(cuda_stream(stream), queue);
    ProfilerRange range("graph");
    check_cuda(cudaGraphLaunch(graph_->executable, cuda_stream(stream)), "cudaGraphLaunch");
}
