"""The batch triple: train_batch_size, micro_batch_size and gradient_accumulation_steps for a number of ranks.

A step has M = train_batch_size / micro_batch_size micro-batches. They are dealt to N ranks in turn, so a rank goes
through gas = ceil(M / N) of them; where N does not divide M, the last ranks have one less.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from zerocore.config._problems import config_error, show
from zerocore.errors import ConfigError

_SEARCHED = 100_000  # sizes below one that does not divide, for those that would


class Batch(NamedTuple):
    """A complete triple, and M."""

    train_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int
    micro_batches: int


def resolve_batch(
    *,
    train_batch_size: int | None,
    micro_batch_size: int | None,
    gradient_accumulation_steps: int | None,
    world_size: int,
) -> Batch:
    """Completes the triple by the rules of Config.resolve.

    Raises:
        ConfigError: it is incomplete, does not divide, or contradicts itself; the message says what would fit.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise config_error([f"world_size: got {show(world_size)}, expected a number of ranks >= 1."])
    total, micro, gas, ranks = train_batch_size, micro_batch_size, gradient_accumulation_steps, world_size
    if total is None and micro is None:
        got = "no batch size" if gas is None else f"only gradient_accumulation_steps={gas}"
        raise config_error(
            [
                f"batch sizes: got {got}, expected train_batch_size or micro_batch_size. Set micro_batch_size "
                "(train_micro_batch_size_per_gpu in a DeepSpeed configuration) to the samples a rank processes at once."
            ]
        )
    if gas is None and (total is None or micro is None):
        gas = 1
    if total is None:
        assert micro is not None and gas is not None
        return Batch(micro * gas * ranks, micro, gas, gas * ranks)
    if micro is None:
        assert gas is not None
        if total % (gas * ranks):
            raise _indivisible_by_ranks(total, gas, ranks)
        return Batch(total, total // (gas * ranks), gas, gas * ranks)
    if gas is None:
        if total % micro:
            raise _indivisible_by_micro(total, micro)
        micro_batches = total // micro
        return Batch(total, micro, -(-micro_batches // ranks), micro_batches)
    if total != micro * gas * ranks:
        raise _contradiction(total, micro, gas, ranks)
    return Batch(total, micro, gas, gas * ranks)


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _multiples_around(value: int, unit: int) -> str:
    below = value - value % unit
    return f"{below} or {below + unit}" if below else str(unit)


def _indivisible_by_ranks(total: int, gas: int, ranks: int) -> ConfigError:
    return config_error(
        [
            f"train_batch_size: got {total} with gradient_accumulation_steps={gas} on {_ranks(ranks)}, expected a "
            f"multiple of {gas} * {ranks} = {gas * ranks}. Set it to {_multiples_around(total, gas * ranks)}; or set "
            "micro_batch_size to a divisor of it and leave gradient_accumulation_steps out: ranks may then have "
            "unequal numbers of micro-batches."
        ]
    )


def _indivisible_by_micro(total: int, micro: int) -> ConfigError:
    nearest = range(min(micro, total), max(0, micro - _SEARCHED), -1)
    divisors = sorted({1, *itertools.islice((size for size in nearest if total % size == 0), 4)})[-4:]
    return config_error(
        [
            f"train_batch_size: got {total} with micro_batch_size={micro}, expected a multiple of micro_batch_size. "
            f"Set it to {_multiples_around(total, micro)}, or micro_batch_size to a divisor of {total} "
            f"({', '.join(map(str, divisors))})."
        ]
    )


def _contradiction(total: int, micro: int, gas: int, ranks: int) -> ConfigError:
    fits = [f"train_batch_size={micro * gas * ranks}"]
    if total % (gas * ranks) == 0:
        fits.append(f"micro_batch_size={total // (gas * ranks)}")
    if total % (micro * ranks) == 0:
        fits.append(f"gradient_accumulation_steps={total // (micro * ranks)}")
    if total % micro == 0:
        fits.append("no gradient_accumulation_steps")
    return config_error(
        [
            f"batch sizes: got train_batch_size={total}, micro_batch_size={micro}, gradient_accumulation_steps={gas} "
            f"on {_ranks(ranks)}, expected train_batch_size = micro_batch_size * gradient_accumulation_steps * ranks, "
            f"which is {micro} * {gas} * {ranks} = {micro * gas * ranks}. One of these fits: {'; '.join(fits)}."
        ]
    )
