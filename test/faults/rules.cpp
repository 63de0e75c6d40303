#include "test/faults/rules.h"

#include <fnmatch.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace {

constexpr std::pair<const char*, int> kErrors[] = {
    {"EIO", EIO},       {"ENOSPC", ENOSPC}, {"EINTR", EINTR}, {"EACCES", EACCES}, {"EMFILE", EMFILE},
    {"ESTALE", ESTALE}, {"EDQUOT", EDQUOT}, {"EROFS", EROFS}, {"ENOSYS", ENOSYS}, {"EAGAIN", EAGAIN},
};
constexpr std::pair<const char*, Fault::Kind> kKinds[] = {
    {"short", Fault::shorten},         {"flip", Fault::flip}, {"kill", Fault::kill},
    {"kill_after", Fault::kill_after}, {"log", Fault::log},
};

std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, separator);) {
        const size_t begin = part.find_first_not_of(" \n");
        if (begin != std::string::npos) parts.push_back(part.substr(begin, part.find_last_not_of(" \n") + 1 - begin));
    }
    return parts;
}

Fault fault_named(const std::string& name) {
    for (const auto& [errno_name, error] : kErrors)
        if (name == errno_name) return {Fault::fail, error};
    for (const auto& [kind_name, kind] : kKinds)
        if (name == kind_name) return {kind};
    if (name.starts_with("hang:")) return {Fault::hang, 0, std::stod(name.substr(5))};
    if (name.starts_with("late:")) return {Fault::late, 0, std::stod(name.substr(5))};
    throw std::invalid_argument("unknown action " + name);
}

FaultRule rule_of(const std::string& text) {
    FaultRule rule;
    rule.text = text;
    for (const std::string& field : split(text, ',')) {
        const size_t equals = std::min(field.find('='), field.size());
        const std::string key = field.substr(0, equals), value = field.substr(std::min(equals + 1, field.size()));
        if (key == "call")
            rule.calls = split(value, '|');
        else if (key == "path")
            rule.path = value;
        else if (key == "nth")
            rule.first = std::stoull(value);
        else if (key == "times")
            rule.times = value == "all" ? UINT64_MAX : std::stoull(value);
        else if (key == "rate")
            rule.rate = std::stod(value);
        else if (key == "seed")
            rule.random.seed(uint32_t(std::stoul(value)));
        else if (key == "rank")
            rule.rank = std::stoi(value);
        else if (key == "action")
            rule.fault = fault_named(value);
        else
            throw std::invalid_argument("unknown field " + field);
    }
    if (rule.fault.kind == Fault::none) throw std::invalid_argument("no action in " + text);
    if (rule.fault.kind == Fault::log) rule.times = UINT64_MAX;
    return rule;
}

std::vector<FaultRule> rules_of(const std::string& text) {
    std::vector<FaultRule> rules;
    for (const std::string& part : split(text, ';')) rules.push_back(rule_of(part));
    return rules;
}

bool matches(const FaultRule& rule, const std::string& call, const std::string& path, int rank) {
    return (rule.rank == -1 || rule.rank == rank) && (rule.calls.empty() || std::ranges::count(rule.calls, call) > 0) &&
           ::fnmatch(rule.path.c_str(), path.c_str(), 0) == 0;
}

bool concerns_this(FaultRule& rule) {
    rule.seen++;
    if (rule.rate > 0) return std::uniform_real_distribution()(rule.random) < rule.rate;
    return rule.seen >= rule.first && rule.seen - rule.first < rule.times;
}

}  // namespace

FaultRules::FaultRules(const std::string& text) : rules_(rules_of(text)) {}

Fault FaultRules::next(const std::string& call, const std::string& path, int rank) {
    const std::lock_guard lock(mutex_);
    Fault fault;
    for (FaultRule& rule : rules_) {
        if (!matches(rule, call, path, rank) || !concerns_this(rule) || fault.kind != Fault::none) continue;
        fault = rule.fault;
        rule.injected++;
    }
    return fault;
}

std::string FaultRules::report() {
    const std::lock_guard lock(mutex_);
    std::ostringstream text;
    for (const FaultRule& rule : rules_) text << rule.seen << ' ' << rule.injected << ' ' << rule.text << '\n';
    return text.str();
}

void FaultRules::replace(const std::string& text) {
    std::vector<FaultRule> rules = rules_of(text);
    const std::lock_guard lock(mutex_);
    rules_.swap(rules);
}

void sleep_for(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

std::string with_flip(const void* bytes, size_t count) {
    std::string copy(static_cast<const char*>(bytes), count);
    if (count > 0) copy[count / 2] = char(copy[count / 2] ^ 1);
    return copy;
}
