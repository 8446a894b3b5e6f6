"""The engine on several ranks: what must be equal on all, and what happens when it is not."""

from __future__ import annotations

import pytest
import torch
import zerocore
from one_weight import config, one_weight, train
from zerocore import _comm
from zerocore.errors import UnsupportedError


def rank():
    return _comm.world().rank


@pytest.mark.ranks(2)
def test_all_ranks_start_from_rank_0s_values_frozen_ones_and_buffers_included():
    model = torch.nn.ModuleDict({"frozen": one_weight(rank() + 1.0), "trained": one_weight(rank() + 5.0)})
    model["frozen"].weight.requires_grad_(False)
    model.register_buffer("table", torch.full((3,), float(rank())))
    model.register_buffer("count", torch.tensor(rank()))
    zerocore.Engine(model, config())
    assert model["frozen"].weight.item() == 1
    assert model["trained"].weight.item() == 5
    assert model.table.tolist() == [0, 0, 0] and model.count.item() == 0


@pytest.mark.ranks(2)
def test_buffers_that_are_views_become_rank_0s_too():
    model = one_weight(1.0)
    model.register_buffer("turned", (torch.arange(6).view(2, 3) + 10 * rank()).t())
    model.register_buffer("empty", torch.zeros(0))
    zerocore.Engine(model, config())
    assert model.turned.tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_gradient_is_the_mean_over_ranks(world_size, stage):
    engine = zerocore.Engine(one_weight(8.0), config(zero_optimization={"stage": stage}))
    for _ in range(3):
        train(engine, 2 * rank())
    assert engine.module.weight.item() == 8 - 3 * 0.5 * (world_size - 1)
    assert engine.get_global_grad_norm() == world_size - 1


@pytest.mark.ranks(2)
def test_a_rank_that_uses_another_branch_neither_hangs_nor_errs():
    model = torch.nn.ModuleDict({"a": one_weight(8.0), "b": one_weight(8.0), "c": one_weight(8.0)})
    model.forward = lambda x, name: model[name](x)
    engine = zerocore.Engine(model, config(optimizer={"type": "AdamW", "params": {"lr": 0.5, "weight_decay": 0.5}}))
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 1), "ab"[rank()]).sum())
        engine.step()
    assert model["a"].weight.item() == model["b"].weight.item() < 8
    assert model["c"].weight.item() == 8


@pytest.mark.ranks(2)
def test_a_late_gradient_is_counted_and_warned_of(caplog):
    engine = zerocore.Engine(one_weight(8.0), config())
    train(engine, 1)
    engine.backward(engine(torch.ones(1, 1)).sum())
    if rank() == 1:
        engine.backward(engine(torch.full((1, 1), 4.0)).sum())
    engine.step()
    assert engine.module.weight.item() == 8 - 0.5 - 0.5 * (1 + 1 + 4) / 2
    assert "arrived after their bucket had been reduced" in caplog.text


@pytest.mark.ranks(2)
def test_a_nan_on_one_rank_stops_no_other_rank():
    engine = zerocore.Engine(one_weight(8.0), config(bf16={"enabled": True}))
    engine.backward(engine(torch.full((1, 1), float("nan") if rank() == 1 else 1.0, dtype=torch.bfloat16)).sum())
    engine.step()
    assert not engine.was_step_applied() and engine.module.weight.item() == 8


@pytest.mark.ranks(2)
def test_batch_norm_statistics_are_rank_0s():
    model = torch.nn.BatchNorm1d(2)
    engine = zerocore.Engine(model, config(train_micro_batch_size_per_gpu=4))
    engine.backward(engine(torch.full((4, 2), rank() + 1.0) * torch.arange(4.0)[:, None]).sum())
    engine.step()
    assert model.running_mean.tolist() == pytest.approx([0.15, 0.15])


@pytest.mark.ranks(2)
def test_means_for_logging_leave_fillers_out():
    engine = zerocore.Engine(one_weight(8.0), {**config(), "train_batch_size": 3})
    for k in range(2):
        engine.backward(engine(torch.ones(1, 1)).sum())
        assert engine.all_reduce_mean(rank() + 1.0) == (1.5 if k == 0 else 1.0)
        engine.step()
    assert engine.module.weight.item() == 8 - 0.5


@pytest.mark.ranks(2)
def test_two_engines_in_one_process_and_one_loss_each():
    first, second = zerocore.Engine(one_weight(8.0), config()), zerocore.Engine(one_weight(4.0), config())
    for _ in range(2):
        train(first, rank())
        train(second, 2 * rank())
    assert (first.module.weight.item(), second.module.weight.item()) == (7.5, 3.0)


@pytest.mark.ranks(2)
def test_a_fillers_loss_is_not_blamed():
    engine = zerocore.Engine(one_weight(8.0), {**config(), "train_batch_size": 3})
    for k in range(2):
        filler = k == 1 and rank() == 1
        engine.backward(engine(torch.full((1, 1), float("nan") if filler else 1.0)).sum())
        engine.step()
    assert engine.was_step_applied() and engine.module.weight.item() == 8 - 0.5


@pytest.mark.ranks(2)
def test_one_backward_through_two_engines_when_a_rank_takes_another_branch():
    a = torch.nn.ModuleDict({"x": one_weight(8.0), "y": one_weight(8.0)})
    a.forward = lambda x: a["x"](x) + (a["y"](x) if rank() == 0 else 0)
    first, second = zerocore.Engine(a, config()), zerocore.Engine(one_weight(8.0), config())
    for _ in range(3):
        loss = (second(torch.ones(1, 1)) + first(torch.ones(1, 1))).sum()
        second.backward(loss)
        first.step()
        second.step()
    assert (a["x"].weight.item(), a["y"].weight.item(), second.module.weight.item()) == (6.5, 7.25, 6.5)


@pytest.mark.ranks(2)
def test_a_buffer_that_cannot_be_written_to():
    model = one_weight(1.0)
    model.register_buffer("table", torch.ones(1).expand(3))
    with pytest.raises(UnsupportedError, match=r"\[engine\] buffers: got one of shape \(3,\) and strides \(0,\)"):
        zerocore.Engine(model, config())
