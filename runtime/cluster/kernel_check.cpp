#include "runtime/cluster/kernel_check.h"

#include <sys/prctl.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <map>
#include <sstream>

#include "kernels/base/check.h"
#include "kernels/device.h"
#include "runtime/io/joined.h"

namespace {

constexpr const char* kPassed = " passed";

// Whether this process is such a check, of a program without the command. It must not start another check.
bool is_check() {
    std::ifstream arguments("/proc/self/cmdline");
    std::string command;
    std::getline(arguments, command, '\0');
    return std::getline(arguments, command, '\0') && command == kCheckKernels;
}

// How a process ended that did not report on a kernel.
std::string problem_of(const Subprocess::Result& result, double limit_s) {
    if (!result.code) return format("its check did not end within %g s", limit_s);
    const size_t end = result.output.find_last_not_of('\n');
    const size_t begin = end == std::string::npos ? end : result.output.rfind('\n', end);
    const std::string last = end == std::string::npos ? "" : result.output.substr(begin + 1, end - begin);
    return format("its check ended with exit code %d", *result.code) + (last.empty() ? "" : ": " + last);
}

}  // namespace

KernelCheck::KernelCheck(int local_rank, double limit_s, const std::string& program)
    : program_(program), local_rank_(local_rank), limit_s_(limit_s) {
    if (limit_s > 0 && !is_check()) waiting_ = arch_kernels();
    if (!waiting_.empty()) start();
}

void KernelCheck::start() {
    std::vector<std::string> command{program_, kCheckKernels, "--gpu", std::to_string(local_rank_)};
    command.insert(command.end(), waiting_.begin(), waiting_.end());
    process_ = std::make_unique<Subprocess>(command);
}

const std::vector<CheckedKernel>& KernelCheck::results() {
    while (!waiting_.empty()) {
        const Subprocess::Result result = process_->wait(limit_s_);
        std::istringstream lines(result.output);
        for (std::string line; !waiting_.empty() && std::getline(lines, line);) {
            const std::string name = waiting_.front();
            if (line == name + kPassed)
                found_.push_back({name, ""});
            else if (line.starts_with(name + ": "))
                found_.push_back({name, line.substr(name.size() + 2)});
            else
                continue;
            waiting_.erase(waiting_.begin());
        }
        if (waiting_.empty()) break;
        found_.push_back({waiting_.front(), problem_of(result, limit_s_)});
        waiting_.erase(waiting_.begin());
        if (!waiting_.empty()) start();
    }
    return found_;
}

std::string text_of(const std::vector<CheckedKernel>& kernels) {
    std::string text;
    for (const CheckedKernel& kernel : kernels) text += kernel.name + ": " + kernel.problem + "\n";
    return text;
}

KernelChoice choice_of(const std::vector<std::string>& texts) {
    std::vector<std::string> names;
    std::map<std::string, std::vector<std::string>> problems;  // by rank; a kernel that a rank lacks has fewer
    for (const std::string& text : texts) {
        std::istringstream lines(text);
        for (std::string line; std::getline(lines, line);) {
            const size_t colon = line.find(": ");
            const std::string name = line.substr(0, colon);
            if (!problems.contains(name)) names.push_back(name);
            problems[name].push_back(line.substr(colon + 2));
        }
    }
    KernelChoice choice;
    for (const std::string& name : names) {
        const std::vector<std::string>& of_ranks = problems[name];
        const auto bad = std::ranges::find_if(of_ranks, [](const std::string& problem) { return !problem.empty(); });
        const std::string rank = texts.size() > 1 ? format(" on rank %d,", int(bad - of_ranks.begin())) : "";
        if (of_ranks.size() < texts.size())
            choice.lines.push_back(name + " is not used: not all ranks have it");
        else if (bad != of_ranks.end())
            choice.lines.push_back(name + " is not used:" + rank + " " + *bad);
        else
            choice.used.push_back(name);
    }
    if (!choice.used.empty()) choice.lines.insert(choice.lines.begin(), joined(choice.used, ", "));
    return choice;
}

void check_kernels(const std::vector<std::string>& names, int local_rank) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    configure_device({.local_rank = local_rank});
    int differ = 0;
    for (const std::string& name : names.empty() ? arch_kernels() : names) {
        const std::string difference = check_arch_kernel(name);
        std::printf("%s%s\n", name.c_str(), difference.empty() ? kPassed : (": " + difference).c_str());
        std::fflush(stdout);
        differ += !difference.empty();
    }
    if (differ > 0) fail(Exit::internal, "%d kernels differ from the portable ones", differ);
}
