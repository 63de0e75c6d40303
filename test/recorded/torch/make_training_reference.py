#!/usr/bin/env python3
"""Writes test/recorded/torch/trained.safetensors: 20 steps of torch.optim's rules on three of the recorded models.

    pip install torch==2.15.* transformers==5.* && python3 test/recorded/torch/make_training_reference.py

    MODEL/RULE              the weights after STEPS steps: elements 0, STRIDE, 2 STRIDE ... of each flattened tensor,
                            one tensor after the other in the order of model.safetensors; without GPT-2's key biases,
                            whose gradient is 0 except for rounding errors
    MODEL/RULE/loss         (STEPS): before each update
    MODEL/RULE/grad_norm    (STEPS): before clipping
    MODEL/RULE/fp32_error   (3): of the weights, losses and norms, the relative error that FP32 causes: the largest of
                            FP32_RUNS runs in FP32, each with initial weights that differ by one unit in the last place
Each model begins with its model.safetensors and trains on the batches of its outputs.safetensors, over and over. The
rules and their settings are make_reference.py's OPTIMIZERS; matrices have weight decay, vectors do not.

The first model also has runs of torch.optim.Muon with the settings MUON. It trains the matrices in the blocks, each
with nn.Linear's orientation, (out, in), and with query, key and value as separate matrices. AdamW with the settings
MUON_ADAMW trains everything else; both have weight decay WEIGHT_DECAY for matrices and 0 for vectors.
    muon                    adjust_lr_fn None: the learning rate is multiplied by sqrt(max(1, rows / columns))
    muon_adamw_rms          adjust_lr_fn "match_rms_adamw": multiplied by 0.2 sqrt(max(rows, columns))
    muon_fp64, muon_adamw_rms_fp64   the same with Newton-Schulz iterations in double precision instead of BF16

All three models also have the group "adafactor", runs of torch.optim.Adafactor with the matrices of Muon: GPT-2's
query, key and value are separate. eps is that of FP32, whatever the precision of the run.

Everything else computes in double precision, so that the recorded values are exact results rounded to FP32. The seeds
determine everything except fp32_error, which depends on the CPU.
"""
from pathlib import Path

import make_family_reference
import make_reference
import torch
import transformers
from make_reference import GRAD_CLIP, OPTIMIZERS, SHAPES, WEIGHT_DECAY, write_safetensors
from safetensors.torch import load_file, safe_open

HERE = Path(__file__).resolve().parent
STEPS, STRIDE, FP32_RUNS = 20, 61, 5
GPT2 = SHAPES[0]
FAMILIES = ("llama_3to1", "qwen3_yarn")
MUON = dict(lr=0.01, weight_decay=WEIGHT_DECAY, momentum=0.95, nesterov=True)
MUON_ADAMW = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
ADAFACTOR = dict(eps=(torch.finfo(torch.float).eps, 1e-3))
MUON_RULES = {"muon": None, "muon_adamw_rms": "match_rms_adamw"}  # adjust_lr_fn
NEWTON_SCHULZ_BF16 = torch.optim._muon._zeropower_via_newtonschulz


def newton_schulz(gradient, coefficients, steps, eps):
    """Returns what torch.optim.Muon's function computes, but in the gradient's precision."""
    a, b, c = coefficients
    is_tall = gradient.size(0) > gradient.size(1)
    x = gradient.T if is_tall else gradient
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


class Recorded:
    """The weights in the file's order, and tokens and targets (batches, batch_size, seq_len)."""

    def __init__(self, directory, dtype, generator):
        outputs = load_file(directory / "outputs.safetensors")
        self.tokens, self.targets = (outputs[name].flatten(0, -3).long() for name in ("tokens", "targets"))
        with safe_open(directory / "model.safetensors", "pt") as file:
            self.weights = {name: file.get_tensor(name) for name in file.offset_keys()}
        for name, weight in self.weights.items():
            if generator:
                signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
                weight = torch.nextafter(weight, signs * torch.inf)
            self.weights[name] = weight.to(dtype)

    def parameters(self):
        return {name: weight.clone().requires_grad_() for name, weight in self.weights.items()}

    def train(self, parameters, optimizers, logits_of):
        """Returns the losses and gradient norms."""
        losses, norms = [], []
        for step in range(STEPS):
            batch = step % len(self.tokens)
            for optimizer in optimizers:
                optimizer.zero_grad()
            logits = logits_of(self.tokens[batch])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.targets[batch].flatten())
            loss.backward()
            losses.append(loss.item())
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, GRAD_CLIP).item())
            for optimizer in optimizers:
                optimizer.step()
        return torch.tensor(losses, dtype=torch.double), torch.tensor(norms, dtype=torch.double)

    def kept(self, tensors):
        """Returns the elements that the file contains."""
        parts = []
        for name in self.weights:
            indices = torch.arange(0, tensors[name].numel(), STRIDE)
            if name.endswith("c_attn.bias"):
                indices = indices[indices // GPT2.n_embd != 1]  # without keys
            parts.append(tensors[name].detach().flatten()[indices])
        return torch.cat(parts).double()


def groups_of(parameters):
    return [dict(params=[p for p in parameters if p.dim() > 1], weight_decay=WEIGHT_DECAY),
            dict(params=[p for p in parameters if p.dim() == 1], weight_decay=0.0)]


def with_linear_matrices(weights):
    """Returns the parameters of a run with Muon: of GPT-2's Conv1D weights (in, out), the matrices (out, in)."""
    parameters = {}
    for name, weight in weights.items():
        if not name.startswith("h.") or weight.dim() == 1:
            parameters[name] = weight.clone().requires_grad_()
            continue
        for i, matrix in enumerate(weight.T.chunk(3 if name.endswith("c_attn.weight") else 1)):
            parameters[f"{name}/{i}"] = matrix.clone().requires_grad_()
    return parameters


def with_conv1d(parameters, names):
    """Returns the reverse of with_linear_matrices()."""
    return {name: parameters[name] if name in parameters else
            torch.cat([parameters[f"{name}/{i}"] for i in range(3) if f"{name}/{i}" in parameters]).T
            for name in names}


def gpt2_runs(dtype, generator):
    """Returns the kept weights, losses and norms of each rule."""
    model, runs = Recorded(HERE / GPT2.name, dtype, generator), {}
    for rule, make_optimizer in OPTIMIZERS.items():
        parameters = model.parameters()
        run = model.train(parameters.values(), [make_optimizer(groups_of(parameters.values()))],
                          lambda tokens: make_reference.gpt2(GPT2, parameters, tokens))
        runs[f"{GPT2.name}/{rule}"] = model.kept(parameters), *run
    parameters = with_linear_matrices(model.weights)
    run = model.train(parameters.values(), [torch.optim.Adafactor(groups_of(parameters.values()), **ADAFACTOR)],
                      lambda tokens: make_reference.gpt2(GPT2, with_conv1d(parameters, model.weights), tokens))
    runs[f"{GPT2.name}/adafactor"] = model.kept(with_conv1d(parameters, model.weights)), *run
    for rule, adjust_lr_fn in MUON_RULES.items():
        for suffix, function in {"": NEWTON_SCHULZ_BF16, "_fp64": newton_schulz}.items():
            torch.optim._muon._zeropower_via_newtonschulz = function
            parameters = with_linear_matrices(model.weights)
            matrices = [p for name, p in parameters.items() if "/" in name]
            others = [p for name, p in parameters.items() if "/" not in name]
            optimizers = [torch.optim.Muon(matrices, **MUON, adjust_lr_fn=adjust_lr_fn),
                          torch.optim.AdamW(groups_of(others), **MUON_ADAMW)]
            run = model.train(
                parameters.values(), optimizers,
                lambda tokens: make_reference.gpt2(GPT2, with_conv1d(parameters, model.weights), tokens))
            runs[f"{GPT2.name}/{rule}{suffix}"] = model.kept(with_conv1d(parameters, model.weights)), *run
    return runs


def family_runs(name, dtype, generator):
    """The same for a model of transformers."""
    directory, runs = make_family_reference.HERE / name, {}
    recorded = Recorded(directory, dtype, generator)
    config = transformers.AutoConfig.from_pretrained(directory, attn_implementation="eager")
    rules = OPTIMIZERS | {"adafactor": lambda groups: torch.optim.Adafactor(groups, **ADAFACTOR)}
    for rule, make_optimizer in rules.items():
        model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
        model.load_state_dict(recorded.weights)
        parameters = dict(model.named_parameters())
        run = recorded.train(parameters.values(), [make_optimizer(groups_of(parameters.values()))],
                             lambda tokens: model(input_ids=tokens, use_cache=False).logits)
        runs[f"{name}/{rule}"] = recorded.kept(parameters), *run
    return runs


def all_runs(dtype, generator=None):
    runs = gpt2_runs(dtype, generator)
    for name in FAMILIES:
        runs |= family_runs(name, dtype, generator)
    return runs


def errors(run, exact):
    (weights, losses, norms), (exact_weights, exact_losses, exact_norms) = run, exact
    return torch.stack([(weights - exact_weights).norm() / exact_weights.norm(),
                        (losses / exact_losses - 1).abs().max(), (norms / exact_norms - 1).abs().max()])


def main():
    torch.set_num_threads(1)
    exact = all_runs(torch.double)
    fp32 = [all_runs(torch.float, torch.Generator().manual_seed(seed)) for seed in range(FP32_RUNS)]
    result = {}
    for group, run in exact.items():
        result[group], result[group + "/loss"], result[group + "/grad_norm"] = run
        worst = torch.stack([errors(runs[group], run) for runs in fp32]).amax(0)
        result[group + "/fp32_error"] = worst
        print(f"{group}: loss {run[1][0]:.4f} to {run[1][-1]:.4f}, errors {', '.join(f'{e:.1e}' for e in worst)}")
    for rule in MUON_RULES:
        bf16, fp64 = (exact[f"{GPT2.name}/{rule}{suffix}"] for suffix in ("", "_fp64"))
        print(f"{rule}: errors of BF16 iterations {', '.join(f'{e:.1e}' for e in errors(bf16, fp64))}")
    write_safetensors(HERE / "trained.safetensors", result)


main()
