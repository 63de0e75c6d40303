// Reads and writes algorithm choices as text and in a file. Host code only.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string_view>
#include <thread>

#include "kernels/base/check.h"
#include "kernels/cuda/matmul/matmul_cache.h"

namespace {

constexpr const char* kHeader = "train_gpt matmul choices, format 1";
constexpr const char* kNoAlgorithm = "apart";

// FNV-1a, 64 bits (Fowler, Noll, Vo): sufficient to detect a truncated or edited file.
uint64_t checksum(std::string_view text) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    return hash;
}

std::string owner_line(const MatmulOwner& owner) {
    return format("cublaslt %zu gpu %s", owner.version, owner.gpu.c_str());
}

std::string choice_line(const std::string& product, const MatmulChoice& choice) {
    std::string line = product + " :";
    if (!choice.by_library) line += format(" %s", kNoAlgorithm);
    for (uint64_t word : choice.algorithm)
        if (choice.by_library) line += format(" %" PRIx64, word);
    return line + format(" ms %.9g\n", double(choice.ms));
}

bool parse_choice(const std::string& line, std::string& product, MatmulChoice& choice) {
    const size_t colon = line.find(" :");
    if (colon == std::string::npos) return false;
    product = line.substr(0, colon);
    std::istringstream words(line.substr(colon + 2));
    std::string word;
    words >> word;
    choice.by_library = word != kNoAlgorithm;
    if (choice.by_library) {
        words.seekg(0);
        for (uint64_t& number : choice.algorithm) words >> std::hex >> number;
    }
    words >> word >> choice.ms;
    return !words.fail() && word == "ms" && (words >> std::ws).eof();
}

std::string system_words(const char* what, const std::string& path) {
    return format("%s %s failed: %s", what, path.c_str(), std::strerror(errno));
}

}  // namespace

std::string choices_to_text(const MatmulChoices& choices, const MatmulOwner& owner) {
    std::string text = format("%s\n%s\n", kHeader, owner_line(owner).c_str());
    for (const auto& [product, choice] : choices) text += choice_line(product, choice);
    return text + format("checksum %016" PRIx64 "\n", checksum(text));
}

std::string choices_from_text(MatmulChoices& choices, const std::string& text, const MatmulOwner& owner) {
    std::istringstream lines(text);
    std::string header, made_by, line;
    if (!std::getline(lines, header) || header != kHeader) return "it is not a list of choices or has another format";
    std::getline(lines, made_by);
    const size_t last = text.rfind("checksum ");
    if (last == std::string::npos || text[last - 1] != '\n' ||
        text.substr(last) != format("checksum %016" PRIx64 "\n", checksum(std::string_view(text).substr(0, last))))
        return "it is damaged: its checksum is missing or wrong";
    if (made_by != owner_line(owner))
        return format("it was made with \"%s\", but this machine has \"%s\"", made_by.c_str(),
                      owner_line(owner).c_str());
    MatmulChoices found;
    while (std::getline(lines, line) && line.compare(0, 9, "checksum ") != 0) {
        std::string product;
        MatmulChoice choice;
        if (!parse_choice(line, product, choice)) return format("it has an invalid line: \"%s\"", line.c_str());
        found[product] = choice;
    }
    for (const auto& [product, choice] : found) choices[product] = choice;
    return {};
}

std::string read_choices(MatmulChoices& choices, const std::string& path, const MatmulOwner& owner) {
    std::ifstream file(path);
    if (!file) return errno == ENOENT ? std::string() : system_words("opening", path);
    std::ostringstream text;
    text << file.rdbuf();
    const std::string reason = choices_from_text(choices, text.str(), owner);
    return reason.empty() ? reason : format("%s is ignored: %s", path.c_str(), reason.c_str());
}

std::string write_choices(const MatmulChoices& choices, const std::string& path, const MatmulOwner& owner) {
    const std::string temporary = format("%s.tmp-%ld", path.c_str(), long(::getpid()));
    std::ofstream file(temporary);
    file << choices_to_text(choices, owner);
    file.close();
    std::string reason;
    if (!file)
        reason = system_words("writing", temporary);
    else if (std::rename(temporary.c_str(), path.c_str()) != 0)
        reason = system_words("renaming a file to", path);
    if (!reason.empty()) std::remove(temporary.c_str());
    return reason;
}

MatmulLock::MatmulLock(const std::string& path, int patience_s) {
    descriptor_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (descriptor_ < 0) return;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(patience_s);
    while (!(held_ = ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0)) {
        if ((errno != EWOULDBLOCK && errno != EINTR) || std::chrono::steady_clock::now() > deadline) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
}

MatmulLock::~MatmulLock() {
    if (descriptor_ >= 0) ::close(descriptor_);  // releases the lock
}
