// The second pass of gradients that are summed over rows: a kernel has written the sums of each group of rows.
#pragma once

#include "kernels/device.h"

// Adds the groups in a fixed order. A null `first` or `second` is skipped, and its sums are not read.
struct GroupTotals {
    float *first, *second;  // (columns)  = or += by `accumulate`, or null
    const void* groups;     // (n_groups, 2, columns) floats: the sums for first, then for second
    int n_groups, columns;
    bool accumulate;
};
void group_totals(const char* name, const GroupTotals& op, Stream stream);
