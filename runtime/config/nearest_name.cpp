#include <algorithm>
#include <numeric>

#include "runtime/config/config.h"

// Wagner, Fischer, "The string-to-string correction problem", J. ACM 21 (1974), one row of the table at a time.
static size_t edit_distance(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);  // row[j]: distance of the first i characters of a to the first j of b
    std::iota(row.begin(), row.end(), size_t(0));
    for (size_t i = 1; i <= a.size(); i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= b.size(); j++) {
            size_t changed = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = std::min({changed, row[j] + 1, row[j - 1] + 1});
        }
    }
    return row.back();
}

std::string nearest_name(const std::string& name, const std::vector<std::string>& known) {
    constexpr size_t kLongest = 200;  // longer input is not a typo, and the time grows with its length
    if (name.size() > kLongest) return "";
    const std::string* nearest = nullptr;
    size_t limit = name.size() / 2;  // names farther away are not suggested
    for (const std::string& candidate : known) {
        const auto [shorter, longer] = std::minmax({name.size(), candidate.size()});
        if (longer - shorter > limit) continue;  // a lower bound of the distance
        const size_t distance = edit_distance(name, candidate);
        if (distance > limit || (nearest && distance == limit)) continue;
        nearest = &candidate;
        limit = distance;
    }
    return nearest ? *nearest : "";
}
