"""DeepSpeed's name for Adagrad. It makes torch's optimizer, whose native twin the engine runs, on shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zerocore.errors import UnsupportedError

__all__ = ["DeepSpeedCPUAdagrad"]


def DeepSpeedCPUAdagrad(  # noqa: N802
    model_params: Iterable[Any],
    lr: float = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """Adagrad, whose weight decay is part of the gradient.

    Raises:
        UnsupportedError: amsgrad, or optimizer states in 16 bits.
    """
    for name, got, expected in (("amsgrad", amsgrad, False), ("fp32_optimizer_states", fp32_optimizer_states, True)):
        if got != expected:
            raise UnsupportedError(
                f"[optimizer] DeepSpeedCPUAdagrad: got {name}={got}, expected {expected}. Leave it out."
            )
    return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
