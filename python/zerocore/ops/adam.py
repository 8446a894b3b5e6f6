"""DeepSpeed's names for Adam. Each makes a torch optimizer, whose native twin the engine runs, on shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from zerocore.errors import UnsupportedError

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


def FusedAdam(  # noqa: N802
    params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """AdamW; with adam_w_mode=False Adam, whose weight decay is part of the gradient.

    Raises:
        UnsupportedError: amsgrad.
    """
    if amsgrad:
        raise UnsupportedError("[optimizer] FusedAdam: got amsgrad=True, expected False. Leave it out.")
    cls = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    optimizer = cls(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    for group in optimizer.param_groups:
        group.setdefault("bias_correction", bias_correction)
    return optimizer


def DeepSpeedCPUAdam(  # noqa: N802
    model_params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """As FusedAdam: parameters and optimizer are on the same device here.

    Raises:
        UnsupportedError: amsgrad, or optimizer states in 16 bits.
    """
    if not fp32_optimizer_states:
        raise UnsupportedError(
            "[optimizer] DeepSpeedCPUAdam: got fp32_optimizer_states=False, expected True. Leave it out."
        )
    return FusedAdam(
        model_params,
        lr=lr,
        bias_correction=bias_correction,
        betas=betas,
        eps=eps,
        adam_w_mode=adamw_mode,
        weight_decay=weight_decay,
        amsgrad=amsgrad,
    )
