// Turns a runtime storage type or activation function into a template argument: the first line of a launcher.
#pragma once

#include <initializer_list>

#include "kernels/base/check.h"  // IWYU pragma: export
#include "kernels/base/choices.h"
#include "kernels/tensor.h"  // IWYU pragma: export

namespace ops {

// Returns the common storage type of `arrays`, skipping absent ones. Fails with Exit::internal and the op's name if two
// differ. An op that supports mixed types must dispatch on each of them.
inline Dtype storage_type(const char* op, std::initializer_list<ConstView> arrays) {
    const ConstView* first = nullptr;
    for (const ConstView& array : arrays) {
        if (!array) continue;
        if (!first) first = &array;
        require(array.dtype == first->dtype, "%s: arrays of type %s and %s; all arrays must have the same type", op,
                name_of(first->dtype), name_of(array.dtype));
    }
    require(first, "%s: all arrays are null", op);
    return first->dtype;
}

// Calls body.operator()<T>() for the storage type T. Fails with Exit::internal and the op's name if T has no kernel.
template <class Body> void dispatch(const char* op, Dtype dtype, Body&& body) {
    switch (dtype) {
        case Dtype::fp32: return body.template operator()<float>();
        case Dtype::bf16: return body.template operator()<bf16>();
        case Dtype::fp16: return body.template operator()<fp16>();
        case Dtype::fp64:
        case Dtype::e4m3:
        case Dtype::e5m2: break;
    }
    fail(Exit::internal, "%s does not support %s", op, name_of(dtype));
}

// The same for the types of 8 bits.
template <class Body> void dispatch_fp8(const char* op, Dtype dtype, Body&& body) {
    if (dtype == Dtype::e4m3) return body.template operator()<e4m3>();
    if (dtype == Dtype::e5m2) return body.template operator()<e5m2>();
    fail(Exit::internal, "%s does not support %s", op, name_of(dtype));
}

// The same for the storage type of master weights or of an optimizer's state: fp32 or bf16.
template <class Body> void dispatch_state(const char* op, Dtype dtype, Body&& body) {
    if (dtype == Dtype::fp32) return body.template operator()<float>();
    if (dtype == Dtype::bf16) return body.template operator()<bf16>();
    fail(Exit::internal, "%s does not support master weights or state of type %s", op, name_of(dtype));
}

template <class Body> void dispatch(const char* op, std::initializer_list<ConstView> arrays, Body&& body) {
    dispatch(op, storage_type(op, arrays), body);
}

// Calls body.operator()<First, Second>() for the storage types of two arrays, which may differ.
template <class Body> void dispatch(const char* op, ConstView first, ConstView second, Body&& body) {
    dispatch(op, first.dtype, [&]<class First>() {
        dispatch(op, second.dtype, [&]<class Second>() { body.template operator()<First, Second>(); });
    });
}

template <class T, class... Types> inline constexpr bool has_type = (std::is_same_v<T, Types> || ...);

// The same for three arrays, each fp32 or of a 16-bit type. Fails with Exit::internal and the op's name if the arrays
// have both 16-bit types.
template <class Body> void dispatch(const char* op, ConstView first, ConstView second, ConstView third, Body&& body) {
    dispatch(op, first, second, [&]<class First, class Second>() {
        dispatch(op, third.dtype, [&]<class Third>() {
            constexpr bool kBothTypes = has_type<bf16, First, Second, Third> && has_type<fp16, First, Second, Third>;
            if constexpr (!kBothTypes)
                body.template operator()<First, Second, Third>();
            else
                fail(Exit::internal, "%s: arrays of type %s, %s and %s; one array is bf16 and another fp16", op,
                     name_of(first.dtype), name_of(second.dtype), name_of(third.dtype));
        });
    });
}

// Calls body.operator()<function>(). Fails with Exit::internal and the op's name if function is `none`.
template <class Body> void dispatch(const char* op, ActivationFunction function, Body&& body) {
    switch (function) {
        case ActivationFunction::gelu_new: return body.template operator()<ActivationFunction::gelu_new>();
        case ActivationFunction::silu: return body.template operator()<ActivationFunction::silu>();
        case ActivationFunction::relu2: return body.template operator()<ActivationFunction::relu2>();
        case ActivationFunction::none: break;
    }
    fail(Exit::internal, "%s without an activation function", op);
}

// Calls body.operator()<T, function>() for both.
template <class Body>
void dispatch(const char* op, std::initializer_list<ConstView> arrays, ActivationFunction activation, Body&& body) {
    dispatch(op, arrays, [&]<class T>() {
        dispatch(op, activation, [&]<ActivationFunction function>() { body.template operator()<T, function>(); });
    });
}

// Checks the sizes of a GEMM. Fails with Exit::internal and the op's name.
inline void require_gemm_sizes(const char* op, int rows, int n, int k) {
    require(rows > 0 && n > 0 && k > 0, "%s: rows, n and k are %d, %d and %d, but must be positive", op, rows, n, k);
}

// Checks the operands and sizes of a GEMM. Fails with Exit::internal and the op's name.
inline void require_gemm(const char* op, ConstView left, ConstView right, int rows, int n, int k) {
    require_gemm_sizes(op, rows, n, k);
    if (!is_fp8(left.dtype) && !is_fp8(right.dtype)) return void(storage_type(op, {left, right}));
    require(is_fp8(left.dtype) && is_fp8(right.dtype) && (left.dtype == Dtype::e4m3 || right.dtype == Dtype::e4m3),
            "%s: operands of type %s and %s", op, name_of(left.dtype), name_of(right.dtype));
    require(rows % 16 == 0 && n % 16 == 0 && k % 16 == 0,
            "%s: rows, n and k are %d, %d and %d, but must be multiples of 16 with operands of 8 bits", op, rows, n, k);
}

// Returns the type of a GEMM's arrays other than its operands: the operands' type, or bf16 if they have 8 bits. Fails
// with Exit::internal and the op's name if an array has another type.
inline Dtype gemm_type(const char* op, ConstView operand, std::initializer_list<ConstView> others) {
    const Dtype dtype = is_fp8(operand.dtype) ? Dtype::bf16 : operand.dtype;
    for (const ConstView& other : others)
        require(!other || other.dtype == dtype,
                "%s: arrays of type %s and %s; all arrays must have the same type, or bf16 with operands of 8 bits", op,
                name_of(operand.dtype), name_of(other.dtype));
    return dtype;
}

// Checks that a GEMM has the array that its activation needs: forward's pre_activation for all but relu2, backward's
// `kept` for all. Fails with Exit::internal and the op's name.
inline void require_activation_array(const char* op, ActivationFunction function, bool is_needed, ConstView array) {
    const char* name = function == ActivationFunction::none ? "none" : name_of(function);
    require(bool(array) == is_needed, "%s: activation %s %s an array of its input or output", op, name,
            is_needed ? "requires" : "does not take");
}

}  // namespace ops
