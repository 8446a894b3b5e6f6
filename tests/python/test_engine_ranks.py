"""The engine on several ranks: what must be equal on all, and what happens when it is not."""

from __future__ import annotations

import pytest
import torch
import zerocore
from one_weight import config, one_weight, train
from zerocore import _comm
from zerocore.errors import ConfigError, UnsupportedError


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
def test_ranks_with_different_configs():
    with pytest.raises(
        ConfigError,
        match=r"ranks differ in config or model: rank 0 has config gradient_clipping = 0.0; "
        r"rank 1 has config gradient_clipping = 1.0",
    ):
        zerocore.Engine(one_weight(8.0), config(gradient_clipping=float(rank())))


@pytest.mark.ranks(2)
def test_ranks_with_different_models():
    with pytest.raises(
        ConfigError,
        match=r"rank 0 has parameter weight: \(1, 3\) .*; rank 1 has parameter weight: \(1, 4\)",
    ):
        zerocore.Engine(torch.nn.Linear(3 + rank(), 1), config())


@pytest.mark.ranks(2)
def test_ranks_with_different_buffers_or_frozen_parameters():
    model = one_weight(1.0)
    model.register_buffer("table", torch.zeros(3 + rank()))
    with pytest.raises(
        ConfigError, match=r"rank 0 has buffer table: \(3,\) torch.float32; rank 1 has buffer table: \(4,\)"
    ):
        zerocore.Engine(model, config())
    model = torch.nn.ModuleList([one_weight(1.0), one_weight(1.0)])
    model[rank()].weight.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"rank 0 has parameter 0.weight: \(1, 1\) torch.float32 frozen, strides"):
        zerocore.Engine(model, config())


@pytest.mark.ranks(2)
def test_a_fillers_loss_is_not_blamed():
    engine = zerocore.Engine(one_weight(8.0), {**config(), "train_batch_size": 3})
    for k in range(2):
        filler = k == 1 and rank() == 1
        engine.backward(engine(torch.full((1, 1), float("nan") if filler else 1.0)).sum())
        engine.step()
    assert engine.was_step_applied() and engine.module.weight.item() == 8 - 0.5


@pytest.mark.ranks(2)
def test_ranks_with_other_orders_of_elements():
    model = one_weight(1.0)
    model.weight = torch.nn.Parameter(torch.ones(2, 3) if rank() else torch.ones(3, 2).t())
    with pytest.raises(ConfigError, match=r"strides \(1, 2\); rank 1 has parameter weight: .* strides \(3, 1\)"):
        zerocore.Engine(model, config())


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
@pytest.mark.parametrize("stage", [0, 2])
def test_a_learning_rate_or_a_write_on_one_rank_only(stage):
    engine = zerocore.Engine(one_weight(8.0), config(zero_optimization={"stage": stage}))
    train(engine, 1)
    engine.optimizer.param_groups[0]["lr"] = 0.5 + 0.1 * rank()
    with pytest.raises(ConfigError, match=r"\[engine\] ranks step with different settings"):
        train(engine, 1)
    engine = zerocore.Engine(one_weight(8.0), config(zero_optimization={"stage": stage}))
    if rank() == 1:
        torch.nn.init.zeros_(engine.module.weight)
    with pytest.raises(ConfigError, match="parameters written by hand on some rank"):
        train(engine, 1)


@pytest.mark.ranks(2)
def test_a_buffer_that_cannot_be_written_to():
    model = one_weight(1.0)
    model.register_buffer("table", torch.ones(1).expand(3))
    with pytest.raises(UnsupportedError, match=r"\[engine\] buffers: got one of shape \(3,\) and strides \(0,\)"):
        zerocore.Engine(model, config())


SCRIPT = """
import sys, torch, zerocore
engine = zerocore.Engine(torch.nn.Linear(4, 4), {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}})
for step in range(10):
    engine.backward(engine(torch.ones(1, 4)).sum())
    if step == 3 and engine.rank == 1:
        FAULT
    engine.step()
"""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise ValueError('the data set is gone')", "ValueError: the data set is gone"),
        ("sys.exit(3)", "CommError"),
        ("engine.all_reduce_mean(1.0)", "mean over ranks"),
    ],
)
def test_a_rank_that_leaves_the_common_path_ends_the_job_with_a_reason(mpirun, tmp_path, fault, message):
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.replace("FAULT", fault))
    job = mpirun(2, str(script), timeout=60)
    assert job.returncode != 0
    assert message in job.stdout
    assert "CommError" in job.stdout and "step 3" in job.stdout
