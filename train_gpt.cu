// main(): the training recipe. Other commands are in commands/.
#include "commands/command_line.h"
#include "commands/layouts.h"
#include "data/evaluation/questions.h"
#include "kernels/base/batch.h"
#include "kernels/base/check.h"
#include "runtime/config/schedule.h"
#include "runtime/io/process.h"
#include "training/divergence.h"
#include "training/evaluation.h"
#include "training/models/model_io.h"
#include "training/models/questions.h"
#include "training/models/votes.h"
#include "training/profiler.h"
#include "training/run.h"
#include "training/run_files.h"
#include "training/saving.h"
#include "training/step.h"
#include "training/summary.h"

int main(int argc, char** argv) {
    return exit_status("train_gpt", [&] {
        const std::optional<CommandLine> line = run_command_line(argc, argv, PROGRAM_VERSION);
        if (!line) {
            flush_output();
            return Exit::ok;
        }
        if (line->supervise) return supervise_training(*line, {argv, argv + argc});
        if (line->nproc > 0) {
            check_node(line->node);
            // An invalid configuration is reported once, before the ranks start.
            if (!line->config.empty()) load_config(line->config, line->overrides, line->nproc * line->node.nodes);
            return launch_ranks(line->nproc, line->node, arguments_of_rank({argv, argv + argc}), line->config.empty());
        }

        // All ranks run this with the same configuration, on their own share of each batch.
        const RankEnvironment environment = find_rank_environment();
        install_signal_handlers(environment.rank == 0);
        Config config = load_config(line->config, line->overrides, environment.size);
        const std::string choice = choose_plan(config, environment);
        if (environment.rank == 0 && !choice.empty()) std::printf("%s\n", choice.c_str());
        Ranks ranks(environment, config, PROGRAM_VERSION);
        return ranks.run([&] {
            TrainingProgress progress(ranks.comm().rank == 0 ? stdout : nullptr, config.train.max_steps,
                                      config.log.every_steps);
            progress.begin("reading the data");
            // All input is checked before run.dir is touched.
            const Config::Data& data = config.data;
            Dataset dataset = open_dataset(training_data(config), data.val, data.tokenizer, config.model.vocab_size);
            set_document_token(config, dataset.tokenizer);
            check_init_from(config, line->config, dataset.tokenizer_digest);
            std::vector<QuestionSet> questions = questions_of(config, dataset.tokenizer);
            check_profile(line->profile, config);
            const std::string digest = dataset.train.digest();
            ranks.control().require_same(digest, "the digest of data.train");
            if (must_stop_early(ranks.comm(), progress)) return Exit::again;
            RunStart start = start_run(config, line->start, digest, ranks.comm());
            configure_device(device_settings(config, ranks));
            progress.begin(start.checkpoint ? "loading the checkpoint" : "preparing the model");
            TrainingRun run(config, ranks, std::move(dataset), std::move(questions), start, progress);
            start.checkpoint.reset();
            check_first_tokens(run);
            write_run_files(run, PROGRAM_VERSION);
            if (must_stop_early(run.comm, progress)) return Exit::again;
            if (!finish_evaluation(run)) {
                end_if(run, run.error);
                return Exit::again;
            }
            Profiler profiler(line->profile, run);

            while (!run.is_complete()) {
                // Forward and backward passes accumulate the gradients of all micro-batches; then one update.
                const int next = run.state.step + 1, micro_steps = ::micro_steps(config, run.grid.data, next);
                profiler.begin_step();
                StepTimer timer(run);
                run.gpt.begin_step({.loss_scale = run.state.progress.loss_scale.scale,
                                    .learning_rate = learning_rate(config, run.length, next),
                                    .group_rates = group_rates(config, run.length, next),
                                    .micro_steps = micro_steps,
                                    .seq_len = sequence_length(config, next),
                                    .average_weight = average_weight(config, run.length, next),
                                    .measure = norms_are_due(run),
                                    .measure_first = noise_scale_is_due(run),
                                    .update = run.state.progress.updates + 1,
                                    .grad_scale = 1.0f / float(batch_tokens(config, next)),
                                    .first_sample = run.state.progress.cursor});
                for (const Pass& pass : run.gpt.passes()) {
                    run.control.note_step(next);
                    if (pass.begins_micro_step()) {
                        run.progress.begin_micro_step(next, pass.micro_step + 1, micro_steps);
                        const Batch batch = timer.next_batch(run.train_loader);
                        run.gpt.load(batch.inputs, batch.targets);
                    }
                    run.gpt.compute(pass);
                }
                const StepVotes votes = votes_of(run, timer);
                const StepResult result = run.gpt.end_step(votes.values);
                const StepEnd step = finish_step(run, timer, votes.gpu, result);

                // If a rank was asked to stop or cannot read its tokens, all ranks know it from this step's votes.
                bool must_stop = run.error || result.votes[kStop] > 0 || (run.comm.size == 1 && stop_signal());
                if (step.divergence) {
                    recover(run, *step.divergence);  // afterwards the run is at a saved checkpoint
                } else {
                    end_if(run, check_replicas_if_due(run));
                    must_stop |= !evaluate_if_due(run, must_stop);
                    if (must_stop || checkpoint_is_due(run)) end_if(run, save(run, must_stop || run.is_complete()));
                }
                profiler.end_step(step.record, must_stop || run.is_complete());
                end_if(run, run.error);
                if (must_stop && !run.is_complete()) {
                    run.progress.print(
                        format("step %d | stopped by signal %d; --resume continues", run.state.step, stop_signal()));
                    return Exit::again;
                }
            }
            print_summary(run);
            return Exit::ok;
        });
    });
}
