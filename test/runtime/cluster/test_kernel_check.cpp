// The choice of kernels from the checks of all ranks, and the background program that checks them.
#include <csignal>

#include "runtime/cluster/kernel_check.h"
#include "runtime/io/files.h"
#include "test/support/catch.h"
#include "test/support/expect_error.h"
#include "test/support/temporary_directory.h"

TEST_CASE("kernels that pass on all ranks are used", "[kernels]") {
    const std::vector<CheckedKernel> good{{"attention", ""}, {"loss", ""}},
        bad{{"attention", "it differs"}, {"loss", ""}};
    KernelChoice choice = choice_of({text_of(good)});
    CHECK(choice.used == std::vector<std::string>{"attention", "loss"});
    CHECK(choice.lines == std::vector<std::string>{"attention, loss"});
    choice = choice_of({text_of(bad)});
    CHECK(choice.used == std::vector<std::string>{"loss"});
    CHECK(choice.lines == std::vector<std::string>{"loss", "attention is not used: it differs"});
    choice = choice_of({text_of(good), text_of(good), text_of(bad)});
    CHECK(choice.lines == std::vector<std::string>{"loss", "attention is not used: on rank 2, it differs"});
    choice = choice_of({text_of(good), text_of({{"loss", ""}})});
    CHECK(choice.lines == std::vector<std::string>{"loss", "attention is not used: not all ranks have it"});
    choice = choice_of({text_of({}), text_of({})});
    CHECK((choice.used.empty() && choice.lines.empty()));
}

TEST_CASE("a CPU has no kernels to check", "[kernels]") { CHECK(KernelCheck(0, 60).results().empty()); }

namespace {

Subprocess::Result result_of(const std::string& script, double limit_s = 60) {
    return Subprocess({"/bin/sh", "-c", script}).wait(limit_s);
}

}  // namespace

TEST_CASE("a background program's output and exit code", "[subprocess]") {
    Subprocess::Result result = result_of("echo one; echo two >&2; cat; exit 3");
    CHECK(result.output == "one\ntwo\n");
    CHECK(result.code == 3);
    CHECK(result_of("kill -9 $$").code == 128 + 9);
    CHECK(result_of("yes | head -c 300000").output.size() == 300'000);  // more than a pipe holds
    expect_error(Exit::os, {"cannot start /no/such/program"}, [] { Subprocess({"/no/such/program"}); });
}

TEST_CASE("a background program ends at its time limit", "[subprocess]") {
    Subprocess::Result result = result_of("echo first; sleep 1000", 0.3);
    CHECK((result.output == "first\n" && !result.code));
    CHECK(!result_of("yes", 0.3).code);                        // endless output
    CHECK(!result_of("exec >&- 2>&-; sleep 1000", 0.3).code);  // without output
    result = result_of("echo first; sleep 1000 &", 0.3);       // what it has started keeps the output open
    CHECK((result.output == "first\n" && result.code == 0));
}

TEST_CASE("a background program ends with its owner", "[subprocess]") {
    const TemporaryDirectory directory;
    const std::string file = directory.path() + "/pid";
    {
        const Subprocess program(
            {"/bin/sh", "-c", "echo $$ > " + file + ".new; mv " + file + ".new " + file + "; cat; sleep 1000"});
        while (!file_exists(file)) ::usleep(1000);
    }
    const int pid = std::stoi(read_file(file));
    CHECK((::kill(pid, 0) == -1 && errno == ESRCH));
}
