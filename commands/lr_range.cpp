#include "commands/lr_range.h"

#include <algorithm>
#include <cmath>

#include "commands/command_line.h"
#include "commands/layouts.h"
#include "kernels/base/batch.h"
#include "kernels/base/check.h"
#include "runtime/config/schedule.h"
#include "runtime/io/installation.h"
#include "training/models/model_io.h"
#include "training/run.h"
#include "training/run_files.h"
#include "training/step.h"

double RangeTest::rate(int step) const { return from * std::pow(to / from, double(step - 1) / (steps - 1)); }

bool RangeTest::add(double loss) {
    if (!std::isfinite(loss)) return false;
    losses.push_back(loss);
    const std::vector<double> means = smoothed();
    return means.back() <= kDiverged * *std::ranges::min_element(means) && int(losses.size()) < steps;
}

std::vector<double> RangeTest::smoothed() const {
    const size_t window = size_t(steps) / 20;
    std::vector<double> sums{0}, means;
    for (const double loss : losses) sums.push_back(sums.back() + loss);
    for (size_t i = 0; i < losses.size(); i++) {
        const size_t begin = i - std::min(i, window), end = std::min(i + window + 1, losses.size());
        means.push_back((sums[end] - sums[begin]) / double(end - begin));
    }
    return means;
}

int RangeTest::lowest_step() const {
    const std::vector<double> means = smoothed();
    return means.empty() ? 0 : int(std::ranges::min_element(means) - means.begin()) + 1;
}

int RangeTest::steepest_step() const {
    const std::vector<double> means = smoothed();
    const int lowest = lowest_step();
    int steepest = 0;
    double steepest_change = 0;
    for (int i = 1; i + 1 < lowest; i++) {
        const double change = means[size_t(i) + 1] - means[size_t(i) - 1];
        if (change < steepest_change) steepest_change = change, steepest = i + 1;
    }
    return steepest;
}

namespace {

struct Options {
    std::string config;
    std::vector<std::string> overrides;
    double from = 0, to = 0;  // 0: from the configuration's rate
    int steps = 100;
};

RangeTest test_of(const Options& options, const Config& config) {
    constexpr double kFactor = 100;
    const double rate = config.optim.learning_rate;
    const RangeTest test{.from = options.from > 0 ? options.from : rate / kFactor,
                         .to = options.to > 0 ? options.to : rate * kFactor,
                         .steps = options.steps};
    if (!(test.from > 0) || !(test.from <= test.to))
        fail(Exit::usage,
             "lr-range: the rate grows from %g to %g, but --from must be positive and at most --to; the defaults are "
             "optim.learning_rate (%g) divided and multiplied by %g",
             test.from, test.to, rate, kFactor);
    return test;
}

// Returns the configuration of the test: a constant schedule, whose rate the test changes before each step.
Config config_of_test(Config config, const RangeTest& test) {
    config.run.dir.erase(config.run.dir.find_last_not_of('/') + 1);
    config.run.dir += ".lr-range";
    config.data.val.clear();
    config.train.max_steps = test.steps;
    config.train.max_epochs = config.train.max_minutes = 0;
    config.train.batch_ramp.clear(), config.train.seq_ramp.clear();
    config.average.kind = AverageKind::none;
    config.train.on_spike = OnSpike::stop;  // which prints nothing
    config.schedule = {.name = LrSchedule::constant, .warmup_steps = 0};
    config.checkpoint.asynchronous = false;
    return config;
}

StepEnd train_step(TrainingRun& run) {
    StepTimer timer(run);
    run.gpt.begin_step({.loss_scale = run.state.progress.loss_scale.scale,
                        .learning_rate = learning_rate(run.config, run.length, run.state.step + 1),
                        .measure = norms_are_due(run),
                        .measure_first = noise_scale_is_due(run),
                        .update = run.state.progress.updates + 1,
                        .grad_scale = 1.0f / float(run.config.train.total_batch_tokens),
                        .first_sample = run.state.progress.cursor});
    for (const Pass& pass : run.gpt.passes()) {
        run.control.note_step(run.state.step + 1);
        if (pass.begins_micro_step()) {
            const Batch batch = timer.next_batch(run.train_loader);
            run.gpt.load(batch.inputs, batch.targets);
        }
        run.gpt.compute(pass);
    }
    const StepVotes votes = votes_of(run, timer);
    StepEnd end = finish_step(run, timer, votes.gpu, run.gpt.end_step(votes.values));
    end_if(run, run.error);
    return end;
}

void print_result(const RangeTest& test, int last_step, const std::string& run_dir) {
    const std::vector<double> smoothed = test.smoothed();
    const int every = std::max(1, test.steps / 20), count = int(smoothed.size());
    std::printf("%6s %12s %10s %10s\n", "step", "rate", "loss", "smoothed");
    for (int step = 1; step <= count; step++)
        if (step % every == 0 || step == 1 || step == count)
            std::printf("%6d %12.4e %10.4f %10.4f\n", step, test.rate(step), test.losses[size_t(step - 1)],
                        smoothed[size_t(step - 1)]);
    if (count < test.steps)
        std::printf("stopped at step %d: the smoothed loss is above %g times its minimum, or a number is not finite\n",
                    last_step, RangeTest::kDiverged);
    const int lowest = test.lowest_step(), steepest = test.steepest_step();
    if (steepest == 0)
        std::printf("the smoothed loss does not fall: repeat with a lower --from or more --steps\n");
    else
        std::printf(
            "suggestions for optim.learning_rate\n  %.2e  steepest descent\n  %.2e  a tenth of %.2e, the rate "
            "of the lowest smoothed loss, %.4f\n",
            test.rate(steepest), test.rate(lowest) / 10, test.rate(lowest), smoothed[size_t(lowest - 1)]);
    if (lowest == test.steps) std::printf("the loss is lowest at the highest rate: repeat with a higher --to\n");
    std::printf("next: %s report %s\n", command_path(program_path()).c_str(), run_dir.c_str());
}

void run_test(const Options& options, const std::string& revision) {
    const RankEnvironment environment = launched_ranks();
    Config given = load_config(options.config, options.overrides, environment.size);
    choose_plan(given, environment);
    RangeTest test = test_of(options, given);
    Config config = config_of_test(given, test);
    Ranks ranks(environment, config, revision);
    ranks.run([&] {
        const bool is_first = ranks.comm().rank == 0;
        TrainingProgress progress(is_first ? stdout : nullptr, test.steps, config.log.every_steps);
        Dataset dataset =
            open_dataset(training_data(config), config.data.val, config.data.tokenizer, config.model.vocab_size);
        set_document_token(config, dataset.tokenizer);
        check_init_from(config, options.config, dataset.tokenizer_digest);
        const std::string digest = dataset.train.digest();
        ranks.control().require_same(digest, "the digest of data.train");
        RunStart start = start_run(config, {.mode = StartMode::fresh}, digest, ranks.comm());
        configure_device(device_settings(config, ranks));
        TrainingRun run(config, ranks, std::move(dataset), {}, start, progress);
        check_first_tokens(run);
        write_run_files(run, revision.c_str());
        for (bool continues = true; continues;) {
            config.optim.learning_rate = test.rate(run.state.step + 1);
            const StepEnd step = train_step(run);
            const bool has_failed = step.divergence && !step.divergence->is_spike;
            continues = test.add(step.record.loss) && !has_failed;
        }
        if (is_first) print_result(test, run.state.step, config.run.dir);
        return Exit::ok;
    });
}

}  // namespace

void add_lr_range(CLI::App& app, CommandLine& line) {
    auto options = std::make_shared<Options>();
    const Command command(app, "lr-range", "train briefly with a growing learning rate, to choose one");
    command.add("CONFIG", &options->config, "JSON configuration of the run").required();
    add_overrides(command, options->overrides);
    auto add_rate = [&](const char* flag, double& rate, const char* help) {
        command.add(flag, &rate, help).finite_in(1e-12, 1000);
    };
    add_rate("--from", options->from, "rate of the first step (default: optim.learning_rate / 100)");
    add_rate("--to", options->to, "rate of the last step (default: optim.learning_rate * 100)");
    command.add("--steps", &options->steps, "number of steps").show_default().integer_in(10, 100'000);
    add_ranks(command, line);
    command.on_parsed([options, &line] {
        if (line.nproc == 0) run_test(*options, line.revision);  // else main() starts the ranks
    });
}
