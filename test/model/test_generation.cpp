// Stop strings: how a text is divided into parts must not affect where it ends.
#include "test/support/catch.h"
#include "training/models/generation.h"

namespace {

// The text up to its stop string, fed `step` bytes at a time.
std::string ended(const std::vector<std::string>& stops, const std::string& text, size_t step) {
    StopStrings ending(stops);
    std::string out;
    for (size_t begin = 0; begin < text.size() && !ending.is_found(); begin += step)
        out += ending.add(text.substr(begin, step));
    return out + ending.finish();
}

}  // namespace

TEST_CASE("a text ends before its first stop string, however it is divided into parts", "[generation]") {
    const struct {
        std::vector<std::string> stops;
        const char *text, *remains;
    } cases[] = {{{}, "all of it", "all of it"},
                 {{"zz"}, "all of it z", "all of it z"},
                 {{"\n\n"}, "one\ntwo\n\nthree", "one\ntwo"},
                 {{"END"}, "ENEND", "EN"},  // a stop string begins inside a partial match
                 {{"aab"}, "aaaab aab", "aa"},
                 {{"START", "END"}, "to the END START", "to the "},
                 {{"END"}, "END", ""},
                 {{"abcd", "c"}, "xabcd", "xab"},  // completed before the longer one
                 {{"c", "abc"}, "xabcd", "x"},     // both completed at once: the longer one wins
                 {{"long stop", "op"}, "a long stops", "a "},
                 {{"é"}, "caf\xc3", "caf\xc3"}};
    for (const auto& c : cases)
        for (size_t step : {1, 2, 3, 100}) {
            INFO(c.text << " by " << step);
            REQUIRE(ended(c.stops, c.text, step) == c.remains);
        }
}

TEST_CASE("only text that may begin a stop string is held back", "[generation]") {
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
