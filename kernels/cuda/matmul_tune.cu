// Timing of algorithms: each proposal a few runs, then the best of them more, medians compared; on equal times the one
// that the library thinks faster.
#include <algorithm>
#include <utility>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/matmul_epilogue.h"
#include "kernels/cuda/matmul_tune.h"

namespace {

constexpr int kFirstRuns = 3, kFinalists = 6;
constexpr int kMostRuns = 31;   // of a finalist
constexpr float kFinalMs = 60;  // about as long is a finalist run

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

// The product's matrices once more, in one piece of memory that goes when this goes; factors are random numbers.
class Stage {
public:
    Stage(const Product& product, Stream stream) : product_(product), stream_(stream) {
        const size_t m = size_t(product.m), n = size_t(product.n), k = size_t(product.k);
        const bool gradient = product.epilogue == Epilogue::bias_gradient;
        const size_t bias_count = !product.bias ? 0 : gradient ? n : m, aux_count = product.aux ? m * n : 0;
        const size_t a_bytes = m * k * size_of(product.in), b_bytes = n * k * size_of(product.in);
        const size_t d_bytes = m * n * size_of(product.out), bias_bytes = bias_count * size_of(product.out);
        const size_t aux_bytes = aux_count * size_of(product.out);
        const size_t sums_bytes = gradient ? column_sums_scratch_bytes(product.k, product.n) : 0;
        size_t bytes = 0;
        for (size_t part : {a_bytes, b_bytes, d_bytes, bias_bytes, aux_bytes, sums_bytes}) bytes += aligned(part);
        if (cudaMalloc(&memory_, bytes) != cudaSuccess) {
            cudaGetLastError();  // being short of memory is no error here
            memory_ = nullptr;
            return;
        }
        char* at = static_cast<char*>(memory_);
        auto take = [&](size_t part) { return std::exchange(at, at + aligned(part)); };
        product_.a = fill(take(a_bytes), product.in, m * k, 1);
        product_.b = fill(take(b_bytes), product.in, n * k, 2);
        product_.d = fill(take(d_bytes), product.out, m * n, 3);
        if (bias_count) product_.bias = fill(take(bias_bytes), product.out, bias_count, 4);
        if (aux_count) product_.aux = fill(take(aux_bytes), product.out, aux_count, 5);
        sums_ = reinterpret_cast<float*>(take(sums_bytes));
    }
    Stage(const Stage&) = delete;
    Stage& operator=(const Stage&) = delete;
    ~Stage() {
        if (!memory_) return;
        cudaStreamSynchronize(cuda_stream(stream_));
        cudaFree(memory_);
    }

    bool has_memory() const { return memory_ != nullptr; }
    const Product& product() const { return product_; }

    void sum_columns() const {
        auto sum = [&]<class T>(const T* values) {
            column_sums(ColumnSums<T>{.out = static_cast<float*>(product_.bias),
                                      .scratch = sums_,
                                      .values = values,
                                      .rows = product_.k,
                                      .cols = product_.n,
                                      .accumulate = false},
                        stream_);
        };
        if (product_.in == Dtype::fp32) sum(static_cast<const float*>(product_.b));
        if (product_.in == Dtype::bf16) sum(static_cast<const bf16*>(product_.b));
        if (product_.in == Dtype::fp16) sum(static_cast<const fp16*>(product_.b));
    }

private:
    void* fill(void* memory, Dtype dtype, size_t count, unsigned seed) const {
        auto fill_as = [&]<class T>(T* out) { random_fill(RandomFill<T>{out, count, seed}, stream_); };
        if (dtype == Dtype::fp32) fill_as(static_cast<float*>(memory));
        if (dtype == Dtype::bf16) fill_as(static_cast<bf16*>(memory));
        if (dtype == Dtype::fp16) fill_as(static_cast<fp16*>(memory));
        return memory;
    }

    Product product_;
    Stream stream_;
    void* memory_ = nullptr;
    float* sums_ = nullptr;
};

class Timer {
public:
    explicit Timer(Stream stream) : stream_(stream) {
        check_cuda(cudaEventCreate(&begin_), "cudaEventCreate");
        check_cuda(cudaEventCreate(&end_), "cudaEventCreate");
    }
    Timer(const Timer&) = delete;
    Timer& operator=(const Timer&) = delete;
    ~Timer() {
        cudaEventDestroy(begin_);
        cudaEventDestroy(end_);
    }

    // The median of `runs` runs.
    template <class Work> float median_ms(int runs, Work work) {
        std::vector<float> times;
        for (int run = 0; run < runs; run++) {
            check_cuda(cudaEventRecord(begin_, cuda_stream(stream_)), "cudaEventRecord");
            work();
            check_cuda(cudaEventRecord(end_, cuda_stream(stream_)), "cudaEventRecord");
            check_cuda(cudaEventSynchronize(end_), "timing a product");
            float ms = 0;
            check_cuda(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
            times.push_back(ms);
        }
        std::nth_element(times.begin(), times.begin() + runs / 2, times.end());
        return times[static_cast<size_t>(runs / 2)];
    }

private:
    Stream stream_;
    cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

int final_runs(float ms) { return std::clamp(int(kFinalMs / std::max(ms, 1e-3f)), kFirstRuns, kMostRuns); }

bool is_faster(const TimedAlgorithm& left, const TimedAlgorithm& right) { return left.ms < right.ms; }

}  // namespace

TimedAlgorithm fastest_of(const std::vector<MatmulAlgorithm>& proposals, ProductDescription& description,
                          const Product& product, cublasLtHandle_t handle, void* workspace, Stream stream) {
    const Stage stage(product, stream);
    if (!stage.has_memory()) return {};
    Timer timer(stream);
    std::vector<TimedAlgorithm> timed;
    for (size_t i = 0; i < proposals.size(); i++) {
        auto run = [&] { return description.run(handle, proposals[i], stage.product(), workspace, stream); };
        const cublasStatus_t status = run();  // the first one warms up
        if (is_refusal(status)) continue;
        check_cublas(status, "cublasLtMatmul");
        timed.push_back({.index = int(i), .ms = timer.median_ms(kFirstRuns, run)});
    }
    std::stable_sort(timed.begin(), timed.end(), is_faster);
    timed.resize(std::min(timed.size(), size_t(kFinalists)));
    for (TimedAlgorithm& finalist : timed) {
        const MatmulAlgorithm& algorithm = proposals[static_cast<size_t>(finalist.index)];
        finalist.ms = timer.median_ms(final_runs(finalist.ms), [&] {
            check_cublas(description.run(handle, algorithm, stage.product(), workspace, stream), "cublasLtMatmul");
        });
    }
    // Back in the library's order, so that the earlier one wins where times are equal.
    std::sort(timed.begin(), timed.end(), [](const auto& left, const auto& right) { return left.index < right.index; });
    const auto best = std::min_element(timed.begin(), timed.end(), is_faster);
    TimedAlgorithm answer = best == timed.end() ? TimedAlgorithm{} : *best;
    if (product.epilogue == Epilogue::bias_gradient) {
        stage.sum_columns();
        answer.apart_ms = timer.median_ms(kFirstRuns, [&] { stage.sum_columns(); });
    }
    return answer;
}
