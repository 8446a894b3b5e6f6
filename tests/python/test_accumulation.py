"""Which rank has a micro-batch when, and what the sum is divided by."""

from __future__ import annotations

import pytest
from zerocore._accumulation import Accumulation, Loop
from zerocore.config import Config
from zerocore.errors import ConfigError


def accumulation(*, rank=0, world_size=3, managed=True):
    """Eight micro-batches: three micro-steps on three ranks, the last rank without one in the third."""
    config = Config(train_batch_size=8, micro_batch_size=1, managed_gradient_accumulation=managed)
    return Accumulation(config.resolve(world_size), rank=rank, world_size=world_size)


@pytest.mark.parametrize(("rank", "present"), [(0, [1, 1, 1, 1]), (1, [1, 1, 1, 1]), (2, [1, 1, 0, 1])])
def test_who_has_a_micro_batch(rank, present):
    """Micro-steps beyond those of the config are the user's own: nobody's is left out."""
    a = accumulation(rank=rank)
    for expected in present:
        assert a.has_micro_batch() == bool(expected)
        a.micro_steps += 1


@pytest.mark.parametrize(("micro_steps", "divisor"), [(1, 3), (2, 6), (3, 8), (4, 11), (5, 14)])
def test_the_mean_is_over_the_micro_batches_there_were(micro_steps, divisor):
    a = accumulation()
    a.set_boundary(True)
    a.micro_steps = micro_steps
    assert a.divisor() == divisor


@pytest.mark.parametrize(("micro_steps", "divisor"), [(1, 3), (2, 3), (3, 8 / 3)])
def test_pytorchs_rule_averages_over_ranks_only(micro_steps, divisor):
    a = accumulation(managed=False)
    a.micro_steps = micro_steps
    assert a.divisor() == divisor


def test_several_losses_on_ranks_with_unequal_micro_batches_cannot_be_guessed():
    a = accumulation()
    a.micro_steps = 2
    with pytest.raises(ConfigError, match=r"\[engine\] 2 forward-backward pairs came before the first step\(\)"):
        a.decide()


def test_boundaries():
    a = accumulation()
    assert (a.loop, a.forward_ends_micro_step()) == (Loop.UNDECIDED, True)
    a.micro_steps = 1
    a.decide()
    assert (a.loop, a.forward_ends_micro_step()) == (Loop.PER_MICRO_STEP, False)
    assert not a.is_boundary() and not a.reached_boundary()
    a.micro_steps = 2
    assert a.is_boundary()
    a.micro_steps = 3
    assert a.reached_boundary()
    a.set_boundary(False)
    assert not a.reached_boundary() and not a.is_boundary()
