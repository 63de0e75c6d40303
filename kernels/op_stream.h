// How the model starts ops: run() starts one and, while a trace records, notes its work.
#pragma once

#include <type_traits>

#include "kernels/device.h"
#include "kernels/op_work.h"
#include "kernels/trace.h"

// The stream of a model's ops, and the trace that records them.
struct OpStream : Stream {
    Trace* trace = nullptr;  // null: none
    int layer = -1;          // of the next ops, from 0; -1: none
};

// Facts about an op that its arguments do not contain.
struct OpNote {
    const char* parameter = "";  // name of its parameter
    size_t elements = 0;         // elements of all its chunks
};

// Calls op(arguments, stream), and adds its span to the stream's trace if there is one.
template <class Op>
void run(const OpStream& stream, void (*op)(const Op&, Stream), const std::type_identity_t<Op>& arguments,
         const OpNote& note = {}) {
    if (!stream.trace) return op(arguments, stream);
    const ops::Work work = ops::work_of_any(arguments, note.elements);
    const Span span{.lane = Lane::device,
                    .name = work.op,
                    .of = note.parameter,
                    .layer = stream.layer,
                    .shape = work.shape,
                    .flops = work.flops,
                    .bytes = work.bytes};
    stream.trace->record(span, stream, [&] { op(arguments, stream); });
}
