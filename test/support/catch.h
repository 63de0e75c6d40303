// Catch2, whichever version is installed: 2 is one header, 3 a library. Tests include this file and nothing else of it.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
using Catch::Matchers::ContainsSubstring;
#else
#include <catch2/catch.hpp>
inline auto ContainsSubstring(const std::string& text) { return Catch::Matchers::Contains(text); }  // version 3's name
#endif
using Catch::Matchers::StartsWith;
