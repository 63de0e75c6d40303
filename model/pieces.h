// The arrays of ops on chunks. Some may be in host memory: see model/offload.h.
#pragma once

#include <array>
#include <initializer_list>
#include <span>

#include "kernels/op_stream.h"
#include "kernels/tensor.h"
#include "kernels/update_ops.h"

struct GptState;

// Chunks in device memory and the host's copy of them.
struct ChunkList {
    const ops::Chunk* device;
    std::span<const ops::Chunk> host;

    ChunkList part(int first, int count) const { return {device + first, host.subspan(size_t(first), size_t(count))}; }
};

// An array that an op on chunks accesses, at this member of each chunk. It may be null. An op that overwrites an array
// updates it, because it leaves the array as it is if a gradient is not finite.
struct ChunkArray {
    enum Access { reads, updates };
    View array;
    size_t ops::Chunk::*place;
    Access access;
};

// The pieces of an op on chunks, each in device memory while it is the current one. Without arrays in host memory there
// is one piece.
//
//     for (Pieces pieces(s, chunks, {{s.master, &ops::Chunk::begin, ChunkArray::updates}}); pieces.next();)
//         run(s.stream, op, {.master = pieces[0], .chunks = pieces.chunks(), .n_chunks = pieces.n_chunks(), ...},
//             pieces.note());
class Pieces {
public:
    Pieces(GptState& s, const ChunkList& chunks, std::initializer_list<ChunkArray> arrays);
    // Ends the use of the current piece, and makes the next one current. False: there is none.
    bool next();

    // The chunks of the current piece.
    const ops::Chunk* chunks() const { return list().device; }
    int n_chunks() const { return current_.count; }
    std::span<const ops::Chunk> host_chunks() const { return list().host; }
    // Counts their elements, for a trace.
    OpNote note() const;
    // An array of the current piece, in the order of the constructor's. Its elements have the places of the whole
    // array's elements; only the ones of the piece's chunks exist.
    View operator[](size_t number) const { return views_[number]; }

private:
    static constexpr size_t kMaxArrays = 5;
    struct Range {
        int first = 0, count = 0;  // chunks
    };

    ChunkList list() const { return chunks_.part(current_.first, current_.count); }
    bool is_offloaded(size_t number) const;
    Range range_from(int first) const;
    View in_window(size_t number, const Range& range, int window) const;
    void copy(const Range& range, int window, bool to_device);

    GptState& s_;
    ChunkList chunks_;
    size_t n_arrays_ = 0;
    std::array<ChunkArray, kMaxArrays> arrays_;
    std::array<View, kMaxArrays> views_;
    bool is_any_offloaded_ = false, is_started_ = false;
    Range current_, upcoming_;
    int window_ = 0;  // of the current piece; the upcoming one has the other
};
