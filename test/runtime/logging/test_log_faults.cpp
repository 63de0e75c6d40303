// A run's logs on a disk that rejects writes, and after crashes that left incomplete lines.
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <fstream>

#include "runtime/io/files.h"
#include "runtime/io/process.h"
#include "runtime/logging/logging.h"
#include "test/support/expect_error.h"
#include "test/support/system_faults.h"
#include "test/support/temporary_directory.h"

namespace {

TrainRecord record_of(int step) {
    return {.step = step, .loss = 1.0 / step, .learning_rate = 1e-3, .time = 1e9 + step};
}

// While this object lives, files of this process can have at most N bytes: a write stops partway at the limit.
class FileSizeLimit {
public:
    explicit FileSizeLimit(size_t bytes) {
        ::getrlimit(RLIMIT_FSIZE, &before_);
        handler_ = std::signal(SIGXFSZ, SIG_IGN);
        const rlimit limit{bytes, before_.rlim_max};
        ::setrlimit(RLIMIT_FSIZE, &limit);
    }
    ~FileSizeLimit() {
        ::setrlimit(RLIMIT_FSIZE, &before_);
        std::signal(SIGXFSZ, handler_);
    }

private:
    rlimit before_{};
    void (*handler_)(int);
};

// Writes the steps first .. last and returns the printed messages.
std::string write_steps(RunLog& log, int first, int last) {
    std::string said;
    for (int step = first; step <= last; step++) {
        log.write(record_of(step));
        if (step % 3 == 0) log.write(ValRecord{step, 2.0 / step, {}, 1e9});
        if (step % 4 == 0) log.write(SampleRecord{step, "a", "abc", 1e9});
        if (const std::string news = log.end_step(); !news.empty()) said += news + "\n";
    }
    return said;
}

std::vector<std::string> contents(const std::string& directory) {
    std::vector<std::string> all;
    for (const char* name : {"metrics.jsonl", "main.log", "samples.jsonl"})
        all.push_back(read_file(directory + "/" + name));
    for (const std::string& name : list_directory(directory + "/tensorboard")) {
        const std::string events = read_file(directory + "/tensorboard/" + name);
        constexpr size_t kStart = 73;  // bytes of the two events that have the start time
        all.push_back(events.substr(std::min(events.size(), kStart)));
    }
    return all;
}

}  // namespace

TEST_CASE("a log that cannot be written for some steps has every record once, in order", "[log]") {
    TemporaryDirectory straight;
    {
        RunLog log(straight.path(), 0, true);
        CHECK(write_steps(log, 1, 12).empty());
    }
    for (const size_t limit : {size_t(0), size_t(1), size_t(333), size_t(1000), size_t(1001), size_t(2500)}) {
        INFO(limit);
        TemporaryDirectory faulty;
        RunLog log(faulty.path(), 0, true);
        std::string said = write_steps(log, 1, 2);
        {
            const FileSizeLimit small(limit);
            said += write_steps(log, 3, 9);
            expect_error(Exit::io, {faulty / "", "File too large"}, [&] { log.sync(); });
            CHECK(log.error() == nullptr);
        }
        CHECK_THAT(said, ContainsSubstring("warning: cannot write "));
        CHECK_THAT(said, ContainsSubstring(": File too large; the records are kept in memory"));
        CHECK(std::count(said.begin(), said.end(), '\n') == 1);
        if (limit % 2 == 0) log.sync();  // writes the missing records first
        said = write_steps(log, 10, 12);
        CHECK(said == "writing the log works again; no records were lost\n");
        CHECK(contents(faulty.path()) == contents(straight.path()));
    }
}

TEST_CASE("a log that cannot be written for 100 steps ends the run, and delays no checkpoint", "[log]") {
    TemporaryDirectory directory;
    {
        RunLog log(directory.path(), 0);
        for (int begin : {1, 101, 201}) {  // more than 100 in all, but never in a row
            {
                const FileSizeLimit none(0);
                write_steps(log, begin, begin + 60);
            }
            write_steps(log, begin + 61, begin + 61);
        }
        CHECK(log.error() == nullptr);
    }
    RunLog log(directory.path(), 0);
    write_steps(log, 1, 1);
    const FileSizeLimit none(0);
    write_steps(log, 2, RunLog::kMaxFailedSteps);
    CHECK(log.error() == nullptr);
    expect_error(Exit::io, {"metrics.jsonl"}, [&] { log.sync(); });
    write_steps(log, RunLog::kMaxFailedSteps + 1, RunLog::kMaxFailedSteps + 1);
    REQUIRE(log.error());
    expect_error(Exit::io, {"metrics.jsonl", "File too large", "100 steps"},
                 [&] { std::rethrow_exception(log.error()); });
    log.sync();
}

TEST_CASE("a log uses little memory, however long no checkpoint is saved", "[log]") {
    TemporaryDirectory directory;
    const std::string path = directory / "x";
    OutputFile{path};
    LogFile file(path, 0);
    const std::string line(1 << 20, 'x');
    const size_t before = resident_bytes();
    for (int i = 0; i < 100; i++) REQUIRE(file.append(line));
    CHECK(resident_bytes() < before + (size_t(32) << 20));
    CHECK(std::filesystem::file_size(path) == 100u << 20);
}

TEST_CASE("a log written while another thread syncs it has every record once, in order", "[log]") {
    TemporaryDirectory straight, synced;
    constexpr int kSteps = 3000;
    {
        RunLog log(straight.path(), 0, true);
        CHECK(write_steps(log, 1, kSteps).empty());
    }
    RunLog log(synced.path(), 0, true);
    std::atomic<bool> is_over = false;
    std::jthread saver([&] {
        while (!is_over) log.sync();
    });
    CHECK(write_steps(log, 1, kSteps).empty());
    is_over = true;
    saver.join();
    log.sync();
    CHECK(contents(synced.path()) == contents(straight.path()));
}

TEST_CASE("a sync that hangs delays no record, and one that fails loses none", "[log]") {
    for (const int error : {0, EIO}) {
        INFO(error);
        TemporaryDirectory straight, faulty;
        {
            RunLog log(straight.path(), 0, true);
            write_steps(log, 1, 20);
        }
        RunLog log(faulty.path(), 0, true);
        write_steps(log, 1, 5);
        auto fault = std::make_unique<SystemFault>(SystemCall::sync, "metrics.jsonl", error);
        std::exception_ptr failure;
        std::jthread saver([&] {
            try {
                log.sync();
            } catch (...) {
                failure = std::current_exception();
            }
        });
        fault->wait_until_met();
        CHECK(write_steps(log, 6, 19).empty());
        fault.reset();  // the disk responds again
        saver.join();
        CHECK(bool(failure) == (error != 0));
        // The system may discard pages after a failed fsync.
        if (error != 0) std::filesystem::resize_file(faulty / "metrics.jsonl", 0);
        write_steps(log, 20, 20);
        log.sync();
        CHECK(contents(faulty.path()) == contents(straight.path()));
    }
}

TEST_CASE("truncating a log of more than a GiB uses little memory and keeps its lines", "[log]") {
    TemporaryDirectory directory;
    const std::string path = directory / "metrics.jsonl";
    const std::string first = json_line(record_of(1)) + "\n", second = json_line(record_of(2)) + "\n";
    std::ofstream(path) << first;
    std::filesystem::resize_file(path, size_t(1100) << 20);  // a hole, as after a power cut
    std::ofstream(path, std::ios::app) << "\n" << second << json_line(record_of(3)) << "\n";
    const size_t before = resident_bytes();
    RunLog log(directory.path(), 2);
    CHECK(resident_bytes() < before + (size_t(200) << 20));
    CHECK(read_file(path) == first + second);
}

TEST_CASE("a log is truncated in place if the lines to keep are its beginning", "[log]") {
    TemporaryDirectory directory;
    const std::string path = directory / "metrics.jsonl";
    auto inode_after = [&](const std::string& content) {
        std::ofstream(path) << content;
        const std::string link = directory / "link";  // keeps the file alive, so that its inode number is not reused
        std::filesystem::remove(link);
        std::filesystem::create_hard_link(path, link);
        RunLog log(directory.path(), 2);
        CHECK(read_file(path) == json_line(record_of(1)) + "\n" + json_line(record_of(2)) + "\n");
        return std::filesystem::equivalent(path, link);
    };
    const std::string good = json_line(record_of(1)) + "\n" + json_line(record_of(2)) + "\n";
    CHECK(inode_after(good));
    CHECK(inode_after(good + json_line(record_of(3)) + "\n{\"kind\":"));
    CHECK_FALSE(inode_after("{\"kind\":\n" + good));
    CHECK_FALSE(inode_after(json_line(record_of(1)) + "\n\n" + json_line(record_of(2)) + "\n"));
}

TEST_CASE("lines that a resumed run removes from its logs do not return after a power cut", "[log]") {
    TemporaryDirectory directory;
    {
        RunLog log(directory.path(), 0);
        write_steps(log, 1, 12);
    }
    for (const auto& [name, step] : {std::pair{"metrics.jsonl", 6}, {"main.log", 3}}) {
        const std::string path = directory / name, whole = read_file(path);
        CHECK(stop_at_sync(
            path, [&] { RunLog(directory.path(), step); },
            [&] {
                const std::string cut = read_file(path);
                CHECK(cut.size() < whole.size());
                CHECK(whole.starts_with(cut));
            }));
    }
}

TEST_CASE("a log that cannot be read is left unchanged", "[log]") {
    TemporaryDirectory directory;
    std::filesystem::create_directories(directory / "metrics.jsonl");
    CHECK_THROWS_AS(RunLog(directory.path(), 0), Error);
    CHECK(std::filesystem::is_directory(directory / "metrics.jsonl"));
}
