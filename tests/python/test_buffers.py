"""Module buffers: running statistics in micro-batch order, recomputation, and what stays rank 0's."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import zerocore
from reference import Reference
from torch import nn
from torch.utils.checkpoint import checkpoint
from zerocore import _comm
from zerocore.config import OptimizerConfig, PrecisionConfig, ZeroConfig
from zerocore.errors import UnsupportedError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HYPER = {"type": "sgd", "lr": 0.05, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
NORMS = nn.modules.batchnorm._NormBase
STEPS = 2


class Norms(nn.Module):
    """Every kind of running statistics: cumulative, of a module used twice, per instance, frozen, not tracked."""

    def __init__(self, *, reentrant=None):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Conv2d(3, 5, 3)
        self.block = nn.Sequential(nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 5, 3, padding=1, bias=False))
        self.cumulative = nn.BatchNorm2d(5, momentum=None)
        self.instance = nn.InstanceNorm2d(5, momentum=0.3, track_running_stats=True)
        self.frozen = nn.BatchNorm2d(5, affine=False).eval()
        self.untracked = nn.BatchNorm2d(5, track_running_stats=False)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        x = self.untracked(self.frozen(self.instance(self.cumulative(x))))
        return x.abs().mean(dim=(2, 3)).square().sum(1).mean()


def make(build=Norms, **setting):
    torch.manual_seed(5)
    return build(**setting)


def batch(j, dtype=torch.float32):
    random = torch.Generator().manual_seed(1000 + j)
    return (torch.randn(4, 3, 8, 8, generator=random) * (1 + j)).to(dtype)


def config(*, buffers="ordered", stage=2, micro_batches=4, dtype="fp32", **keys):
    return zerocore.Config(
        micro_batch_size=1,
        train_batch_size=micro_batches,
        buffers=buffers,
        zero=ZeroConfig(stage=stage),
        precision=PrecisionConfig(dtype=dtype),
        optimizer=OptimizerConfig(**HYPER),
        **keys,
    )


def train(engine, *, steps=STEPS, dtype=torch.float32):
    total = engine.config.micro_batches
    for step in range(steps):
        for k in range(engine.gradient_accumulation_steps()):
            j = min(k * engine.world_size + engine.rank, total - 1)  # the last again where there is none
            engine.backward(engine(batch(step * total + j, dtype)))
            engine.step()
    return engine


def buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def check_equal(got, expected):
    assert got.keys() == expected.keys()
    for name in got:
        assert torch.equal(got[name], expected[name]), f"{name}: got {got[name]}, expected {expected[name]}"


def sequential(model, *, micro_batches, dtype=torch.float32):
    """A plain loop over the micro-batches in one process."""
    masters = [p.detach().clone() for p in model.parameters()]
    loop = Reference(model.to(dtype), masters, hyper=HYPER)
    for step in range(STEPS):
        loop.step([lambda j=step * micro_batches + k: model(batch(j, dtype)) for k in range(micro_batches)])
    return model


def update_as_documented(model):
    """The model's running statistics follow docs/numerics.md instead of torch's kernel."""
    for module in model.modules():
        if not isinstance(module, NORMS) or not module.training or not module.track_running_stats:
            continue

        def before(module, args):
            module.old = module.momentum, module.running_mean.clone(), module.running_var.clone()
            module.momentum = 1.0
            module.running_mean.data.zero_(), module.running_var.data.zero_()

        def after(module, args, output):
            module.momentum, *old = module.old
            for running, was in zip((module.running_mean, module.running_var), old, strict=True):
                m = module.momentum if module.momentum is not None else 1 / float(module.num_batches_tracked)
                m = torch.tensor([m], dtype=running.dtype)
                running.data.copy_(m * running + (1 - m) * was)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
    return model


@functools.cache
def expected_buffers(micro_batches, dtype):
    return buffers(sequential(update_as_documented(make()), micro_batches=micro_batches, dtype=DTYPES[dtype]))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("micro_batches", [3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ordered_statistics_have_the_bits_of_a_sequential_loop(stage, micro_batches, dtype, world_size):
    engine = zerocore.Engine(make(), config(stage=stage, micro_batches=micro_batches, dtype=dtype))
    train(engine, dtype=DTYPES[dtype])
    check_equal(buffers(engine.module), expected_buffers(micro_batches, dtype))
    assert engine.module.cumulative.num_batches_tracked == STEPS * micro_batches
    assert engine.module.block[0].num_batches_tracked == 2 * STEPS * micro_batches
    assert engine.module.block[0].momentum == 0.1 and engine.module.cumulative.momentum is None


@pytest.mark.ranks(1, 3)
def test_ordered_statistics_are_torchs(world_size):
    """Means to the bit, variances up to their rounding to fp32: torch's kernel has them in double."""
    got = buffers(train(zerocore.Engine(make(), config())).module)
    expected = buffers(sequential(make(), micro_batches=4))
    for name in expected:
        exact = not name.endswith("running_var") and not name.startswith("instance")
        torch.testing.assert_close(got[name], expected[name], rtol=0 if exact else 1e-6, atol=0 if exact else 1e-7)


def test_the_policy_rank0_leaves_one_rank_to_torch():
    got = buffers(train(zerocore.Engine(make(), config(buffers="rank0"))).module)
    check_equal(got, buffers(sequential(make(), micro_batches=4)))


@pytest.mark.ranks(2)
def test_the_policy_rank0_gives_all_ranks_the_statistics_of_rank_0():
    bn = nn.BatchNorm1d(2)
    engine = zerocore.Engine(bn, config(buffers="rank0", micro_batches=2))
    engine.backward(engine(torch.tensor([[0.0, 4.0], [2.0, 0.0]]) + 10 * engine.rank).square().sum())
    engine.step()
    assert bn.running_mean.tolist() == pytest.approx([0.1, 0.2]) and bn.num_batches_tracked == 1


@pytest.mark.ranks(2)
def test_other_buffers_stay_rank_0s():
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.register_buffer("last", torch.zeros(()))

    def keep_last(module, args):
        module.last.copy_(args[0].mean())

    model.register_forward_pre_hook(keep_last)
    engine = zerocore.Engine(model, config(micro_batches=2))
    engine.backward(engine(torch.tensor([[0.0, 4.0], [2.0, 2.0]]) + 10 * engine.rank).square().sum())
    engine.step()
    assert model.last == 2 and model[0].num_batches_tracked == 2
    assert model[0].running_mean.tolist() == pytest.approx([0.9 * 0.1 * 1 + 0.1 * 11, 0.9 * 0.1 * 3 + 0.1 * 13])


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", ["rank0", "ordered"])
def test_recomputation_updates_nothing(policy, reentrant, world_size):
    plain = train(zerocore.Engine(make(), config(buffers=policy)))
    again = train(zerocore.Engine(make(reentrant=reentrant), config(buffers=policy)))
    check_equal(buffers(again.module), buffers(plain.module))
    for p, q in zip(again.module.parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("policy", ["rank0", "ordered"])
def test_evaluation_uses_the_statistics_and_leaves_them(policy):
    engine = train(zerocore.Engine(make(), config(buffers=policy)))
    before = buffers(engine.module)
    plain = copy.deepcopy(engine.module).eval()
    engine.eval()
    assert torch.equal(engine(batch(0)), plain(batch(0)))
    with torch.no_grad():
        assert torch.equal(engine(batch(0)), plain(batch(0)))
    check_equal(buffers(engine.module), before)


@pytest.mark.parametrize("managed", [True, False])
def test_both_kinds_of_loops(managed):
    """step() after each micro-batch, or once after all of them."""
    engine = zerocore.Engine(make(), config(managed_gradient_accumulation=managed))
    if managed:
        train(engine)
    else:
        for step in range(STEPS):
            for j in range(4):
                (engine(batch(4 * step + j)) / 4).backward()
            engine.step()
    check_equal(buffers(engine.module), expected_buffers(4, "fp32"))


def batch_norm(**setting):
    """A model of one BatchNorm, its engine, and the same module for torch alone."""
    bn = nn.BatchNorm1d(2)
    return bn, zerocore.Engine(bn, config(micro_batches=1, **setting)), nn.BatchNorm1d(2)


def rows(j):
    return torch.tensor([[0.0, 4.0], [2.0, 2.0]]) * (j + 1)


def step(engine, x):
    engine.backward(engine(x).square().sum())
    engine.step()


def check_close(bn, plain):
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(getattr(bn, name), buffer)


def test_a_forward_without_backward_belongs_to_the_micro_step():
    bn, engine, plain = batch_norm()
    engine(rows(0))
    assert bn.num_batches_tracked == 0
    step(engine, rows(1))
    plain(rows(0)), plain(rows(1))
    check_close(bn, plain)


def test_a_training_forward_without_gradients_updates_at_once():
    bn, engine, plain = batch_norm()
    with torch.no_grad():
        engine(rows(0)), plain(rows(0))
    check_close(bn, plain)
    step(engine, rows(1))
    plain(rows(1))
    check_close(bn, plain)


def test_a_part_without_gradients_is_in_order_too():
    model = nn.ModuleDict({"teacher": nn.BatchNorm1d(2), "student": nn.Linear(2, 2)})

    def forward(x):
        with torch.no_grad():
            target = model["teacher"](x)
        return (model["student"](x) - target).square().sum()

    model.forward = forward
    engine = zerocore.Engine(model, config(micro_batches=1))
    loss = engine(rows(0))
    assert model["teacher"].num_batches_tracked == 0
    engine.backward(loss)
    engine.step()
    assert model["teacher"].running_mean.tolist() == pytest.approx([0.1, 0.3])


@pytest.mark.ranks(2)
def test_after_a_training_forward_without_gradients_rank_0s_statistics_count():
    bn, plain = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    engine = zerocore.Engine(bn, config(micro_batches=2))
    with torch.no_grad():
        engine(rows(5 + engine.rank))
        plain(rows(5))
    step(engine, rows(engine.rank))
    plain(rows(0)), plain(rows(1))
    check_close(bn, plain)


@pytest.mark.ranks(2)
def test_ranks_may_run_a_module_a_different_number_of_times():
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(2), "other": nn.BatchNorm1d(3)})
    model.forward = lambda x, times: sum(model["norm"](x * (i + 1)).square().sum() for i in range(times))
    engine = zerocore.Engine(model, config(micro_batches=2))
    engine.backward(engine(rows(engine.rank), 1 + 2 * engine.rank))
    engine.step()
    plain = nn.BatchNorm1d(2)
    plain(rows(0))
    for i in range(3):
        plain(rows(1) * (i + 1))
    check_close(model["norm"], plain)
    check_close(model["other"], nn.BatchNorm1d(3))


def test_a_frozen_module_among_others_is_left_alone():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    engine = zerocore.Engine(model, config(micro_batches=1))
    model[0].eval()
    step(engine, rows(0))
    check_close(model[0], nn.BatchNorm1d(2))
    assert model[1].num_batches_tracked == 1
    model.train()
    step(engine, rows(0))
    assert (model[0].num_batches_tracked, model[1].num_batches_tracked) == (1, 2)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_forward_that_raises_leaves_the_module_as_it_was(momentum):
    bn, engine, plain = batch_norm()
    bn.momentum = plain.momentum = momentum
    own = bn.running_mean
    for wrong in (torch.ones(4, 3), torch.ones(1, 2), torch.ones(())):
        with pytest.raises((RuntimeError, ValueError)):
            engine(wrong)
    assert bn.running_mean is own and bn.momentum == momentum
    step(engine, rows(0))
    plain(rows(0))
    check_close(bn, plain)


def test_dropped_micro_steps_update_nothing_but_forwards_to_come_do():
    bn, engine, plain = batch_norm()
    engine.backward(engine(rows(7)).square().sum())
    engine.zero_grad()
    loss = engine(rows(0)).square().sum()
    engine.zero_grad()  # in PyTorch's loops it often stands here
    engine.backward(loss)
    engine.step()
    plain(rows(0))
    check_close(bn, plain)


@pytest.mark.parametrize("policy", ["rank0", "ordered"])
def test_a_copy_of_the_model_is_torchs_alone(policy):
    bn, engine, plain = batch_norm(buffers=policy)
    plain(rows(0))
    for copied in (copy.deepcopy(bn), pickle.loads(pickle.dumps(bn))):
        copied(rows(0))
        check_close(copied, plain)
    step(engine, rows(0))
    check_close(bn, plain)


@pytest.mark.parametrize("policy", ["rank0", "ordered"])
def test_close_takes_the_hooks_off(policy):
    engine = train(zerocore.Engine(make(), config(buffers=policy)))
    engine.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in engine.module.modules())
    before = int(engine.module.cumulative.num_batches_tracked)
    engine.module(batch(0))
    assert engine.module.cumulative.num_batches_tracked == before + 1


def test_sync_batch_norm_cannot_be_ordered():
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    zerocore.Engine(copy.deepcopy(model), config(buffers="rank0"))
    with pytest.raises(UnsupportedError, match=r"^\[engine\] module 1: got a SyncBatchNorm, .* or buffers='rank0'\.$"):
        zerocore.Engine(model, config())
    assert not model[0].weight._post_accumulate_grad_hooks


@pytest.mark.ranks(2)
def test_small_and_large_buffers_are_rank_0s():
    """Of all dtypes, sizes and layouts, more than travel in one message."""

    class Holder(nn.Module):
        def __init__(self, rank):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            kinds = [torch.float32, torch.int64, torch.bool, torch.bfloat16]
            for i in range(200):
                values = torch.arange(i % 7 + rank, i % 7 + rank + i, dtype=torch.float32)
                self.register_buffer(f"b{i}", values.to(kinds[i % 4]))
            self.register_buffer("large", torch.full((300, 300), float(rank)))
            self.register_buffer("turned", torch.full((30, 4), float(rank)).t())
            self.register_buffer("scalar", torch.tensor(float(rank)))

        def forward(self, x):
            return self.linear(x)

    rank = _comm.world().rank
    engine = zerocore.Engine(Holder(rank), config(buffers="rank0", micro_batches=2))
    expected = dict(Holder(0).named_buffers())
    for _ in range(2):
        for name, buffer in engine.module.named_buffers():
            assert torch.equal(buffer, expected[name]) and buffer.stride() == expected[name].stride(), name
            buffer.copy_((buffer.float() + rank).to(buffer.dtype))
            expected[name] = expected[name].float().to(buffer.dtype)
        step(engine, rows(0))


@pytest.mark.ranks(2)
def test_what_is_sent():
    """Without buffers nothing is sent for them; small ones of a dtype go together; statistics take two collectives."""

    def calls(model, policy):
        engine = zerocore.Engine(model, config(buffers=policy))
        before = {op: count["calls"] for op, count in engine.comm_report().items()}
        for _ in range(2):
            step(engine, rows(0))
        return {op: count["calls"] - before.get(op, 0) for op, count in engine.comm_report().items()}

    plain = calls(nn.Linear(2, 2), "rank0")
    assert plain.get("broadcast", 0) == 0 and calls(nn.Linear(2, 2), "ordered") == plain

    def norms():
        return nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.BatchNorm1d(2))

    rank0, ordered = calls(norms(), "rank0"), calls(norms(), "ordered")
    assert rank0["broadcast"] == 2 and ordered.get("broadcast", 0) == 0  # fp32 and int64, at the update
    assert sum(ordered.values()) == sum(rank0.values()) - 2 + 2 * 2
    assert _comm.world().size == 2
