// Guesses what somebody meant who typed a name that does not exist.
#pragma once

#include <string>
#include <vector>

// The candidate with the fewest inserted, deleted or changed characters (Levenshtein's distance; the first of equals),
// or an empty string where none is within half of the name's length.
std::string nearest_name(const std::string& name, const std::vector<std::string>& candidates);
