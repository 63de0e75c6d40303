// Catch2, version 2 (one header) or 3 (a library), whichever is installed. Tests include only this file of Catch2.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#include <string>
using Catch::Matchers::ContainsSubstring;
#else
#include <catch2/catch.hpp>
inline auto ContainsSubstring(const std::string& text) { return Catch::Matchers::Contains(text); }  // version 3's name
#endif
using Catch::Matchers::StartsWith;
