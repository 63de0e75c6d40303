#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "kernels/numeric.h"
#include "runtime/cluster/control_channel.h"
#include "runtime/cluster/wire_format.h"
#include "runtime/io/files.h"
#include "runtime/io/json.h"
#include "runtime/io/process.h"
#include "test/support/expect_error.h"
#include "test/support/rank_processes.h"

namespace {

ControlSettings within(double timeout_s) {
    ControlSettings settings;
    settings.start_s = timeout_s;
    settings.heartbeat_s = 0.1;
    return settings;
}

// Connects and leaves the run.
int connect_and_leave(const RankEnvironment& environment, double timeout_s) {
    ControlChannel control(environment, within(timeout_s));
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

TEST_CASE("rendezvous: all connected ranks report missing ranks and ranks with another run's token", "[control]") {
    RankProcesses ranks(5);
    for (const int rank : {0, 1, 3})
        ranks.start(ranks.environment_of(rank),
                    [](const RankEnvironment& environment) { return connect_and_leave(environment, 1.5); });
    RankEnvironment stranger = ranks.environment_of(2), left_over = ranks.environment_of(4);
    stranger.token[0] = stranger.token[0] == 'a' ? 'b' : 'a';
    left_over.run_id = "yesterday";
    for (const RankEnvironment& environment : {stranger, left_over})
        ranks.start(environment, [](const RankEnvironment& other) { return connect_and_leave(other, 1); });
    for (const int process : {3, 4}) expect_printed(ranks, process, Exit::hang, {"could not join rank 0", "token"});
    for (const int process : {0, 1, 2})
        expect_printed(ranks, process, Exit::hang,
                       {"2 of 5 ranks did not connect", "missing 2, 4", "connected 0, 1, 3 on ", "; rejected ",
                        "without this run's token, the last from 127.0.0.1"});
}

TEST_CASE("rendezvous: a process that knows only the job and step numbers cannot join", "[control]") {
    const TemporaryDirectory directory;
    const std::string file = directory.path() + "/run.token.slurm_17.0";
    RankProcesses ranks(3);
    const auto environment_of = [&](int rank) {
        RankEnvironment environment = ranks.environment_of(rank);
        environment.token = "", environment.run_id = "slurm 17.0", environment.token_file = file;
        return environment;
    };
    // Left by an earlier start that was killed, and one that other users could have written or read.
    const int mode = GENERATE(0600, 0640);
    std::ofstream(file) << std::string(32, 'a');
    REQUIRE(::chmod(file.c_str(), mode_t(mode)) == 0);
    RankEnvironment stranger = environment_of(1), guesser = environment_of(1);
    stranger.token_file = "", guesser.token = std::string(32, 'a');
    const auto join = [](const RankEnvironment& environment) { return connect_and_leave(environment, 15); };
    const auto try_to_join = [](const RankEnvironment& environment) { return connect_and_leave(environment, 2); };
    ranks.start(environment_of(2), join);  // reads the old file
    ranks.start(stranger, try_to_join);
    ranks.start(guesser, try_to_join);
    ranks.start(environment_of(0), join);
    for (const int process : {1, 2}) expect_printed(ranks, process, Exit::hang, {"could not join rank 0", "token"});
    struct stat status;
    REQUIRE(::stat(file.c_str(), &status) == 0);
    CHECK((status.st_mode & 0777) == 0600);
    ranks.start(environment_of(1), join);
    for (const int process : {0, 3, 4}) CHECK(ranks.wait(process) == 0);
    CHECK(!file_exists(file));
}

TEST_CASE("rendezvous: a token file that others can write or read is rejected", "[control]") {
    const TemporaryDirectory directory;
    const std::string file = directory / "run.token";
    std::ofstream(file) << std::string(32, 'a');
    REQUIRE(::chmod(file.c_str(), 0640) == 0);
    RankProcesses ranks(2);
    RankEnvironment stranger = ranks.environment_of(0), rank = ranks.environment_of(1);
    stranger.token = std::string(32, 'a'), rank.token = "", rank.token_file = file;
    ranks.start(stranger, [](const RankEnvironment& environment) { return connect_and_leave(environment, 2); });
    ranks.start(rank, [](const RankEnvironment& environment) { return connect_and_leave(environment, 1); });
    expect_printed(ranks, 1, Exit::hang, {"rank 0 has not written the run's token to " + file});
    CHECK(ranks.wait(0) == int(Exit::hang));
}

TEST_CASE("rendezvous: a rank without the token file reports its expected path", "[control]") {
    RankProcesses ranks(2);
    RankEnvironment first = ranks.environment_of(0), second = ranks.environment_of(1);
    first.token = second.token = "", second.token_file = "/nowhere/run.token";
    first.token_file = "/nowhere/run.token";
    const auto join = [](const RankEnvironment& environment) { return connect_and_leave(environment, 1); };
    ranks.start(first, join);
    expect_printed(ranks, 0, Exit::cannot_create, {"/nowhere/run.token", "TRAIN_GPT_TOKEN"});
}

TEST_CASE("rendezvous: without rank 0 the others fail", "[control]") {
    RankProcesses ranks(2);
    const int listener =
        ranks.start(ranks.environment_of(0), [](const RankEnvironment&) { return 0; });  // closes the port
    CHECK(ranks.wait(listener) == 0);
    const int other = ranks.start(ranks.environment_of(1), [](const RankEnvironment& environment) {
        return connect_and_leave(environment, 0.5);
    });
    expect_printed(ranks, other, Exit::hang, {"rank 1", "could not join rank 0 at 127.0.0.1", "refused"});
}

TEST_CASE("rendezvous: two processes with one rank, or another size of the run, fail on all ranks", "[control]") {
    RankProcesses ranks(3);
    const bool is_duplicate = GENERATE(true, false);
    ranks.start(ranks.environment_of(0),
                [](const RankEnvironment& environment) { return connect_and_leave(environment, 15); });
    RankEnvironment odd = ranks.environment_of(1);
    if (!is_duplicate) odd.size = odd.local_size = 4;
    ranks.start(ranks.environment_of(1),
                [](const RankEnvironment& environment) { return connect_and_leave(environment, 15); });
    ranks.start(odd, [](const RankEnvironment& environment) { return connect_and_leave(environment, 15); });
    for (const int process : {0, 1, 2}) {
        if (is_duplicate)
            expect_printed(ranks, process, Exit::config,
                           {"two processes were started as rank 1", format("pid %d", int(ranks.pid(1))),
                            format("pid %d", int(ranks.pid(2)))});
        else if (process != 1)  // which may connect too late to receive it
            expect_printed(ranks, process, Exit::config,
                           {format("(pid %d) was started in a run of 4 ranks", int(ranks.pid(2))), "in one of 3"});
    }
}

TEST_CASE("rendezvous: a rank that dies while others are missing aborts the rendezvous", "[control]") {
    RankProcesses runs[2]{RankProcesses(4), RankProcesses(4)};
    for (RankProcesses& ranks : runs)
        for (const int rank : {0, 1, 2})
            ranks.start(ranks.environment_of(rank),
                        [](const RankEnvironment& environment) { return connect_and_leave(environment, 15); });
    ::usleep(700'000);
    for (const int victim : {1, 0}) {
        runs[victim].kill(victim, SIGKILL);
        for (const int process : {0, 1, 2})
            if (process != victim)
                expect_printed(runs[victim], process, Exit::peer_lost,
                               {format("rank %d", victim), "died", "rendezvous"});
    }
}

TEST_CASE("rendezvous: 2,000 junk connections neither join nor block", "[control]") {
    RankProcesses ranks(3);
    const int port = ranks.environment_of(0).master_port;
    ranks.start(ranks.environment_of(0),
                [](const RankEnvironment& environment) { return connect_and_leave(environment, 20); });
    ranks.start(ranks.environment_of(1),
                [](const RankEnvironment& environment) { return connect_and_leave(environment, 20); });
    std::vector<Connection> held;  // silent, and kept open
    int reached = 0;
    std::string why;
    for (int i = 0; i < 2000; ++i) {
        FileDescriptor socket = connect_to(loopback(port), Clock::now() + seconds(5), why);
        if (!socket) continue;
        ++reached;
        Connection connection(std::move(socket), 1000);
        const std::string junk = hmac_sha256("junk", std::to_string(i));
        if (i % 5 == 1) [[maybe_unused]]
            const auto sent = ::send(connection.events().fd, junk.data(), junk.size(), MSG_NOSIGNAL);
        if (i % 5 == 2) connection.send(MessageKind::hello, junk);
        if (i % 5 == 3) connection.send(MessageKind::hello, pack(junk, junk));
        if (i % 5 == 4) connection.send(MessageKind::hello, std::string(20'000, 'x'));
        if (i % 5 == 0) held.push_back(std::move(connection));
    }
    CHECK(reached == 2000);
    // More silent connections than rank 0 keeps open.
    for (int i = 0; i < 300; ++i) held.emplace_back(connect_to(loopback(port), Clock::now() + seconds(5), why), 1000);
    // In less time than a silent connection is kept open.
    ranks.start(ranks.environment_of(2),
                [](const RankEnvironment& environment) { return connect_and_leave(environment, 4); });
    for (const int process : {0, 1, 2}) expect_printed(ranks, process, Exit::ok, {});
}

// The next message, or empty if the peer closes the connection.
static std::optional<Message> receive(Connection& connection) {
    for (const TimePoint deadline = Clock::now() + seconds(10); Clock::now() < deadline;) {
        const bool is_open = connection.receive();
        if (auto message = connection.next()) return message;
        if (!is_open) return std::nullopt;
        wait_for_events({connection.events()}, deadline);
    }
    throw std::runtime_error("the peer neither answers nor closes the connection");
}

TEST_CASE("rendezvous: rank 0 rejects a recorded reply and authenticates itself", "[control]") {
    RankProcesses ranks(2);
    const RankEnvironment environment = ranks.environment_of(1);
    ranks.start(ranks.environment_of(0), [](const RankEnvironment& mine) { return connect_and_leave(mine, 15); });
    std::string reason, version, nonces[2];
    std::vector<Connection> connections;
    for (std::string& nonce : nonces) {
        connections.emplace_back(connect_to(loopback(environment.master_port), Clock::now() + seconds(5), reason),
                                 1000);
        REQUIRE(unpack(receive(connections.back())->fields, version, nonce));
    }
    const std::string key = pack(version, environment.token, environment.run_id, "");
    const std::string hello = pack(1, 2, "elsewhere", 4242, "mine");
    const std::string reply = pack(hello, hmac_sha256(key, pack("rank", nonces[0], hello)));
    connections[1].send(MessageKind::hello, reply);
    CHECK_FALSE(receive(connections[1]));
    connections[0].send(MessageKind::hello, reply);
    const std::optional<Message> welcome = receive(connections[0]);
    REQUIRE(welcome);
    CHECK(welcome->fields == hmac_sha256(key, pack("rank 0", "mine", nonces[0])));
    connections.clear();
    expect_printed(ranks, 0, Exit::peer_lost, {"rank 1 on elsewhere (pid 4242) died"});
}

TEST_CASE("rendezvous: a rank outside the run is rejected", "[control]") {
    for (const int rank : {2, -1}) {
        RankProcesses ranks(2);
        const RankEnvironment environment = ranks.environment_of(1);
        ranks.start(ranks.environment_of(0), [](const RankEnvironment& mine) { return connect_and_leave(mine, 15); });
        std::string reason, version, nonce, sentence;
        Connection connection(connect_to(loopback(environment.master_port), Clock::now() + seconds(5), reason), 1000);
        REQUIRE(unpack(receive(connection)->fields, version, nonce));
        const std::string key = pack(version, environment.token, environment.run_id, "");
        const std::string hello = pack(rank, 2, "elsewhere", 4242, "mine");
        connection.send(MessageKind::hello, pack(hello, hmac_sha256(key, pack("rank", nonce, hello))));
        expect_printed(ranks, 0, Exit::config, {format("rank %d on elsewhere (pid 4242)", rank)});
    }
}

TEST_CASE("rendezvous: a rank does not join a listener that does not know the token", "[control]") {
    RankProcesses ranks(2);
    const FileDescriptor listener = listen_on_loopback();
    RankEnvironment environment = ranks.environment_of(1);
    environment.master_port = address_of(listener).port();
    const int joiner =
        ranks.start(environment, [](const RankEnvironment& mine) { return connect_and_leave(mine, 1.5); });
    SocketAddress from;
    FileDescriptor socket;
    for (const TimePoint deadline = Clock::now() + seconds(10); !socket && Clock::now() < deadline; ::usleep(1000))
        socket = accept_from(listener, from);
    Connection connection(std::move(socket), 1000);
    connection.send(MessageKind::challenge, pack("train_gpt control channel 3", "nonce"));
    REQUIRE(receive(connection));
    connection.send(MessageKind::welcome, std::string(32, 'x'));
    expect_printed(ranks, joiner, Exit::hang, {"could not join rank 0", "it belongs to another run"});
}

TEST_CASE("rendezvous: rank 0 stops listening once all ranks are connected", "[control]") {
    RankProcesses ranks(2);
    ranks.start_all([&](const RankEnvironment& environment) {
        ControlChannel control(environment, within(15));
        ranks.ready();
        ::usleep(500'000);
        control.leave();
        return 0;
    });
    ranks.wait_until_ready(2);
    std::string why;
    CHECK_FALSE(connect_to(loopback(ranks.environment_of(1).master_port), Clock::now() + seconds(5), why));
    CHECK(why.find("refused") != std::string::npos);
    for (const int process : {0, 1}) CHECK(ranks.wait(process) == 0);
}

TEST_CASE("rendezvous: with a broadcast, rank 0 publishes its own address", "[control]") {
    TemporaryDirectory directory;
    const std::string fifo = directory / "fifo";
    REQUIRE(::mkfifo(fifo.c_str(), 0600) == 0);
    const TextBroadcast broadcast = [&](const std::string& mine) {
        if (!mine.empty()) return std::ofstream(fifo) << mine, mine;
        std::ifstream file(fifo);
        return std::string(std::istreambuf_iterator<char>(file), {});
    };
    RankProcesses ranks(2);
    const bool is_local = GENERATE(true, false);
    for (const int rank : {0, 1}) {
        RankEnvironment environment;
        environment.rank = rank, environment.size = 2, environment.local_size = is_local ? 2 : 1,
        environment.launcher = "Open MPI";
        ranks.start(environment, [&](const RankEnvironment& mine) {
            if (!is_local && own_addresses().empty()) return 0;
            ControlChannel control(mine, within(15), broadcast);
            control.require_same("x", "letter");
            control.leave();
            return 0;
        });
    }
    for (const int process : {0, 1}) expect_printed(ranks, process, Exit::ok, {});
}

TEST_CASE("rendezvous: a missing address and a socket that cannot listen are errors", "[control]") {
    RankEnvironment environment;
    environment.rank = 1, environment.size = 2, environment.launcher = "MPICH";
    expect_error(Exit::usage, {"MPICH", "MASTER_ADDR"}, [&] { ControlChannel control(environment); });
    const FileDescriptor other = listen_on_all_interfaces(0);  // holds the port
    const int port = address_of(other).port();
    environment.rank = 0, environment.master_host = "192.0.2.1",
    environment.master_port = port;  // an address reserved for documentation, not this machine's
    expect_error(Exit::os, {format("rank 0 cannot listen at 192.0.2.1, port %d", port), "in use"},
                 [&] { ControlChannel control(environment, within(0.2)); });
    environment.listen_fd = 0;
    expect_error(Exit::usage, {"TRAIN_GPT_LISTEN_FD is 0"}, [&] { ControlChannel control(environment); });
    environment.master_host = "";
    const TextBroadcast broken = [](const std::string&) { return pack(Exit::os, "rank 0 cannot listen", "", 0, ""); };
    environment.rank = 1;
    expect_error(Exit::os, {"rank 0 cannot listen"}, [&] { ControlChannel control(environment, {}, broken); });
    const TextBroadcast junk = [](const std::string&) { return "somewhere"; };
    expect_error(Exit::internal, {"\"somewhere\""}, [&] { ControlChannel control(environment, {}, junk); });
}

TEST_CASE("rendezvous: lists of ranks are abbreviated", "[control]") {
    CHECK(text_of_ranks({}) == "");
    CHECK(text_of_ranks({3}) == "3");
    CHECK(text_of_ranks({0, 1, 2, 3, 7}) == "0-3, 7");
    CHECK(text_of_ranks({0, 1, 5, 6, 7}) == "0, 1, 5-7");
}

TEST_CASE("authentication: the standard's examples, and random numbers differ", "[control]") {
    const auto hex = [](const std::string& bytes) {
        std::string digits;
        for (const char byte : bytes) digits += format("%02x", unsigned(uint8_t(byte)));
        return digits;
    };
    // RFC 4231, cases 1, 2 and 6
    CHECK(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")) ==
          "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    CHECK(hex(hmac_sha256("Jefe", "what do ya want for nothing?")) ==
          "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    CHECK(hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")) ==
          "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    CHECK(is_same_secret("ab", "ab"));
    CHECK_FALSE(is_same_secret("ab", "aB"));
    CHECK_FALSE(is_same_secret("ab", "abc"));
    CHECK(random_hex(16).size() == 32);
    CHECK(random_hex(16).find_first_not_of("0123456789abcdef") == std::string::npos);
    CHECK(random_hex(16) != random_hex(16));
}

TEST_CASE("wire format: parsing is safe on arbitrary bytes and reports what is malformed", "[control]") {
    const std::string good = pack(~0ull, "text", "");
    uint64_t number = 0;
    std::string text, empty;
    CHECK(unpack(good, number, text, empty));
    CHECK(number == ~0ull);
    CHECK(text == "text");
    CHECK(empty == "");
    for (size_t size = 0; size < good.size(); ++size)
        CHECK_FALSE(unpack(std::string_view(good).substr(0, size), number, text, empty));
    CHECK_FALSE(unpack(good, number, text));
    CHECK_FALSE(unpack(good + '\0', number, text, empty));
    for (uint64_t i = 0; i < 20'000; ++i) {
        std::string junk;
        for (uint64_t k = 0; k < philox(1, i, 0).word[0] % 64; ++k) junk += char(philox(2, i, k).word[0] >> 24);
        std::string_view rest = junk;
        while (take_field(rest, text)) CHECKED_ELSE(text.size() + rest.size() <= junk.size()) FAIL("beyond its end");
    }
}
