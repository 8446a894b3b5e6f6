"""Ranks must build the same engine: says which setting or parameter differs, before anything can hang."""

from __future__ import annotations

import hashlib
import json

import torch

from zerocore import _core
from zerocore._exchange import gather_json
from zerocore._optimizer import Optimizer, plain_settings
from zerocore.config import ResolvedConfig
from zerocore.errors import ConfigError


def description(*, config: ResolvedConfig, model: torch.nn.Module, optimizer: Optimizer) -> list[str]:
    """What an engine is made of, a line a fact, in an order that is the same on all ranks."""
    lines = [f"config {line}" for line in config.describe().splitlines()]
    lines += [
        f"parameter {name}: {tuple(p.shape)} {p.dtype} {'trainable' if p.requires_grad else 'frozen'}, "
        f"strides {p.stride()}"
        for name, p in model.named_parameters()
    ]
    lines += [f"buffer {name}: {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    lines.append(f"optimizer: {optimizer.type}")
    for index, group in enumerate(optimizer.param_groups):
        settings = dict(sorted(plain_settings(group).items()))
        lines.append(f"optimizer group {index}: {len(group['params'])} parameters, {settings}")
    return lines


def check_agreement(
    comm: _core.Communicator, *, config: ResolvedConfig, model: torch.nn.Module, optimizer: Optimizer
) -> None:
    """Compares the description across ranks. Collective.

    Raises:
        ConfigError: on every rank, with the first line that differs and what each rank has there.
    """
    lines = description(config=config, model=model, optimizer=optimizer)
    text = json.dumps(lines).encode()
    digests = comm.gather_bytes(hashlib.sha256(text).digest(), "compare config and model")
    if len(set(digests)) == 1:
        return
    by_rank = gather_json(comm, lines, "find the difference")
    for position in range(max(len(each) for each in by_rank)):
        here = [each[position] if position < len(each) else "(nothing)" for each in by_rank]
        if len(set(here)) > 1:
            listing = "; ".join(f"rank {rank} has {line}" for rank, line in enumerate(here[:8]))
            raise ConfigError(
                f"[engine] ranks differ in config or model: {listing}. All ranks must build the same model with the "
                "same config."
            )
