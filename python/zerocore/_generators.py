"""The states of this process's random generators, as tensors of bytes."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from zerocore.errors import CheckpointError


def generator_states() -> dict[str, torch.Tensor]:
    """The states of the random generators that users draw from, as bytes."""
    version, internal, gauss = random.getstate()
    states = {"torch": torch.get_rng_state(), "python": _bytes_of([version, list(internal), gauss])}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = _bytes_of([kind, keys.tolist(), *rest])
    return states


def _bytes_of(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def restore_generators(states: Mapping[str, torch.Tensor]) -> None:
    """Sets this process's random generators as generator_states() found them.

    Raises:
        CheckpointError: that is no state of such a generator.
    """
    before = generator_states()
    try:
        for name, state in states.items():
            _restore_generator(name, state)
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError, OverflowError) as error:
        for name, state in before.items():
            _restore_generator(name, state)
        raise CheckpointError(f"[ckpt] rng/{name}: got no state of such a generator ({error}).") from None


def _restore_generator(name: str, state: torch.Tensor) -> None:
    if name == "torch":
        torch.set_rng_state(state)
        return
    if name == "cuda":
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.set_rng_state(state)
        return
    value = json.loads(bytes(state.tolist()))
    if name == "python":
        random.setstate((value[0], tuple(value[1]), value[2]))
    elif name == "numpy" and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(tuple(value))
