// The specification compared with PyTorch: a GPT-2 of ref:: ops, with fp32 storage, forward, backward and update.

#include "model/update.h"
#include "test/reference/reference.h"
#include "test/support/catch.h"
#include "test/support/torch_reference.h"

namespace {

// fp32 storage: each op rounds its results to 2^-24 = 6e-8, with a few dozen ops between tokens and gradients.
constexpr double kTolerance = 1e-5;

using Floats = std::vector<float>;

// The parameters in flat arrays, one or more chunks per tensor, by Hugging Face's names; linear weights are (out, in).
struct Parameters {
    struct Place {
        size_t begin, count, rows, cols;
    };
    std::map<std::string, Place> places;
    std::vector<ops::Chunk> chunks;
    Floats master, grad, m, v;

    explicit Parameters(const TorchTensors& weights) {
        for (const auto& [name, tensor] : weights) {
            Place place{master.size(), tensor.values.size(), tensor.shape[0], tensor.values.size() / tensor.shape[0]};
            Floats values = tensor.values;
            if (is_linear_weight(name))
                values = transposed(values, place.rows, place.cols), std::swap(place.rows, place.cols);
            master.insert(master.end(), values.begin(), values.end());
            for (size_t done = 0; done < place.count; done += ops::kChunkElements)
                chunks.push_back({.begin = place.begin + done,
                                  .count = int(std::min<size_t>(place.count - done, ops::kChunkElements)),
                                  .tensor = int(places.size()),
                                  .index = int(chunks.size()),
                                  .group = tensor.shape.size() == 2 ? 0 : 1,
                                  .state_begin = place.begin + done});
            places[name] = place;
        }
        grad.resize(master.size()), m.resize(master.size()), v.resize(master.size());
    }

    const float* weight(const std::string& name) const { return master.data() + places.at(name).begin; }
    float* gradient(const std::string& name) { return grad.data() + places.at(name).begin; }

    // A tensor of one of the flat arrays in Hugging Face's layout.
    Floats hugging_face(const Floats& flat, const std::string& name) const {
        const Place& place = places.at(name);
        Floats values(flat.begin() + place.begin, flat.begin() + place.begin + place.count);
        return is_linear_weight(name) ? transposed(values, place.rows, place.cols) : values;
    }
};

// A layer norm's results, and a block's. `inp` of the first norm is the residual stream before the block.
struct Norm {
    Floats inp, out, mean, rstd;
};
struct Block {
    Norm norm1, norm2;
    Floats qkv, lse, attn, attn_proj, pre_activation, fc, fc_proj;
};

class ReferenceGpt {
public:
    Parameters parameters;
    Floats logits;  // (rows, vocab), their gradient after backward

    explicit ReferenceGpt(const TorchReference& reference)
        : parameters(reference.weights),
          r_(reference),
          rows_(reference.batch_size * reference.seq_len),
          channels_(reference.n_embd),
          blocks_(reference.n_layer) {}

    void forward(const int* tokens) {
        Floats residual(size_t(rows_) * channels_);
        ref::embedding_forward(ops::EmbeddingForward{.out = residual.data(),
                                                     .tokens = tokens,
                                                     .wte = parameters.weight("wte.weight"),
                                                     .wpe = parameters.weight("wpe.weight"),
                                                     .batch = r_.batch_size,
                                                     .seq_len = r_.seq_len,
                                                     .channels = channels_});
        const Floats* branch = nullptr;  // the next norm adds it to the residual
        for (int l = 0; l < r_.n_layer; l++) {
            Block& block = blocks_[l];
            std::string h = "h." + std::to_string(l) + ".";
            norm_forward(block.norm1, h + "ln_1", l == 0 ? residual : blocks_[l - 1].norm2.inp, branch);
            linear_forward(block.qkv, h + "attn.c_attn", block.norm1.out);
            attention_forward(block);
            linear_forward(block.attn_proj, h + "attn.c_proj", block.attn);
            norm_forward(block.norm2, h + "ln_2", block.norm1.inp, &block.attn_proj);
            linear_forward(block.fc, h + "mlp.c_fc", block.norm2.out, &block.pre_activation);
            linear_forward(block.fc_proj, h + "mlp.c_proj", block.fc);
            branch = &block.fc_proj;
        }
        norm_forward(norm_f_, "ln_f", blocks_.back().norm2.inp, branch);
        linear_forward(logits, "wte", norm_f_.out);
    }

    // Mean loss of the micro-step times 1 / micro_steps; logits become their gradient.
    double loss(const int* targets) {
        Floats losses(rows_);
        ref::cross_entropy(ops::CrossEntropy{.logits = logits.data(),
                                             .loss = losses.data(),
                                             .targets = targets,
                                             .loss_scale = nullptr,
                                             .rows = rows_,
                                             .vocab = r_.vocab_size,
                                             .padded_vocab = r_.vocab_size,
                                             .grad_scale = 1.0f / float(rows_ * r_.micro_steps),
                                             .write_dlogits = true});
        double sum = 0;
        ref::loss_sum({.out = &sum, .loss = losses.data(), .rows = rows_, .accumulate = false});
        return sum / (rows_ * r_.micro_steps);
    }

    // The ops of forward() in reverse order.
    void backward(const int* tokens, bool accumulate) {
        accumulate_ = accumulate;
        Floats dresidual(size_t(rows_) * channels_), dnorm, dattn, dqkv, dfc;
        linear_backward(dnorm, "wte", norm_f_.out, logits);
        norm_backward(dresidual, "ln_f", norm_f_, dnorm, false);
        for (int l = r_.n_layer - 1; l >= 0; l--) {
            Block& block = blocks_[l];
            std::string h = "h." + std::to_string(l) + ".";
            linear_backward(dfc, h + "mlp.c_proj", block.fc, dresidual, &block.pre_activation);
            linear_backward(dnorm, h + "mlp.c_fc", block.norm2.out, dfc);
            norm_backward(dresidual, h + "ln_2", block.norm2, dnorm, true);
            linear_backward(dattn, h + "attn.c_proj", block.attn, dresidual);
            attention_backward(dqkv, block, dattn);
            linear_backward(dnorm, h + "attn.c_attn", block.norm1.out, dqkv);
            norm_backward(dresidual, h + "ln_1", block.norm1, dnorm, true);
        }
        ref::embedding_backward(ops::EmbeddingBackward{.dwte = parameters.gradient("wte.weight"),
                                                       .dwpe = parameters.gradient("wpe.weight"),
                                                       .scratch = nullptr,
                                                       .dout = dresidual.data(),
                                                       .tokens = tokens,
                                                       .batch = r_.batch_size,
                                                       .seq_len = r_.seq_len,
                                                       .channels = channels_,
                                                       .vocab = r_.vocab_size,
                                                       .n_positions = r_.n_positions,
                                                       .accumulate = accumulate});
    }

    // All micro-steps of a step (counted from 0). Returns the step's loss.
    double accumulate_gradients(int step) {
        double sum = 0;
        for (int micro_step = 0; micro_step < r_.micro_steps; micro_step++) {
            forward(r_.tokens(step, micro_step));
            sum += loss(r_.targets(step, micro_step));
            backward(r_.tokens(step, micro_step), micro_step > 0);
        }
        return sum;
    }

private:
    // branch null: out = norm(residual); otherwise inp = residual + branch, out = norm(inp).
    void norm_forward(Norm& norm, const std::string& name, const Floats& residual, const Floats* branch) {
        norm.inp = residual, norm.out.resize(residual.size()), norm.mean.resize(rows_), norm.rstd.resize(rows_);
        const float *weight = parameters.weight(name + ".weight"), *bias = parameters.weight(name + ".bias");
        ref::residual_norm_forward(ops::ResidualNormForward{.residual = branch ? View(norm.inp.data()) : View(),
                                                            .out = norm.out.data(),
                                                            .mean = norm.mean.data(),
                                                            .rstd = norm.rstd.data(),
                                                            .inp = residual.data(),
                                                            .branch = branch ? ConstView(branch->data()) : ConstView(),
                                                            .weight = weight,
                                                            .bias = bias,
                                                            .rows = rows_,
                                                            .cols = channels_,
                                                            .eps = 1e-5f});
    }

    void norm_backward(Floats& dinp, const std::string& name, const Norm& norm, const Floats& dout,
                       bool accumulate_dinp) {
        ref::norm_backward(ops::NormBackward{.dinp = dinp.data(),
                                             .dweight = parameters.gradient(name + ".weight"),
                                             .dbias = parameters.gradient(name + ".bias"),
                                             .scratch = nullptr,
                                             .dout = dout.data(),
                                             .inp = norm.inp.data(),
                                             .weight = parameters.weight(name + ".weight"),
                                             .mean = norm.mean.data(),
                                             .rstd = norm.rstd.data(),
                                             .rows = rows_,
                                             .cols = channels_,
                                             .accumulate_dinp = accumulate_dinp,
                                             .accumulate = accumulate_});
    }

    static ActivationFunction activation_of(const Floats* pre_activation) {
        return pre_activation ? ActivationFunction::gelu_new : ActivationFunction::none;
    }

    // The head is tied to "wte" and has no bias.
    void linear_forward(Floats& out, const std::string& name, const Floats& inp, Floats* pre_activation = nullptr) {
        const Parameters::Place& place = parameters.places.at(name + ".weight");
        out.resize(rows_ * place.rows);
        if (pre_activation) pre_activation->resize(out.size());
        ref::matmul_forward(ops::MatmulForward{.out = out.data(),
                                               .pre_activation = pre_activation ? pre_activation->data() : nullptr,
                                               .inp = inp.data(),
                                               .weight = parameters.weight(name + ".weight"),
                                               .bias = name == "wte" ? nullptr : parameters.weight(name + ".bias"),
                                               .rows = rows_,
                                               .n = int(place.rows),
                                               .k = int(place.cols),
                                               .activation = activation_of(pre_activation)});
    }

    void linear_backward(Floats& dinp, const std::string& name, const Floats& inp, const Floats& dout,
                         const Floats* pre_activation = nullptr) {
        const Parameters::Place& place = parameters.places.at(name + ".weight");
        dinp.resize(rows_ * place.cols);
        ref::matmul_backward_weight(
            ops::MatmulBackwardWeight{.dweight = parameters.gradient(name + ".weight"),
                                      .dbias = name == "wte" ? nullptr : parameters.gradient(name + ".bias"),
                                      .scratch = nullptr,
                                      .dout = dout.data(),
                                      .inp = inp.data(),
                                      .rows = rows_,
                                      .n = int(place.rows),
                                      .k = int(place.cols),
                                      .accumulate = accumulate_});
        ref::matmul_backward_input(ops::MatmulBackwardInput{.dinp = dinp.data(),
                                                            .dout = dout.data(),
                                                            .weight = parameters.weight(name + ".weight"),
                                                            .kept = pre_activation ? pre_activation->data() : nullptr,
                                                            .rows = rows_,
                                                            .n = int(place.rows),
                                                            .k = int(place.cols),
                                                            .activation = activation_of(pre_activation)});
    }

    float attention_scale() const { return float(1 / std::sqrt(channels_ / r_.n_head)); }

    void attention_forward(Block& block) {
        block.attn.resize(size_t(rows_) * channels_), block.lse.resize(size_t(rows_) * r_.n_head);
        ref::attention_forward(ops::AttentionForward{.out = block.attn.data(),
                                                     .lse = block.lse.data(),
                                                     .qkv = block.qkv.data(),
                                                     .batch = r_.batch_size,
                                                     .seq_len = r_.seq_len,
                                                     .n_head = r_.n_head,
                                                     .n_kv_head = r_.n_head,
                                                     .head_size = channels_ / r_.n_head,
                                                     .scale = attention_scale()});
    }

    void attention_backward(Floats& dqkv, const Block& block, const Floats& dout) {
        dqkv.resize(block.qkv.size());
        ref::attention_backward(ops::AttentionBackward{.dqkv = dqkv.data(),
                                                       .scratch = nullptr,
                                                       .dout = dout.data(),
                                                       .qkv = block.qkv.data(),
                                                       .out = block.attn.data(),
                                                       .lse = block.lse.data(),
                                                       .batch = r_.batch_size,
                                                       .seq_len = r_.seq_len,
                                                       .n_head = r_.n_head,
                                                       .n_kv_head = r_.n_head,
                                                       .head_size = channels_ / r_.n_head,
                                                       .scale = attention_scale()});
    }

    const TorchReference& r_;
    int rows_, channels_;
    bool accumulate_ = false;
    std::vector<Block> blocks_;
    Norm norm_f_;
};

void check_tensors(const ReferenceGpt& gpt, const TorchReference& torch, const std::string& group, const Floats& flat) {
    for (const auto& [name, place] : gpt.parameters.places) {
        double error = torch_error(torch, group, name, gpt.parameters.hugging_face(flat, name));
        INFO(group << " of " << name << " is off by " << error);
        CHECK(error <= kTolerance);
    }
}

bool agrees(double ours, double theirs) { return std::abs(ours - theirs) <= kTolerance * std::abs(theirs); }

// Constants of make_reference.py.
constexpr float kClip = 1, kWeightDecay = 0.1f;

ops::GradNorm grad_norm(const Parameters& p) {
    std::vector<double> sums(p.places.size());
    float loss_scale = 1;
    ops::GradNorm norm;
    ref::squared_sums({sums.data(), p.grad.data(), p.chunks.data(), int(p.chunks.size())});
    ref::grad_norm_finish({&norm, sums.data(), &loss_scale, int(sums.size()), kClip});
    return norm;
}

// A step of an optimizer with the constants of make_reference.py: of group 0, matrices, or 1, vectors.
void optimizer_step(Parameters& p, const ops::GradNorm& norm, const TorchOptimizer& optimizer, int step) {
    std::vector<ops::UpdateScalars> scalars;
    for (const double decay : {double(kWeightDecay), 0.0})
        scalars.push_back(update_scalars(optimizer.settings(), {optimizer.kind, decay}, optimizer.learning_rate, step));
    const bool has_v = optimizer_row(optimizer.kind).slots.size() > 1;
    ref::elementwise_update({.rule = optimizer.kind,
                             .master = p.master.data(),
                             .param = nullptr,
                             .state = {p.m.data(), has_v ? p.v.data() : nullptr},
                             .grad = p.grad.data(),
                             .chunks = p.chunks.data(),
                             .scalars = scalars.data(),
                             .grad_norm = &norm,
                             .n_chunks = int(p.chunks.size())});
}

void check_training(const TorchReference& torch, const TorchOptimizer& optimizer) {
    const std::string& group = optimizer.group;
    ReferenceGpt gpt(torch);
    for (int step = 0; step < torch.steps; step++) {
        INFO(group << " step " << step);
        CHECK(agrees(gpt.accumulate_gradients(step), torch.output(group + "/loss").values[step]));
        ops::GradNorm norm = grad_norm(gpt.parameters);
        CHECK(agrees(norm.norm, torch.output(group + "/grad_norm").values[step]));
        optimizer_step(gpt.parameters, norm, optimizer, step + 1);
    }
    check_tensors(gpt, torch, group, gpt.parameters.master);
}

}  // namespace

TEST_CASE("ref:: agrees with PyTorch: logits, loss and every gradient", "[reference]") {
    for (const std::string& name : kTorchReferences) {
        INFO(name);
        TorchReference torch = load_torch_reference(name);
        ReferenceGpt gpt(torch);
        gpt.forward(torch.tokens(0, 0));
        CHECK(torch_error(torch, "first", "logits", gpt.logits) <= kTolerance);
        CHECK(agrees(gpt.accumulate_gradients(0), torch.output("first/loss").values[0]));
        check_tensors(gpt, torch, "gradient", gpt.parameters.grad);
    }
}

TEST_CASE("ref:: agrees with PyTorch: five steps of each optimizer", "[reference]") {
    for (const std::string& name : kTorchReferences) {
        INFO(name);
        TorchReference torch = load_torch_reference(name);
        for (const TorchOptimizer& optimizer : kTorchOptimizers)
            if (torch.has(optimizer.group)) check_training(torch, optimizer);
    }
}
