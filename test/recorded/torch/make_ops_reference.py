#!/usr/bin/env python3
"""Writes ops.json: PyTorch's double-precision results of the ops that GPT-2 does not use.

    python3 test/recorded/torch/make_ops_reference.py            (needs torch 2.4 or newer for rms_norm)

The file has a list of cases for each of "rms_norm", "gated", "product" and "cross_entropy": the inputs, the output, and
the gradients of the sum of dout * out by autograd. One seed determines everything.
"""
import json
from pathlib import Path

import torch
from torch.nn import functional

torch.set_default_dtype(torch.float64)
GENERATOR = torch.Generator().manual_seed(12)
ACTIVATIONS = {"gelu_new": lambda x: functional.gelu(x, approximate="tanh"), "silu": functional.silu,
               "relu2": lambda x: functional.relu(x).square()}


def random(*shape, width=1.0):
    return (width * torch.randn(*shape, generator=GENERATOR)).requires_grad_()


def flat(tensors):
    return {name: None if tensor is None else tensor.detach().flatten().tolist() for name, tensor in tensors.items()}


def case(out, inputs, **rest):
    """Returns a case with `inputs` by name and their gradients; inputs may be None."""
    dout = torch.randn(*out.shape, generator=GENERATOR)
    (out * dout).sum().backward()
    gradients = {"d" + name: tensor.grad for name, tensor in inputs.items() if tensor is not None}
    return {**rest, **flat({**inputs, **gradients, "out": out, "dout": dout})}


def rms_norm(rows, cols, eps, has_weight):
    inp, weight = random(rows, cols, width=2), random(cols) if has_weight else None
    return case(functional.rms_norm(inp, (cols,), weight, eps), {"inp": inp, "weight": weight}, rows=rows, cols=cols,
                eps=eps)


def gated(activation, rows, hidden):
    inp = random(rows, 2 * hidden, width=2)
    gate, up = inp.chunk(2, dim=-1)
    return case(ACTIVATIONS[activation](gate) * up, {"inp": inp}, activation=activation, rows=rows, hidden=hidden)


def product(activation, rows, k, hidden, n):
    """An MLP without a gate: out = f(inp first^T) second^T."""
    inp, first, second = random(rows, k), random(hidden, k), random(n, hidden)
    out = functional.linear(ACTIVATIONS[activation](functional.linear(inp, first)), second)
    return case(out, {"inp": inp, "first": first, "second": second}, activation=activation, rows=rows, k=k,
                hidden=hidden, n=n)


def cross_entropy(rows, vocab, softcap, z_loss):
    logits = random(rows, vocab, width=4)
    targets = torch.randint(vocab, (rows,), generator=GENERATOR)
    capped = softcap * torch.tanh(logits / softcap) if softcap else logits
    loss = functional.cross_entropy(capped, targets, reduction="none")
    (loss + z_loss * torch.logsumexp(capped, -1).square()).sum().backward()
    return {"rows": rows, "vocab": vocab, "softcap": softcap, "z_loss": z_loss, "targets": targets.tolist(),
            **flat({"logits": logits, "loss": loss, "dlogits": logits.grad})}


def main():
    cases = {
        "rms_norm": [rms_norm(3, 7, 0.25, True), rms_norm(2, 5, 1 / 1024, False)],
        "gated": [gated(name, 2, 5) for name in ACTIVATIONS],
        "product": [product(name, 3, 4, 5, 2) for name in ACTIVATIONS],
        "cross_entropy": [cross_entropy(3, 7, softcap, z_loss) for softcap, z_loss in
                          ((0, 0), (2.5, 0), (0, 0.125), (16, 0.0625))],
    }
    text = json.dumps(cases).replace("}, {", "},\n {").replace("], \"", "],\n  \"")
    (Path(__file__).parent / "ops.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
