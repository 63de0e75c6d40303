// Parts of the vocabulary: a part has the tokens [first, first + count). Losses.
#pragma once

namespace ops {

// Returns the row or column of a token in a part, or -1 if the part does not have it. A token of -1 is in no part.
HOST_DEVICE inline int index_in_part(int token, int first, int count) {
    const int index = token - first;
    return index >= 0 && index < count ? index : -1;
}

// Returns a loss below 2^25 rounded to a multiple of 2^-26. A sum below 2^27 of such numbers is exact, so it does not
// depend on their order.
HOST_DEVICE inline double term_of_losses(float loss) {
    constexpr double kShift = 0x1.8p26;  // a double near it is a multiple of 2^-26
    return (double(loss) + kShift) - kShift;
}

}  // namespace ops
