// Runs an action that must fail, and checks its error.
#pragma once

#include <vector>

#include "kernels/base/check.h"
#include "test/support/catch.h"

// Returns the error message. Checks the exit code, that the message is one line and that it contains all `words`.
template <class Action> std::string expect_error(Exit code, const std::vector<std::string>& words, Action action) {
    try {
        action();
    } catch (const Error& error) {
        const std::string sentence = error.what();
        INFO(sentence);
        CHECK(int(error.code) == int(code));
        CHECK(sentence.find('\n') == std::string::npos);
        for (const std::string& word : words) {
            INFO("expected in the message: " << word);
            CHECK(sentence.find(word) != std::string::npos);
        }
        return sentence;
    }
    FAIL("no error, exit code " << int(code) << " was expected");
    return {};
}
