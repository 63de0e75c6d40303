#include <algorithm>

#include "kernels/base/check.h"
#include "kernels/cpu/parallel.h"
#include "kernels/ops.h"
#include "kernels/shared/amax.h"
#include "kernels/shared/dispatch.h"

namespace ops {

namespace {

constexpr size_t kCalls = 64;  // calls of philox() at a time, so that the loop over them vectorizes
constexpr size_t kPiece = kCalls * kDropoutGroup;

// Elements [begin, begin + count) of a sample; count is at most kPiece, begin is a multiple of kDropoutGroup.
template <class T>
void drop_piece(T* out, const T* inp, const DropoutMask& mask, uint64_t key, size_t begin, size_t count) {
    uint32_t word[4][kCalls];
#pragma omp simd
    for (size_t call = 0; call < kCalls; call++) {
        const Philox random = mask.words(key, begin / kDropoutGroup + call);
        for (int w = 0; w < 4; w++) word[w][call] = random.word[w];
    }
    float keep[kPiece];
    const float factor = mask.factor;
    for (size_t call = 0; call < kCalls; call++)
        for (int i = 0; i < kDropoutGroup; i++)
            keep[call * kDropoutGroup + i] = mask.keeps(word[i / 2][call], i % 2) ? factor : 0.0f;
#pragma omp simd
    for (size_t i = 0; i < count; i++) out[i] = from_float<T>(keep[i] > 0 ? to_float(inp[i]) * keep[i] : 0.0f);
}

}  // namespace

void dropout(const Dropout& op, Stream) {
    dispatch("dropout", {op.out, op.inp}, [&]<class T>() {
        require(op.first % op.count % kDropoutGroup == 0 && op.start % kDropoutGroup == 0,
                "dropout: first is element %zu of a sample and start is %zu, but both must be multiples of %d",
                op.first % op.count, op.start, kDropoutGroup);
        const size_t end = op.first + op.elements, pieces = (op.count + kPiece - 1) / kPiece;
        parallel_for((end + op.count - 1) / op.count * pieces, [&](size_t piece) {
            const size_t sample = piece / pieces, origin = sample * op.count;
            const size_t begin = std::max(origin + piece % pieces * kPiece, op.first);
            const size_t piece_end = std::min({origin + (piece % pieces + 1) * kPiece, origin + op.count, end});
            if (begin >= piece_end) return;
            drop_piece(op.out.as<T>() + (begin - op.first), op.inp.as<T>() + (begin - op.first), op.mask,
                       op.mask.keys[sample], op.start + begin - origin, piece_end - begin);
        });
        set_amax(op.out, op.elements);
    });
}

}  // namespace ops
