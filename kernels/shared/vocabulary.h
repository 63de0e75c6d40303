// Parts of the vocabulary: a part has the tokens [first, first + count).
#pragma once

namespace ops {

// Returns the row or column of a token in a part, or -1 if the part does not have it. A token of -1 is in no part.
HOST_DEVICE inline int index_in_part(int token, int first, int count) {
    const int index = token - first;
    return index >= 0 && index < count ? index : -1;
}

}  // namespace ops
