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
        case Dtype::fp64: break;
    }
    fail(Exit::internal, "%s does not support %s", op, name_of(dtype));
}

template <class Body> void dispatch(const char* op, std::initializer_list<ConstView> arrays, Body&& body) {
    dispatch(op, storage_type(op, arrays), body);
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

// Checks that a GEMM has the array that its activation needs: forward's pre_activation for all but relu2, backward's
// `kept` for all. Fails with Exit::internal and the op's name.
inline void require_activation_array(const char* op, ActivationFunction function, bool is_needed, ConstView array) {
    const char* name = function == ActivationFunction::none ? "none" : name_of(function);
    require(bool(array) == is_needed, "%s: activation %s %s an array of its input or output", op, name,
            is_needed ? "requires" : "does not take");
}

}  // namespace ops
