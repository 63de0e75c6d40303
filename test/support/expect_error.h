// Runs an action that must fail, and says what is wrong with the way in which it fails.
#pragma once


#include "kernels/base/check.h"
#include "test/support/catch.h"

// The error's sentence. Checks the exit code, that the sentence is one line and that it holds all the `words`.
template <class Action> std::string expect_error(Exit code, const std::vector<std::string>& words, Action action) {
    try {
        action();
    } catch (const Error& error) {
        const std::string sentence = error.what();
        INFO(sentence);
        CHECK(int(error.code) == int(code));
        CHECK(sentence.find('\n') == std::string::npos);
        for (const std::string& word : words) {
            INFO("expected in the sentence: " << word);
            CHECK(sentence.find(word) != std::string::npos);
        }
        return sentence;
    }
    FAIL("no error, exit code " << int(code) << " was expected");
    return {};
}
