"""The smallest model there is: one weight, whose gradient and update are closed-form."""

from __future__ import annotations

import torch


def config(**changes):
    """DeepSpeed's JSON for plain SGD with lr 0.5, stage 2, no clipping; `changes` replaces top-level keys."""
    base = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2},
    }
    return base | changes


def one_weight(value=8.0):
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(value)
    return model


def train(engine, factor, *, steps=1):
    """The gradient of the weight is `factor`."""
    for _ in range(steps):
        engine.backward(engine(torch.full((1, 1), float(factor))).sum())
        engine.step()
