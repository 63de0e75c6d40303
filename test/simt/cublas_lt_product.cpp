#include "test/simt/cublas_lt_product.h"

#include <algorithm>
#include <cstring>

#include "kernels/base/check.h"
#include "kernels/numeric.h"
#include "test/simt/device_memory.h"
#include "test/simt/fault.h"
#include "test/simt/sanitizers.h"

namespace simt {

namespace {

float load(cudaDataType_t type, const void* memory, size_t i) {
    if (type == CUDA_R_32F) return static_cast<const float*>(memory)[i];
    if (type == CUDA_R_16BF) return to_float(static_cast<const bf16*>(memory)[i]);
    if (type == CUDA_R_8F_E4M3) return to_float(static_cast<const e4m3*>(memory)[i]);
    if (type == CUDA_R_8F_E5M2) return to_float(static_cast<const e5m2*>(memory)[i]);
    return to_float(static_cast<const fp16*>(memory)[i]);
}

void store(cudaDataType_t type, void* memory, size_t i, float value) {
    if (type == CUDA_R_32F)
        static_cast<float*>(memory)[i] = value;
    else if (type == CUDA_R_16BF)
        static_cast<bf16*>(memory)[i] = from_float<bf16>(value);
    else
        static_cast<fp16*>(memory)[i] = from_float<fp16>(value);
}

float rounded_to(cudaDataType_t type, float value) {
    store(type, &value, 0, value);
    return load(type, &value, 0);
}

float tf32(float value) {
    uint32_t bits = std::bit_cast<uint32_t>(value);
    return std::bit_cast<float>((bits + 0xfffu + (bits >> 13 & 1u)) & ~0x1fffu);
}

float gelu(float x) { return 0.5f * x * (1.0f + std::tanh(0.79788456f * (x + 0.044715f * x * x * x))); }

float gelu_gradient(float x) {
    const float inner = 0.79788456f * (x + 0.044715f * x * x * x), t = std::tanh(inner);
    return 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * 0.79788456f * (1.0f + 3.0f * 0.044715f * x * x);
}

float a_at(const CublasLtCall& call, uint64_t row, uint64_t i) {
    const uint64_t ld = uint64_t(call.a_layout.ld);
    const float value =
        load(call.a_layout.type, call.a, call.op.transpose_a == CUBLAS_OP_T ? i + row * ld : row + i * ld);
    return call.op.compute == CUBLAS_COMPUTE_32F_FAST_TF32 ? tf32(value) : value;
}

float b_at(const CublasLtCall& call, uint64_t i, uint64_t col) {
    const uint64_t ld = uint64_t(call.b_layout.ld);
    const float value =
        load(call.b_layout.type, call.b, call.op.transpose_b == CUBLAS_OP_T ? col + i * ld : i + col * ld);
    return call.op.compute == CUBLAS_COMPUTE_32F_FAST_TF32 ? tf32(value) : value;
}

// The sum of one element of d, in the algorithm's order. `a` and `b` are a row of op(a) and a column of op(b).
float sum_of(const CublasLtCall& call, const float* a, const float* b) {
    const AlgorithmFacts& facts = kCublasLtFacts[call.id];
    float parts[4] = {};
    uint64_t begin = 0;
    for (int part = 0; part < facts.parts; part++) {
        const uint64_t end = call.k * uint64_t(part + 1) / uint64_t(facts.parts);
        // Algorithm 1 sums backwards, so that its bits differ from algorithm 0's.
        if (call.id == 1) {
            for (uint64_t i = end; i-- > begin;) parts[part] += a[i] * b[i];
        } else {
            for (uint64_t i = begin; i < end; i++) parts[part] += a[i] * b[i];
        }
        begin = end;
    }
    if (facts.reduction == CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE ||
        facts.reduction == CUBLASLT_REDUCTION_SCHEME_INPLACE)
        for (float& part : parts) part = rounded_to(call.d_layout.type, part);
    float sum = 0;
    for (int part = 0; part < facts.parts; part++) sum += parts[call.swapped ? facts.parts - 1 - part : part];
    // One more rounding, as an unpredictable order may have.
    return call.swapped ? std::nextafter(sum, INFINITY) : sum;
}

float scale_of(const CublasLtCall& call) {
    float scale = 1;
    for (const float* factor : {call.op.a_scale, call.op.b_scale})
        if (factor) scale *= *factor;
    return scale;
}

void finish_element(const CublasLtCall& call, uint64_t row, uint64_t col, float sum) {
    const size_t at = row + col * uint64_t(call.d_layout.ld), aux_at = row + col * uint64_t(call.op.aux_ld);
    const cudaDataType_t type = call.d_layout.type;
    float value = call.within_limits ? call.alpha * scale_of(call) * sum : NAN;
    const bool has_pieces = call.op.epilogue == CUBLASLT_EPILOGUE_BIAS && call.d_layout.ld % 8 != 0;
    if (call.op.epilogue == CUBLASLT_EPILOGUE_DGELU || has_pieces) value = rounded_to(type, value);  // as on an H200
    if (call.beta != 0) value += call.beta * load(type, call.c, at);
    if (call.op.epilogue & CUBLASLT_EPILOGUE_BIAS) value += load(type, call.op.bias, row);
    if ((call.op.epilogue & CUBLASLT_EPILOGUE_GELU_AUX) == CUBLASLT_EPILOGUE_GELU_AUX) {
        store(type, call.op.aux, aux_at, value);
        value = gelu(value);
    }
    if (call.op.epilogue == CUBLASLT_EPILOGUE_DGELU) value *= gelu_gradient(load(type, call.op.aux, aux_at));
    store(type, call.d, at, value);
}

// Reports the product's accesses to the race detector. False, after a fault, if they are not to device memory.
bool accesses_are_legal(const CublasLtCall& call) {
    auto bytes = [](const cublasLtMatrixLayoutOpaque_t& matrix) {
        return (uint64_t(matrix.ld) * (matrix.cols - 1) + matrix.rows) * bytes_of(matrix.type);
    };
    bool legal = true;
    auto access = [&](const void* memory, size_t count, bool writes, const char* what) {
        if (!is_device_memory(memory, count)) {
            note_fault(
                format("cublasLtMatmul: %s, %zu bytes at %p, is not one piece of device memory", what, count, memory));
            legal = false;
        } else if (writes) {
            saw_write(on_device(memory), count);
        } else {
            saw_read(on_device(memory), count);
        }
    };
    const size_t d_element = bytes_of(call.d_layout.type);
    const bool is_gradient = call.op.epilogue == CUBLASLT_EPILOGUE_BGRADB;
    const bool writes_aux = call.op.epilogue != CUBLASLT_EPILOGUE_DGELU;
    for (const float* scale : {call.op.a_scale, call.op.b_scale})
        if (scale) access(scale, sizeof(float), false, "scale");
    access(call.a, bytes(call.a_layout), false, "a");
    access(call.b, bytes(call.b_layout), false, "b");
    if (call.beta != 0) access(call.c, bytes(call.d_layout), false, "c");
    access(call.d, bytes(call.d_layout), true, "d");
    if (has_bias(call.op.epilogue))
        access(call.op.bias, (is_gradient ? call.n : call.m) * d_element, is_gradient, "bias");
    if (has_aux(call.op.epilogue))
        access(call.op.aux, (uint64_t(call.op.aux_ld) * (call.n - 1) + call.m) * d_element, writes_aux, "aux");
    if (kCublasLtFacts[call.id].workspace_bytes)
        access(call.workspace, kCublasLtFacts[call.id].workspace_bytes, true, "workspace");
    return legal;
}

}  // namespace

void carry_out(const CublasLtCall& by_host_addresses) {
    if (!accesses_are_legal(by_host_addresses)) return;
    const Quiet quiet;  // the host has used these bytes of its stack, too
    CublasLtCall call = by_host_addresses;
    give_to_device(&call, sizeof(call));
    std::vector<float> a(call.m * call.k), b(call.k);
    for (uint64_t row = 0; row < call.m; row++)
        for (uint64_t i = 0; i < call.k; i++) a[row * call.k + i] = a_at(call, row, i);
    for (uint64_t col = 0; col < call.n; col++) {
        float sum_of_b = 0;
        for (uint64_t i = 0; i < call.k; i++) sum_of_b += b[i] = b_at(call, i, col);
        for (uint64_t row = 0; row < call.m; row++)
            finish_element(call, row, col, sum_of(call, &a[row * call.k], b.data()));
        if (call.op.epilogue == CUBLASLT_EPILOGUE_BGRADB) store(call.d_layout.type, call.op.bias, col, sum_of_b);
    }
    // Overwrites the workspace, so that nothing can be kept in it.
    constexpr size_t kSpoiled = 4096;
    if (const size_t bytes = kCublasLtFacts[call.id].workspace_bytes)
        std::memset(call.workspace, 0xff, std::min(bytes, kSpoiled));
}

}  // namespace simt
