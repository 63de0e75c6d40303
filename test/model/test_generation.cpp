// Stop strings: where a text ends must not depend on the parts that it comes in.
#include "test/support/catch.h"
#include "training/models/generation.h"

namespace {

// What remains of the text that arrives `step` bytes at a time.
std::string ended(const std::vector<std::string>& stops, const std::string& text, size_t step) {
    StopStrings ending(stops);
    std::string out;
    for (size_t begin = 0; begin < text.size() && !ending.is_found(); begin += step)
        out += ending.add(text.substr(begin, step));
    return out + ending.finish();
}

}  // namespace

TEST_CASE("a text ends before its first stop string, whatever its parts", "[generation]") {
    const struct {
        std::vector<std::string> stops;
        const char *text, *remains;
    } cases[] = {{{}, "all of it", "all of it"},
                 {{"zz"}, "all of it z", "all of it z"},
                 {{"\n\n"}, "one\ntwo\n\nthree", "one\ntwo"},
                 {{"END"}, "ENEND", "EN"},  // a stop string begins within what began like one
                 {{"aab"}, "aaaab aab", "aa"},
                 {{"START", "END"}, "to the END START", "to the "},
                 {{"END"}, "END", ""},
                 {{"abcd", "c"}, "xabcd", "xab"},  // complete before the longer one is
                 {{"c", "abc"}, "xabcd", "x"},     // both at once: the longer one
                 {{"long stop", "op"}, "a long stops", "a "},
                 {{"é"}, "caf\xc3", "caf\xc3"}};
    for (const auto& c : cases)
        for (size_t step : {1, 2, 3, 100}) {
            INFO(c.text << " by " << step);
            REQUIRE(ended(c.stops, c.text, step) == c.remains);
        }
}

TEST_CASE("only what may begin a stop string is held back", "[generation]") {
    StopStrings ending({"\nQ:", "END"});
    REQUIRE(ending.add("answer") == "answer");
    REQUIRE(ending.add(" E") == " ");
    REQUIRE(ending.add("N\n") == "EN");
    REQUIRE(ending.add("Q") == "");
    REQUIRE(ending.add("x") == "\nQx");
    REQUIRE(ending.add("\nQ: 2") == "");
    REQUIRE(ending.is_found());
    REQUIRE(ending.add("more") == "");
    REQUIRE(ending.finish() == "");
}
