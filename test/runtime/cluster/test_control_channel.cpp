#include <unistd.h>

#include <algorithm>
#include <csignal>

#include "runtime/cluster/control_channel.h"
#include "runtime/io/json.h"
#include "test/support/catch.h"
#include "test/support/rank_processes.h"

namespace {

// Short timeouts. No test depends on a fast machine: only events that must not occur have short times.
ControlSettings quick() {
    ControlSettings settings;
    settings.heartbeat_s = 0.1;
    settings.silence_s = settings.start_s = settings.step_s = settings.save_s = 20;
    settings.collective_timeout_s = 15;
    return settings;
}

[[noreturn]] void sleep_for_ever() {
    for (;;) ::pause();
}

bool contains(const std::string& text, const std::string& word) { return text.find(word) != std::string::npos; }

size_t lines(const std::string& text) { return size_t(std::count(text.begin(), text.end(), '\n')); }

// Every rank except `except` must exit with `code`, after one error message with all the words.
void expect_end(RankProcesses& ranks, int size, int except, Exit code, const std::vector<std::string>& words) {
    for (int rank = 0; rank < size; ++rank) {
        if (rank == except) continue;
        CHECK(ranks.wait(rank) == int(code));
        const std::string printed = ranks.printed(rank);
        INFO("rank " << rank << " printed: " << printed);
        CHECK(lines(printed) == 1);
        for (const std::string& word : words) {
            INFO("expected in the sentence: " << word);
            CHECK(contains(printed, word));
        }
    }
}

std::string rank_and_pid(const RankProcesses& ranks, int rank) {
    char host[256] = "";
    ::gethostname(host, sizeof host);
    return format("rank %d on %s (pid %d)", rank, host, int(ranks.pid(rank)));
}

}  // namespace

TEST_CASE("control: a single rank needs no socket and no thread", "[control]") {
    ControlChannel control(RankEnvironment{});
    CHECK(control.all_gather("a", "letters") == std::vector<std::string>{"a"});
    control.require_same("c", "letter");
    control.note_phase(Phase::step, 1);
    control.leave();
}

TEST_CASE("control: ranks exchange texts and leave together", "[control]") {
    RankProcesses ranks(4);
    ranks.start_all([](const RankEnvironment& environment) {
        ControlChannel control(environment, quick());
        const std::string binary(60'000, char('a' + environment.rank));
        for (int round = 0; round < 20; ++round) {
            const auto texts =
                control.all_gather(round == 7 ? binary : std::to_string(environment.rank * round), "numbers");
            for (int rank = 0; rank < 4; ++rank)
                if (texts[size_t(rank)] !=
                    (round == 7 ? std::string(60'000, char('a' + rank)) : std::to_string(rank * round)))
                    return 1;
            control.require_same("equal\0bytes", "digest");
        }
        if (environment.rank == 2) ::usleep(300'000);  // the others wait meanwhile
        control.leave();
        control.leave_with_error(Exit::data, "too late to matter");
        return 0;
    });
    for (int rank = 0; rank < 4; ++rank) {
        CHECK(ranks.wait(rank) == 0);
        CHECK(ranks.printed(rank) == "");
    }
}

TEST_CASE("control: a difference between ranks fails on all of them", "[control]") {
    RankProcesses ranks(4);
    ranks.start_all([](const RankEnvironment& environment) {
        ControlChannel control(environment, quick());
        control.require_same("same", "binary");
        try {
            control.require_same(environment.rank == 2 ? "seed 2" : "seed 1", "configuration");
        } catch (const Error& error) {
            // A common error does not stop the ranks that leave later.
            if (environment.rank == 1) ::usleep(200'000);
            control.leave_with_error(error.code, error.what());
            throw;
        }
        return 0;
    });
    expect_end(ranks, 4, -1, Exit::config,
               {"configuration differs", "ranks 0, 1, 3", "\"seed 1\"", "rank 2", "\"seed 2\""});
}

TEST_CASE("control: different collectives fail on all ranks", "[control]") {
    RankProcesses ranks(3);
    ranks.start_all([](const RankEnvironment& environment) {
        ControlChannel control(environment, quick());
        if (environment.rank == 1)
            control.require_same("", "tokenizer");
        else
            control.all_gather("", "losses");
        return 0;
    });
    expect_end(ranks, 3, -1, Exit::internal, {"rank 1", "require_same of \"tokenizer\"", "all_gather of \"losses\""});
}

TEST_CASE("control: a rank that does not call a collective is reported", "[control]") {
    RankProcesses ranks(3);
    ranks.start_all([](const RankEnvironment& environment) {
        ControlSettings settings = quick();
        settings.collective_timeout_s = 0.5;
        ControlChannel control(environment, settings);
        if (environment.rank == 1) sleep_for_ever();
        control.all_gather("", "losses");
        return 0;
    });
    expect_end(ranks, 3, -1, Exit::hang, {"1 of 3 ranks", "all_gather of \"losses\"", rank_and_pid(ranks, 1)});
}

// Ranks in step 7, after collective 31, which then call `action`.
static void start_training(RankProcesses& ranks, const ControlSettings& settings,
                           const std::function<void(const RankEnvironment&, ControlChannel&)>& action) {
    ranks.start_all([=, &ranks](const RankEnvironment& environment) {
        ControlChannel control(environment, settings);
        control.note_phase(Phase::step, 7);
        control.note_collective(31, "all_reduce of gradients");
        ::usleep(300'000);  // a few heartbeats
        ranks.ready();
        action(environment, control);
        sleep_for_ever();
        return 0;
    });
}

TEST_CASE("control: all others report a rank that is killed", "[control]") {
    RankProcesses runs[2]{RankProcesses(4), RankProcesses(4)};
    const int victims[] = {2, 0};
    for (RankProcesses& ranks : runs) start_training(ranks, quick(), [](const RankEnvironment&, ControlChannel&) {});
    for (int run = 0; run < 2; ++run) {
        runs[run].wait_until_ready(4);
        runs[run].kill(victims[run], SIGKILL);
        CHECK(runs[run].wait(victims[run]) == 128 + SIGKILL);
        expect_end(runs[run], 4, victims[run], Exit::peer_lost,
                   {rank_and_pid(runs[run], victims[run]) + " died", "phase step", "step 7",
                    "collective 31 (all_reduce of gradients)"});
    }
}

TEST_CASE("control: a stopped rank is detected by its missing heartbeats", "[control]") {
    ControlSettings settings = quick();
    settings.silence_s = 1.5;
    RankProcesses runs[2]{RankProcesses(3), RankProcesses(3)};
    const int victims[] = {1, 0};
    for (RankProcesses& ranks : runs) start_training(ranks, settings, [](const RankEnvironment&, ControlChannel&) {});
    for (int run = 0; run < 2; ++run) {
        runs[run].wait_until_ready(3);
        runs[run].kill(victims[run], SIGSTOP);
    }
    for (int run = 0; run < 2; ++run) {
        expect_end(runs[run], 3, victims[run], Exit::hang,
                   {rank_and_pid(runs[run], victims[run]) + " hangs", "no heartbeat", "step 7"});
        // If it is continued, it exits.
        runs[run].kill(victims[run], SIGCONT);
        CHECK(runs[run].wait(victims[run]) > 0);
    }
}

TEST_CASE("control: a rank in an endless loop is reported, not the ranks that wait for it", "[control]") {
    ControlSettings settings = quick();
    settings.step_s = 1;
    RankProcesses ranks(3);
    start_training(ranks, settings, [](const RankEnvironment& environment, ControlChannel& control) {
        if (environment.rank != 1) control.note_collective(32, "all_gather of weights");
        volatile bool is_endless = true;
        while (environment.rank == 1 && is_endless) {}
    });
    expect_end(ranks, 3, -1, Exit::hang,
               {rank_and_pid(ranks, 1) + " hangs: no progress", "limit 1 s", "collective 31",
                "others have reached collective 32"});
}

TEST_CASE("control: each phase has its own timeout, and progress is not a hang", "[control]") {
    ControlSettings settings = quick();
    settings.step_s = 0.8;
    RankProcesses ranks(3);
    ranks.start_all([&](const RankEnvironment& environment) {
        ControlChannel control(environment, settings);
        // The first step of a process has the timeout of Phase::start.
        control.note_step(1);
        if (environment.rank == 0) ::usleep(1'100'000);
        control.require_same("", "start");
        control.note_step(2);
        // Rank 2 finishes at once and waits for the others.
        for (int micro_step = 0; micro_step < 10 && environment.rank != 2; ++micro_step) {
            ::usleep(100'000);
            control.note_step(2);
        }
        control.require_same("", "end of step");
        // The others wait for rank 0, which saves a checkpoint.
        control.note_phase(environment.rank == 0 ? Phase::save : Phase::step, 2);
        if (environment.rank != 0) control.note_collective(1, "barrier");
        if (environment.rank == 0) ::usleep(1'100'000);
        control.require_same("", "end of save");
        control.leave();
        return 0;
    });
    for (int rank = 0; rank < 3; ++rank) {
        CHECK(ranks.wait(rank) == 0);
        CHECK(ranks.printed(rank) == "");
    }
}

TEST_CASE("control: the other ranks quote an error of one rank", "[control]") {
    RankProcesses runs[2]{RankProcesses(3), RankProcesses(3)};
    const int tellers[] = {2, 0};
    for (int run = 0; run < 2; ++run)
        start_training(runs[run], quick(),
                       [teller = tellers[run]](const RankEnvironment& environment, ControlChannel& control) {
                           if (environment.rank != teller) return;
                           control.leave_with_error(Exit::data, "shard\x1b[31m 12 has 5 bytes too few");
                           ::_exit(int(Exit::data));
                       });
    for (int run = 0; run < 2; ++run) {
        CHECK(runs[run].wait(tellers[run]) == int(Exit::data));
        CHECK(runs[run].printed(tellers[run]) == "");
        expect_end(runs[run], 3, tellers[run], Exit::peer_lost,
                   {rank_and_pid(runs[run], tellers[run]),
                    "left with exit code 65: shard\\x1b[31m 12 has 5 bytes too few", "step 7"});
    }
}

TEST_CASE("control: the first of two errors is quoted", "[control]") {
    RankProcesses ranks(4);
    start_training(ranks, quick(), [](const RankEnvironment& environment, ControlChannel& control) {
        control.all_gather("", "the beginning");
        if (environment.rank != 1 && environment.rank != 2) return;
        if (environment.rank == 2) ::usleep(200'000);
        const Exit code = environment.rank == 1 ? Exit::data : Exit::io;
        control.leave_with_error(code, environment.rank == 1 ? "the first" : "the second");
        ::_exit(int(code));
    });
    for (const int rank : {0, 3}) {
        CHECK(ranks.wait(rank) == int(Exit::peer_lost));
        CHECK(contains(ranks.printed(rank), "left with exit code 65: the first"));
    }
}

TEST_CASE("control: an error caused by a rank's death does not hide the death", "[control]") {
    RankProcesses ranks(3);
    start_training(ranks, quick(), [](const RankEnvironment& environment, ControlChannel& control) {
        const pid_t victim = std::stoi(control.all_gather(std::to_string(::getpid()), "pids")[1]);
        if (environment.rank != 2) return;
        std::thread([victim] { ::usleep(200'000), ::kill(victim, SIGKILL); }).detach();
        control.leave_with_error(Exit::internal, "connection reset in all_reduce");
        ::_exit(int(Exit::internal));
    });
    expect_end(ranks, 3, 1, Exit::peer_lost, {rank_and_pid(ranks, 1) + " died"});
}

TEST_CASE("control: a rank that exits without leaving counts as dead", "[control]") {
    RankProcesses ranks(2);
    ranks.start_all([](const RankEnvironment& environment) {
        {
            ControlChannel control(environment, quick());
            if (environment.rank == 0) sleep_for_ever();
        }
        return 0;
    });
    CHECK(ranks.wait(1) == 0);
    expect_end(ranks, 2, 1, Exit::peer_lost, {"rank 1", "died"});
}

TEST_CASE("control: a rank that does not leave is reported", "[control]") {
    RankProcesses ranks(3);
    ranks.start_all([](const RankEnvironment& environment) {
        ControlSettings settings = quick();
        settings.start_s = 1.5;
        ControlChannel control(environment, settings);
        if (environment.rank == 1) sleep_for_ever();
        control.leave();
        return 0;
    });
    expect_end(ranks, 3, -1, Exit::hang, {rank_and_pid(ranks, 1) + " hangs: no progress", "limit 1.5 s"});
}

TEST_CASE("control: a stop signal is not a death, and SIGSTOP to all ranks blames none", "[control]") {
    ControlSettings settings = quick();
    settings.silence_s = settings.step_s = 1.5;
    RankProcesses ranks(3);
    ranks.start_all([&](const RankEnvironment& environment) {
        std::signal(SIGTERM, SIG_IGN);
        ControlChannel control(environment, settings);
        control.note_phase(Phase::step, 1);
        ::usleep(200'000);
        ranks.ready();
        for (int i = 0; i < 6; ++i) {
            ::usleep(100'000);
            control.note_phase(Phase::step, i);
        }
        control.leave();
        return 0;
    });
    ranks.wait_until_ready(3);
    ranks.kill(1, SIGTERM);
    for (int rank = 0; rank < 3; ++rank) ranks.kill(rank, SIGSTOP);
    ::usleep(2'000'000);
    for (int rank = 0; rank < 3; ++rank) ranks.kill(rank, SIGCONT);
    for (int rank = 0; rank < 3; ++rank) {
        CHECK(ranks.wait(rank) == 0);
        CHECK(ranks.printed(rank) == "");
    }
}
