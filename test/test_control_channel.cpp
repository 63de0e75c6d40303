#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include "runtime/cluster/control_channel.h"
#include "test/catch.h"
#include "test/rank_processes.h"

namespace {

// Short deadlines. Nothing here depends on a machine being fast: only what must not happen is given little time.
ControlSettings quick() {
    ControlSettings settings;
    settings.opening.deadline_s = 15;
    settings.watch = {
        .heartbeat_s = 0.1, .silence_s = 20, .start_s = 20, .step_s = 20, .evaluation_s = 20, .save_s = 20};
    settings.answer_s = settings.leave_s = 15;
    return settings;
}

[[noreturn]] void sleep_for_ever() {
    for (;;) ::pause();
}

bool contains(const std::string& text, const std::string& word) { return text.find(word) != std::string::npos; }

size_t lines(const std::string& text) { return size_t(std::count(text.begin(), text.end(), '\n')); }

// Every rank but `except` ends with `code`, after one sentence that holds all the words.
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
    ControlChannel control({});
    CHECK(control.all_gather("a", "letters") == std::vector<std::string>{"a"});
    CHECK(control.broadcast("b", "letter") == "b");
    control.require_same("c", "letter");
    control.note_phase(Phase::step, 1);
    control.leave();
    CHECK(control.members().size() == 1);
}

TEST_CASE("control: ranks exchange texts and leave together", "[control]") {
    RankProcesses ranks(4);
    ranks.start_all([](const Place& place) {
        ControlChannel control(place, quick());
        const std::string binary(60'000, char('a' + place.rank));
        for (int round = 0; round < 20; ++round) {
            const auto texts = control.all_gather(round == 7 ? binary : std::to_string(place.rank * round), "numbers");
            for (int rank = 0; rank < 4; ++rank)
                if (texts[size_t(rank)] !=
                    (round == 7 ? std::string(60'000, char('a' + rank)) : std::to_string(rank * round)))
                    return 1;
            if (control.broadcast("from " + std::to_string(place.rank), "word") != "from 0") return 2;
            control.require_same("equal\0bytes", "digest");
        }
        for (int rank = 0; rank < 4; ++rank)
            if (control.members()[size_t(rank)].rank != rank || control.members()[size_t(rank)].pid <= 1) return 3;
        if (control.members()[size_t(place.rank)].pid != ::getpid()) return 4;
        if (place.rank == 2) ::usleep(300'000);  // the others wait
        control.leave();
        control.leave_with_error(Exit::data, "too late to matter");
        return 0;
    });
    for (int rank = 0; rank < 4; ++rank) {
        CHECK(ranks.wait(rank) == 0);
        CHECK(ranks.printed(rank) == "");
    }
}

TEST_CASE("control: ranks that are not the same are told so on all ranks", "[control]") {
    RankProcesses ranks(4);
    ranks.start_all([](const Place& place) {
        ControlChannel control(place, quick());
        control.require_same("same", "binary");
        try {
            control.require_same(place.rank == 2 ? "seed 2" : "seed 1", "configuration");
        } catch (const Error& error) {
            // Whoever is first to leave with what all know ends nobody else.
            if (place.rank == 1) ::usleep(200'000);
            control.leave_with_error(error.code, error.what());
            throw;
        }
        return 0;
    });
    expect_end(ranks, 4, -1, Exit::config,
               {"configuration differs", "ranks 0, 1, 3", "\"seed 1\"", "rank 2", "\"seed 2\""});
}

TEST_CASE("control: ranks that ask for different things are told so", "[control]") {
    RankProcesses ranks(3);
    ranks.start_all([](const Place& place) {
        ControlChannel control(place, quick());
        if (place.rank == 1)
            control.broadcast("", "tokenizer");
        else
            control.all_gather("", "losses");
        return 0;
    });
    expect_end(ranks, 3, -1, Exit::internal, {"rank 1", "broadcast of \"tokenizer\"", "all_gather of \"losses\""});
}

TEST_CASE("control: a rank that does not come to ask is named", "[control]") {
    RankProcesses ranks(3);
    ranks.start_all([](const Place& place) {
        ControlSettings settings = quick();
        settings.answer_s = 0.5;
        ControlChannel control(place, settings);
        if (place.rank == 1) sleep_for_ever();
        control.all_gather("", "losses");
        return 0;
    });
    expect_end(ranks, 3, -1, Exit::hang, {"1 of 3 ranks", "all_gather of \"losses\"", rank_and_pid(ranks, 1)});
}

// Ranks in step 7, behind collective 31; `deed` is what one of them does then.
static void start_training(RankProcesses& ranks, const ControlSettings& settings,
                           const std::function<void(const Place&, ControlChannel&)>& deed) {
    ranks.start_all([=, &ranks](const Place& place) {
        ControlChannel control(place, settings);
        control.note_phase(Phase::step, 7);
        control.note_collective(31, "all_reduce of gradients");
        ::usleep(300'000);  // a few heartbeats
        ranks.ready();
        deed(place, control);
        sleep_for_ever();
        return 0;
    });
}

TEST_CASE("control: a rank that is killed is named by all others", "[control]") {
    RankProcesses runs[2]{RankProcesses(4), RankProcesses(4)};
    const int victims[] = {2, 0};
    for (RankProcesses& ranks : runs) start_training(ranks, quick(), [](const Place&, ControlChannel&) {});
    for (int run = 0; run < 2; ++run) {
        runs[run].wait_until_ready(4);
        runs[run].kill(victims[run], SIGKILL);
        CHECK(runs[run].wait(victims[run]) == 128 + SIGKILL);
        expect_end(runs[run], 4, victims[run], Exit::peer_lost,
                   {rank_and_pid(runs[run], victims[run]) + " died", "phase step", "step 7",
                    "collective 31 (all_reduce of gradients)"});
    }
}

TEST_CASE("control: a rank that is stopped is found by its silence", "[control]") {
    ControlSettings settings = quick();
    settings.watch.silence_s = 1.5;
    RankProcesses runs[2]{RankProcesses(3), RankProcesses(3)};
    const int victims[] = {1, 0};
    for (RankProcesses& ranks : runs) start_training(ranks, settings, [](const Place&, ControlChannel&) {});
    for (int run = 0; run < 2; ++run) {
        runs[run].wait_until_ready(3);
        runs[run].kill(victims[run], SIGSTOP);
    }
    for (int run = 0; run < 2; ++run) {
        expect_end(runs[run], 3, victims[run], Exit::hang,
                   {rank_and_pid(runs[run], victims[run]) + " hangs", "nothing was heard", "step 7"});
        // Should it ever run again, it does not stay.
        runs[run].kill(victims[run], SIGCONT);
        CHECK(runs[run].wait(victims[run]) > 0);
    }
}

TEST_CASE("control: a rank that computes for ever is the one that did not arrive", "[control]") {
    ControlSettings settings = quick();
    settings.watch.step_s = 1;
    RankProcesses ranks(3);
    start_training(ranks, settings, [](const Place& place, ControlChannel& control) {
        if (place.rank != 1) control.note_collective(32, "all_gather of weights");
        volatile bool is_endless = true;
        while (place.rank == 1 && is_endless) {}
    });
    expect_end(ranks, 3, -1, Exit::hang,
               {rank_and_pid(ranks, 1) + " hangs: no progress", "limit 1 s", "collective 31",
                "others have reached collective 32"});
}

TEST_CASE("control: a phase has its own patience, and progress is no hang", "[control]") {
    ControlSettings settings = quick();
    settings.watch.step_s = 0.8;
    RankProcesses ranks(3);
    ranks.start_all([&](const Place& place) {
        ControlChannel control(place, settings);
        // The first step of a process has the patience of a start.
        control.note_step(1);
        if (place.rank == 0) ::usleep(1'100'000);
        control.require_same("", "start");
        control.note_step(2);
        // Rank 2 is done at once and waits for the others.
        for (int micro_step = 0; micro_step < 10 && place.rank != 2; ++micro_step) {
            ::usleep(100'000);
            control.note_step(2);
        }
        control.require_same("", "end of step");
        // The others wait for rank 0, which saves.
        control.note_phase(place.rank == 0 ? Phase::save : Phase::step, 2);
        if (place.rank != 0) control.note_collective(1, "barrier");
        if (place.rank == 0) ::usleep(1'100'000);
        control.require_same("", "end of save");
        control.leave();
        return 0;
    });
    for (int rank = 0; rank < 3; ++rank) {
        CHECK(ranks.wait(rank) == 0);
        CHECK(ranks.printed(rank) == "");
    }
}

TEST_CASE("control: an error of one rank is quoted by the others", "[control]") {
    RankProcesses runs[2]{RankProcesses(3), RankProcesses(3)};
    const int tellers[] = {2, 0};
    for (int run = 0; run < 2; ++run)
        start_training(runs[run], quick(), [teller = tellers[run]](const Place& place, ControlChannel& control) {
            if (place.rank != teller) return;
            control.leave_with_error(Exit::data, "shard 12 has 5 bytes too few");
            ::_exit(int(Exit::data));
        });
    for (int run = 0; run < 2; ++run) {
        CHECK(runs[run].wait(tellers[run]) == int(Exit::data));
        CHECK(runs[run].printed(tellers[run]) == "");
        expect_end(
            runs[run], 3, tellers[run], Exit::peer_lost,
            {rank_and_pid(runs[run], tellers[run]), "left with exit code 65: shard 12 has 5 bytes too few", "step 7"});
    }
}

TEST_CASE("control: an error that follows from a death does not hide it", "[control]") {
    RankProcesses ranks(3);
    start_training(ranks, quick(), [](const Place& place, ControlChannel& control) {
        if (place.rank != 2) return;
        const pid_t victim = pid_t(control.members()[1].pid);
        std::thread([victim] { ::usleep(200'000), ::kill(victim, SIGKILL); }).detach();
        control.leave_with_error(Exit::internal, "connection reset in all_reduce");
        ::_exit(int(Exit::internal));
    });
    expect_end(ranks, 3, 1, Exit::peer_lost, {rank_and_pid(ranks, 1) + " died"});
}

TEST_CASE("control: who leaves without a word is dead for the others", "[control]") {
    RankProcesses ranks(2);
    ranks.start_all([](const Place& place) {
        {
            ControlChannel control(place, quick());
            if (place.rank == 0) sleep_for_ever();
        }
        return 0;
    });
    CHECK(ranks.wait(1) == 0);
    expect_end(ranks, 2, 1, Exit::peer_lost, {"rank 1", "died"});
}

TEST_CASE("control: who does not leave is named", "[control]") {
    RankProcesses ranks(3);
    ranks.start_all([](const Place& place) {
        ControlSettings settings = quick();
        settings.leave_s = place.rank == 0 ? 0.5 : 10;
        ControlChannel control(place, settings);
        if (place.rank == 1) sleep_for_ever();
        control.leave();
        return 0;
    });
    CHECK(ranks.wait(0) == int(Exit::hang));
    CHECK(contains(ranks.printed(0), "rank 1 did not end the run within 0.5 s"));
    CHECK(ranks.wait(1) == int(Exit::peer_lost));
    CHECK(ranks.wait(2) == int(Exit::peer_lost));
}

TEST_CASE("control: a signal that asks to stop is no death, a stop of all ranks nobody's fault", "[control]") {
    ControlSettings settings = quick();
    settings.watch.silence_s = settings.watch.step_s = 1.5;
    RankProcesses ranks(3);
    ranks.start_all([&](const Place& place) {
        std::signal(SIGTERM, SIG_IGN);
        ControlChannel control(place, settings);
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

TEST_CASE("control: what is to be done before the end is done, and has no power to prevent it", "[control]") {
    RankProcesses ranks(4);
    start_training(ranks, quick(), [](const Place& place, ControlChannel& control) {
        if (place.rank == 0) control.on_end([] { [[maybe_unused]] auto n = ::write(STDERR_FILENO, "aborted\n", 8); });
        if (place.rank == 1) control.on_end([] { sleep_for_ever(); });
        if (place.rank == 2) control.on_end([] { throw 1; });
        ::usleep(200'000);
        if (place.rank == 3) ::_exit(0);
    });
    for (const int rank : {0, 1, 2}) CHECK(ranks.wait(rank) == int(Exit::peer_lost));
    CHECK(contains(ranks.printed(0), "died"));
    CHECK(contains(ranks.printed(0), "aborted\n"));
}
