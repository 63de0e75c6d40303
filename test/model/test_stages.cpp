// The layers, tensors and files of the stages of a pipeline.
#include <algorithm>
#include <cmath>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "model/activations.h"
#include "model/balance.h"
#include "model/optimizers.h"
#include "model/options.h"
#include "model/plan.h"
#include "model/schedule.h"
#include "model/tensors.h"
#include "test/support/catch.h"

namespace {

GptOptions stage_options(int layers, int stages, int chunks = 1) {
    GptOptions options{.shape = {.n_layer = layers, .n_head = 2, .n_embd = 16, .n_positions = 64, .vocab_size = 257},
                       .batch = 1,
                       .seq_len = 64,
                       .optimizer = {},
                       .head_rows = 8};
    options.pipeline = {.size = stages, .chunks = chunks};
    if (chunks > 1) options.pipeline.schedule = PipelineSchedule::interleaved;
    return options;
}

// The multiplications of a token's forward pass in a GPT-2 layer: 12 C^2 in products, and C (T / 2) for each of scores
// and values.
double layer_work(const GptShape& s, int seq_len) {
    const double C = s.n_embd;
    return 12 * C * C + C * seq_len;
}

// Returns the least of the most work of a part, over all divisions of the layers. The last part has the head.
double least_work(int layers, int parts, double layer, double head) {
    if (parts == 1) return layers * layer + head;
    double least = HUGE_VAL;
    for (int first = 1; first <= layers - parts + 1; first++)
        least = std::min(least, std::max(first * layer, least_work(layers - first, parts - 1, layer, head)));
    return least;
}

}  // namespace

TEST_CASE("the most work of a part is as small as possible", "[model][pipeline]") {
    bool head_matters = false;
    for (const auto& [stages, chunks] : {std::pair(1, 1), {2, 1}, {3, 1}, {4, 1}, {2, 2}, {3, 2}, {2, 4}})
        for (int layers = stages * chunks; layers <= 12; layers++) {
            const GptOptions options = stage_options(layers, stages, chunks);
            const double layer = layer_work(options.shape, options.seq_len);
            const double head = options.shape.n_embd * options.shape.padded_vocab();
            const std::vector<LayerRange> ranges = layer_ranges(options);
            CAPTURE(stages, chunks, layers);
            REQUIRE(int(ranges.size()) == stages * chunks);
            int end = 0;
            double most = 0;
            for (const LayerRange& range : ranges) {
                REQUIRE(range.first == end);
                REQUIRE(range.count > 0);
                end = range.end();
                most = std::max(most, range.count * layer + (end == layers ? head : 0));
            }
            REQUIRE(end == layers);
            CHECK(most == least_work(layers, stages * chunks, layer, head));
            head_matters |= ranges.back().count < ranges.front().count;
        }
    CHECK(head_matters);
}

namespace {

// Memory is not quite linear in the number of layers: buffers are multiples of 256 bytes, and each rank has a table of
// all ranks' tensors.
constexpr double kNear = 1.01;

// All divisions of the layers into parts, each with its largest work of a part and its largest memory of a rank.
struct Divided {
    std::vector<int> layers;
    double work;
    size_t bytes;
};

void divide(const GptOptions& options, int left, std::vector<int>& layers, std::vector<Divided>& divisions) {
    const int parts = options.pipeline.size - int(layers.size());
    if (parts == 0) {
        GptOptions stage = options;
        stage.pipeline.layers = layers;
        Divided& divided = divisions.emplace_back(layers, 0, 0);
        const PipelineWork work = pipeline_work(options);
        const std::vector<LayerRange> ranges = layer_ranges(stage);
        const std::vector<size_t> bytes = planned_bytes_of_stages(stage);
        divided.bytes = *std::ranges::max_element(bytes);
        for (int& rank = stage.pipeline.rank = 0; rank < options.pipeline.size; rank++) {
            divided.work = std::max(divided.work, work.of_part(size_t(rank), ranges[size_t(rank)]));
            REQUIRE(bytes[size_t(rank)] == planned_bytes(stage));
        }
        return;
    }
    for (int count = parts == 1 ? left : 1; count <= left - parts + 1; count++) {
        layers.push_back(count);
        divide(options, left - count, layers, divisions);
        layers.pop_back();
    }
}

const Divided& find(const std::vector<Divided>& divisions, const std::vector<int>& layers) {
    return *std::ranges::find(divisions, layers, &Divided::layers);
}

}  // namespace

// Memory differs between stages: the first one has the embeddings and, with 1f1b, the most micro-steps in flight.
TEST_CASE("stages fit if they can, then the slowest is fastest, then the largest is smallest", "[model][pipeline]") {
    int smaller = 0, slower = 0;
    for (const auto& [stages, layers] : {std::pair(2, 6), {2, 7}, {3, 8}, {3, 10}, {4, 9}, {4, 11}})
        for (const PipelineSchedule schedule : {PipelineSchedule::one_f_one_b, PipelineSchedule::gpipe}) {
            GptOptions options = stage_options(layers, stages);
            options.shape.n_embd = 64, options.micro_steps = 8;
            options.pipeline.schedule = schedule;
            std::vector<int> chosen;
            std::vector<Divided> divisions;
            divide(options, layers, chosen, divisions);
            CAPTURE(stages, layers, int(schedule));
            const PipelineWork work = pipeline_work(options);
            const Divided free = find(divisions, balanced_layers(options, work));
            for (const Divided& d : divisions)
                smaller += d.work == free.work && double(d.bytes) > kNear * double(free.bytes);
            // No limit, one with which nothing fits, and one between each two sizes.
            std::vector<double> limits = {HUGE_VAL, 1};
            std::ranges::sort(divisions, {}, &Divided::bytes);
            for (size_t i = 1; i < divisions.size(); i++)
                if (double(divisions[i].bytes) > kNear * kNear * double(divisions[i - 1].bytes))
                    limits.push_back(kNear * double(divisions[i - 1].bytes));
            for (const double limit : limits) {
                const bool any_fits = limit > 1;
                const Divided best = std::ranges::min(divisions, {}, [&](const Divided& d) {
                    return std::tuple(double(d.bytes) > limit, any_fits ? d.work : 0, d.bytes);
                });
                chosen = balanced_layers(options, work, limit);
                CAPTURE(limit, chosen, best.layers);
                const Divided& found = find(divisions, chosen);
                if (any_fits) CHECK(found.work == best.work);
                CHECK(double(found.bytes) <= kNear * double(best.bytes));
                slower += any_fits && found.work > free.work;
            }
        }
    CHECK(smaller > 0);
    CHECK(slower > 0);
}

// FLOPs: Kaplan et al., arXiv 2001.08361, section 2.1: 6 per weight and 12 per attended key and channel. Collectives:
// 44 per micro-step of 4 layers, counted on ranks (dev/results/2026-11-27-tensor-parallelism.md).
TEST_CASE("pipeline: the work of all parts is the work of the model", "[model][pipeline]") {
    for (const auto& [stages, chunks] : {std::pair(1, 1), {2, 1}, {4, 1}, {2, 2}})
        for (const Recompute recompute : {Recompute::none, Recompute::block})
            for (const bool defers : {false, true}) {
                if (defers && (stages == 1 || chunks > 1 || recompute == Recompute::block)) continue;
                GptOptions options = stage_options(4, stages, chunks);
                options.recompute = recompute;
                if (defers) options.pipeline.schedule = PipelineSchedule::zero_bubble;
                INFO(stages << " stages, " << chunks << " chunks, recompute " << int(recompute) << ", " << defers);
                double flops[3] = {}, ring[3] = {};
                int collectives = 0;
                for (options.pipeline.rank = 0; options.pipeline.rank < stages; options.pipeline.rank++)
                    for (const auto& passes : work_of_parts(options))
                        for (const Pass::Kind kind : {Pass::forward, Pass::backward, Pass::weights}) {
                            flops[kind] += passes[kind].flops_per_token;
                            ring[kind] += passes[kind].ring_bytes_per_token;
                            collectives += passes[kind].collectives;
                        }
                const GptShape& shape = options.shape;
                const double C = shape.n_embd, layers = 4 * layer_work(shape, options.seq_len);
                const double again = recompute == Recompute::block ? 2 * layers : 0;
                CHECK(flops[Pass::forward] == 2 * layers);
                CHECK(flops[Pass::weights] == (defers ? 4 * 2 * 12 * C * C : 0));
                CHECK(flops[0] + flops[1] + flops[2] == 6 * layers + 6 * C * shape.padded_vocab() + again);
                // A pass of weights gathers both inputs and both gradients; a recomputed layer does all but a sum.
                CHECK(collectives == 44 + 4 * (defers ? 2 : 0) + 4 * (again > 0 ? 3 : 0));
                // Keys and values of all layers. In backward also gradients in FP32: on average 3/4, all of later
                // ranks' and half of earlier ranks' keys.
                CHECK((ring[0] == 4 * 2 * C * 4 && ring[1] == 1.75 * ring[0] && ring[2] == 0));
            }
}

TEST_CASE("stages take the given numbers of layers in turn", "[model][pipeline]") {
    GptOptions options = stage_options(10, 2, 2);
    options.pipeline.layers = {1, 2, 3, 4};
    std::vector<std::pair<int, int>> own[2];
    for (int& stage = options.pipeline.rank; stage < 2; stage++)
        for (const LayerRange& range : own_layers(options)) own[stage].emplace_back(range.first, range.count);
    CHECK(own[0] == std::vector{std::pair(0, 1), {3, 3}});
    CHECK(own[1] == std::vector{std::pair(1, 2), {6, 4}});
}

TEST_CASE("memory is for as many micro-steps as are in flight in any step", "[model][pipeline]") {
    using enum PipelineSchedule;
    for (const auto& [schedule, chunks] :
         {std::pair(gpipe, 1), {one_f_one_b, 1}, {zero_bubble, 1}, {interleaved, 2}, {interleaved, 3}})
        for (int stages = 2; stages <= 16; stages++)
            for (int micro_steps = 1; micro_steps <= 64; micro_steps++) {
                GptOptions options = stage_options(stages * chunks, stages, chunks);
                options.micro_steps = micro_steps, options.pipeline.schedule = schedule;
                const auto passes = schedule_passes(schedule, stages, chunks, micro_steps);
                CAPTURE(int(schedule), chunks, stages, micro_steps);
                for (int& stage = options.pipeline.rank; stage < stages; stage++) {
                    std::vector<int> in_flight;
                    for (int chunk = 0; chunk < chunks; chunk++)
                        in_flight.push_back(most_in_flight(passes[size_t(stage)], chunk));
                    REQUIRE(micro_steps_in_flight(options) == in_flight);
                    REQUIRE(micro_steps_deferred(options) == most_deferred(passes[size_t(stage)]));
                }
            }
}

TEST_CASE("the stages have each tensor once, except a tied embedding", "[model][pipeline]") {
    for (const bool is_tied : {true, false})
        for (const auto& [stages, chunks, ranks] : {std::tuple(2, 1, 1), {3, 2, 1}, {4, 1, 3}}) {
            GptOptions options = stage_options(7, stages, chunks);
            options.shape.tie_embeddings = is_tied, options.ranks = ranks;
            CAPTURE(is_tied, stages, chunks, ranks);
            const TensorLayout whole = lay_out_tensors(options.shape);
            std::multiset<std::string> names, expected;
            std::set<int> indices;
            size_t counted = 0;
            for (const Tensor& tensor : whole.tensors) expected.insert(tensor.name);
            if (is_tied) expected.insert("wte");
            for (int& stage = options.pipeline.rank; stage < stages; stage++) {
                const TensorLayout layout = lay_out_rank(options);
                REQUIRE(layout.names.size() == whole.tensors.size());
                for (const Tensor& tensor : layout.tensors) {
                    names.insert(tensor.name);
                    CHECK(layout.names[size_t(tensor.number)] == tensor.name);
                    CHECK(tensor.is_copy == (is_tied && tensor.name == "wte" && stage > 0));
                }
                for (const ops::Chunk& chunk : chunk_grid(layout))
                    CHECK(indices.insert(chunk.index).second != layout.tensors[size_t(chunk.tensor)].is_copy);
                for (const ops::Chunk& chunk : counted_once(layout, chunk_grid(layout))) counted += size_t(chunk.count);
            }
            CHECK(names == expected);
            CHECK(counted == whole.parameters);
            CHECK(*indices.rbegin() + 1 == int(indices.size()));
        }
}

// Name, first element in its tensor, count and index of each chunk.
using NamedChunk = std::tuple<std::string, uint32_t, int, int>;

TEST_CASE("deterministic chunks are the same for any number of stages", "[model][pipeline]") {
    for (const bool is_tied : {true, false})
        for (const int ranks : {1, 2}) {
            std::set<NamedChunk> expected;
            for (const auto& [stages, chunks] : {std::pair(1, 1), {2, 1}, {3, 2}, {5, 1}}) {
                GptOptions options = stage_options(7, stages, chunks);
                options.shape.tie_embeddings = is_tied, options.ranks = ranks, options.deterministic_reduce = true;
                options.shape.n_embd = 96, options.bucket_bytes = 1 << 20;  // layers of some chunks, several per bucket
                std::set<NamedChunk> grid;
                for (int& stage = options.pipeline.rank; stage < stages; stage++) {
                    const TensorLayout layout = lay_out_rank(options);
                    for (const ops::Chunk& chunk : chunk_grid(layout))
                        grid.emplace(layout.tensors[size_t(chunk.tensor)].name, chunk.first, chunk.count, chunk.index);
                }
                CAPTURE(is_tied, ranks, stages, chunks);
                if (expected.empty()) expected = grid;
                CHECK(grid == expected);
            }
        }
}

TEST_CASE("the stages save as much as one rank", "[model][pipeline]") {
    for (const OptimizerKind kind : {OptimizerKind::adamw, OptimizerKind::muon, OptimizerKind::adafactor}) {
        GptOptions options = stage_options(5, 1);
        set_optimizer(options.optimizer, kind);
        options.averages = true;
        const size_t alone = saved_bytes(options);
        options.pipeline.size = 3;
        size_t of_stages = 0;
        for (int& stage = options.pipeline.rank; stage < 3; stage++) of_stages += saved_bytes(options);
        CAPTURE(name_of(kind));
        CHECK(of_stages == alone);
    }
}

// Heads, key/value heads, hidden channels and the rows of a micro-batch, max_terms, ranks and the terms.
TEST_CASE("terms of sums: the same for any number of ranks that divide them", "[stages]") {
    struct Case {
        int heads, kv_heads, hidden, rows, most, ranks, terms;
    };
    for (const Case& c : {Case{16, 16, 64, 48, 8, 1, 8},
                          {16, 16, 64, 48, 8, 2, 8},
                          {16, 16, 64, 48, 8, 8, 8},
                          {16, 16, 64, 48, 8, 16, 16},
                          {16, 16, 64, 48, 1, 4, 4},
                          {16, 16, 64, 48, 6, 1, 4},
                          {12, 12, 64, 48, 8, 1, 4},
                          {25, 25, 64, 48, 8, 1, 1},
                          {16, 2, 64, 48, 8, 1, 2},
                          {16, 2, 64, 48, 8, 8, 8},
                          {16, 16, 36, 48, 8, 1, 4},
                          {16, 16, 64, 6, 8, 1, 2}}) {
        INFO(c.heads << " heads, " << c.kv_heads << " of keys, " << c.hidden << " channels, " << c.rows
                     << " rows, most " << c.most << ", ranks " << c.ranks);
        GptOptions options;
        options.shape.n_head = c.heads, options.shape.given_kv_heads = c.kv_heads,
        options.shape.given_hidden = c.hidden;
        options.shape.given_head_size = 64, options.shape.n_embd = 64;
        options.batch = 1, options.seq_len = c.rows, options.tensor_parallel.size = c.ranks;
        options.max_terms = c.most;
        CHECK(terms_of_sums(options) == c.terms);
        options.training = false;
        CHECK(terms_of_sums(options) == c.ranks);
    }
}

TEST_CASE("segments of a ring: all ranks together have as many as divide every sequence", "[stages]") {
    struct Case {
        int seq_len, most, ranks, segments;
    };
    for (const Case& c : {Case{1024, 8, 1, 8},
                          {1024, 8, 2, 4},
                          {1024, 8, 8, 1},
                          {1024, 8, 16, 0},
                          {1536, 8, 3, 0},
                          {1024, 1, 1, 0},
                          {1024, 1, 4, 0},
                          {1024, 6, 1, 4},
                          {128, 8, 1, 4},
                          {192, 8, 4, 0},
                          {192, 8, 2, 1},
                          {32, 8, 1, 0}}) {
        INFO("seq_len " << c.seq_len << ", most " << c.most << ", ranks " << c.ranks);
        GptOptions options;
        options.max_terms = c.most, options.context.size = c.ranks;
        CHECK(segments_of_ring(options, c.seq_len) == c.segments);
        options.training = false;
        CHECK(segments_of_ring(options, c.seq_len) == 0);
    }
}

// The two ranks of a ring, and one rank: which tokens of two sequences each has, in the order of its rows.
TEST_CASE("segments: a rank has the rows of the ring's ranks in their order", "[stages]") {
    const BatchSizes whole{2, 256};
    auto rows_of = [&](const ContextParallel& context) {
        std::vector<int> rows;
        const BatchSizes part = context.part(whole);
        for (int b = 0; b < part.batch; b++)
            for (int t = 0; t < part.seq_len; t++) rows.push_back(context.first_row(whole, b) + t);
        return rows;
    };
    std::vector<int> of_ring;
    for (int rank = 0; rank < 4; rank++) {
        const ContextParallel place{.rank = rank, .size = 4, .segments = 1};
        CHECK(rows_of(place) == rows_of({.rank = rank, .size = 4}));
        for (const int row : rows_of(place)) of_ring.push_back(row);
    }
    CHECK(rows_of({.rank = 0, .size = 1, .segments = 4}) == of_ring);
    const std::vector<int> last = rows_of({.rank = 1, .size = 2, .segments = 2});
    CHECK(std::ranges::equal(last, std::span(of_ring).last(last.size())));
    CHECK(rows_of({}).size() == of_ring.size());
    CHECK(ContextParallel{.rank = 0, .size = 2, .segments = 2}.starts(32, 1).second == 192);
}
