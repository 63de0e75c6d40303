// The records of a run: digits that restore the bits, no repeated step after a resume, progress lines, signals.
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "runtime/io/files.h"
#include "runtime/io/process.h"
#include "runtime/logging/logging.h"
#include "test/support/expect_error.h"
#include "test/support/temporary_directory.h"

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
        if (step % 4 == 0) log.write(SampleRecord{step, "In", "In " + std::to_string(step) + "\n\"\x1b\xff"});
        if (step % 5 == 0) log.write(NormRecord{step, {{"wte", 0.5}}, {{"h.0.residual", 1.0 / step}}});
    }
    log.sync();
}

// The output of `action` on a stream.
template <class Action> std::string printed(Action action) {
    std::FILE* file = std::tmpfile();
    action(file);
    std::rewind(file);
    std::string text(1 << 16, '\0');
    text.resize(std::fread(text.data(), 1, text.size(), file));
    std::fclose(file);
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
          "kind step time loss lr grad_norm loss_scale tokens epoch step_ms tokens_per_s mfu compute_ms comm_ms "
          "data_ms optimizer_ms comm_bytes resident_bytes ");
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

    const Json val = Json::parse(json_line(ValRecord{7, 2.0 / 3, std::nullopt, 1.7e9 + 0.125}));
    CHECK(val.dump() ==
          R"({"kind":"val","step":7,"time":1700000000.125,"loss":0.6666666666666666,"bits_per_byte":null})");
    const Json norms = Json::parse(json_line(NormRecord{7, {{"wte", 1.0 / 3}, {"h.0.\"", HUGE_VAL}}, {{"f", 2}}, 3}));
    CHECK(norms.dump() == R"({"kind":"norms","step":7,"time":3.0,"grad_norms":{"wte":0.3333333333333333,)"
                          R"("h.0.\"":"inf"},"activation_rms":{"f":2}})");
}

TEST_CASE("a sample is valid JSON whatever the model writes", "[log]") {
    const Json json = Json::parse(json_line(SampleRecord{7, "A \xff", "A \xc3\xa9\n\x1b[2J\xe2\x82", 1.5}));
    CHECK(json["step"] == 7);
    CHECK(json["time"] == 1.5);
    CHECK(json["prompt"] == "A \ufffd");
    CHECK(json["text"] == "A \u00e9\n\x1b[2J\ufffd");
    CHECK(printable("A \xc3\xa9\n\x1b[2J\t\x7f\r\xc2\x9b\x31\xc2\xa0\xe2\x82") ==
          "A \u00e9\n\\x1b[2J\t\\x7f\\x0d\\x9b1\u00a0\ufffd");
}

TEST_CASE("numbers that are not finite are written as valid JSON", "[log]") {
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

TEST_CASE("after a resume from any step the files equal an uninterrupted run's", "[log]") {
    TemporaryDirectory straight;
    write_steps(straight.path(), 0, 20);
    const std::vector<std::string> litters = {
        "", "{\"kind\":\"train\",\"st", "{\"kind\":\"train\",\"step\":1", std::string(4, '\0'), "\n\n", "s:7"};
    for (int committed : {0, 1, 9, 20})
        for (const std::string& litter : litters) {
            INFO("resumed from step " << committed << ", crash left " << litter);
            TemporaryDirectory resumed;
            write_steps(resumed.path(), 0, std::min(committed + 5, 20));
            for (const char* name : {"metrics.jsonl", "main.log", "samples.jsonl"})
                std::ofstream(resumed / name, std::ios::app) << litter;
            write_steps(resumed.path(), committed, 20);
            for (const char* name : {"metrics.jsonl", "main.log", "samples.jsonl"})
                CHECK(read_file(resumed / name) == read_file(straight / name));
            CHECK(list_directory(resumed.path()) ==
                  std::vector<std::string>{"main.log", "metrics.jsonl", "samples.jsonl"});
        }
}

TEST_CASE("a log that is a link stays a link, and its target is continued", "[log]") {
    TemporaryDirectory directory;
    for (const char* name : {"whole", "run", "disk"}) std::filesystem::create_directory(directory / name);
    write_steps(directory / "whole", 0, 12);
    write_steps(directory / "run", 0, 5);
    const std::string kNames[] = {"metrics.jsonl", "main.log", "samples.jsonl"};
    for (const std::string& name : kNames) {
        std::filesystem::rename(directory / ("run/" + name), directory / ("disk/" + name));
        std::filesystem::create_symlink("../disk/" + name, directory / ("run/" + name));
    }
    for (const bool has_gap : {false, true}) {  // the files are truncated or replaced
        if (has_gap) std::ofstream(directory / "disk/metrics.jsonl", std::ios::app) << "{\"kind\"\n{\"step\":9}\n";
        write_steps(directory / "run", has_gap ? 8 : 5, has_gap ? 12 : 8);
        for (const std::string& name : kNames) CHECK(std::filesystem::is_symlink(directory / ("run/" + name)));
    }
    for (const std::string& name : kNames)
        CHECK(read_file(directory / ("disk/" + name)) == read_file(directory / ("whole/" + name)));
    CHECK(list_directory(directory / "disk").size() == std::size(kNames));

    std::filesystem::remove(directory / "disk/main.log");
    expect_error(Exit::io, {"run/main.log", "link", "No such file"}, [&] { RunLog(directory / "run", 12); });
    CHECK(std::filesystem::is_symlink(directory / "run/main.log"));
}

TEST_CASE("lines appear in the files immediately and complete", "[log]") {
    TemporaryDirectory directory;
    RunLog log(directory.path(), 0);
    for (int step = 1; step <= 3; step++) {
        log.write(record_of(step));
        CHECK(read_file(directory / "metrics.jsonl").ends_with(json_line(record_of(step)) + "\n"));
    }
    expect_error(Exit::cannot_create, {"no/such"}, [&] { RunLog(directory / "no/such", 0); });
}

TEST_CASE("the progress line shows step, loss, rate, speed and the time left", "[log]") {
    TrainRecord record{.step = 12, .loss = 3.14159, .learning_rate = 6e-4, .grad_norm = 1.25f, .tokens = 12'000};
    CHECK(progress_line(record, 500, 500'000, 165.7, 6000) ==
          "step 12/500 | loss 3.1416 | lr 6.00e-04 | norm 1.25 | 6,000 tokens/s | 166 ms | 1 min 21 s left");
    CHECK(progress_line(record, 500, 500'000, 331, 1234567.8).ends_with(" 1,234,568 tokens/s | 331 ms | 0 s left"));
    CHECK(progress_line(record, 500, 500'000, 120, 8270).ends_with(" 59 s left"));
    CHECK(progress_line(record, 500, 500'000, 120, 66.5).ends_with(" 2 h 02 min left"));
    record.step = 500;
    record.tokens = 500'000;
    record.skipped = "wte";
    CHECK(progress_line(record, 500, 500'000, 165.7, 999)
              .ends_with(" 999 tokens/s | 166 ms | 0 s left | skipped: wte is not finite"));
}

TEST_CASE("progress is a line every N steps, and for the first and the last step", "[log]") {
    const std::string text = printed([](std::FILE* out) {
        TrainingProgress progress(out, 25, 10);
        progress.end_at(25, record_of(25).tokens);
        for (int step = 3; step <= 25; step++) progress.show(record_of(step));
        progress.show(ValRecord{25, 4.25, std::nullopt});
        progress.print("done");
    });
    std::vector<std::string> lines;
    for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1)
        lines.push_back(text.substr(begin, end - begin));
    REQUIRE(lines.size() == 6);
    for (size_t i = 0; i < 4; i++)
        CHECK(lines[i].starts_with(std::vector{"step 3/", "step 10/", "step 20/", "step 25/"}[i]));
    CHECK(lines[3].find("| 0 s left") != std::string::npos);
    CHECK(lines[4] == "step 25 | validation loss 4.2500");
    CHECK(lines[5] == "done");
}

TEST_CASE("speed and time left are means of the steps since the previous line", "[log]") {
    // 1000 tokens per step, 2000 from step 6; only the first and the last step of a line's nine are slow.
    const std::string lines = printed([](std::FILE* out) {
        TrainingProgress progress(out, 20, 10);
        progress.end_at(20, 35'000);
        for (int step = 1; step <= 10; step++) {
            TrainRecord record = record_of(step);
            record.step_ms = step == 1 || step == 10 ? 1000 : 100;
            record.tokens = step <= 5 ? 1000 * step : 2000 * step - 5000;
            record.tokens_per_s = (step <= 5 ? 1000 : 2000) / (record.step_ms / 1000);
            progress.show(record);
        }
    });
    CHECK_THAT(lines, ContainsSubstring(" 1,000 tokens/s | 1000 ms | 34 s left\nstep 10/20 "));
    CHECK(lines.ends_with(" 7,778 tokens/s | 200 ms | 3 s left\n"));
}

TEST_CASE("a long operation shows its progress from time to time", "[log]") {
    const std::string text = printed([](std::FILE* out) {
        TrainingProgress progress(out, 9, 1, 0.2);
        progress.begin("preparing");
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        progress.show(record_of(1));
        for (const int micro : {1, 3}) {
            progress.begin_micro_step(2, micro, 3);
            std::this_thread::sleep_for(std::chrono::milliseconds(300));
        }
        progress.show(record_of(2));
        progress.begin("");
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
    });
    CHECK(text.starts_with("preparing | 0 s\n"));
    CHECK(text.find("\nstep 1/9 | loss") != std::string::npos);
    CHECK(text.find("\nstep 2/9 | micro-step 3/3 | 0 s\n") != std::string::npos);
    CHECK(text.find("\n | ") == std::string::npos);
    CHECK(std::count(text.begin(), text.end(), '\n') < 8);
}

TEST_CASE("the first signal requests a stop, the second exits, SIGHUP is ignored", "[log]") {
    // In a child process, because the flag cannot be reset. Its exit code shows how far it got.
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
    // The notice appears at once, on stderr.
    for (const auto& [signal, notice] : {std::pair{SIGINT, "stopping after this step; press again to stop now\n"},
                                         {SIGTERM, "stopping after this step; SIGINT or SIGTERM stops now\n"}}) {
        INFO(signal);
        int ends[2];
        REQUIRE(::pipe(ends) == 0);
        CHECK(exit_code([&, number = signal] {
                  ::dup2(ends[1], STDERR_FILENO);
                  install_signal_handlers(true);
                  ::raise(number);
                  ::raise(SIGUSR1);
                  ::_exit(3);
              }) == 3);
        ::close(ends[1]);
        char text[200] = "";
        CHECK(::read(ends[0], text, sizeof(text) - 1) == ssize_t(std::strlen(notice)));
        CHECK(std::string(text) == notice);
        ::close(ends[0]);
    }
    CHECK(exit_code([] {
              for (int signal : {SIGHUP, SIGPIPE, SIGXFSZ}) ::raise(signal);
              ::_exit(stop_signal() == 0 ? 3 : 4);
          }) == 3);
}
