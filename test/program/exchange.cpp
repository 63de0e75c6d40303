// Ranks that exchange messages, for test_exchange.py, on CPUs or simulated GPUs:
//
//   exchange [--nproc N] patterns         who sends what to whom: checks every byte, the totals and the trace
//   exchange --nproc N parts              messages of more than 64 MiB
//   exchange --nproc N sizes SENT WANTED  rank 0 sends rank 1 that many bytes, which expects others
//   exchange --nproc N missing            rank 0 does not send what rank 1 expects
//   exchange --nproc N surplus            rank 0 sends what rank 1 does not expect, then what it does
//   exchange --nproc N dies, stops        rank 1 does so instead of sending
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>

#include "kernels/trace.h"
#include "runtime/cluster/cluster.h"

namespace {

// The sizes of the messages from one rank to another.
using Pattern = std::function<std::vector<size_t>(int from, int to)>;

// Byte i of the n-th message. All messages of the exchanges in `round` differ, also if one is shifted.
unsigned char byte_of(int round, int from, int to, size_t n, size_t i) {
    const uint64_t key = ((uint64_t(round) * 64 + uint64_t(from)) * 64 + uint64_t(to)) * 64 + n;
    return static_cast<unsigned char>((key * 0x9e3779b97f4a7c15 + i * 0x632be59bd9b4e019) >> 56);
}

// The messages of a rank, between gaps in one array, before and after the exchange.
struct Plan {
    struct Place {
        int peer;
        size_t begin, bytes;
    };
    std::vector<Place> send, receive;
    std::vector<unsigned char> before, after;
    size_t sent = 0;  // bytes to other ranks

    Plan(const Comm& comm, int round, const Pattern& pattern) {
        // The n-th messages to or from all ranks follow each other, beginning with the next rank.
        for (size_t n = 0, left = 1; left > 0; n++) {
            left = 0;
            for (int i = 1; i <= comm.size; i++) {
                const int peer = (comm.rank + i) % comm.size;
                for (const bool is_sent : {false, true}) {
                    const auto sizes = is_sent ? pattern(comm.rank, peer) : pattern(peer, comm.rank);
                    if (n >= sizes.size()) continue;
                    left++;
                    add(comm.rank, peer, is_sent, round, n, sizes[n]);
                }
            }
        }
        after.resize(after.size() + kGap, 0xee);
        before.resize(after.size(), 0xee);
    }

    Exchange on(void* array) const {
        Exchange op;
        auto at = [&](const Place& place) -> Exchange::Message {
            return {place.peer, static_cast<char*>(array) + place.begin, place.bytes};
        };
        std::ranges::transform(send, std::back_inserter(op.send), at);
        std::ranges::transform(receive, std::back_inserter(op.receive), at);
        return op;
    }

private:
    static constexpr size_t kGap = 3;

    void add(int rank, int peer, bool is_sent, int round, size_t n, size_t bytes) {
        const Place place{peer, after.size() + kGap, bytes};
        after.resize(place.begin, 0xee);
        after.resize(place.begin + bytes);
        for (size_t i = 0; i < bytes; i++)
            after[place.begin + i] = is_sent ? byte_of(round, rank, peer, n, i) : byte_of(round, peer, rank, n, i);
        before.resize(place.begin, 0xee);
        if (is_sent)
            before.insert(before.end(), after.begin() + ptrdiff_t(place.begin), after.end());
        else
            before.resize(after.size(), 0xdd);
        (is_sent ? send : receive).push_back(place);
        sent += is_sent && peer != rank ? bytes : 0;
    }
};

// Exchanges the pattern while the stream copies other memory, and compares every byte.
void check(const Comm& comm, const char* name, int round, const Pattern& pattern) {
    const Plan plan(comm, round, pattern);
    const size_t bytes = plan.before.size();
    const DeviceBuffer array(bytes), source(bytes), copy(bytes);
    copy_to_device(source.data(), plan.before.data(), bytes, {});
    copy_on_device(array.data(), source.data(), bytes, {});  // the exchange must wait for it
    const CommTotals before = comm_totals(comm);
    const Ticket ticket = exchange(plan.on(array.data()), comm, {});
    copy_on_device(copy.data(), source.data(), bytes, {});
    wait(ticket, comm, {});
    copy_on_device(copy.data(), array.data(), bytes, {});
    std::vector<unsigned char> result(bytes);
    copy_to_host(result.data(), copy.data(), bytes, {});
    synchronize({});
    const auto wrong = std::ranges::mismatch(result, plan.after).in1 - result.begin();
    require(size_t(wrong) == bytes, "%s: byte %td of rank %d's array is %d instead of %d", name, wrong, comm.rank,
            int(result[size_t(wrong)]), int(plan.after[size_t(wrong)]));
    const uint64_t sent = (comm_totals(comm) - before).bytes_sent;
    require(sent == plan.sent, "%s: rank %d counts %zu sent bytes instead of %zu", name, comm.rank, size_t(sent),
            plan.sent);
}

// Several exchanges without a wait between them, then a wait for the last.
void check_sequence(const Comm& comm) {
    constexpr int kCount = 40;
    const Pattern ring = [&](int from, int to) {
        return to == (from + 1) % comm.size ? std::vector<size_t>{1000, 1000} : std::vector<size_t>();
    };
    std::vector<Plan> plans;
    std::vector<DeviceBuffer> arrays;
    Ticket last;
    for (int i = 0; i < kCount; i++) {
        plans.emplace_back(comm, 100 + i, ring);
        arrays.emplace_back(plans.back().before.size());
        copy_to_device(arrays.back().data(), plans.back().before.data(), arrays.back().bytes(), {});
        last = exchange(plans.back().on(arrays.back().data()), comm, {});
    }
    wait(last, comm, {});
    for (size_t i = 0; i < plans.size(); i++) {
        std::vector<unsigned char> result(arrays[i].bytes());
        copy_to_host(result.data(), arrays[i].data(), result.size(), {});
        synchronize({});
        require(result == plans[i].after, "rank %d: exchange %zu of a sequence is wrong", comm.rank, i);
    }
}

void check_trace(const Comm& comm) {
    Trace trace;
    trace.begin_step(1, {});
    observe(comm, &trace);
    check(comm, "traced", 90, [](int, int) { return std::vector<size_t>{100}; });
    observe(comm, nullptr);
    std::vector<Span> spans = trace.take();
    std::erase_if(spans, [](const Span& span) { return span.lane != Lane::communication; });
    if (comm.handle)
        require(spans.size() == 1 && spans[0].name == "exchange" && spans[0].bytes == 100.0 * (comm.size - 1),
                "the trace has %zu collectives, the first sends %g bytes", spans.size(),
                spans.empty() ? 0 : spans[0].bytes);
}

void patterns(const Comm& comm) {
    using Sizes = std::vector<size_t>;
    const int size = comm.size;
    const std::pair<const char*, Pattern> all[] = {
        {"no messages", [](int, int) { return Sizes(); }},
        {"only to itself",
         [](int from, int to) {
             return from == to ? Sizes{5, 70000, 5} : Sizes();
         }},
        {"ring", [=](int from, int to) { return to == (from + 1) % size ? Sizes{1001} : Sizes(); }},
        {"all to all", [](int from, int to) { return Sizes{size_t(1 + 3001 * from + 70001 * to)}; }},
        {"several per pair",
         [](int from, int to) {
             return Sizes{64, 64, size_t(1 + from), 300000, size_t(1 + to)};
         }},
        {"all to one",
         [=](int, int to) {
             return to == size - 1 ? Sizes{4096, 4096} : Sizes();
         }},
        {"one to all",
         [](int from, int) {
             return from == 0 ? Sizes{1, 1, 1} : Sizes();
         }},
        {"a rank without messages",
         [=](int from, int to) {
             return from == size / 2 || to == size / 2 ? Sizes() : Sizes{77, 1234567};
         }},
        {"many messages", [](int, int) { return Sizes(50, 12); }},
    };
    const DeviceBuffer gathered(size_t(size) * sizeof(double));
    for (int repetition = 0; repetition < 3; repetition++)
        for (size_t i = 0; i < std::size(all); i++) {
            check(comm, all[i].first, int(i) + 10 * repetition, all[i].second);
            if (i % 3 != size_t(repetition)) continue;  // other collectives between two exchanges
            require(all_reduce_max(comm.rank, comm) == size - 1, "all_reduce_max() is wrong");
            char* const mine = static_cast<char*>(gathered.data()) + size_t(comm.rank) * sizeof(double);
            wait(all_gather(gathered.data(), mine, sizeof(double), comm, {}), comm, {});
        }
    check_sequence(comm);
    check_trace(comm);
}

void parts(const Comm& comm) {
    constexpr size_t kPart = size_t(64) << 20;
    for (const size_t bytes : {kPart - 1, kPart, kPart + 1, 2 * kPart})
        check(comm, "parts", int(bytes % 7), [=](int from, int to) {
            return from == 0 && to == comm.size - 1 ? std::vector<size_t>{3, bytes, 3} : std::vector<size_t>();
        });
}

// Rank 0 sends `sent` bytes to rank 1, which expects `wanted`; 0: no message.
void unequal(const Comm& comm, size_t sent, size_t wanted) {
    const DeviceBuffer array(std::max(sent, wanted));
    Exchange op;
    if (comm.rank == 0 && sent) op.send.push_back({1, array.data(), sent});
    if (comm.rank == 1 && wanted) op.receive.push_back({0, array.data(), wanted});
    wait(exchange(op, comm, {}), comm, {});
    all_reduce_max(0, comm);
}

void run_case(const Comm& comm, const std::vector<std::string>& arguments) {
    const std::string& name = arguments.at(0);
    const auto from_1 = [](int from, int) { return from == 1 ? std::vector<size_t>{1000} : std::vector<size_t>(); };
    if (name == "patterns") return patterns(comm);
    if (name == "parts") return parts(comm);
    if (name == "sizes") return unequal(comm, std::stoul(arguments.at(1)), std::stoul(arguments.at(2)));
    if (name == "missing") return unequal(comm, 0, 1000);
    if (name == "surplus") {
        unequal(comm, 1000, 0);
        return check(comm, "after a surplus message", 1,
                     [](int from, int to) { return std::vector<size_t>(from == 0 && to == 1, 1000); });
    }
    check(comm, "before the fault", 0, from_1);
    if (name == "dies" && comm.rank == 1) std::raise(SIGKILL);
    while (name == "stops" && comm.rank == 1) ::pause();
    check(comm, "with a lost rank", 1, from_1);
}

Exit run(std::vector<std::string> arguments) {
    if (arguments.at(1) == "--nproc") {
        const int ranks = std::stoi(arguments.at(2));
        arguments.erase(arguments.begin() + 1, arguments.begin() + 3);
        if (ranks > 1) return launch_ranks(ranks, {}, arguments, false);
    }
    const RankEnvironment environment = find_rank_environment();
    Config config;
    config.run.dir = "run";
    const std::string& name = arguments.at(1);
    config.parallel.step_timeout_s = name == "missing" || name == "stops" ? 6 : 100;
    Ranks ranks(environment, config, "exchange");
    return ranks.run([&] {
        configure_device({.local_rank = environment.local_rank});
        for (int step : {1, 2}) ranks.control().note_step(step);  // the first has the longer timeout of a start
        run_case(ranks.comm(), {arguments.begin() + 1, arguments.end()});
        return Exit::ok;
    });
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return int(run({argv, argv + argc}));
    } catch (const Error& error) {
        std::fprintf(stderr, "exchange: %s\n", error.what());
        return int(error.code);
    }
}
