"""Torch optimizers that are handed in: with a native twin, and without one, on shards."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import zerocore
from one_weight import config, one_weight
from toy_models import SHARD_ALL, batch, make
from zerocore.config import Config, PrecisionConfig, ZeroConfig
from zerocore.errors import ConfigError, Error, UnsupportedError

MICRO_BATCHES = 4
CLIP = 0.5

pytestmark = pytest.mark.usefixtures("one_thread")


class Mine(torch.optim.Adam):
    """A subclass, which is not its parent: it moves twice as far."""

    def step(self, closure=None):
        super().step(closure)
        super().step(closure)


FOREIGN = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3, weight_decay=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-3),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "subclass": lambda p: Mine(p, lr=1e-3),
}


def groups_of(model):
    """Two groups, of which one has a learning rate of its own."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [{"params": trained[::2], "lr": 2e-3}, {"params": trained[1::2]}]


def build(make_optimizer, *, stage, name="odd", dtype="fp32", allow=True, **settings):
    model = make(name)
    settings = Config(
        train_batch_size=MICRO_BATCHES,
        micro_batch_size=1,
        gradient_clipping=CLIP,
        allow_untested_optimizer=allow,
        precision=PrecisionConfig(dtype=dtype),
        zero=ZeroConfig(stage=stage, bucket_numel=3000, **SHARD_ALL),
        **settings,
    )
    return zerocore.Engine(model, settings, optimizer=make_optimizer(groups_of(model)))


def train(engine, steps, name="odd"):
    for _ in range(steps):
        first = engine.global_steps * MICRO_BATCHES
        for k in range(engine.gradient_accumulation_steps()):
            j = min(k * engine.world_size + engine.rank, MICRO_BATCHES - 1)
            engine.backward(engine(*batch(name, first + j, torch.float32)))
            engine.step()


def values(engine):
    with engine.unsharded():
        return [p.detach().clone() for p in engine.module.parameters()]


def plain_torch(make_optimizer, steps, name="odd"):
    model = make(name)
    optimizer = make_optimizer(groups_of(model))
    for step in range(steps):
        for j in range(MICRO_BATCHES):
            (model(*batch(name, step * MICRO_BATCHES + j, torch.float32)) / MICRO_BATCHES).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", FOREIGN)
def test_a_class_without_a_twin_runs_on_shards(name, world_size):
    """Unused parameters, tied ones, scalars and empty ones included."""
    expected = plain_torch(FOREIGN[name], 3)
    for stage in (0, 1, 2, 3):
        engine = build(FOREIGN[name], stage=stage)
        train(engine, 3)
        for a, b in zip(values(engine), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text: f"stage {stage}: {text}")  # noqa: B023
        engine.close()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", ["rmsprop", "nadam", "asgd", "subclass"])
def test_its_state_is_saved_and_resharded(name, folder, world_size):
    engine = build(FOREIGN[name], stage=2)
    train(engine, 2)
    engine.save_checkpoint(folder)
    train(engine, 2)
    expected = values(engine)
    engine.close()
    for stage in (0, 1, 3):
        engine = build(FOREIGN[name], stage=stage)
        train(engine, 1)  # something to overwrite
        assert engine.load_checkpoint(folder, strict=True).path is not None
        train(engine, 2)
        for a, b in zip(values(engine), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        engine.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_masters_are_what_it_updates(stage):
    """bf16: steps too small for the parameters add up in the masters."""
    engine = build(lambda p: torch.optim.RMSprop(p, lr=1e-5), stage=stage, dtype="bf16")
    param = engine.module.shift
    before = zerocore.utils.safe_get_full_fp32_param(param)
    for _ in range(2):
        for k in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(*batch("odd", k * 2 + engine.rank, torch.bfloat16)))
            engine.step()
    after = zerocore.utils.safe_get_full_fp32_param(param)
    assert 0 < (after - before).abs().max() < 1e-3
    with engine.unsharded():
        assert torch.equal(param.detach(), after.bfloat16())


def test_schedulers_and_skipped_steps():
    model = one_weight()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine = zerocore.Engine(
        model,
        config(bf16={"enabled": True}, zero_allow_untested_optimizer=True),
        optimizer=optimizer,
        lr_scheduler=schedule,
    )
    for value, lr in ((1.0, 0.25), (float("nan"), 0.25), (1.0, 0.125)):
        engine.backward(engine(torch.full((1, 1), value, dtype=torch.bfloat16)).sum())
        before = model.weight.detach().clone()
        engine.step()
        assert engine.get_lr() == [lr]
        assert torch.equal(before, model.weight) == (value != value)


@pytest.mark.ranks(2)
def test_ranks_compare_what_its_groups_say_and_not_how_they_say_it():
    """A learning rate in a tensor, which becomes a number on a rank that has run out of batches; and an object."""
    model = one_weight()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=torch.tensor(0.5))
    optimizer.param_groups[0]["note"] = object()
    engine = zerocore.Engine(model, config(zero_allow_untested_optimizer=True), optimizer=optimizer)
    with engine.join():
        for _ in range(1 + engine.rank):
            engine.backward(engine(torch.ones(1, 1)).sum())
            engine.step()
    assert engine.global_steps == 2
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5 + 1e-6 * engine.rank)
    engine.backward(engine(torch.ones(1, 1)).sum())
    with pytest.raises(ConfigError, match="ranks step with different settings"):
        engine.step()


def test_it_is_refused_by_name_without_the_flag_and_said_with_it(caplog):
    with pytest.raises(
        UnsupportedError, match=r"got torch.optim.rmsprop.RMSprop, expected one of torch.optim that has"
    ):
        build(FOREIGN["rmsprop"], stage=1, allow=False)
    with pytest.raises(
        UnsupportedError, match=r"test_torch_optimizers.Mine, .* Subclasses are not taken for their parents"
    ):
        build(FOREIGN["subclass"], stage=1, allow=False)
    build(FOREIGN["subclass"], stage=1)
    assert "Mine has no native twin: its own code runs on each rank's shards" in caplog.text


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.LBFGS([x for group in p for x in group["params"]]),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.SparseAdam(p),
    ],
)
def test_what_is_not_elementwise_is_refused_by_name(make_optimizer):
    with pytest.raises(UnsupportedError, match="this one needs whole parameters"):
        build(make_optimizer, stage=1)


def test_a_16_bit_accumulator_is_refused():
    with pytest.raises(UnsupportedError, match="accumulate_dtype: got bf16 with an optimizer that has no native twin"):
        model = make("wide")
        precision = PrecisionConfig(dtype="bf16", accumulate_dtype="bf16")
        settings = Config(micro_batch_size=1, allow_untested_optimizer=True, precision=precision)
        zerocore.Engine(model, settings, optimizer=torch.optim.RMSprop(model.parameters()))


class Hoarder(torch.optim.Optimizer):
    """Its state is a list."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("seen", []).append(1)
                    p.sub_(group["lr"] * p.grad)


def test_state_that_cannot_be_saved_is_refused_by_name(tmp_path):
    engine = build(Hoarder, stage=1)
    train(engine, 1)
    with pytest.raises(UnsupportedError, match=r"the optimizer's state 'seen' of scale is neither a number nor"):
        engine.save_checkpoint(tmp_path)


def test_an_optimizer_that_fails_leaves_an_engine_that_says_so():
    model = one_weight()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.5)
    engine = zerocore.Engine(model, config(zero_allow_untested_optimizer=True), optimizer=optimizer)
    optimizer.step = lambda: 1 / 0
    engine.backward(engine(torch.ones(1, 1)).sum())
    with pytest.raises(ZeroDivisionError):
        engine.step()
    with pytest.raises(Error, match="state is not whole: the optimizer failed"):
        engine.backward(engine(torch.ones(1, 1)).sum())


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-3, betas=(0.8, 0.9), weight_decay=0.1),
        lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    ],
)
def test_twins_have_their_groups(make_optimizer, world_size):
    """Learning rate, decay and betas of each group, and what changes between steps."""

    def of_groups(groups):
        optimizer = make_optimizer(groups)
        optimizer.param_groups[1]["weight_decay"] = 0.3
        return optimizer

    engine = build(of_groups, stage=3, allow=False)
    train(engine, 3)
    assert [group["weight_decay"] for group in engine.optimizer.param_groups][1] == 0.3
    for a, b in zip(values(engine), plain_torch(of_groups, 3), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    engine.close()


def test_what_a_twin_cannot_do_is_refused_whenever_it_is_asked():
    for flag in ("amsgrad", "maximize"):
        with pytest.raises(UnsupportedError, match=f"adamw: got {flag}=True, expected False"):
            build(lambda p, flag=flag: torch.optim.AdamW(p, **{flag: True}), stage=1)
    engine = build(lambda p: torch.optim.AdamW(p), stage=1)
    engine.optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(UnsupportedError, match="got maximize=True"):
        train(engine, 1)


def test_an_optimizer_that_has_stepped_is_refused():
    for make_optimizer in (torch.optim.AdamW, torch.optim.Adagrad):
        model = one_weight()
        optimizer = make_optimizer(model.parameters())
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        with pytest.raises(UnsupportedError, match="already holds state of 1 parameters"):
            zerocore.Engine(model, config(), optimizer=optimizer)


def test_without_an_optimizer_it_is_adamw_and_said_once(caplog):
    engine = zerocore.Engine(one_weight(), Config(micro_batch_size=1))
    told = [each.getMessage() for each in caplog.records]
    assert len([text for text in told if "no optimizer was given and the config has none: using AdamW" in text]) == 1
    group = engine.optimizer.param_groups[0]
    assert engine.optimizer.type == "adamw"
    assert {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")} == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
    }


def test_neither_an_optimizer_nor_a_function():
    with pytest.raises(ConfigError, match="the function given as optimizer returned 3"):
        zerocore.Engine(one_weight(), config(), optimizer=lambda params: 3)
    with pytest.raises(ConfigError, match=r"got 'adam', expected a torch\.optim\.Optimizer or a function"):
        zerocore.Engine(one_weight(), config(), optimizer="adam")


# The optimizer that was handed in, after the engine was built

OWN = {
    "a twin": lambda p: torch.optim.SGD(p, lr=0.5),
    "on shards": lambda p: torch.optim.RMSprop(p, lr=0.5),
}


def engine_of(make_optimizer):
    """An engine with two groups, and the optimizer that it got."""
    model = torch.nn.Sequential(one_weight(), one_weight())
    optimizer = make_optimizer([{"params": [p]} for p in model.parameters()])
    return zerocore.Engine(model, config(zero_allow_untested_optimizer=True), optimizer=optimizer), optimizer


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda o: o.load_state_dict(o.state_dict()),
            r"\[engine\] the optimizer's list of parameter groups is another",
        ),
        (lambda o: setattr(o, "param_groups", list(o.param_groups)), "list of parameter groups is another one"),
        (lambda o: o.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}), "groups changed: got 3, exp"),
        (lambda o: o.param_groups.pop(), r"\[engine\] the number of parameter groups changed: got 1, expected 2"),
    ],
    ids=["loaded", "replaced", "added", "removed"],
)
def test_changes_of_its_groups_that_the_engine_would_not_see(kind, change, message):
    engine, optimizer = engine_of(OWN[kind])
    before = values(engine)
    change(optimizer)
    engine.backward(engine(torch.ones(1, 1)).sum())
    with pytest.raises(ConfigError, match=message):
        engine.step()
    assert all(map(torch.equal, before, values(engine)))


@pytest.mark.parametrize("kind", OWN)
def test_groups_cannot_be_added_to_the_engines_optimizer(kind):
    engine, _ = engine_of(OWN[kind])
    with pytest.raises(ConfigError, match=r"\[optimizer\] add_param_group: got a call after the engine was built"):
        engine.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert len(engine.optimizer.param_groups) == 2


def test_zero_grad_of_the_engines_optimizer_says_once_that_it_keeps_gradients(caplog):
    engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=2))

    def told():
        return sum("engine.zero_grad() to drop them" in r.message for r in caplog.records)

    for _ in range(2):
        engine.optimizer.zero_grad()
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 1)).sum())
            engine.step()
    engine.optimizer.zero_grad()
    engine.backward(engine(torch.ones(1, 1)).sum())
    engine.zero_grad()
    engine.optimizer.zero_grad()
    assert told() == 0
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 1)).sum())
        engine.optimizer.zero_grad()
        engine.step()
        assert told() == 1
    assert engine.module.weight.item() == 8 - 3 * 0.5


def test_its_shards_outlive_the_engine():
    engine, optimizer = engine_of(OWN["on shards"])
    engine.backward(engine(torch.ones(1, 1)).sum())
    engine.step()
    model = engine.module
    engine.close()
    core = weakref.ref(engine._params.core)
    del engine
    gc.collect()
    assert core() is not None
    assert [each.item() for each in optimizer.state] == [p.item() for p in model.parameters()]
