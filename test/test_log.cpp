// The records of a run: digits that restore the bits, no step twice after a resume, lines for people, signals.
#include <fcntl.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "runtime/logging/logging.h"
#include "test/expect_error.h"
#include "test/temporary_directory.h"

namespace {

using Json = nlohmann::ordered_json;

TrainRecord record_of(int step) {
    return {.step = step,
            .loss = 10.0 / (step + 2),
            .learning_rate = 6e-4 / step,
            .grad_norm = 1.0f / float(step),
            .loss_scale = 1,
            .tokens = int64_t(step) << 33,
            .step_ms = 100.0 / 3,
            .tokens_per_s = 1e5 / 7};
}

void write_steps(const std::string& dir, int committed_step, int last_step) {
    RunLog log(dir, committed_step);
    for (int step = committed_step + 1; step <= last_step; step++) {
        log.write(record_of(step));
        if (step % 3 == 0) log.write(ValRecord{step, 3.0 / step, 1.25 / step});
    }
    log.sync();
}

// What `action` prints on a stream that is a file, or the terminal end of a pseudo-terminal.
template <class Action> std::string printed_on_file(Action action) {
    std::FILE* file = std::tmpfile();
    action(file);
    std::rewind(file);
    std::string text(1 << 16, '\0');
    text.resize(std::fread(text.data(), 1, text.size(), file));
    std::fclose(file);
    return text;
}

template <class Action> std::string printed_on_terminal(Action action) {
    const int master = ::posix_openpt(O_RDWR | O_NOCTTY);
    REQUIRE(master != -1);
    REQUIRE(::grantpt(master) == 0);
    REQUIRE(::unlockpt(master) == 0);
    std::FILE* terminal = std::fopen(::ptsname(master), "w");
    REQUIRE(terminal);
    action(terminal);
    std::fclose(terminal);  // what was written is less than a terminal's buffer, so nobody waits
    // The system hands it over in pieces, and ends with an error since nobody holds the other side any more.
    std::string text;
    char piece[256];
    for (ssize_t count; (count = ::read(master, piece, sizeof(piece))) > 0;) text.append(piece, size_t(count));
    ::close(master);
    return text;
}

}  // namespace

TEST_CASE("a line of metrics restores every bit of every number", "[log]") {
    TrainRecord record = record_of(3);
    record.loss = 0.1 + 0.2;
    record.grad_norm = 0.1f;
    record.loss_scale = 0x1p100f;
    record.learning_rate = 5e-324;
    record.mfu = 1.0 / 3;
    record.data_ms = 3, record.comm_ms = 5, record.optimizer_ms = 7;
    const Json json = Json::parse(json_line(record));
    std::string keys;
    for (const auto& [key, value] : json.items()) keys += key + " ";
    CHECK(keys ==
          "kind step loss lr grad_norm loss_scale tokens step_ms tokens_per_s mfu compute_ms comm_ms "
          "data_ms optimizer_ms comm_bytes ");
    CHECK(json["kind"] == "train");
    CHECK(json["compute_ms"].get<double>() == record.step_ms - 3 - 5 - 7);
    CHECK(json["step"] == 3);
    CHECK(json["loss"].get<double>() == 0.1 + 0.2);
    CHECK(json["lr"].get<double>() == 5e-324);
    CHECK(json["grad_norm"].get<float>() == 0.1f);
    CHECK(json["loss_scale"].get<float>() == 0x1p100f);
    CHECK(json["tokens"].get<int64_t>() == int64_t(3) << 33);
    CHECK(json["step_ms"].get<double>() == 100.0 / 3);
    CHECK(json["tokens_per_s"].get<double>() == 1e5 / 7);
    CHECK(json["mfu"].get<double>() == 1.0 / 3);

    const Json val = Json::parse(json_line(ValRecord{7, 2.0 / 3, std::nullopt}));
    CHECK(val.dump() == R"({"kind":"val","step":7,"loss":0.6666666666666666,"bits_per_byte":null})");
}

TEST_CASE("what is not a finite number is still valid JSON", "[log]") {
    TrainRecord record = record_of(1);
    record.loss = std::nan("");
    record.grad_norm = std::numeric_limits<float>::infinity();
    record.learning_rate = -std::numeric_limits<double>::infinity();
    record.skipped = "blocks.0.\"mlp\"";
    const Json json = Json::parse(json_line(record));
    CHECK(json["loss"] == "nan");
    CHECK(json["grad_norm"] == "inf");
    CHECK(json["lr"] == "-inf");
    CHECK(json["mfu"].is_null());
    CHECK(json["skipped"] == "blocks.0.\"mlp\"");
}

TEST_CASE("main.log has llm.c's form", "[log]") {
    TemporaryDirectory directory;
    {
        RunLog log(directory.path(), 0);
        log.write(TrainRecord{.step = 12, .loss = 3.14159, .learning_rate = 6e-4, .grad_norm = 1.005f});
        log.write(ValRecord{12, 2.71828, std::nullopt});
    }
    CHECK(read_file(directory / "main.log") == "s:12 trl:3.1416 lr:0.000600 norm:1.00\ns:12 tel:2.7183\n");
}

TEST_CASE("after a resume from any step the files are those of a run that never stopped", "[log]") {
    TemporaryDirectory straight;
    write_steps(straight.path(), 0, 20);
    const std::vector<std::string> litters = {
        "", "{\"kind\":\"train\",\"st", "{\"kind\":\"train\",\"step\":1", std::string(4, '\0'), "\n\n", "s:7"};
    for (int committed : {0, 1, 9, 20})
        for (const std::string& litter : litters) {
            INFO("resumed from step " << committed << ", crash left " << litter);
            TemporaryDirectory resumed;
            write_steps(resumed.path(), 0, std::min(committed + 5, 20));
            for (const char* name : {"metrics.jsonl", "main.log"})
                std::ofstream(resumed / name, std::ios::app) << litter;
            write_steps(resumed.path(), committed, 20);
            for (const char* name : {"metrics.jsonl", "main.log"})
                CHECK(read_file(resumed / name) == read_file(straight / name));
            CHECK(list_directory(resumed.path()) == std::vector<std::string>{"main.log", "metrics.jsonl"});
        }
}

TEST_CASE("lines appear in the files at once and whole", "[log]") {
    TemporaryDirectory directory;
    RunLog log(directory.path(), 0);
    for (int step = 1; step <= 3; step++) {
        log.write(record_of(step));
        CHECK(read_file(directory / "metrics.jsonl").ends_with(json_line(record_of(step)) + "\n"));
    }
    expect_error(Exit::cannot_create, {"no/such"}, [&] { RunLog(directory / "no/such", 0); });
}

TEST_CASE("the progress line says step, loss, rate, speed and the time left", "[log]") {
    TrainRecord record{.step = 12,
                       .loss = 3.14159,
                       .learning_rate = 6e-4,
                       .grad_norm = 1.25f,
                       .step_ms = 165.7,
                       .tokens_per_s = 1234567.8};
    CHECK(progress_line(record, 500, 81) ==
          "step 12/500 | loss 3.1416 | lr 6.00e-04 | norm 1.25 | 1,234,568 tokens/s | 166 ms | 1 min 21 s left");
    CHECK(progress_line(record, 500, 59).ends_with(" 59 s left"));
    CHECK(progress_line(record, 500, 7265).ends_with(" 2 h 01 min left"));
    record.skipped = "wte";
    record.tokens_per_s = 999;
    CHECK(progress_line(record, 500, 0).ends_with(" 999 tokens/s | 166 ms | 0 s left | skipped: wte is not finite"));
}

TEST_CASE("without a terminal, or with several ranks, progress is a plain line every so many steps", "[log]") {
    auto train = [](std::FILE* out, int ranks) {
        TrainingProgress progress(out, ranks, 25, 10);
        for (int step = 3; step <= 25; step++) progress.show(record_of(step));
        progress.say("done");
    };
    const std::string text = printed_on_file([&](std::FILE* out) { train(out, 1); });
    CHECK(text.find_first_of("\r\x1b") == std::string::npos);
    std::string on_terminal = printed_on_terminal([&](std::FILE* out) { train(out, 2); });
    std::erase(on_terminal, '\r');  // the terminal's own, before each newline
    CHECK(on_terminal == text);
    std::vector<std::string> lines;
    for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1)
        lines.push_back(text.substr(begin, end - begin));
    REQUIRE(lines.size() == 5);
    for (size_t i = 0; i < 4; i++)
        CHECK(lines[i].starts_with(std::vector{"step 3/", "step 10/", "step 20/", "step 25/"}[i]));
    CHECK(lines[3].find("| 0 s left") != std::string::npos);
    CHECK(lines[4] == "done");
}

TEST_CASE("on a terminal progress rewrites one line that is never wider than the terminal", "[log]") {
    const std::string text = printed_on_terminal([](std::FILE* out) {
        TrainingProgress progress(out, 1, 3, 10);
        for (int step = 1; step <= 2; step++) progress.show(record_of(step));
        progress.say("validation");
        progress.show(record_of(3));
    });
    const std::string line1 = progress_line(record_of(1), 3, 0).substr(0, 40);
    CHECK(text.starts_with(line1));
    CHECK(text.find("\r\x1b[Kstep 2/3") != std::string::npos);
    CHECK(text.find("\r\x1b[Kvalidation\r\nstep 3/3") != std::string::npos);
    CHECK(text.ends_with("\n"));
    for (size_t begin = 0, end; (end = text.find("\x1b[K", begin)) != std::string::npos; begin = end + 3)
        CHECK(end - begin <= 80);
}

TEST_CASE("the first signal asks to stop, the second ends, hang-ups are ignored", "[log]") {
    // In a child, since the flag cannot be taken back. Its exit code tells how far it came.
    auto exit_code = [](auto action) {
        const pid_t child = ::fork();
        if (child == 0) {
            install_signal_handlers();
            action();
            ::_exit(0);
        }
        int status = 0;
        ::waitpid(child, &status, 0);
        return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
    };
    CHECK(exit_code([] { ::_exit(stop_signal() == 0 ? 3 : 4); }) == 3);
    CHECK(exit_code([] {
              ::raise(SIGTERM);
              ::_exit(stop_signal() == SIGTERM ? 3 : 4);
          }) == 3);
    CHECK(exit_code([] {
              ::raise(SIGINT);
              ::raise(SIGTERM);
              ::_exit(4);
          }) == 128 + SIGTERM);
    CHECK(exit_code([] {
              for (int signal : {SIGHUP, SIGPIPE, SIGXFSZ}) ::raise(signal);
              ::_exit(stop_signal() == 0 ? 3 : 4);
          }) == 3);
}
