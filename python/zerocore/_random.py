"""Random numbers by name: (seed, step, micro-batch, forward index) says what a forward draws, not its rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_MASK = (1 << 64) - 1
_CPU = torch.device("cpu")


GOLDEN = 0x9E3779B97F4A7C15  # what splitmix64 adds before each call of the below


def mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea & Flood 2014): a bijection of 64 bits in which every bit matters."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def named_seed(*names: int) -> int:
    """A 64-bit seed from a tuple of integers."""
    state = 0
    for name in names:
        state = mix((state ^ (name & _MASK)) + GOLDEN)
    return state


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Those that operations on a device draw from: the CPU's, and the device's own."""
    own = [torch.cuda.default_generators[device.index]] if device.type == "cuda" else []
    return [torch.default_generator, *own]


@contextlib.contextmanager
def named_generator(*names: int, device: torch.device = _CPU) -> Iterator[None]:
    """Seeds the generators of a device by `names` for the block; after it the user's go on as if nothing was drawn."""
    generators = default_generators(device)
    saved = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(named_seed(*names))
    try:
        yield
    finally:
        for generator, state in zip(generators, saved, strict=True):
            generator.set_state(state)
