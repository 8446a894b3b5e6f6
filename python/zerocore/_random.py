"""Random numbers by name: (seed, step, micro-batch, forward index) says what a forward draws, not its rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea & Flood 2014): a bijection of 64 bits in which every bit matters."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def named_seed(*names: int) -> int:
    """A 64-bit seed from a tuple of integers."""
    state = 0
    for name in names:
        state = _mix(state ^ (name & _MASK))
    return state


@contextlib.contextmanager
def named_generator(*names: int) -> Iterator[None]:
    """Seeds the CPU generator by `names` for the block; after it the user's goes on as if nothing had been drawn."""
    generator = torch.default_generator
    saved = generator.get_state()
    generator.manual_seed(named_seed(*names))
    try:
        yield
    finally:
        generator.set_state(saved)
