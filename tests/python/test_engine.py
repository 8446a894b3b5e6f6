"""The engine on one rank: semantics, bookkeeping, and what wrong use is told."""

from __future__ import annotations

import copy
import gc
import logging
import math
import weakref

import pytest
import torch
import zerocore
from one_weight import config, one_weight, train
from zerocore import utils
from zerocore.config import LossScaleConfig, OptimizerConfig, PrecisionConfig
from zerocore.errors import ConfigError, Error, NonFiniteError, UnsupportedError

# Accumulation


def test_step_after_each_micro_step_gives_the_mean():
    engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=4))
    for factor in (1, 2, 3, 6):
        assert engine.module.weight.item() == 8
        train(engine, factor)
    assert engine.module.weight.item() == 8 - 0.5 * 3
    assert (engine.global_steps, engine.micro_steps) == (1, 4)


def test_boundary_is_known_before_step():
    engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=2))
    assert not engine.is_gradient_accumulation_boundary()
    train(engine, 1)
    assert not engine.was_step_applied()
    assert engine.is_gradient_accumulation_boundary()
    train(engine, 1)
    assert engine.was_step_applied()


def test_pytorch_loop_keeps_the_sum_of_the_users_losses(caplog):
    engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=4))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for factor in (1, 2, 3, 6):
                engine.backward(engine(torch.full((1, 1), float(factor))).sum() / 4)
            engine.step()
    assert engine.module.weight.item() == 8 - 2 * 0.5 * 3
    assert engine.global_steps == 2
    assert sum("managed_gradient_accumulation" in r.message for r in caplog.records) == 1


def test_unmanaged_accumulation_needs_no_guess(caplog):
    engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=4, managed_gradient_accumulation=False))
    with caplog.at_level(logging.WARNING):
        train(engine, 2)
        assert engine.module.weight.item() == 7
        for factor in (1, 3):
            engine.backward(engine(torch.full((1, 1), float(factor))).sum())
        engine.step()
    assert engine.module.weight.item() == 7 - 0.5 * 4
    assert not caplog.records


def test_explicit_boundaries_give_the_mean_over_what_there_was():
    engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=4))
    for factors in ((1, 2, 6), (4, 8)):
        for i, factor in enumerate(factors):
            engine.set_gradient_accumulation_boundary(i == len(factors) - 1)
            engine.backward(engine(torch.full((1, 1), float(factor))).sum())
            engine.step()
    assert engine.module.weight.item() == 8 - 0.5 * 3 - 0.5 * 6


def test_several_backwards_in_one_micro_step_add_up():
    engine = zerocore.Engine(one_weight(), config())
    for _ in range(3):
        a, b = engine(torch.ones(1, 1)), engine(torch.full((1, 1), 3.0))
        engine.backward(a.sum())
        engine.backward(b.sum())
        engine.step()
    assert engine.module.weight.item() == 8 - 3 * 0.5 * 4


def test_several_backwards_a_micro_step_under_accumulation(caplog):
    engine = zerocore.Engine(one_weight(20.0), config(gradient_accumulation_steps=3))
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            engine.backward(engine(torch.ones(1, 1)).sum())
            engine.backward(engine(torch.full((1, 1), 3.0)).sum())
            engine.step()
    assert engine.global_steps == 2
    assert engine.module.weight.item() == 20 - 2 * 0.5 * 4
    assert sum("several losses" in r.message for r in caplog.records) == 1


def test_clipping_sees_the_mean():
    engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=2, gradient_clipping=1.0))
    train(engine, 2)
    train(engine, 4)
    report = engine.grad_norm_report()
    assert engine.get_global_grad_norm() == report.before == 3.0
    assert report.factor == pytest.approx(1 / 3)
    assert engine.module.weight.item() == pytest.approx(8 - 0.5)


def test_plain_backward_works_without_loss_scaling():
    engine = zerocore.Engine(one_weight(), config())
    engine(torch.full((1, 1), 2.0)).sum().backward()
    engine.step()
    assert engine.module.weight.item() == 7


def test_plain_backward_under_fp16_is_refused():
    engine = zerocore.Engine(one_weight(), config(fp16={"enabled": True}))
    with pytest.raises(ConfigError, match=r"\[engine\] a gradient of weight arrived outside engine.backward"):
        engine(torch.ones(1, 1, dtype=torch.float16)).sum().backward()


# Parameters


def test_parameters_are_replaced_in_place_and_gradients_taken():
    model = one_weight()
    weight = model.weight
    engine = zerocore.Engine(model, config())
    train(engine, 2)
    assert model.weight is weight
    assert weight.grad is None
    assert weight.item() == 7


def test_an_unused_parameter_is_not_decayed():
    model = torch.nn.ModuleDict({"a": one_weight(), "b": one_weight()})
    model.forward = lambda x: model["a"](x)
    engine = zerocore.Engine(model, config(optimizer={"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5}}))
    train(engine, 1, steps=3)
    assert model["b"].weight.item() == 8
    assert model["a"].weight.item() < 7


def test_channels_last_parameters_keep_their_layout():
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    reference = torch.nn.Conv2d(3, 4, 3)
    reference.load_state_dict(model.state_dict())
    engine = zerocore.Engine(model, config())
    x = torch.randn(2, 3, 8, 8)
    engine.backward(engine(x).square().mean())
    engine.step()
    reference(x).square().mean().backward()
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(model.weight.detach(), (reference.weight - 0.5 * reference.weight.grad).detach())


def test_groups_keep_their_settings_and_schedules_change_them():
    model = torch.nn.ModuleList([one_weight(), one_weight()])
    model.forward = lambda x: model[0](x) + model[1](x)
    groups = [{"params": [model[0].weight], "lr": 1.0}, {"params": [model[1].weight], "lr": 0.25}]
    engine = zerocore.Engine(model, config(), optimizer=torch.optim.SGD(groups, lr=0.5))
    train(engine, 2)
    assert (model[0].weight.item(), model[1].weight.item()) == (6, 7.5)
    engine.optimizer.param_groups[1]["lr"] = 0.0
    assert engine.get_lr() == [1.0, 0.0]
    train(engine, 2)
    assert (model[0].weight.item(), model[1].weight.item()) == (4, 7.5)


def test_a_torch_scheduler_on_the_handed_in_optimizer_is_seen():
    model = one_weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = zerocore.Engine(
        model, config(), optimizer=optimizer, lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    )
    train(engine, 2)
    assert engine.get_lr() == [0.25]
    train(engine, 2)
    assert model.weight.item() == 8 - 1 - 0.5


def test_bf16_keeps_fp32_masters():
    model = one_weight(1.0)
    engine = zerocore.Engine(
        model, config(bf16={"enabled": True}, optimizer={"type": "SGD", "params": {"lr": 2.0**-10}})
    )
    for _ in range(4):
        engine.backward(engine(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
        engine.step()
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.item() == 1 - 2.0**-8  # four updates, each too small for a bf16 weight of 1


def test_states_are_read_and_written_in_fp32_whatever_torchs_default_dtype():
    value = torch.full((1, 1), 1.2345678)
    adamw = {"type": "AdamW", "params": {"lr": 1e-4}}
    engine = zerocore.Engine(one_weight(0.1), config(bf16={"enabled": True}, optimizer=adamw))
    weight = engine.module.weight
    mixed = zerocore.Engine(
        one_weight(0.1),
        zerocore.Config(
            micro_batch_size=1,
            precision=PrecisionConfig(dtype="fp32", compute_dtype="bf16"),
            optimizer=OptimizerConfig(type="sgd"),
        ),
    )
    assert torch.get_default_dtype() == torch.float32
    torch.set_default_dtype(torch.bfloat16)
    try:
        utils.safe_set_full_optimizer_state(weight, value, "exp_avg")
        utils.safe_set_full_fp32_param(weight, value)
        states = [
            utils.safe_get_full_optimizer_state(weight, "exp_avg"),
            utils.safe_get_local_optimizer_state(weight, "exp_avg").view(1, 1),
            utils.safe_get_full_fp32_param(weight),
            utils.safe_get_local_fp32_param(weight).view(1, 1),
        ]
        kept = mixed.state_dict()["weight"]
    finally:
        torch.set_default_dtype(torch.float32)
    for state in states:
        assert state.dtype == torch.float32 and torch.equal(state, value)
    assert kept.dtype == torch.float32 and torch.equal(kept, torch.full((1, 1), 0.1))


def test_values_written_to_the_model_reach_the_masters():
    for precision in ({}, {"bf16": {"enabled": True}}):
        model = torch.nn.ModuleDict({"a": one_weight(), "b": one_weight()})
        model.forward = lambda x, model=model: model["a"](x) + model["b"](x)
        engine = zerocore.Engine(model, config(**precision))
        model.load_state_dict({"a.weight": torch.full((1, 1), 3.0), "b.weight": torch.full((1, 1), 5.0)})
        torch.nn.init.constant_(model["b"].weight, 2.0)
        engine.backward(engine(torch.ones(1, 1, dtype=model["a"].weight.dtype)).sum())
        engine.step()
        assert (model["a"].weight.item(), model["b"].weight.item()) == (2.5, 1.5)


def test_memory_report_counts_states():
    model = torch.nn.Linear(1024, 64, bias=False)
    model.register_buffer("table", torch.zeros(10))
    report = zerocore.Engine(model, config(bf16={"enabled": True}, optimizer={"type": "AdamW"})).memory_report()
    psi = 65536
    assert report == {
        "parameters": 2 * psi,
        "gradient_accumulator": 4 * psi,
        "master_weights": 4 * psi,
        "optimizer_state": 8 * psi,
        "gradient_buckets": 0,
        "gathered_parameters": 0,
        "messages": 0,
        "frozen_parameters": 0,
        "buffers": 20,
        "checkpoint_snapshot": 0,
    }


# Random numbers


def test_the_users_generator_is_left_alone_and_dropout_has_names():
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout(0.5))
    engine = zerocore.Engine(model, config())
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first = engine(torch.ones(1, 4)) == 0
    second = engine(torch.ones(1, 4)) == 0
    assert torch.equal(torch.rand(4), expected)
    assert not torch.equal(first, second)
    engine.close()
    again = zerocore.Engine(model, config())
    torch.manual_seed(99)
    assert torch.equal(again(torch.ones(1, 4)) == 0, first)


# Loss scaling and non-finite gradients


def fp16(**changes):
    return config(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1} | changes)


def half_step(engine, value):
    engine.backward(engine(torch.full((1, 1), value, dtype=torch.float16)).sum())
    engine.step()


def test_loss_scale_does_not_show_in_the_update():
    engine = zerocore.Engine(one_weight(), fp16())
    assert engine.loss_scale == 16
    half_step(engine, 2.0)
    assert engine.module.weight.item() == 7
    assert engine.get_global_grad_norm() == 2


def test_an_overflow_skips_the_step_halves_the_scale_and_holds_the_scheduler(caplog):
    engine = zerocore.Engine(
        one_weight(), fp16() | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}}
    )
    lr = engine.get_lr()
    with caplog.at_level(logging.WARNING):
        half_step(engine, math.inf)
    assert engine.module.weight.item() == 8
    assert (engine.loss_scale, engine.global_steps, engine.skipped_steps) == (8, 1, 1)
    assert not engine.was_step_applied()
    assert engine.get_lr() == lr
    assert "step 0: gradients are not finite" in caplog.text and "weight" in caplog.text
    half_step(engine, 1.0)
    assert engine.was_step_applied()


def test_clamp_goes_on_at_the_smallest_loss_scale(caplog):
    rule = LossScaleConfig(initial_scale_power=1, hysteresis=1, min_scale=1.0)
    precision = PrecisionConfig(dtype="fp16", loss_scale=rule, on_nonfinite="clamp")
    settings = zerocore.Config(micro_batch_size=1, optimizer=OptimizerConfig(type="sgd"), precision=precision)
    engine = zerocore.Engine(one_weight(), settings)
    before = engine.module.weight.item()
    for _ in range(3):
        half_step(engine, math.inf)
    assert (engine.loss_scale, engine.skipped_steps, engine.module.weight.item()) == (1, 3, before)
    assert caplog.text.count("weight") >= 3
    half_step(engine, 1.0)
    assert engine.was_step_applied()


def test_an_exhausted_loss_scale_names_the_parameters():
    engine = zerocore.Engine(one_weight(), fp16(initial_scale_power=0))
    with pytest.raises(
        NonFiniteError, match=r"inf or NaN in 1 parameters, first weight; loss on rank 0 was (inf|nan).*minimum 1"
    ):
        half_step(engine, math.inf)
        engine.get_lr()  # on a device that runs behind, whoever asks next gets to know


def test_a_nan_loss_in_fp32_is_an_error_that_changes_nothing():
    engine = zerocore.Engine(one_weight(), config())
    train(engine, 2)
    with pytest.raises(
        NonFiniteError,
        match=r"\[engine\] step 1: gradients are not finite, nothing was updated.*first weight; loss on rank 0 was nan",
    ):
        train(engine, math.nan)
        engine.get_lr()
    assert engine.module.weight.item() == 7
    train(engine, 2)
    assert engine.module.weight.item() == 6


# Wrong use


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda engine: engine(torch.ones(2, 1)),
            r"\[engine\] backward: got a loss of shape \(2, 1\), expected a scalar",
        ),
        (lambda engine: 3.0, r"\[engine\] backward: got a loss of shape float, expected a scalar"),
        (lambda engine: engine(torch.ones(1, 1)).sum().detach(), r"\[engine\] backward: the loss has no graph"),
    ],
)
def test_a_wrong_loss(loss, message):
    engine = zerocore.Engine(one_weight(), config())
    with pytest.raises(ConfigError, match=message):
        engine.backward(loss(engine))


def test_step_before_backward():
    engine = zerocore.Engine(one_weight(), config())
    with pytest.raises(
        ConfigError, match=r"\[engine\] step: no gradients, expected a backward\(\) since the last step"
    ):
        engine.step()
    train(engine, 1)
    with pytest.raises(ConfigError, match="no gradients"):
        engine.step()


def test_no_trainable_parameter():
    model = one_weight()
    model.weight.requires_grad_(False)
    with pytest.raises(
        ConfigError, match=r"\[engine\] the model has no trainable parameter: got 1 parameters, all frozen"
    ):
        zerocore.Engine(model, config())


def test_a_model_that_is_none_or_in_another_precision():
    with pytest.raises(ConfigError, match=r"\[engine\] model: got NoneType"):
        zerocore.Engine(None, config())
    with pytest.raises(ConfigError, match=r"parameter weight is torch.bfloat16 but the config trains in fp32"):
        zerocore.Engine(one_weight().bfloat16(), config())
    with pytest.raises(UnsupportedError, match=r"parameter weight is torch.float64"):
        zerocore.Engine(one_weight().double(), config())


def test_foreign_optimizers():
    model = one_weight()
    with pytest.raises(
        UnsupportedError, match=r"\[optimizer\] got torch.optim.rprop.Rprop, expected one of torch.optim"
    ):
        zerocore.Engine(model, config(), optimizer=torch.optim.Rprop(model.parameters()))
    with pytest.raises(UnsupportedError, match="amsgrad=True"):
        zerocore.Engine(model, config(), optimizer=torch.optim.AdamW(model.parameters(), amsgrad=True))
    with pytest.raises(ConfigError, match="the optimizer holds 1 trainable parameters, 0 of them the model's"):
        zerocore.Engine(model, config(), optimizer=torch.optim.SGD(one_weight().parameters(), lr=1.0))
    engine = zerocore.Engine(model, config())
    with pytest.raises(UnsupportedError, match=r"Call engine\.step\(\)"):
        engine.optimizer.step()


def test_initialize_has_deepspeeds_shape():
    model = one_weight()
    engine, optimizer, loader, scheduler = zerocore.initialize(
        model=model, config=config(), training_data=[torch.ones(1)] * 4
    )
    assert (
        engine.module is model
        and engine.optimizer is optimizer
        and loader is engine.training_dataloader
        and scheduler is None
    )
    assert len(loader) == 4
    with pytest.raises(ConfigError, match=r"\[initialize\] no config"):
        zerocore.initialize(model=model)
    with pytest.raises(UnsupportedError, match=r"\[initialize\] mpu"):
        zerocore.initialize(model=model, config=config(), mpu=object())


def test_after_a_failed_backward_nothing_is_stepped_by_mistake():
    model = torch.nn.Sequential(one_weight(), one_weight())
    engine = zerocore.Engine(model, config())
    hidden = model[0](torch.ones(1, 1))
    hidden.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(model[1](hidden).sum())
    with pytest.raises(
        Error, match=r"state is not whole: an earlier backward\(\) failed \(ZeroDivisionError: division by zero\)"
    ):
        engine.step()
    with pytest.raises(Error, match="Build a new engine"):
        engine.backward(engine(torch.ones(1, 1)).sum())


def test_a_backward_that_failed_before_any_gradient_can_be_tried_again():
    engine = zerocore.Engine(one_weight(), config())
    out = engine(torch.ones(1, 1))
    handle = out.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.backward(out.sum(), retain_graph=True)
    handle.remove()
    train(engine, 2)
    assert engine.module.weight.item() == 7


def test_gradients_are_dropped_by_the_engine_only():
    for change in (
        lambda p: setattr(p, "grad", None),
        lambda p: p.grad.mul_(2),
        lambda p: setattr(p, "grad", p.grad + 1),
    ):
        engine = zerocore.Engine(one_weight(), config())
        engine.backward(engine(torch.ones(1, 1)).sum())
        change(engine.module.weight)
        with pytest.raises(ConfigError, match=r"\[engine\] the gradient of weight was removed or changed between"):
            engine.step()


def test_a_gan_loop_drops_what_the_generator_left():
    torch.manual_seed(0)
    nets = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
    twins = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
    for net, twin in zip(nets, twins, strict=True):
        twin.load_state_dict(net.state_dict())
    g, d = (zerocore.Engine(net, config()) for net in nets)
    optimizers = [torch.optim.SGD(twin.parameters(), lr=0.5) for twin in twins]
    for _ in range(3):
        z = torch.randn(2, 3)
        g.backward(d(g(z)).square().mean())
        g.step()
        d.zero_grad()
        d.backward(d(g(z).detach()).abs().mean())
        d.step()
        (twins[1](twins[0](z))).square().mean().backward()
        optimizers[0].step()
        twins[1].zero_grad()
        twins[1](twins[0](z).detach()).abs().mean().backward()
        optimizers[1].step()
        twins[0].zero_grad()
        twins[1].zero_grad()
    for net, twin in zip(nets, twins, strict=True):
        torch.testing.assert_close(net.weight.detach(), twin.weight.detach())


def test_zero_grad_inside_an_accumulation():
    engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=2))
    train(engine, 1)
    engine.zero_grad()  # nothing is open
    engine.backward(engine(torch.ones(1, 1)).sum())
    with pytest.raises(ConfigError, match=r"\[engine\] zero_grad: got a call in micro-step 2 of a step"):
        engine.zero_grad()
    loop = zerocore.Engine(one_weight(), config(managed_gradient_accumulation=False))
    for factor in (5, 7):
        loop.backward(loop(torch.full((1, 1), float(factor))).sum())
    loop.zero_grad()
    train(loop, 2)
    assert loop.module.weight.item() == 7


def test_forwards_that_the_engine_does_not_see_are_told_of(caplog):
    for see, told in ((True, 0), (False, 1)):
        engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=2))
        for k in range(2):
            engine.set_gradient_accumulation_boundary(k == 1)
            x = torch.ones(1, 1)
            engine.backward((engine(x) if see else engine.module(x)).sum())
        engine.step()
        assert caplog.text.count("and no forward of the engine before either") == told
    loss = engine(torch.ones(1, 1)).sum()
    for _ in range(2):  # two losses of a micro-batch that was seen
        engine.backward(loss, retain_graph=True)
    engine.step()
    assert caplog.text.count("and no forward of the engine before either") == 1


def test_model_and_engine_that_came_apart():
    for part in (lambda e: setattr(e.module.weight, "data", torch.ones(1, 1)), lambda e: e.module.to(torch.bfloat16)):
        engine = zerocore.Engine(one_weight(), config())
        part(engine)
        with pytest.raises(ConfigError, match=r"\[engine\] parameter weight no longer lies in the engine's memory"):
            engine.backward(engine.module.weight.sum())
    first = zerocore.Engine(one_weight(), config())
    with pytest.raises(ConfigError, match=r"\[engine\] parameter weight belongs to another engine.*Call close\(\)"):
        zerocore.Engine(first.module, config())
    first.close()
    zerocore.Engine(first.module, config())
    with pytest.raises(ConfigError, match=r"\[engine\] the engine was closed"):
        first.backward(first.module(torch.ones(1, 1)).sum())


def pair():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def stage_config(stage):
    return config(zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0})


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("0.weight", lambda m, values: m.load_state_dict(values, assign=True)),
        ("1.weight", lambda m, values: setattr(m[1], "weight", torch.nn.Parameter(torch.zeros(4, 4)))),
        ("1.weight", lambda m, values: m.__setitem__(1, torch.nn.Linear(4, 4))),
        ("1.bias", lambda m, values: m[1].register_parameter("bias", None)),
    ],
    ids=["assign", "parameter", "module", "none"],
)
def test_a_parameter_that_was_replaced_is_an_error(stage, name, change):
    model = pair()
    values = copy.deepcopy(model.state_dict())
    engine = zerocore.Engine(model, stage_config(stage))
    train_pair(engine)
    change(model, values)
    with pytest.raises(ConfigError, match=rf"\[engine\] parameter {name} of the model is no longer the one that the"):
        train_pair(engine)


def train_pair(engine):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()


def test_a_tied_parameter_that_was_replaced_under_one_name_is_an_error():
    model = pair()
    model[1].weight = model[0].weight
    engine = zerocore.Engine(model, config())
    model[1].weight = torch.nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(ConfigError, match=r"\[engine\] parameter 1\.weight of the model is no longer the one"):
        train_pair(engine)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m[1], "weight", m[0].weight),  # tied later
        lambda m: torch.nn.utils.spectral_norm(m[1]),  # moves it to another name
        lambda m: m.__setitem__(1, torch.nn.Sequential(m[1])),  # wraps its module
        lambda m: m.__delitem__(1),
    ],
)
def test_parameters_that_have_only_moved_train_on(change):
    model = pair()
    engine = zerocore.Engine(model, config())
    change(model)
    before = model[0].weight.detach().clone()
    for _ in range(2):
        train_pair(engine)
    assert not torch.equal(model[0].weight, before)


def test_a_parameter_unfrozen_later_is_warned_of_once(caplog):
    model = torch.nn.ModuleDict({"frozen": one_weight(), "trained": one_weight()})
    model["frozen"].weight.requires_grad_(False)
    model.forward = lambda x: model["trained"](x)
    engine = zerocore.Engine(model, config())
    model["frozen"].weight.requires_grad_(True)
    train(engine, 1, steps=2)
    assert sum("frozen.weight requires a gradient now" in r.message for r in caplog.records) == 1


def test_torch_notices_a_step_inside_a_live_graph():
    model = torch.nn.Sequential(one_weight(), one_weight())
    engine = zerocore.Engine(model, config())
    loss = engine(torch.ones(1, 1)).sum()
    engine.backward(loss, retain_graph=True)
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(loss)


def test_buffers_shared_by_modules_stay_shared():
    model = torch.nn.ModuleList([one_weight(), one_weight()])
    table = torch.zeros(3)
    for module in model:
        module.register_buffer("table", table)
    zerocore.Engine(model, config(bf16={"enabled": True}))
    assert model[0].table is model[1].table and model[0].table.dtype == torch.bfloat16


def test_eval_mode_loops_of_pytorchs_kind_count_micro_batches():
    engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=2))
    engine.eval()
    for _ in range(2):
        for factor in (1, 3):
            engine.backward(engine(torch.full((1, 1), float(factor))).sum() / 2)
        engine.step()
    assert engine.global_steps == 2 and engine.module.weight.item() == 8 - 2 * 0.5 * 2


def test_step_twice_inside_an_accumulation():
    engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=3))
    train(engine, 1)
    with pytest.raises(ConfigError, match=r"\[engine\] step: no gradients"):
        engine.step()


def test_what_is_reported_after_a_step():
    engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=2, gradient_clipping=1.0))
    train(engine, 4, steps=2)
    assert engine.was_step_applied()
    report = engine.grad_norm_report()
    assert (report.before, report.after) == (4.0, pytest.approx(1.0))
    returned = engine.backward(engine(torch.full((1, 1), 2.0)).sum())
    assert returned.item() == pytest.approx(engine.module.weight.item()) and not returned.requires_grad
    engine.step()
    assert not engine.was_step_applied()


def test_optimizer_state_cannot_be_saved_yet_and_decay_is_each_groups_own():
    model = torch.nn.ModuleList([one_weight(), one_weight()])
    model.forward = lambda x: model[0](x) + model[1](x)
    optimizer = torch.optim.Adam(
        [{"params": [p], "decoupled_weight_decay": d} for p, d in zip(model.parameters(), (True, False), strict=True)],
        lr=0.1,
        weight_decay=0.5,
    )
    engine = zerocore.Engine(model, config(), optimizer=optimizer)
    for call, instead in (
        (engine.optimizer.state_dict, "save_checkpoint"),
        (lambda: engine.optimizer.load_state_dict({}), "load_checkpoint"),
        (engine.optimizer.step, "step"),
    ):
        with pytest.raises(UnsupportedError, match=rf"got a call, expected none: .* Call engine\.{instead}\(\)"):
            call()
    train(engine, 1)
    assert model[0].weight.item() == pytest.approx(8 * 0.95 - 0.1)
    assert model[1].weight.item() == pytest.approx(8 - 0.1)


def test_schedulers_that_would_change_nothing():
    model = one_weight()
    other = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(ConfigError, match="over another optimizer than the engine's"):
        zerocore.Engine(model, config(), lr_scheduler=torch.optim.lr_scheduler.StepLR(other, 1))
    with pytest.raises(ConfigError, match="got ReduceLROnPlateau"):
        zerocore.Engine(
            model, config(), optimizer=other, lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(other)
        )


def test_frozen_parameters_keep_their_dtype_under_fp32_and_are_cast_under_bf16():
    for settings, expected in (({}, torch.float64), ({"bf16": {"enabled": True}}, torch.bfloat16)):
        model = torch.nn.ModuleDict({"frozen": one_weight().double(), "trained": one_weight()})
        model["frozen"].weight.requires_grad_(False)
        zerocore.Engine(model, config(**settings))
        assert model["frozen"].weight.dtype == expected


def test_close_gives_the_model_back():
    model = one_weight()
    engine = zerocore.Engine(model, config())
    train(engine, 2)
    engine.close()
    engine.close()
    model(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad.item() == 1
    assert model.weight.item() == 7


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_closed_engine_is_not_kept_by_its_model(stage):
    model = one_weight()
    engine = zerocore.Engine(model, config(zero_optimization={"stage": stage}))
    train(engine, 2)
    held = weakref.ref(engine._params)
    engine.close()
    del engine
    gc.collect()
    assert held() is None
    assert model.weight.item() == 7
    again = zerocore.Engine(model, config(zero_optimization={"stage": stage}))
    train(again, 2)
    assert model.weight.item() == 6


def test_groups_changed_after_the_engine_was_built():
    changes = {
        r"parameter group 0 of the optimizer changed.*got 1 parameters, expected the same 2": lambda groups: groups[0][
            "params"
        ].pop(),
        r"the number of parameter groups changed: got 2, expected 1": lambda groups: groups.append(dict(groups[0])),
    }
    for message, change in changes.items():
        engine = zerocore.Engine(torch.nn.Linear(1, 1), config())
        change(engine.optimizer.param_groups)
        engine.backward(engine(torch.ones(1, 1)).sum())
        with pytest.raises(ConfigError, match=message):
            engine.step()
