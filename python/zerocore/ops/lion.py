"""DeepSpeed's names for Lion, which torch has none of. The engine runs the native twin, on shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from zerocore.errors import UnsupportedError

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class FusedLion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, algorithm 2): steps by the sign of an interpolated momentum; weight decay is decoupled.

    Handed to an engine it stands for the native optimizer. Its own step(), in plain torch, is for use without one.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of each parameter that has a gradient; returns what `closure`, called before, gives."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                momentum = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.sub_(group["lr"] * torch.lerp(param.grad, momentum, beta1).sign())
                momentum.lerp_(param.grad, 1 - beta2)
        return loss


def DeepSpeedCPULion(  # noqa: N802
    model_params: Iterable[Any],
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    fp32_optimizer_states: bool = True,
) -> FusedLion:
    """As FusedLion: parameters and optimizer are on the same device here.

    Raises:
        UnsupportedError: optimizer states in 16 bits.
    """
    if not fp32_optimizer_states:
        raise UnsupportedError(
            "[optimizer] DeepSpeedCPULion: got fp32_optimizer_states=False, expected True. Leave it out."
        )
    return FusedLion(model_params, lr=lr, betas=betas, weight_decay=weight_decay)
