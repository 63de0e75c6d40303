// Checks the keys of a configuration against each other.
#include "kernels/base/check.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "kernels/numeric.h"
#include "runtime/config/config.h"
#include "runtime/config/schedule.h"
#include "runtime/io/joined.h"

int largest_batch_size(const Config& config, int world, int most) {
    int64_t total = config.train.total_batch_tokens;
    for (const auto& [until_step, tokens] : config.train.batch_ramp) total = std::gcd(total, tokens);
    const int64_t sequences = total / (int64_t(config.train.seq_len) * world);
    if (sequences * config.train.seq_len * world != total) return 0;
    int size = int(std::min<int64_t>(sequences, most));
    while (size > 0 && sequences % size != 0) size--;
    return size;
}

namespace {

// Collects the problems of a configuration.
struct Check {
    std::vector<std::string> problems;

    template <class... Args> void that(bool holds, const char* pattern, const Args&... args) {
        if (!holds) problems.push_back(format(pattern, printf_argument(args)...));
    }
};

// Adds a problem for each pair of keys in which the first is larger than the second.
void check_limits(const Config& c, Check& check) {
    for (const auto& [key, value, limit_key, limit] :
         {std::tuple{"train.seq_len", c.train.seq_len, "model.n_positions", c.model.n_positions},
          {"eval.stride", c.eval.stride, "train.seq_len", c.train.seq_len},
          {"sample.top_k", c.sample.top_k, "model.vocab_size", c.model.vocab_size},
          {"schedule.warmup_steps", c.schedule.warmup_steps, "train.max_steps",
           c.train.max_steps > 0 ? c.train.max_steps : kMaxSteps}})
        check.that(value <= limit, "%s (%d) must not be larger than %s (%d)", key, value, limit_key, limit);
    check.that(!c.loss_scale.dynamic || c.loss_scale.minimum <= c.loss_scale.initial,
               "loss_scale.minimum (%g) must not be larger than loss_scale.initial (%g)", c.loss_scale.minimum,
               c.loss_scale.initial);
}

// Adds the problems of parts that need others.
void check_parts(const Config& c, Check& check) {
    check.that(!c.data.document_mask || c.data.document_token >= 0 || !c.data.tokenizer.empty(),
               "data.document_mask needs data.tokenizer or data.document_token, the token that starts a document");
    check.that(c.data.document_token < c.model.vocab_size,
               "data.document_token (%d) must be below model.vocab_size (%d)", c.data.document_token,
               c.model.vocab_size);
    check.that(!c.train.may_roll_back() || c.checkpoint.every_steps > 0,
               "train.on_spike or train.on_nonfinite is \"rollback\", but checkpoint.every_steps is 0");
    check_limits(c, check);
    check.that(c.train.precision != Precision::fp16 || c.loss_scale.dynamic || c.loss_scale.fixed > 1,
               "train.precision \"fp16\" needs loss_scale.dynamic true or loss_scale.fixed above 1 (is %g): without "
               "a loss scale, small gradients vanish in fp16",
               c.loss_scale.fixed);
}

void check_optimizer(const Config& c, Check& check) {
    check.that(!optimizer_row(c.optim.scalar_name).is_of_matrices(),
               "optim.scalar_name must be an optimizer of vectors, is \"%s\"", name_of(c.optim.scalar_name));
    const std::optional<OptimizerKind> without = c.optim.without_slots();
    check.that(c.optim.state_dtype == OptimizerDtype::fp32 || !without,
               "optim.state_dtype is \"bf16\", but the state of %s is always fp32; set it to \"fp32\"",
               name_of(without.value_or(c.optim.name)));
    check.that(c.optim.master_dtype == OptimizerDtype::fp32 || compute_type(c.train.precision) == Dtype::bf16,
               "optim.master_dtype \"bf16\" needs train.precision \"bf16\" or \"fp8\" (is \"%s\")",
               name_of(c.train.precision));
}

// Checks that some limit ends the run, and that the schedule and the validations are compatible with it.
void check_end(const Config& c, Check& check) {
    const int warmup = c.schedule.warmup_steps, steps = c.train.max_steps, cooldown = cooldown_steps(c, steps);
    const LrSchedule schedule = c.schedule.name;
    check.that(steps > 0 || c.train.max_epochs > 0 || c.train.max_minutes > 0,
               "train.max_steps, train.max_epochs and train.max_minutes are all 0; set at least one to end the run");
    check.that(c.train.max_minutes == 0 || (schedule != LrSchedule::cosine && schedule != LrSchedule::linear),
               "train.max_minutes (%g) needs schedule.name \"wsd\", \"constant\" or \"cyclic\", is \"%s\", which "
               "depends on the number of steps from the start",
               c.train.max_minutes, name_of(schedule));
    check.that(schedule != LrSchedule::wsd || steps == 0 || warmup > steps || warmup + cooldown <= steps,
               "schedule.warmup_steps (%d) plus the cooldown (schedule.cooldown_fraction %g of train.max_steps, %d "
               "steps) must not exceed train.max_steps (%d)",
               warmup, c.schedule.cooldown_fraction, cooldown, steps);
    check.that(
        c.average.kind != AverageKind::tail || steps > 0 || c.train.max_epochs > 0 || schedule == LrSchedule::wsd,
        "average.kind \"tail\" needs train.max_steps, train.max_epochs or schedule.name \"wsd\", is \"%s\": "
        "without them the number of steps is unknown before the end",
        name_of(schedule));
    const bool validates = !c.data.val.empty() && c.eval.every_steps > 0;
    for (const auto& [is_set, key] :
         {std::pair(c.eval.patience > 0, "eval.patience"), std::pair(c.checkpoint.keep_best, "checkpoint.keep_best")})
        check.that(!is_set || validates, "%s needs validations: data.val and eval.every_steps must be set", key);
    check.that(c.eval.questions.empty() || c.eval.every_steps > 0, "eval.questions needs eval.every_steps, which is 0");
}

// Checks the tokens of a step. `key` names them.
void check_batch(const Config& c, int world, const std::string& key, int64_t total, Check& check) {
    // The ranges keep the product far below 2^63. A divisor of the total, an int, is an int as well.
    const int batch_size = std::max(1, c.train.batch_size);  // 0 becomes at least 1
    const int64_t tokens = int64_t(batch_size) * c.train.seq_len * world;
    const int64_t below = total / tokens * tokens;
    const int smaller = largest_batch_size(c, world, batch_size);
    check.that(below == total,
               "%s (%ld) must be a multiple of train.batch_size (%d) times train.seq_len "
               "(%d) times the number of ranks (%d), i.e. of %ld; the nearest valid %s%ld%s",
               key, total, batch_size, c.train.seq_len, world, tokens,
               below ? format("values are %ld and ", below).c_str() : "value is ", below + tokens,
               smaller > 0 ? format("; or set train.batch_size to %d", smaller).c_str() : "");
    check.that(c.log.noise_scale_every_steps == 0 || total >= 2 * tokens,
               "log.noise_scale_every_steps needs at least 2 micro-steps per step: %s (%ld) must be at least 2 times "
               "train.batch_size (%d) times train.seq_len (%d) times the number of ranks (%d)",
               key, total, batch_size, c.train.seq_len, world);
}

void check_ramps(const Config& c, int world, Check& check) {
    for (const auto& [until_step, tokens] : c.train.batch_ramp)
        check_batch(c, world, format("train.batch_ramp: total_batch_tokens until step %d", until_step), tokens, check);
    check_batch(c, world, "train.total_batch_tokens", c.train.total_batch_tokens, check);
    for (const auto& [until_step, seq_len] : c.train.seq_ramp)
        check.that(c.train.seq_len % seq_len == 0,
                   "train.seq_ramp: seq_len until step %d (%ld) must divide train.seq_len (%d)", until_step, seq_len,
                   c.train.seq_len);
    for (const auto& [key, ramp] : {std::pair("batch_ramp", &c.train.batch_ramp), {"seq_ramp", &c.train.seq_ramp}}) {
        int previous = 0;
        for (const auto& [until_step, value] : *ramp) {
            check.that(previous < until_step && (c.train.max_steps == 0 || until_step < c.train.max_steps),
                       "train.%s: until_step %d must be above the previous one (%d) and below train.max_steps (%d)",
                       key, until_step, previous, c.train.max_steps);
            previous = until_step;
        }
    }
}

// Checks that no key is set that parallel.auto chooses.
void check_auto(const Config& c, Check& check) {
    const Config::Parallel defaults;
    for (const auto& [key, is_set] : {std::pair("zero_stage", c.parallel.zero_stage != defaults.zero_stage),
                                      {"tensor", c.parallel.tensor != defaults.tensor},
                                      {"context", c.parallel.context != defaults.context},
                                      {"pipeline", c.parallel.pipeline != defaults.pipeline},
                                      {"pipeline_layers", c.parallel.pipeline_layers != defaults.pipeline_layers}})
        check.that(!is_set, "parallel.auto chooses parallel.%s, which must not be set", key);
}

// Checks that the ranks form a grid, and that its other keys support it.
void check_grid(const Config& c, int world, Check& check) {
    const int tensor = c.parallel.tensor, context = c.parallel.context, pipeline = c.parallel.pipeline;
    std::string factors;
    int product = 1, dimensions = 0;
    for (const auto& [name, ranks] : {std::pair("tensor", tensor), {"context", context}, {"pipeline", pipeline}}) {
        check.that(ranks == 1 || c.log.noise_scale_every_steps == 0,
                   "log.noise_scale_every_steps does not support parallel.%s (%d)", name, ranks);
        if (ranks > 1) factors += format("%sparallel.%s (%d)", dimensions++ > 0 ? " times " : "", name, ranks);
        product *= ranks;
    }
    check.that(grid_of(c, world).size() == world, "the number of ranks (%d) must be a multiple of %s%s", world, factors,
               dimensions > 1 ? format(", i.e. of %d", product).c_str() : "");
    const auto check_sequences = [&](const std::string& key, int64_t seq_len) {
        check.that(context == 1 || seq_len % (32 * int64_t(context)) == 0,
                   "%s (%ld) must be a multiple of 32 times parallel.context (%d)", key, seq_len, context);
    };
    check_sequences("train.seq_len", c.train.seq_len);
    for (const auto& [until_step, seq_len] : c.train.seq_ramp)
        check_sequences(format("train.seq_ramp: seq_len until step %d", until_step), seq_len);
    check.that(!c.offload.activations || c.train.recompute == Recompute::block,
               "offload.activations keeps only the inputs of the blocks: train.recompute must be \"block\", is \"%s\"",
               name_of(c.train.recompute));
    for (const auto& [name, is_on] : {std::pair("weights", c.offload.weights), {"gradients", c.offload.gradients}}) {
        check.that(!is_on || c.offload.optimizer, "offload.%s needs offload.optimizer, which is false", name);
        check.that(!is_on || world == 1,
                   "offload.%s supports one rank, not %d; with several, parallel.zero_stage 3 divides the state", name,
                   world);
    }
    check.that(!c.offload.gradients || !c.parallel.deterministic_reduce,
               "offload.gradients does not support parallel.deterministic_reduce");
    if (pipeline == 1) return;
    check.that(c.parallel.zero_stage < 3,
               "parallel.zero_stage (3) must be at most 2 with parallel.pipeline (%d): each micro-step would "
               "gather the parameters of the stage again",
               pipeline);
    const bool defers = c.parallel.pipeline_schedule == PipelineSchedule::zero_bubble;
    check.that(!defers || c.train.recompute == Recompute::none || c.train.recompute == Recompute::automatic,
               "parallel.pipeline_schedule \"zero_bubble\" keeps activations for the weights' gradients: "
               "train.recompute must be \"none\", is \"%s\"",
               name_of(c.train.recompute));
    check.that(!defers || c.parallel.zero_stage < 2,
               "parallel.pipeline_schedule \"zero_bubble\" completes the weights' gradients after the backward pass: "
               "parallel.zero_stage (%d) must be at most 1",
               c.parallel.zero_stage);
    const bool is_interleaved = c.parallel.pipeline_schedule == PipelineSchedule::interleaved;
    const int chunks = c.parallel.chunks(), parts = pipeline * chunks;
    check.that(is_interleaved == (chunks > 1),
               "parallel.pipeline_chunks (%d) must be %s with parallel.pipeline_schedule \"%s\"", chunks,
               is_interleaved ? "at least 2" : "1", name_of(c.parallel.pipeline_schedule));
    const std::string named = format("parallel.pipeline (%d) times parallel.pipeline_chunks (%d)", pipeline, chunks);
    check.that(parts <= c.model.n_layer, "model.n_layer (%d) must be at least %s, i.e. %d", c.model.n_layer, named,
               parts);
    const std::vector<int>& layers = c.parallel.pipeline_layers;
    if (layers.empty()) return;
    check.that(int(layers.size()) == parts, "parallel.pipeline_layers must have %s, i.e. %d, numbers, has %zu", named,
               parts, layers.size());
    const int64_t sum = std::accumulate(layers.begin(), layers.end(), int64_t(0));
    check.that(sum == c.model.n_layer, "the sum of parallel.pipeline_layers (%ld) must be model.n_layer (%d)", sum,
               c.model.n_layer);
}

}  // namespace

void check_config(const Config& c, const std::string& origin, int world) {
    Check check;
    const std::string model = c.model.problem();
    check.that(model.empty(), "%s", model);
    check_parts(c, check);
    check_optimizer(c, check);
    check_end(c, check);
    if (c.parallel.automatic) {
        check_auto(c, check);
    } else {
        check_grid(c, world, check);
        check_ramps(c, grid_of(c, world).data, check);
    }
    if (!check.problems.empty()) fail(Exit::config, "%s: %s", origin, joined(check.problems, "; "));
}
