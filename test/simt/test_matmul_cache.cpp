// The chosen algorithms as text, in a file, and between processes.
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <sstream>

#include "kernels/cuda/matmul/matmul_cache.h"
#include "test/simt/matmul_layer.h"
#include "test/simt/sanitizers.h"
#include "test/support/catch.h"
#include "test/support/temporary_directory.h"

namespace {

using simt::cublas_lt;

const MatmulOwner kOwner{.gpu = "NVIDIA H200", .version = 130100};

MatmulChoices some_choices() {
    MatmulChoices choices;
    choices["bf16 bf16 tn m 768 n 65536 k 768 bias = align 16 16 16 16 0"] = {
        .by_library = true, .algorithm = {1, 0, ~uint64_t(0), 0xabc, 4, 5, 6, 7}, .ms = 0.123456789f};
    choices["bf16 fp32 nt m 1 n 2 k 3 bias_gradient += align 2 2 4 4 0"] = {.by_library = false, .ms = 2.5f};
    choices["fp32 fp32 nn m 1 n 2 k 3 plain = align 4 4 4 0 0"] = {.by_library = true, .algorithm = {9}};
    return choices;
}

bool are_equal(const MatmulChoices& left, const MatmulChoices& right) {
    return left.size() == right.size() && std::equal(left.begin(), left.end(), right.begin(), [](auto& l, auto& r) {
               return l.first == r.first && l.second.by_library == r.second.by_library &&
                      l.second.algorithm == r.second.algorithm && l.second.ms == r.second.ms;
           });
}

std::string content_of(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
}

void write_content(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

size_t files_in(const TemporaryDirectory& directory) {
    size_t files = 0;
    for ([[maybe_unused]] const auto& file : std::filesystem::directory_iterator(directory.path())) files++;
    return files;
}

// ThreadSanitizer's fibers do not survive fork(); other tests look for races.
bool can_start_processes() { return !simt::tsan(); }

// Runs `work` in a process without this process's plans; its exit code is the result.
template <class Work> pid_t start_process(Work work) {
    const pid_t child = fork();
    if (child == 0) _exit(work());
    return child;
}
int result_of(pid_t child) {
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// One GEMM, used for the first time in this process and timed if necessary; returns the algorithm that ran last.
int algorithm_for(const LayerShape& s, const std::string& cache, std::initializer_list<float> ms) {
    std::copy(ms.begin(), ms.end(), cublas_lt().ms);
    cublas_lt().products.clear();
    set_matmul_tuning(true);
    set_matmul_cache(cache);
    Layer<bf16>(s).check_forward(false, false);
    return cublas_lt().products.back().algorithm;
}
bool was_timed() { return cublas_lt().products.size() > 1; }

constexpr int kTimed = 100;  // added to the algorithm if the process timed it

int algorithm_and_timed(const LayerShape& s, const std::string& cache, std::initializer_list<float> ms) {
    const int algorithm = algorithm_for(s, cache, ms);
    return algorithm + (was_timed() ? kTimed : 0);
}

}  // namespace

TEST_CASE("matmul cache: text and back", "[matmul]") {
    const MatmulChoices choices = some_choices();
    const std::string text = choices_to_text(choices, kOwner);
    MatmulChoices read;
    CHECK(choices_from_text(read, text, kOwner).empty());
    CHECK(are_equal(read, choices));
    CHECK(choices_to_text(read, kOwner) == text);
    MatmulChoices none;
    CHECK(choices_from_text(none, choices_to_text({}, kOwner), kOwner).empty());
    CHECK(none.empty());
}

TEST_CASE("matmul cache: all damage is detected", "[matmul]") {
    const std::string text = choices_to_text(some_choices(), kOwner);
    MatmulChoices read;
    size_t taken = 0;
    for (size_t i = 0; i < text.size(); i++) {
        std::string damaged = text;
        damaged[i] = char(damaged[i] ^ 1);
        taken += choices_from_text(read, damaged, kOwner).empty();
        taken += choices_from_text(read, text.substr(0, i), kOwner).empty();
        taken += choices_from_text(read, text.substr(0, i) + text.substr(i + 1), kOwner).empty();
    }
    taken += choices_from_text(read, text + "more\n", kOwner).empty();
    taken += choices_from_text(read, text + text, kOwner).empty();
    CHECK(taken == 0);
    CHECK(read.empty());
}

TEST_CASE("matmul cache: a cache of another GPU or version is ignored, with a reason", "[matmul]") {
    const std::string text = choices_to_text(some_choices(), kOwner);
    MatmulChoices read;
    const std::string version = choices_from_text(read, text, {.gpu = kOwner.gpu, .version = 130101});
    CHECK(version.find("130100") != std::string::npos);
    CHECK(version.find("130101") != std::string::npos);
    const std::string gpu = choices_from_text(read, text, {.gpu = "NVIDIA H100", .version = kOwner.version});
    CHECK(gpu.find("NVIDIA H200") != std::string::npos);
    CHECK(gpu.find("NVIDIA H100") != std::string::npos);
    CHECK(read.empty());
}

TEST_CASE("matmul cache: the file is replaced atomically", "[matmul]") {
    const TemporaryDirectory directory;
    const std::string path = directory / "choices.txt";
    MatmulChoices read;
    CHECK(read_choices(read, path, kOwner).empty());  // no file needs no reason
    CHECK(read.empty());
    CHECK(write_choices({}, path, kOwner).empty());
    CHECK(write_choices(some_choices(), path, kOwner).empty());
    CHECK(read_choices(read, path, kOwner).empty());
    CHECK(are_equal(read, some_choices()));
    CHECK(files_in(directory) == 1);

    // Places that cannot be written: a missing directory, a file as directory, a directory as file.
    CHECK(write_choices({}, directory / "absent/choices.txt", kOwner).find("No such file") != std::string::npos);
    CHECK(write_choices({}, path + "/choices.txt", kOwner).find("Not a directory") != std::string::npos);
    std::filesystem::create_directories(directory / "folder/inside");
    CHECK_FALSE(write_choices({}, directory / "folder", kOwner).empty());
    CHECK_FALSE(read_choices(read, directory / "folder", kOwner).empty());
    CHECK(files_in(directory) == 2);
    CHECK(content_of(path) == choices_to_text(some_choices(), kOwner));
}

TEST_CASE("matmul cache: a lock has one holder and gives up in time", "[matmul]") {
    const TemporaryDirectory directory;
    const std::string path = directory / "choices.lock";
    {
        const MatmulLock lock(path, 0);
        CHECK(lock.held());
        CHECK_FALSE(MatmulLock(path, 0).held());
    }
    CHECK(MatmulLock(path, 0).held());
    CHECK_FALSE(MatmulLock(directory / "absent/choices.lock", 0).held());
}

TEST_CASE("matmul cache: a second process uses the first one's choice instead of its own timing", "[matmul]") {
    if (!can_start_processes()) return;
    const WithDefaults defaults;
    const TemporaryDirectory directory;
    const std::string cache = directory / "choices.txt";
    const LayerShape s{16, 24, 1008};
    CHECK(result_of(start_process([&] { return algorithm_and_timed(s, cache, {9, 9, 1, 9}); })) == kTimed + 2);
    CHECK(result_of(start_process([&] { return algorithm_and_timed(s, cache, {1, 9, 9, 9}); })) == 2);
    CHECK(content_of(cache).find("m 24 n 16 k 1008 plain =") != std::string::npos);

    // The same GEMM with another epilogue has its own choice, which is found again.
    auto with_bias = [&] {
        set_matmul_tuning(true);
        set_matmul_cache(cache);
        cublas_lt().products.clear();
        Layer<bf16>(s).check_forward(true, false);
        return int(was_timed());
    };
    CHECK(result_of(start_process(with_bias)) == 1);
    CHECK(result_of(start_process(with_bias)) == 0);
}

// Both start with an empty file and opposite timings of the algorithms.
TEST_CASE("matmul cache: two processes at once use the same choices", "[matmul]") {
    if (!can_start_processes()) return;
    const WithDefaults defaults;
    const TemporaryDirectory directory;
    const std::string cache = directory / "choices.txt";
    const LayerShape shapes[] = {{16, 24, 1016}, {16, 24, 1024}, {16, 24, 1032}, {16, 24, 1040}};
    auto run = [&](std::initializer_list<float> ms) {
        int answer = 0;
        for (const LayerShape& s : shapes) answer = answer * 4 + algorithm_for(s, cache, ms);
        return answer;
    };
    for (int round = 0; round < 2; round++) {
        const pid_t first = start_process([&] { return run({1, 5, 5, 5}); });
        const pid_t second = start_process([&] { return run({5, 5, 5, 1}); });
        const int answer = result_of(first);
        CHECK(answer >= 0);
        CHECK(answer == result_of(second));
        CHECK(result_of(start_process([&] { return run({5, 5, 1, 5}); })) == answer);
    }
    MatmulChoices read;
    CHECK(read_choices(read, cache, {.gpu = device_info().name, .version = cublasLtGetVersion()}).empty());
    CHECK(read.size() == std::size(shapes));
    CHECK(files_in(directory) == 2);  // the cache and the lock
}

TEST_CASE("matmul cache: a file that is damaged or of another version is replaced", "[matmul]") {
    if (!can_start_processes()) return;
    const WithDefaults defaults;
    const TemporaryDirectory directory;
    const std::string cache = directory / "choices.txt";
    const LayerShape s{16, 24, 1048};
    CHECK(result_of(start_process([&] { return algorithm_for(s, cache, {9, 9, 1, 9}); })) == 2);
    const std::string good = content_of(cache);
    for (const std::string& content : {good.substr(0, good.size() / 2), std::string(), std::string("{}"), good + "x"}) {
        write_content(cache, content);
        CHECK(result_of(start_process([&] {
                  set_matmul_cache(cache);
                  const bool noted = cuda_matmul_path().find("is ignored") != std::string::npos;
                  return noted ? algorithm_and_timed(s, cache, {1, 9, 9, 9}) : -1;
              })) == kTimed + 0);
        CHECK(result_of(start_process([&] { return algorithm_and_timed(s, cache, {9, 9, 1, 9}); })) == 0);
    }
    const std::string before = content_of(cache);
    CHECK(result_of(start_process([&] {
              cublas_lt().version = 130200;  // read at a process's first use of the library
              MatmulChoices read;
              const MatmulOwner owner{.gpu = device_info().name, .version = cublasLtGetVersion()};
              return int(read_choices(read, cache, owner).find("is ignored") != std::string::npos && read.empty());
          })) == 1);
    CHECK(content_of(cache) == before);
}

TEST_CASE("matmul cache: a choice that the library no longer has is replaced", "[matmul]") {
    if (!can_start_processes()) return;
    const WithDefaults defaults;
    const TemporaryDirectory directory;
    const std::string cache = directory / "choices.txt";
    const LayerShape s{16, 24, 1056};
    CHECK(result_of(start_process([&] { return algorithm_for(s, cache, {9, 9, 1, 9}); })) == 2);
    CHECK(result_of(start_process([&] {
              cublas_lt().gone[2] = true;
              return algorithm_and_timed(s, cache, {9, 9, 9, 1});
          })) == kTimed + 3);
    CHECK(result_of(start_process([&] { return algorithm_and_timed(s, cache, {1, 9, 9, 9}); })) == 3);
}

TEST_CASE("matmul cache: a directory that cannot be written costs only the timing", "[matmul]") {
    if (!can_start_processes()) return;
    const WithDefaults defaults;
    const TemporaryDirectory directory;
    const std::string cache = directory / "absent/choices.txt";
    const LayerShape s{16, 24, 1064};
    CHECK(result_of(start_process([&] {
              const int answer = algorithm_and_timed(s, cache, {9, 9, 1, 9});
              return cuda_matmul_path().find("absent") != std::string::npos ? answer : -1;
          })) == kTimed + 2);
    CHECK(files_in(directory) == 0);
}

TEST_CASE("matmul choices: choices in a checkpoint take precedence, without a file", "[matmul]") {
    if (!can_start_processes()) return;
    const WithDefaults defaults;
    const TemporaryDirectory directory;
    const std::string checkpoint = directory / "choices-in-checkpoint.txt", cache = directory / "choices.txt";
    const LayerShape s{16, 24, 1072};
    CHECK(result_of(start_process([&] {
              const int answer = algorithm_for(s, "", {9, 9, 1, 9});
              write_content(checkpoint, matmul_choices());
              return answer;
          })) == 2);
    // Against a cache with other choices, and after the GEMM was planned differently.
    CHECK(result_of(start_process([&] { return algorithm_for(s, cache, {1, 9, 9, 9}); })) == 0);
    CHECK(result_of(start_process([&] {
              if (!load_matmul_choices(content_of(checkpoint)).empty()) return -1;
              return algorithm_and_timed(s, cache, {1, 9, 9, 9});
          })) == 2);
    CHECK(result_of(start_process([&] {
              if (algorithm_for(s, "", {1, 9, 9, 9}) != 0) return -1;
              if (!load_matmul_choices(content_of(checkpoint)).empty()) return -2;
              return algorithm_and_timed(s, "", {1, 9, 9, 9});
          })) == 2);
    CHECK(load_matmul_choices("nonsense").find("are ignored") != std::string::npos);
    const std::string other = choices_to_text(some_choices(), {.gpu = "another", .version = 1});
    CHECK(load_matmul_choices(other).find("another") != std::string::npos);
}
