#include "commands/command_line.h"

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <optional>
#include <string_view>

#include "kernels/check.h"
#include "runtime/cluster/place.h"
#include "runtime/performance/performance.h"

namespace {

constexpr const char* kCheckpointHelp = "run directory or RUN/checkpoints/step_N";
constexpr const char* kSetHelp = "section.key=value: replaces a value of the configuration; may be repeated";

struct StartFlags {
    bool resume = false, automatic = false, fresh = false;

    StartMode mode() const {
        return resume      ? StartMode::resume
               : automatic ? StartMode::automatic
               : fresh     ? StartMode::fresh
                           : StartMode::only_new;
    }
};

void add_overrides(CLI::App& app, CommandLine& line) {
    app.add_option("--set", line.overrides, kSetHelp)->take_all()->allow_extra_args(false);
}

// What stands behind --node and --master.
struct NodeTexts {
    std::string node, master;
};

void add_ranks(CLI::App& app, CommandLine& line, NodeTexts& texts) {
    auto* nproc = app.add_option("--nproc", line.nproc, "start that many ranks on this machine");
    nproc->check(CLI::Range(1, 1024));
    auto* node = app.add_option("--node", texts.node, "with --nproc on each of several machines: its number, like 0/2");
    auto* master = app.add_option("--master", texts.master, "machine 0 and a free port there, like node0:29500");
    node->needs(nproc)->needs(master);
    master->needs(node);
}

// The two parts of a text around a mark; the second is empty where there is none.
struct Halves {
    std::string_view left, right;
    Halves(std::string_view text, size_t mark)
        : left(text.substr(0, mark)), right(mark < text.size() ? text.substr(mark + 1) : std::string_view()) {}
};

void finish_node(LocalNode& node, const NodeTexts& texts) {
    if (texts.node.empty()) return;
    const Halves number(texts.node, texts.node.find('/')), master(texts.master, texts.master.rfind(':'));
    const auto place = whole_number(number.left), nodes = whole_number(number.right);
    const auto port = whole_number(master.right);
    if (!place || !nodes || *place < 0 || *place >= *nodes || *nodes > 1 << 20)
        fail(Exit::usage, "--node is \"%s\", expected this machine's number from 0 and how many there are, like 0/2",
             texts.node.c_str());
    if (master.left.empty() || !port || *port < 1 || *port > 65535)
        fail(Exit::usage, "--master is \"%s\", expected machine 0 and a port there, like node0:29500",
             texts.master.c_str());
    node = {int(*place), int(*nodes), std::string(master.left), int(*port)};
}

void add_training(CLI::App& app, CommandLine& line, StartFlags& start) {
    app.add_option("CONFIG", line.config, "the run, as JSON; --help-config lists the keys");
    add_overrides(app, line);
    auto* resume =
        app.add_flag("--resume", start.resume, "continue the newest sound checkpoint in run.dir, or exit 66");
    auto* automatic = app.add_flag("--auto", start.automatic, "continue if there is a checkpoint, else start");
    auto* fresh = app.add_flag("--fresh", start.fresh, "move what is in run.dir aside and start anew");
    resume->excludes(automatic)->excludes(fresh);
    automatic->excludes(fresh);
    app.add_flag_callback(
        "--debug-sync", [&] { line.overrides.push_back("device.debug_sync=true"); },
        "GPU: wait after each kernel, so that an error names the kernel that made it");
    app.add_flag("--accept-changes", line.accept_changes, "resume although configuration or data have changed");
}

CLI::App* add_command(CLI::App& app, CommandLine& line, Command command, const char* name, const char* help) {
    return app.add_subcommand(name, help)->callback([&line, command] { line.command = command; });
}

void add_prepare(CLI::App& app, CommandLine& line) {
    CLI::App* prepare = add_command(app, line, Command::prepare, "prepare", "text to tokenizer and token shards");
    prepare->add_option("INPUT", line.prepare.inputs, "UTF-8 text, or JSONL (.jsonl) with a \"text\" field")
        ->required();
    prepare->add_option("--out", line.prepare.out_dir, "directory for tokenizer.json and the shards")->required();
    prepare->add_option("--tokenizer", line.prepare.tokenizer, "bytes, bpe, or a tokenizer's file")
        ->capture_default_str();
    prepare->add_option("--vocab-size", line.prepare.vocab_size, "tokens of a new bpe tokenizer");
    prepare->add_option("--val-fraction", line.prepare.val_fraction, "share of the input, at its end, to hold out")
        ->capture_default_str();
    prepare->add_option("--shard-tokens", line.prepare.shard_tokens, "tokens per shard, at most")
        ->capture_default_str();
    prepare->add_option("--copies", line.prepare.copies, "times that the training part is written, for a short text")
        ->capture_default_str();
    prepare
        ->add_option("--bpe-dropout", line.prepare.bpe_dropout,
                     "probability that a merge of the training part is left out, so that its copies differ")
        ->capture_default_str();
}

void add_sample(CLI::App& app, CommandLine& line) {
    CLI::App* sample = add_command(app, line, Command::sample, "sample", "text from a checkpoint");
    sample->add_option("CHECKPOINT", line.checkpoint, kCheckpointHelp)->required();
    sample->add_option("--prompt", line.sample.prompt, "text to continue");
    sample->add_option("--tokens", line.sample.tokens, "new tokens")->capture_default_str()->check(CLI::PositiveNumber);
    sample->add_option("--temperature", line.sample.temperature, "0: always the likeliest token")
        ->capture_default_str()
        ->check(CLI::NonNegativeNumber);
    sample->add_option("--top-k", line.sample.top_k, "only the k likeliest; 0: all")
        ->capture_default_str()
        ->check(CLI::NonNegativeNumber);
    sample->add_option("--seed", line.seed, "another seed, another text")->capture_default_str();
}

// What stands behind plan's options, before it is known to mean something.
struct ScalingTexts {
    std::optional<std::string> nvlink;
    std::string net = "50GB/s";
};

void add_plan(CLI::App& app, CommandLine& line, ScalingTexts& texts) {
    CLI::App* plan = add_command(app, line, Command::plan, "plan",
                                 "memory by category and FLOPs, and with --gpus the speed; allocates nothing");
    plan->add_option("CONFIG", line.config, "the run, as JSON")->required();
    add_overrides(*plan, line);
    auto* gpus = plan->add_option("--gpus", line.scaling.gpus, "predict the speed on this many GPUs, by ZeRO stage")
                     ->check(CLI::Range(1, 1 << 20));
    plan->add_option("--gpu", line.scaling.gpu, "which GPU: a100, h100, h200, b200, rtx4090, ...")
        ->capture_default_str()
        ->needs(gpus);
    plan->add_option("--gpus-per-node", line.scaling.gpus_per_node, "GPUs that NVLink or PCIe connects")
        ->capture_default_str()
        ->check(CLI::Range(1, 1 << 20))
        ->needs(gpus);
    plan->add_option("--nvlink", texts.nvlink, "its rate per GPU and direction, like 450GB/s (default: the GPU's)")
        ->needs(gpus);
    plan->add_option("--net", texts.net, "the network's rate per GPU and direction, like 50GB/s or 400Gb/s")
        ->capture_default_str()
        ->needs(gpus);
}

void finish_scaling(CommandLine::Scaling& scaling, const ScalingTexts& texts) {
    const GpuModel& gpu = find_gpu(scaling.gpu);
    scaling.nvlink_bytes_per_s = texts.nvlink ? parse_rate(*texts.nvlink, "--nvlink") : gpu.link_bytes_per_s;
    scaling.net_bytes_per_s = parse_rate(texts.net, "--net");
    check_nodes(scaling.gpus, scaling.gpus_per_node);
}

void add_other_commands(CLI::App& app, CommandLine& line) {
    CLI::App* eval = add_command(app, line, Command::eval, "eval", "validation loss of a checkpoint");
    eval->add_option("CHECKPOINT", line.checkpoint, kCheckpointHelp)->required();
    eval->add_option("--data", line.data, "glob of shards (default: the run's data.val)");
    eval->add_option("--batches", line.batches, "micro-batches; 0: all")
        ->capture_default_str()
        ->check(CLI::NonNegativeNumber);
    eval->add_option("--stride", line.stride, "tokens each window adds (default: the run's eval.stride)")
        ->check(CLI::NonNegativeNumber);

    CLI::App* inspect = add_command(app, line, Command::inspect, "inspect", "what is this file, and is it sound");
    inspect->add_option("PATH", line.path, "checkpoint, run, token shard, tokenizer or safetensors file")->required();

    CLI::App* exporter = add_command(app, line, Command::export_hf, "export", "weights for other programs");
    exporter
        ->add_flag_function(
            "--hf", [](int64_t) {}, "as a Hugging Face GPT-2 directory")
        ->required();
    exporter->add_option("CHECKPOINT", line.checkpoint, kCheckpointHelp)->required();
    exporter->add_option("DIR", line.path, "absent or empty directory")->required();
}

}  // namespace

CommandLine parse_command_line(int argc, char** argv, const std::function<std::string()>& version) {
    CommandLine line;
    StartFlags start;
    ScalingTexts scaling;
    NodeTexts node;
    CLI::App app("Pretrains GPT-class language models. Without a command: trains CONFIG.", "train_gpt");
    app.set_version_flag("--version", version);
    app.add_flag_callback(
        "--help-config", [&] { line.command = Command::help_config; }, "every configuration key");
    app.add_flag_callback(
        "--markdown-config", [&] { line.command = Command::markdown_config; }, "the same as a Markdown table");
    app.require_subcommand(0, 1);
    add_training(app, line, start);
    add_ranks(app, line, node);
    add_prepare(app, line);
    add_sample(app, line);
    add_plan(app, line, scaling);
    add_other_commands(app, line);
    try {
        app.parse(argc, argv);
    } catch (const CLI::Success& help_or_version) {
        std::exit(app.exit(help_or_version));
    } catch (const CLI::ParseError& error) {
        fail(Exit::usage, "%s (--help shows what can be said)", error.what());
    }
    line.start = start.mode();
    finish_scaling(line.scaling, scaling);
    finish_node(line.node, node);
    if (line.command == Command::train && line.config.empty())
        fail(Exit::usage, "no configuration and no command (--help shows what can be said)");
    return line;
}

ScalingInputs inputs_of(const CommandLine::Scaling& machine) {
    ScalingInputs inputs;
    inputs.gpu = find_gpu(machine.gpu);
    inputs.gpus = machine.gpus;
    inputs.gpus_per_node = machine.gpus_per_node;
    inputs.nvlink_bytes_per_s = machine.nvlink_bytes_per_s;
    inputs.net_bytes_per_s = machine.net_bytes_per_s;
    return inputs;
}

std::vector<std::string> arguments_of_rank(const std::vector<std::string>& arguments) {
    std::vector<std::string> others;
    for (size_t i = 0; i < arguments.size(); i++) {
        const std::string name = arguments[i].substr(0, arguments[i].find('='));
        if (name != "--nproc" && name != "--node" && name != "--master")
            others.push_back(arguments[i]);
        else if (name == arguments[i])
            i++;  // its value
    }
    return others;
}
