#!/usr/bin/env python3
"""Writes test/recorded/torch/optimizers.safetensors: 20 steps of torch.optim with given gradients, in double precision.

    python3 test/recorded/torch/make_optimizer_reference.py            (PyTorch 2.15)

    weights             (COUNT): the weights before the first step
    gradients           (STEPS, COUNT)
    RULE                (COUNT): the weights after the last step
Gradients and weights are FP32 numbers, the results are rounded to FP32. Weight decay applies to the first half.
"""
from pathlib import Path

import torch
from make_reference import write_safetensors

STEPS, COUNT, SEED, DECAY = 20, 512, 9, 0.1
RULES = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-2),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-2),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
}


def main():
    generator = torch.Generator().manual_seed(SEED)
    weights = torch.randn(COUNT, generator=generator)
    # Gradients of different sizes, and some that are zero.
    scales = 10 ** torch.randint(-4, 2, (COUNT,), generator=generator).float()
    gradients = torch.randn(STEPS, COUNT, generator=generator) * scales
    gradients[:, ::17] = 0
    result = {"weights": weights, "gradients": gradients}
    for name, make_optimizer in RULES.items():
        decayed, others = (half.double().clone() for half in weights.chunk(2))
        optimizer = make_optimizer([dict(params=[decayed], weight_decay=DECAY), dict(params=[others], weight_decay=0)])
        for gradient in gradients.double():
            decayed.grad, others.grad = gradient.chunk(2)
            optimizer.step()
        result[name] = torch.cat([decayed, others]).float()
    write_safetensors(Path(__file__).with_name("optimizers.safetensors"), result)


main()
