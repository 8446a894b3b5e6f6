"""Uneven batches through engine.join(): the bits of one rank that has all of them, and the same number of steps."""

from __future__ import annotations

import itertools

import pytest
import torch
import zerocore
from one_weight import config, one_weight, train
from toy_models import batch, make
from zerocore import _comm, _core
from zerocore.config import OptimizerConfig
from zerocore.errors import CommError, ConfigError, UnsupportedError

pytestmark = pytest.mark.usefixtures("one_thread")


def rank():
    return _comm.world().rank


def settings(stage, **changes):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4}},
        "gradient_clipping": 0.05,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 3000},
    } | changes


def result(engine):
    return (
        [p.detach().clone() for p in engine.module.parameters()],
        engine.global_steps,
        engine.get_lr(),
        engine.get_global_grad_norm(),
    )


def number(k, r, world_size):
    """Which of the data set's micro-batches is rank r's in its k-th turn."""
    return k * world_size + r


def alone(name, steps, **changes):
    """One rank that goes through the given micro-batches of each step, in this order."""
    comm = _core.self_communicator(timeout_ms=60_000)
    engine = zerocore.Engine(make(name), settings(0, **changes), comm=comm)
    for micro_batches in steps:
        for i, j in enumerate(micro_batches):
            engine.set_gradient_accumulation_boundary(i == len(micro_batches) - 1)
            engine.backward(engine(*batch(name, j, torch.float32)))
            engine.step()
    return result(engine)


def steps_of(counts, *, gas):
    """The real micro-batches of each step when rank r has counts[r], step by step, in global order."""
    turns = [[number(k, r, len(counts)) for r in range(len(counts)) if k < counts[r]] for k in range(max(counts))]
    steps = [list(itertools.chain(*turns[at : at + gas])) for at in range(0, len(turns), gas)]
    return steps if len(turns) % gas == 0 else steps[:-1]


def same(got, expected):
    assert got[1:] == expected[1:]
    assert all(torch.equal(a, b) for a, b in zip(got[0], expected[0], strict=True))


COUNTS = {2: [(2, 5), (4, 0), (3, 3)], 3: [(0, 4, 2), (5, 1, 3)]}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", ["odd", "wide"])
def test_the_bits_of_one_rank_with_exactly_those_micro_batches(name, stage, world_size):
    for counts in COUNTS[world_size]:
        engine = zerocore.Engine(make(name), settings(stage))
        with engine.join():
            for k in range(counts[rank()]):
                engine.backward(engine(*batch(name, number(k, rank(), world_size), torch.float32)))
                engine.step()
        same(result(engine), alone(name, steps_of(counts, gas=1)))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loop", ["step after each", "explicit", "step after all"])
def test_accumulation(loop, world_size):
    counts, gas = (3, 6), 2
    engine = zerocore.Engine(make("wide"), settings(2, gradient_accumulation_steps=gas))
    if loop == "step after all":
        engine = zerocore.Engine(
            make("wide"), settings(2, gradient_accumulation_steps=gas, managed_gradient_accumulation=False)
        )
    with engine.join():
        for k in range(counts[rank()]):
            if loop == "explicit":
                engine.set_gradient_accumulation_boundary(k % gas == gas - 1)
            loss = engine(*batch("wide", number(k, rank(), world_size), torch.float32))
            engine.backward(loss / gas if loop == "step after all" else loss)
            if loop != "step after all" or k % gas == gas - 1:
                engine.step()
    expected = alone("wide", steps_of(counts, gas=gas))
    if loop == "step after all":  # the loop divides, so each micro-batch's gradient is rounded after it
        assert engine.global_steps == expected[1]
        for a, b in zip(engine.module.parameters(), expected[0], strict=True):
            torch.testing.assert_close(a, b)
        return
    same(result(engine), expected)


@pytest.mark.ranks(2)
def test_training_goes_on_after_the_block_and_in_a_second_one():
    engine = zerocore.Engine(one_weight(8.0), config())
    with engine.join():
        train(engine, 1, steps=1 + rank())  # means of (1, 1) and of (1)
    assert engine.module.weight.item() == 7
    train(engine, 2 * rank())
    assert engine.module.weight.item() == 6.5
    with engine.join():
        train(engine, 1, steps=2 - rank())
    assert (engine.module.weight.item(), engine.global_steps) == (5.5, 5)


@pytest.mark.ranks(2)
def test_outside_of_the_block_nothing_is_exchanged():
    engine = zerocore.Engine(one_weight(8.0), config())
    train(engine, 1, steps=3)  # what the first steps agree on is behind
    with engine.join():
        train(engine, 1)
    before = engine.comm_report(), engine._join_comm.counters()
    train(engine, 1)
    after = engine.comm_report(), engine._join_comm.counters()
    assert after[1] == before[1]
    assert after[0]["gather_bytes"] == before[0]["gather_bytes"]
    assert after[0]["all_reduce"]["calls"] - before[0]["all_reduce"]["calls"] == 2  # end of micro-step, norm


@pytest.mark.ranks(2)
def test_means_for_logging_leave_out_who_has_run_out():
    engine = zerocore.Engine(one_weight(8.0), config())
    means = []
    with engine.join():
        for k in range(2 + rank()):
            loss = engine(torch.ones(1, 1)).sum()
            means.append(engine.all_reduce_mean(10 * k + rank()))
            engine.backward(loss)
            means.append(engine.all_reduce_mean(10 * k + rank()))
            engine.step()
            means.append(engine.all_reduce_mean(10 * k + rank()))
    assert means == [0.5, 0.5, 0.5, 10.5, 10.5, 10.5, 21.0, 21.0, 21.0][: 3 * (2 + rank())]


@pytest.mark.ranks(2)
def test_a_learning_rate_that_the_loop_sets_is_taken_over():
    engine = zerocore.Engine(one_weight(8.0), config())
    with engine.join():
        for k in range(1 + 2 * rank()):
            engine.optimizer.param_groups[0]["lr"] = 0.5 / 2**k
            train(engine, 1)
    assert engine.module.weight.item() == 8 - 0.5 - 0.25 - 0.125
    assert engine.get_lr() == [0.125]


@pytest.mark.ranks(2)
def test_parameters_that_only_the_others_still_use():
    model = torch.nn.ModuleDict({"a": one_weight(8.0), "b": one_weight(8.0)})
    model.forward = lambda x, name: model[name](x)
    engine = zerocore.Engine(model, config())
    with engine.join():
        for name in ["a", "ab"][rank()]:
            engine.backward(engine(torch.ones(1, 1), name).sum())
            engine.step()
    assert (model["a"].weight.item(), model["b"].weight.item()) == (7.5, 7.5)


@pytest.mark.ranks(2)
def test_running_statistics_in_micro_batch_order():
    def make_engine(comm=None):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        settings = zerocore.Config(micro_batch_size=1, optimizer=OptimizerConfig(type="sgd", lr=0.1), buffers="ordered")
        return zerocore.Engine(model, settings, comm=comm)

    def backward(engine, j):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(j))
        engine.backward(engine(x).pow(3).mean())

    together = make_engine()
    with together.join():
        for j in [[0], [1, 2, 3]][rank()]:
            backward(together, j)
            together.step()
    apart = make_engine(_core.self_communicator(timeout_ms=60_000))
    for j in range(4):
        apart.set_gradient_accumulation_boundary(j > 0)  # steps of micro-batches 0 and 1, 2, 3
        backward(apart, j)
        apart.step()
    for a, b in zip(together.module.state_dict().items(), apart.module.state_dict().items(), strict=True):
        assert a[0] == b[0] and torch.equal(a[1], b[1]), a[0]


@pytest.mark.ranks(2)
def test_gradients_that_are_not_finite_are_skipped_on_all():
    engine = zerocore.Engine(one_weight(8.0), config(bf16={"enabled": True}))
    with engine.join():
        for k in range(1 + 2 * rank()):
            value = float("nan") if k == 1 else 1.0
            engine.backward(engine(torch.full((1, 1), value, dtype=torch.bfloat16)).sum())
            engine.step()
    assert (engine.global_steps, engine.skipped_steps, engine.module.weight.item()) == (3, 1, 7)


@pytest.mark.ranks(2)
def test_what_a_rank_that_has_run_out_cannot_follow_is_refused():
    engine = zerocore.Engine(one_weight(8.0), config())
    out_of_batches = r"inside of join\(\): got one that rank 0, out of batches, cannot follow"
    with pytest.raises(ConfigError, match=out_of_batches), engine.join():
        train(engine, 1, steps=1 + rank())
        engine.state_dict() if rank() == 1 else None
    engine = zerocore.Engine(one_weight(8.0), config())
    with engine.join():
        train(engine, 1)
        engine.state_dict()
    pending = r"zero_grad: got a call inside of join\(\) with gradients pending"
    with pytest.raises(ConfigError, match=pending), engine.join():
        engine.backward(engine(torch.ones(1, 1)).sum())
        engine.zero_grad()
    engine = zerocore.Engine(one_weight(8.0), config())
    with pytest.raises(ConfigError, match="the end of the block after a forward without a backward"), engine.join():
        engine(torch.ones(1, 1))


@pytest.mark.ranks(2)
def test_ranks_with_batches_that_do_not_do_the_same():
    engine = zerocore.Engine(one_weight(8.0), config())
    expected = r"inside of join\(\), in step 0: rank 0 begins a micro-step; rank 1 calls all_reduce_mean\(\)"
    with pytest.raises(CommError, match=expected), engine.join():
        train(engine, 1) if rank() == 0 else engine.all_reduce_mean(1.0)


def test_blocks_inside_of_blocks():
    first, second = zerocore.Engine(one_weight(8.0), config()), zerocore.Engine(one_weight(8.0), config())
    with pytest.raises(UnsupportedError, match="join: got a second block inside of one"), first.join(), second.join():
        pass
    with second.join():
        train(second, 1)
    assert second.module.weight.item() == 7.5


@pytest.mark.ranks(2)
def test_stage_3_needs_every_rank():
    engine = zerocore.Engine(one_weight(8.0), config(zero_optimization={"stage": 3}))
    with pytest.raises(UnsupportedError, match="there every rank must run the model for the others"):
        engine.join()
