#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iterator>
#include <string>

#include "kernels/numeric.h"
#include "runtime/cluster/control_channel.h"
#include "runtime/cluster/sha256.h"
#include "test/catch.h"
#include "test/expect_error.h"
#include "test/rank_processes.h"

namespace {

ControlSettings within(double opening_s) {
    ControlSettings settings;
    settings.opening.deadline_s = opening_s;
    settings.watch.heartbeat_s = 0.1;
    return settings;
}

// Opens and leaves.
int meet(const Place& place, double opening_s) {
    ControlChannel control(place, within(opening_s));
    control.leave();
    return 0;
}

void expect_printed(RankProcesses& ranks, int process, Exit code, const std::vector<std::string>& words) {
    INFO("process " << process);
    CHECK(ranks.wait(process) == int(code));
    const std::string printed = ranks.printed(process);
    INFO("printed: " << printed);
    for (const std::string& word : words) {
        INFO("expected: " << word);
        CHECK(printed.find(word) != std::string::npos);
    }
}

SocketAddress loopback(int port) {
    std::string why;
    return resolve("127.0.0.1", port, why).at(0);
}

}  // namespace

TEST_CASE("rendezvous: who does not come, or knows another run's token, is named on all that are there", "[control]") {
    RankProcesses ranks(5);
    for (const int rank : {0, 1, 3})
        ranks.start(ranks.place(rank), [](const Place& place) { return meet(place, 1.5); });
    Place stranger = ranks.place(2), left_over = ranks.place(4);
    stranger.token[0] = stranger.token[0] == 'a' ? 'b' : 'a';
    left_over.run_id = "yesterday";
    for (const Place& place : {stranger, left_over})
        ranks.start(place, [](const Place& other) { return meet(other, 1); });
    for (const int process : {3, 4}) expect_printed(ranks, process, Exit::hang, {"did not reach rank 0", "token"});
    for (const int process : {0, 1, 2})
        expect_printed(ranks, process, Exit::hang,
                       {"2 of 5 ranks did not come", "missing 2, 4", "there are 0, 1, 3 on ",
                        "did not know this run's token were turned away, the last from 127.0.0.1"});
}

TEST_CASE("rendezvous: where rank 0 does not come, the others say so", "[control]") {
    RankProcesses ranks(2);
    const int listener = ranks.start(ranks.place(0), [](const Place&) { return 0; });  // closes the port
    CHECK(ranks.wait(listener) == 0);
    const int other = ranks.start(ranks.place(1), [](const Place& place) { return meet(place, 0.5); });
    expect_printed(ranks, other, Exit::hang, {"rank 1", "did not reach rank 0 at 127.0.0.1", "refused"});
}

TEST_CASE("rendezvous: two processes that are one rank, and one that counts otherwise, end the run", "[control]") {
    RankProcesses ranks(3);
    const bool is_duplicate = GENERATE(true, false);
    ranks.start(ranks.place(0), [](const Place& place) { return meet(place, 15); });
    Place odd = ranks.place(1);
    if (!is_duplicate) odd.size = odd.local_size = 4;
    ranks.start(ranks.place(1), [](const Place& place) { return meet(place, 15); });
    ranks.start(odd, [](const Place& place) { return meet(place, 15); });
    for (const int process : {0, 1, 2}) {
        if (is_duplicate)
            expect_printed(ranks, process, Exit::config,
                           {"two processes say they are rank 1", format("pid %d", int(ranks.pid(1))),
                            format("pid %d", int(ranks.pid(2)))});
        else if (process != 1)  // which may come too late to hear it
            expect_printed(ranks, process, Exit::config,
                           {format("(pid %d) says it is one of 4 ranks", int(ranks.pid(2))), "is one of 3"});
    }
}

TEST_CASE("rendezvous: a rank that dies while others are awaited ends the wait", "[control]") {
    RankProcesses runs[2]{RankProcesses(4), RankProcesses(4)};
    for (RankProcesses& ranks : runs)
        for (const int rank : {0, 1, 2})
            ranks.start(ranks.place(rank), [](const Place& place) { return meet(place, 15); });
    ::usleep(700'000);
    for (const int victim : {1, 0}) {
        runs[victim].kill(victim, SIGKILL);
        for (const int process : {0, 1, 2})
            if (process != victim)
                expect_printed(runs[victim], process, Exit::peer_lost,
                               {format("rank %d", victim), "died", "gathering"});
    }
}

TEST_CASE("rendezvous: 2,000 junk connections neither join nor block", "[control]") {
    RankProcesses ranks(3);
    const int port = ranks.place(0).master_port;
    ranks.start(ranks.place(0), [](const Place& place) { return meet(place, 20); });
    ranks.start(ranks.place(1), [](const Place& place) { return meet(place, 20); });
    std::vector<Connection> held;  // say nothing, and do not go
    int reached = 0;
    std::string why;
    for (int i = 0; i < 2000; ++i) {
        Socket socket = connect_to(loopback(port), Clock::now() + seconds(5), why);
        if (!socket) continue;
        ++reached;
        Connection connection(std::move(socket), 1000);
        const std::string junk = sha256(std::to_string(i));
        if (i % 5 == 1) [[maybe_unused]]
            const auto sent = ::send(connection.fd(), junk.data(), junk.size(), MSG_NOSIGNAL);
        if (i % 5 == 2) connection.send(MessageKind::hello, junk);
        if (i % 5 == 3) connection.send(MessageKind::hello, FieldWriter().text(junk).text(junk).fields());
        if (i % 5 == 4) connection.send(MessageKind::hello, std::string(20'000, 'x'));
        if (i % 5 == 0) held.push_back(std::move(connection));
    }
    CHECK(reached == 2000);
    // In less time than a guest who says nothing is listened to.
    ranks.start(ranks.place(2), [](const Place& place) { return meet(place, 4); });
    for (const int process : {0, 1, 2}) expect_printed(ranks, process, Exit::ok, {});
}

TEST_CASE("rendezvous: once all are there nobody listens any more", "[control]") {
    RankProcesses ranks(2);
    ranks.start_all([&](const Place& place) {
        ControlChannel control(place, within(15));
        ranks.ready();
        ::usleep(500'000);
        control.leave();
        return 0;
    });
    ranks.wait_until_ready(2);
    std::string why;
    CHECK_FALSE(connect_to(loopback(ranks.place(1).master_port), Clock::now() + seconds(5), why));
    CHECK(why.find("refused") != std::string::npos);
    for (const int process : {0, 1}) CHECK(ranks.wait(process) == 0);
}

TEST_CASE("rendezvous: with a way to share, rank 0 says itself where it is", "[control]") {
    TemporaryDirectory directory;
    const std::string fifo = directory / "fifo";
    REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
    const Share share = [&](const std::string& mine) {
        if (!mine.empty()) return std::ofstream(fifo) << mine, mine;
        std::ifstream file(fifo);
        return std::string(std::istreambuf_iterator<char>(file), {});
    };
    RankProcesses ranks(2);
    const bool is_local = GENERATE(true, false);
    for (const int rank : {0, 1}) {
        Place place;
        place.rank = rank, place.size = 2, place.local_size = is_local ? 2 : 1, place.launcher = "Open MPI";
        ranks.start(place, [&](const Place& mine) {
            if (!is_local && own_addresses(0).empty()) return 0;
            ControlChannel control(mine, within(15), share);
            control.require_same("x", "letter");
            control.leave();
            return 0;
        });
    }
    for (const int process : {0, 1}) expect_printed(ranks, process, Exit::ok, {});
}

TEST_CASE("rendezvous: without an address, and where rank 0 cannot listen, an error says so", "[control]") {
    Place place;
    place.rank = 1, place.size = 2, place.launcher = "MPICH";
    expect_error(Exit::usage, {"MPICH", "MASTER_ADDR"}, [&] { ControlChannel control(place); });
    place.rank = 0, place.master_host = "192.0.2.1", place.master_port = 1;  // an address for documentation, not ours
    ControlSettings settings;
    settings.opening.listen_host = "192.0.2.1";
    expect_error(Exit::os, {"rank 0 cannot listen at 192.0.2.1, port 1"},
                 [&] { ControlChannel control(place, settings); });
    place.listen_fd = 0;
    expect_error(Exit::usage, {"TRAIN_GPT_LISTEN_FD is 0"}, [&] { ControlChannel control(place); });
    const Share broken = [](const std::string&) { return "error rank 0 cannot listen"; };
    place.rank = 1;
    expect_error(Exit::os, {"rank 0 cannot listen"}, [&] { ControlChannel control(place, {}, broken); });
    const Share junk = [](const std::string&) { return "listens somewhere"; };
    expect_error(Exit::internal, {"listens somewhere"}, [&] { ControlChannel control(place, {}, junk); });
}

TEST_CASE("rendezvous: ranks as people write them", "[control]") {
    CHECK(text_of_ranks({}) == "");
    CHECK(text_of_ranks({3}) == "3");
    CHECK(text_of_ranks({0, 1, 2, 3, 7}) == "0-3, 7");
    CHECK(text_of_ranks({0, 1, 5, 6, 7}) == "0, 1, 5-7");
}

TEST_CASE("sha256: the standards' examples", "[control]") {
    CHECK(hexadecimal(sha256("")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(hexadecimal(sha256("abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(hexadecimal(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")) ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK(hexadecimal(sha256(std::string(1'000'000, 'a'))) ==
          "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    // RFC 4231, cases 1, 2 and 6
    CHECK(hexadecimal(hmac_sha256(std::string(20, '\x0b'), "Hi There")) ==
          "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    CHECK(hexadecimal(hmac_sha256("Jefe", "what do ya want for nothing?")) ==
          "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    CHECK(
        hexadecimal(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")) ==
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    CHECK(same_secret("ab", "ab"));
    CHECK_FALSE(same_secret("ab", "aB"));
    CHECK_FALSE(same_secret("ab", "abc"));
    CHECK(random_bytes(16) != random_bytes(16));
}

TEST_CASE("message: whatever bytes arrive, a reader ends and says whether they were sound", "[control]") {
    const std::string good = FieldWriter().number(~0ull).text("text").text("").fields();
    FieldReader reader(good);
    CHECK(reader.number() == ~0ull);
    CHECK(reader.text() == "text");
    CHECK(reader.text() == "");
    CHECK(reader.sound());
    for (size_t size = 0; size < good.size(); ++size) {
        FieldReader part(std::string_view(good).substr(0, size));
        part.number(), part.text(), part.text();
        CHECK_FALSE(part.sound());
    }
    CHECK_FALSE(FieldReader(good).sound());
    for (uint64_t i = 0; i < 20'000; ++i) {
        std::string junk;
        for (uint64_t k = 0; k < philox(1, i, 0).word[0] % 64; ++k) junk += char(philox(2, i, k).word[0] >> 24);
        FieldReader random(junk);
        for (int field = 0; field < 8; ++field)
            CHECKED_ELSE(random.text().size() <= junk.size()) FAIL("beyond its end");
    }
}
