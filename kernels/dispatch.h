// From a storage type as a value to a storage type as a template argument: the first line of a launcher.
#pragma once

#include <initializer_list>

#include "kernels/check.h"
#include "kernels/tensor.h"

namespace ops {

// The storage type that all of `arrays` have; absent ones have none. Fails with Exit::internal and the op's name where
// two differ: an op that supports a combination of types dispatches on each of them.
inline Dtype storage_type(const char* op, std::initializer_list<ConstView> arrays) {
    const ConstView* first = nullptr;
    for (const ConstView& array : arrays) {
        if (!array) continue;
        if (!first) first = &array;
        require(array.dtype == first->dtype, "%s: arrays of %s and %s; the op supports one storage type at a time", op,
                name_of(first->dtype), name_of(array.dtype));
    }
    require(first, "%s: no array", op);
    return first->dtype;
}

// Calls body.operator()<T>() where T is the storage type. Fails with Exit::internal and the op's name where no kernel
// has been written for it.
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

}  // namespace ops
