// Ranks that exchange messages and form groups, for test_exchange.py, on CPUs or simulated GPUs:
//
//   exchange [--nproc N] patterns         who sends what to whom: checks every byte, the totals and the trace
//   exchange --nproc N parts              messages of more than 64 MiB
//   exchange --nproc N sizes SENT WANTED  rank 0 sends rank 1 that many bytes, which expects others
//   exchange --nproc N missing            rank 0 does not send what rank 1 expects
//   exchange --nproc N surplus            rank 0 sends what rank 1 does not expect, then what it does
//   exchange --nproc N dies, stops        rank 1 does so instead of sending
//   exchange [--nproc N] groups [tree]    splits in several ways: checks members, collectives, totals and traces; tree:
//                                         with deterministic sums
//   exchange [--nproc N] sums [tree]      reduce-scatters of all types: compares every bit with a textbook
//   exchange --nproc 4 crossed            collectives of rows and columns in an order that differs between ranks
//   exchange --nproc N dies, stops group  rank 1 does so in a group with rank 0
//   exchange --nproc 3 stages             rank 1 of a pipeline hangs: see hang_in_pipeline()
//   exchange --nproc N fails              rank 0's library call, which the environment makes fail; with a group
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <numeric>

#include "kernels/shared/dispatch.h"
#include "kernels/trace.h"
#include "runtime/cluster/cluster.h"
#include "test/program/lost_ranks.h"
#include "test/reference/tree_sum.h"

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

// ---- groups ---------------------------------------------------------------------------------------------------------

struct Place {
    int color, key;
};
using Partition = std::function<Place(int rank)>;

// The ranks of this rank's group, in its order: a textbook for split().
std::vector<int> members_of(const Comm& comm, const Partition& partition) {
    std::vector<int> members;
    for (int rank = 0; rank < comm.size; rank++)
        if (partition(rank).color == partition(comm.rank).color) members.push_back(rank);
    std::ranges::stable_sort(members, {}, [&](int rank) { return partition(rank).key; });
    return members;
}

// Gathers and sums values that differ between ranks, elements and rounds.
class GroupCollectives {
public:
    GroupCollectives(const Comm& group, std::vector<int> members, int round)
        : group_(group),
          members_(std::move(members)),
          round_(round),
          size_(members_.size()),
          gathered_(size_ * kCount * sizeof(float)),
          inp_(size_ * kCount * sizeof(float)),
          out_(kCount * sizeof(float)),
          scratch_(std::max<size_t>(1, reduce_scatter_scratch_bytes(Dtype::fp32, kCount, group.size, true))) {
        for (size_t i = 0; i < size_ * kCount; i++) values_.push_back(value(members_[size_t(group.rank)], i));
        copy_to_device(inp_.data(), values_.data(), inp_.bytes(), {});
        synchronize({});
    }

    void start() {
        float* const gathered = static_cast<float*>(gathered_.data()) + size_t(group_.rank) * kCount;
        copy_on_device(gathered, inp_.data(), kCount * sizeof(float), {});
        all_gather(gathered_.data(), gathered, kCount * sizeof(float), group_, {});
        float* const inp = static_cast<float*>(inp_.data());
        ticket_ = reduce_scatter_sum({.out = group_.size == 1 ? inp : static_cast<float*>(out_.data()),
                                      .scratch = scratch_.data(),
                                      .inp = inp,
                                      .count = kCount},
                                     group_, {});
    }

    void check(const char* name) {
        wait(ticket_, group_, {});
        std::vector<float> gathered(size_ * kCount), sums(kCount);
        copy_to_host(gathered.data(), gathered_.data(), gathered_.bytes(), {});
        copy_to_host(sums.data(), group_.size == 1 ? inp_.data() : out_.data(), out_.bytes(), {});
        synchronize({});
        for (size_t i = 0; i < gathered.size(); i++)
            require(gathered[i] == value(members_[i / kCount], i % kCount), "%s: rank %d's group gathered %g at %zu",
                    name, members_[size_t(group_.rank)], gathered[i], i);
        for (size_t i = 0; i < kCount; i++) {
            float sum = 0;
            for (int member : members_) sum += value(member, size_t(group_.rank) * kCount + i);
            require(sums[i] == sum, "%s: rank %d's group has the sum %g instead of %g", name,
                    members_[size_t(group_.rank)], sums[i], sum);
        }
    }

private:
    static constexpr size_t kCount = 1000;

    // Whole numbers, so that every order of addition gives the same sum
    float value(int rank, size_t i) const { return float((size_t(rank * 31 + round_ * 7) + i) % 1009); }

    const Comm group_;
    const std::vector<int> members_;
    const int round_;
    const size_t size_;
    std::vector<float> values_;
    DeviceBuffer gathered_, inp_, out_, scratch_;
    Ticket ticket_;
};

void check_group(const Comm& comm, const char* name, const Partition& partition) {
    const std::vector<int> members = members_of(comm, partition);
    const int color = partition(comm.rank).color, size = int(members.size());
    Comm group = split(comm, color, partition(comm.rank).key);
    require(group.size == size && members[size_t(group.rank)] == comm.rank,
            "%s: rank %d is rank %d of %d in its group of %d", name, comm.rank, group.rank, group.size, size);
    const CommTotals all_before = comm_totals(comm);
    for (int round : {1, 2}) {
        GroupCollectives collectives(group, members, round);
        collectives.start();
        check(group, name, 200 + 10 * round + color, [](int from, int to) {
            return std::vector<size_t>{size_t(1 + 100 * from + to), 5000};
        });
        collectives.check(name);
    }
    require(all_reduce_max(comm.rank, group) == *std::ranges::max_element(members), "%s: wrong maximum", name);
    const DeviceBuffer device_sum(sizeof(double));
    double sum = comm.rank;
    copy_to_device(device_sum.data(), &sum, sizeof sum, {});
    wait(all_reduce_sum(static_cast<double*>(device_sum.data()), 1, group, {}), group, {});
    copy_to_host(&sum, device_sum.data(), sizeof sum, {});
    synchronize({});
    require(sum == std::accumulate(members.begin(), members.end(), 0.0), "%s: wrong sum %g", name, sum);
    check_trace(group);
    require(comm_totals(comm).bytes_sent == all_before.bytes_sent, "%s: a group's bytes are counted twice", name);
    close_comm(group);
    require(group.size == 1 && all_reduce_max(comm.rank, comm) == comm.size - 1, "%s: after closing a group", name);
}

void groups(const Comm& comm) {
    check_group(comm, "pairs", [](int rank) { return Place{rank / 2, rank}; });
    check_group(comm, "even and odd, last first", [](int rank) { return Place{rank % 2, -rank}; });
    check_group(comm, "all", [](int) { return Place{7, 0}; });
    check_group(comm, "alone", [](int rank) { return Place{rank, 3}; });
    check_group(comm, "the first and the others", [](int rank) { return Place{rank > 0, rank % 2}; });
}

// Each rank waits for another: 0's row for 1, 1's column for 3, 3's row for 2 and 2's column for 0.
void crossed(const Comm& comm) {
    const Partition partitions[] = {[](int rank) {
                                        return Place{rank / 2, rank};
                                    },
                                    [](int rank) {
                                        return Place{rank % 2, rank};
                                    }};
    std::vector<GroupCollectives> lines;
    for (const Partition& partition : partitions)
        lines.emplace_back(split(comm, partition(comm.rank).color, partition(comm.rank).key),
                           members_of(comm, partition), 3);
    const size_t first = comm.rank == 1 || comm.rank == 2;
    for (int repetition = 0; repetition < 20; repetition++) {
        lines[first].start();
        if (repetition == 0) ::usleep(100'000);  // the other ranks' collectives are in progress before the next
        lines[1 - first].start();
        for (GroupCollectives& line : lines) line.check("crossed");
    }
}

// ---- sums -----------------------------------------------------------------------------------------------------------

struct Sum {
    Dtype inp, out;
    size_t count;
    bool in_place, tree;
};

// Compares every bit with the textbook's sum, and checks the bytes sent and that the scratch memory is large enough.
void check_sum(const Comm& comm, const Sum& sum) {
    constexpr size_t kGuard = 256;
    const size_t size = size_t(comm.size), begin = size_t(comm.rank) * sum.count;
    const size_t scratch_bytes = reduce_scatter_scratch_bytes(sum.inp, sum.count, comm.size, sum.tree, sum.out);
    const DeviceBuffer inp(size * sum.count * size_of(sum.inp)), other(sum.count * size_of(sum.out)),
        scratch(scratch_bytes + kGuard);  // zero
    const View all(inp.data(), sum.inp), out = sum.in_place ? all.from(begin) : View(other.data(), sum.out);
    std::vector<std::byte> terms(inp.bytes()), result(other.bytes()), guard(kGuard);
    ops::dispatch("sums", sum.inp, [&]<class T>() {
        T* const to = View(terms.data(), sum.inp).as<T>();
        for (size_t i = 0; i < size * sum.count; i++)
            to[i] = from_float<T>(float(ref::tree_term(comm.rank, i, sum.inp)));
    });
    copy_to_device(inp.data(), terms.data(), terms.size(), {});
    const CommTotals before = comm_totals(comm);
    wait(reduce_scatter_sum({.out = out, .scratch = scratch.data(), .inp = all, .count = sum.count}, comm, {}), comm,
         {});
    copy_to_host(result.data(), out.data, result.size(), {});
    copy_to_host(guard.data(), static_cast<std::byte*>(scratch.data()) + scratch_bytes, kGuard, {});
    synchronize({});

    const std::string name = format("%s in %s of %zu", name_of(sum.inp), name_of(sum.out), sum.count);
    std::vector<double> ranks(size);
    for (size_t i = 0; i < sum.count; i++) {
        for (size_t rank = 0; rank < size; rank++) ranks[rank] = ref::tree_term(int(rank), begin + i, sum.inp);
        const double expected = ref::rounded(ref::tree_sum(ranks), sum.out);
        const double found = element(ConstView(result.data(), sum.out), i);
        require(std::memcmp(&found, &expected, sizeof found) == 0, "%s: rank %d's sum %zu is %.9g instead of %.9g",
                name, comm.rank, i, found, expected);
    }
    const uint64_t sent = (comm_totals(comm) - before).bytes_sent;
    require(sent == (size - 1) * sum.count * size_of(sum.inp), "%s: %zu bytes were sent", name, size_t(sent));
    require(std::ranges::count(guard, std::byte{0}) == kGuard, "%s: the scratch memory is too small", name);
}

void check_refused(const Comm& comm, Dtype inp, Dtype out) {
    const DeviceBuffer array(size_t(comm.size) * sizeof(double));
    const ReduceScatter op{{array.data(), out}, nullptr, {array.data(), inp}, 1};
    std::string words;
    try {
        reduce_scatter_sum(op, comm, {});
    } catch (const Error& error) {
        words = error.code == Exit::internal ? error.what() : "another exit code";
    }
    const std::string expected = format("a sum of %s in %s", name_of(inp), name_of(out));
    require(words.find("reduce_scatter_sum") == 0 && words.find(expected) != words.npos, "%s: %s", expected, words);
}

void sums(const Comm& comm, bool tree) {
    constexpr Dtype kTypes[] = {Dtype::fp32, Dtype::bf16, Dtype::fp16, Dtype::fp64};
    for (const Dtype inp : kTypes)
        for (const Dtype out : kTypes) {
            const bool has_fp32 = inp == Dtype::fp32 || out == Dtype::fp32;
            const bool has_fp64 = inp == Dtype::fp64 || out == Dtype::fp64;
            if (has_fp64 || (inp != out && (!has_fp32 || comm.size == 1))) {
                check_refused(comm, inp, out);
                continue;
            }
            const bool is_any_order = inp == out && has_fp32 && !tree && comm_needs_gather() && comm.size > 1;
            for (const size_t count : {1, 1027, 4096, 5003})
                for (const bool in_place : {false, true})
                    if (!is_any_order && (in_place ? inp == out : comm.size > 1))
                        check_sum(comm, {inp, out, count, in_place, tree});
        }
}

// ---- cases ----------------------------------------------------------------------------------------------------------

void run_case(const Comm& all, const std::vector<std::string>& arguments) {
    const std::string& name = arguments.at(0);
    const Comm comm = arguments.back() == "group" ? split(all, all.rank > 1, all.rank) : all;
    const auto from_1 = [](int from, int) { return from == 1 ? std::vector<size_t>{1000} : std::vector<size_t>(); };
    if (name == "groups") return groups(comm);
    if (name == "sums") return sums(comm, arguments.back() == "tree");
    if (name == "crossed") return crossed(comm);
    if (name == "fails") return fail_with_group(comm);
    if (name == "patterns") return patterns(comm);
    if (name == "stages") return hang_in_pipeline(comm);
    if (name == "parts") return parts(comm);
    if (name == "sizes") return unequal(comm, std::stoul(arguments.at(1)), std::stoul(arguments.at(2)));
    if (name == "missing") return unequal(comm, 0, 1000);
    if (name == "surplus") {
        unequal(comm, 1000, 0);
        return check(comm, "after a surplus message", 1,
                     [](int from, int to) { return std::vector<size_t>(from == 0 && to == 1, 1000); });
    }
    check(comm, "before the fault", 0, from_1);
    if (name == "dies" && all.rank == 1) std::raise(SIGKILL);
    while (name == "stops" && all.rank == 1) ::pause();
    check(comm, "with a lost rank", 1, from_1);
    all_reduce_max(0, all);  // the groups without it
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
    config.device.arch_kernels = false;  // this program has no command check-kernels
    const std::string& name = arguments.at(1);
    config.parallel.deterministic_reduce = arguments.back() == "tree";
    config.parallel.step_timeout_s = name == "missing" || name == "stops" || name == "stages" ? 6 : 100;
    if (name == "stages") config.parallel.pipeline = environment.size;
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
