#include "commands/model_io.h"

#include <functional>
#include <vector>

#include "data/encoder.h"
#include "model/sample.h"
#include "runtime/checkpoint/inspect.h"
#include "runtime/checkpoint/train_state.h"
#include "runtime/config/schedule.h"
#include "runtime/performance/flops.h"

GptOptions gpt_options(const Config& config, int rank, int ranks) {
    GptOptions options;
    options.shape = {.n_layer = config.model.n_layer,
                     .n_head = config.model.n_head,
                     .n_kv_head = config.model.n_head,
                     .n_embd = config.model.n_embd,
                     .n_positions = config.model.n_positions,
                     .vocab_size = config.model.vocab_size};
    options.batch = config.train.batch_size;
    options.seq_len = config.train.seq_len;
    options.precision = config.train.precision;
    options.recompute = recompute_named(config.train.recompute);
    options.optimizer = {.kind = config.optim.name == "sgd" ? OptimizerKind::sgd : OptimizerKind::adamw,
                         .beta1 = config.optim.beta1,
                         .beta2 = config.optim.beta2,
                         .eps = float(config.optim.eps),
                         .weight_decay = float(config.optim.weight_decay),
                         .momentum = float(config.optim.momentum),
                         .grad_clip = float(config.optim.grad_clip)};
    options.head_rows = config.train.head_rows;
    options.micro_steps = micro_steps(config, ranks);
    options.rank = rank;
    options.ranks = ranks;
    options.zero_stage = config.parallel.zero_stage;
    options.deterministic_reduce = config.parallel.deterministic_reduce;
    options.bucket_bytes = size_t(config.parallel.bucket_mb) << 20;
    return options;
}

double flops_of_token(const GptOptions& o) {
    return flops_per_token({int64_t(lay_out_tensors(o.shape).parameters), o.shape.n_layer, o.shape.n_embd, o.seq_len});
}

LoadedModel load_model(const std::string& path, int batch) {
    const Checkpoint checkpoint = open_checkpoint(path);
    Config config = parse_config(checkpoint.manifest().info.config, checkpoint.directory() + "/MANIFEST.json");
    GptOptions options = gpt_options(config);
    options.batch = batch > 0 ? batch : options.batch;
    options.training = false;
    Gpt gpt(options, comm_single());
    checkpoint.load(to_load(gpt.master_tensors()), OtherTensors::ignore);
    gpt.masters_changed();
    const std::string run_dir = run_directory_of(checkpoint.directory());
    return {std::move(config), std::move(gpt), run_dir + "/tokenizer.json"};
}

Validation evaluate_pass(Gpt& gpt, Loader& loader, const std::optional<Tokenizer>& tokenizer) {
    auto next = [&] {
        const Batch batch = loader.next();
        return EvalBatch{batch.inputs, batch.targets};
    };
    std::function<int(int)> token_bytes;
    if (tokenizer) token_bytes = [&](int token) { return tokenizer->token_bytes(token); };
    loader.seek(0);
    return evaluate(gpt, loader.batches_per_pass(), next, token_bytes);
}

std::string sample_text(Gpt& gpt, const Tokenizer& tokenizer, const Config::Sample& options, uint64_t seed) {
    std::vector<int> prompt{tokenizer.eot()};
    for (int id : Encoder(tokenizer).encode(options.prompt)) prompt.push_back(id);
    std::vector<int32_t> text;
    sample(gpt, prompt,
           {.tokens = options.tokens,
            .temperature = options.temperature,
            .top_k = options.top_k,
            .seed = seed,
            .stop_token = tokenizer.eot()},
           [&](int token) {
               if (token < tokenizer.vocab_size()) text.push_back(token);
           });
    return options.prompt + tokenizer.decode(text);
}
