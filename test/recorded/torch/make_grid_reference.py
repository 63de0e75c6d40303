#!/usr/bin/env python3
"""Writes test/recorded/torch/grids.json: 20 steps of AdamW on the models of grid_models.py, which test_grid_torch.py
trains on grids of ranks.

    pip install torch==2.15.* transformers==5.* && python3 test/recorded/torch/make_grid_reference.py

Of each model:
    loss            of each step, before the update
    grad_norm       of each step, before clipping
    fp32_error      the relative errors of losses and norms in FP32: the largest of RUNS runs, each with initial weights
                    that differ by one unit in the last place
    bf16_error      the same with BF16 weights and activations, as train.precision "bf16" has: the weights are rounded
                    from FP32 in each step, and the loss is in FP32

A step is over the whole text. loss and grad_norm are of runs in double precision. transformers casts to FP32 in norms,
in softmax and for rotary positions; in these runs the casts are to double precision. The seeds determine everything
except the errors, which depend on the CPU.
"""
import contextlib
import json
from pathlib import Path
from unittest import mock

import grid_models
import torch
import transformers
from grid_models import BETAS, EPS, GRAD_CLIP, LEARNING_RATE, MODELS, SEQ_LEN, STEPS, VOCABULARY, WEIGHT_DECAY

HERE = Path(__file__).resolve().parent
RUNS = 5


@contextlib.contextmanager
def double_instead_of_float():
    with mock.patch.object(torch, "float32", torch.float64), mock.patch.object(torch, "float", torch.float64), \
            mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def initial_weights(name, generator):
    """Returns the weights of grid_models.py; with a generator, each differs by one unit in the last place."""
    weights = {}
    for key, (shape, values) in grid_models.weights_of(name).items():
        weight = torch.frombuffer(bytearray(values), dtype=torch.float32).view(shape)
        if generator:
            signs = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
            weight = torch.nextafter(weight, signs * torch.inf)
        weights[key] = weight
    return weights


def train(name, weights, dtype, is_bf16=False):
    """Returns the losses and the gradient norms."""
    kind, arguments = MODELS[name]
    config = transformers.AutoConfig.for_model(name, vocab_size=VOCABULARY, attn_implementation="eager", **arguments)
    model = getattr(transformers, kind)(config).to(dtype).eval()
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys(), parameters.keys() ^ weights.keys()
    with torch.no_grad():
        for key, parameter in parameters.items():
            parameter.copy_(weights[key])
    optimizer = torch.optim.AdamW(
        [dict(params=[p for p in parameters.values() if p.dim() > 1], weight_decay=WEIGHT_DECAY),
         dict(params=[p for p in parameters.values() if p.dim() == 1], weight_decay=0.0)],
        lr=LEARNING_RATE, betas=BETAS, eps=EPS)
    tokens = torch.tensor(grid_models.text())
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        computed = {key: p.bfloat16() if is_bf16 else p for key, p in parameters.items()}
        logits = torch.func.functional_call(
            model, computed, kwargs=dict(input_ids=tokens[:-1].view(-1, SEQ_LEN), use_cache=False)).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).to(dtype), tokens[1:])
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), GRAD_CLIP).item())
        optimizer.step()
    return losses, norms


def largest_errors(runs, exact):
    """Returns the largest relative error of a loss and of a norm."""
    return {key: float(f"{max(abs(a / b - 1) for run in runs for a, b in zip(run[i], exact[i])):.1e}")
            for i, key in enumerate(("loss", "grad_norm"))}


def main():
    torch.set_num_threads(1)
    result = {}
    for name in MODELS:
        weights = initial_weights(name, None)
        with double_instead_of_float():
            exact = train(name, weights, torch.float64)
        neighbors = [initial_weights(name, torch.Generator().manual_seed(seed)) for seed in range(RUNS)]
        result[name] = {"loss": exact[0], "grad_norm": exact[1]}
        for precision in ("fp32", "bf16"):
            runs = [train(name, weights, torch.float32, precision == "bf16") for weights in neighbors]
            result[name][f"{precision}_error"] = largest_errors(runs, exact)
        print(name, result[name])
    (HERE / "grids.json").write_text(json.dumps(result, indent=1) + "\n")


main()
