// GEMM with oneDNN, which uses matrix instructions if the CPU has them.
//
// Each call computes one tile on the calling thread. The library chooses its blocking when it creates a primitive,
// depending on the number of threads. Primitives are created for one thread, so the bits depend only on the shape.
#include "kernels/cpu/onednn.h"

#include <omp.h>

#include <compare>
#include <map>
#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>

#include "kernels/base/check.h"
#include "kernels/numeric.h"

namespace {

using dnnl::memory;

const dnnl::engine& engine() {
    static const dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
    return cpu;
}

// The key of a primitive.
struct Key {
    Dtype dtype;
    bool left_transposed, right_transposed;
    size_t left_step, right_step, out_step;
    int rows, cols, depth;
    auto operator<=>(const Key&) const = default;
};

template <class T> Key key_of(const Product<T>& product, const Tile& tile) {
    return {.dtype = dtype_of<T>,
            .left_transposed = product.left.transposed,
            .right_transposed = product.right.transposed,
            .left_step = product.left.step,
            .right_step = product.right.step,
            .out_step = tile.step,
            .rows = tile.rows,
            .cols = tile.cols,
            .depth = product.depth};
}

memory::desc describe(Dtype dtype, int rows, int cols, size_t step, bool transposed) {
    const memory::data_type type = dtype == Dtype::fp32   ? memory::data_type::f32
                                   : dtype == Dtype::bf16 ? memory::data_type::bf16
                                                          : memory::data_type::f16;
    const memory::dim along = static_cast<memory::dim>(step);
    return {{rows, cols}, type, transposed ? memory::dims{1, along} : memory::dims{along, 1}};
}

// out = left x right. oneDNN 2 describes it in two steps, later versions in one.
template <class Matmul>
typename Matmul::primitive_desc describe_product(const memory::desc& left, const memory::desc& right,
                                                 const memory::desc& out, const dnnl::primitive_attr& attributes) {
    if constexpr (requires { typename Matmul::desc; })
        return {typename Matmul::desc(left, right, out), attributes, engine()};
    else
        return {engine(), left, right, out, attributes};
}

struct Primitive {
    dnnl::matmul::primitive_desc description;
    dnnl::matmul run;

    explicit Primitive(const Key& key) {
        dnnl::primitive_attr attributes;
        attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
        description = describe_product<dnnl::matmul>(
            describe(key.dtype, key.rows, key.depth, key.left_step, key.left_transposed),
            describe(key.dtype, key.depth, key.cols, key.right_step, key.right_transposed),
            describe(Dtype::fp32, key.rows, key.cols, key.out_step, false), attributes);
        run = dnnl::matmul(description);
    }
};

// During its lifetime, oneDNN runs calls of this thread only on this thread.
struct OneThread {
    int before = omp_get_max_threads();
    OneThread() { omp_set_num_threads(1); }
    ~OneThread() { omp_set_num_threads(before); }
};

// Creates each primitive once and caches it; a lookup allocates nothing.
const Primitive& primitive(const Key& key) {
    static std::mutex mutex;
    static std::map<Key, Primitive> primitives;
    const std::lock_guard lock(mutex);
    const auto found = primitives.find(key);
    if (found != primitives.end()) return found->second;
    const OneThread one_thread;
    return primitives.emplace(key, Primitive(key)).first->second;
}

// The library's view of a matrix. Its API has no const, but it only reads inputs.
template <class T> memory view(const memory::desc& description, const T* data) {
    return memory(description, engine(), const_cast<T*>(data));
}

}  // namespace

bool library_has_matrix_instructions() {
    return (dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core_amx) == dnnl_cpu_isa_avx512_core_amx;
}

template <class T> size_t library_scratch_bytes(const Product<T>& product, const Tile& tile) {
    try {
        return primitive(key_of(product, tile)).description.scratchpad_desc().get_size();
    } catch (const dnnl::error& error) {
        fail(Exit::internal, "oneDNN does not support the GEMM (%d, %d) by (%d, %d) in %s: %s", tile.rows,
             product.depth, product.depth, tile.cols, name_of(dtype_of<T>), error.what());
    }
}

template <class T> bool library_product(const Product<T>& product, const Tile& tile, std::byte* scratch) {
    const OneThread one_thread;
    const Key key = key_of(product, tile);
    const Primitive& found = primitive(key);
    const dnnl::matmul::primitive_desc& description = found.description;
    try {
        dnnl::stream stream(engine());
        found.run.execute(stream,
                          {{DNNL_ARG_SRC, view(description.src_desc(), product.left.block(tile.row, 0).data)},
                           {DNNL_ARG_WEIGHTS, view(description.weights_desc(), product.right.block(0, tile.col).data)},
                           {DNNL_ARG_DST, view(description.dst_desc(), tile.data)},
                           {DNNL_ARG_SCRATCHPAD, view(description.scratchpad_desc(), scratch)}});
        stream.wait();
        return true;
    } catch (const dnnl::error&) {
        return false;
    }
}

template size_t library_scratch_bytes(const Product<float>&, const Tile&);
template size_t library_scratch_bytes(const Product<bf16>&, const Tile&);
template size_t library_scratch_bytes(const Product<fp16>&, const Tile&);
template bool library_product(const Product<float>&, const Tile&, std::byte*);
template bool library_product(const Product<bf16>&, const Tile&, std::byte*);
template bool library_product(const Product<fp16>&, const Tile&, std::byte*);
