"""What scripts for DeepSpeed call besides initialize(), forward, backward and step()."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import re

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import zerocore
from one_weight import config, one_weight, train
from torch import nn
from zerocore import utils, zero
from zerocore.accelerator import get_accelerator
from zerocore.errors import ConfigError, UnsupportedError
from zerocore.ops.adagrad import DeepSpeedCPUAdagrad
from zerocore.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zerocore.ops.lion import DeepSpeedCPULion, FusedLion
from zerocore.utils import groups


def rank():
    return zerocore.comm.get_rank()


def ones(factor=1.0):
    return torch.full((1, 1), float(factor))


# Accumulation


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_sync_is_legal_in_every_stage(stage, world_size):
    def trained(hint):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 70), nn.Tanh(), nn.Linear(70, 3))
        engine = zerocore.Engine(model, config(gradient_accumulation_steps=4, zero_optimization={"stage": stage}))
        data = torch.Generator().manual_seed(rank())
        for j in range(8):
            engine.set_gradient_accumulation_boundary(j % 4 == 3)
            with engine.no_sync() if hint and j % 4 < 3 else contextlib.nullcontext():
                engine.backward(engine(torch.randn(2, 5, generator=data)).square().mean())
            if j % 4 == 3:
                engine.step()
        return utils.params_sha256(model)

    assert trained(hint=True) == trained(hint=False)


def test_a_step_inside_of_no_sync_is_refused():
    engine = zerocore.Engine(one_weight(), config())
    with engine.no_sync():
        engine.backward(engine(ones()).sum())
        with pytest.raises(ConfigError, match=r"\[engine\] step: got a call inside no_sync"):
            engine.step()
    engine.step()
    assert engine.module.weight.item() == 7.5


@pytest.mark.ranks(1, 2)
def test_backwards_in_no_sync_add_up_to_one_step(world_size):
    engine = zerocore.Engine(one_weight(), config())
    with engine.no_sync():
        engine.backward(engine(ones(1)).sum())
        engine.backward(engine(ones(2)).sum())
    with engine.coalesce_grad_reduction():
        engine.backward(engine(ones(3)).sum())
    engine.step()
    assert engine.module.weight.item() == 8 - 0.5 * 6


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("explicit", [False, True])
def test_losses_that_the_script_has_divided(explicit, world_size):
    """scale_wrt_gas=False: what transformers' Trainer passes, whose losses are divided by the step's tokens."""
    engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=2))
    for factor, boundary in ((1, False), (3, True)):
        if explicit:
            engine.set_gradient_accumulation_boundary(boundary)
        loss = engine(ones(factor + rank())).sum()
        assert engine.backward(loss, scale_wrt_gas=False).item() == loss.item()
        engine.step()
    assert engine.module.weight.item() == 8 - 0.5 * (1 + 3 + 2 * (world_size - 1) / 2)


def test_a_step_is_divided_once():
    engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=2))
    engine.backward(engine(ones()).sum(), scale_wrt_gas=False)
    engine.step()
    with pytest.raises(ConfigError, match="got scale_wrt_gas=True after False in the same step"):
        engine.backward(engine(ones()).sum())
    engine.backward(engine(ones()).sum(), False, False)
    engine.step()
    train(engine, 4, steps=2)
    assert engine.module.weight.item() == 8 - 0.5 * 2 - 0.5 * 4


@pytest.mark.ranks(1, 2)
def test_the_train_batch_size_may_grow_between_steps(world_size):
    engine = zerocore.Engine(one_weight(), config(train_micro_batch_size_per_gpu=2))
    train(engine, 1)
    engine.set_train_batch_size(4 * world_size)
    assert engine.get_batch_info() == (4 * world_size, 2, 2)
    train(engine, 1)
    assert not engine.was_step_applied()
    with pytest.raises(ConfigError, match="set_train_batch_size: got a call with gradients pending"):
        engine.set_train_batch_size(2 * world_size)
    train(engine, 3)
    assert engine.module.weight.item() == 8 - 0.5 - 0.5 * 2
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (10 * world_size, 5, 2)
    engine.set_train_batch_size(5 * world_size)
    train(engine, 1)
    assert engine.was_step_applied() and engine.train_batch_size() == 5 * world_size
    with pytest.raises(ConfigError, match="train_batch_size"):
        engine.set_train_batch_size(5 * world_size + 1)


def test_samples_are_counted_at_the_batch_size_of_their_step(tmp_path):
    """Monitors write by them: they must not go back."""
    engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=4))
    train(engine, 1, steps=4)
    engine.set_train_batch_size(1)
    assert engine.global_samples == 4
    train(engine, 1)
    assert engine.global_samples == 5
    engine.save_checkpoint(tmp_path)
    engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=4))
    engine.load_checkpoint(tmp_path)
    assert engine.global_samples == 5


def test_a_batch_size_that_the_data_was_dealt_for_stays():
    data = [torch.ones(1)] * 8
    engine = zerocore.Engine(one_weight(), config(), training_data=data)
    with pytest.raises(UnsupportedError, match="got an engine that deals training_data"):
        engine.set_train_batch_size(4)


# Backward


def test_a_loss_that_the_script_scales_itself():
    for dtype, extra in (("fp32", {}), ("fp16", {"fp16": {"enabled": True, "initial_scale_power": 4}})):
        engine = zerocore.Engine(one_weight(), config(**extra))
        x = ones().half() if dtype == "fp16" else ones()
        engine.scale(engine(x).sum()).backward()
        engine.step()
        assert engine.module.weight.item() == 7.5
        assert engine.optimizer.cur_scale == engine.loss_scale == (16 if extra else 1)
        if extra:
            with pytest.raises(ConfigError, match=r"engine\.scale\(loss\)\.backward\(\) instead"):
                engine(x).sum().backward()


class Halves(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.shared = shared

    def forward(self, x):
        return self.shared(self.shared(x))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_submodule_used_twice(stage, world_size):
    engine = zerocore.Engine(Halves(one_weight(2.0)), config(zero_optimization={"stage": stage}))
    train(engine, 1)  # d(w w)/dw = 4
    assert utils.safe_get_full_fp32_param(engine.module.shared.weight).item() == 0


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_loss_through_two_engines(stage, world_size):
    settings = config(zero_optimization={"stage": stage})
    first, second = zerocore.Engine(one_weight(3.0), settings), zerocore.Engine(one_weight(2.0), settings)
    for _ in range(2):
        loss = second(first(ones())).sum()
        first.backward(loss)
        first.step()
        second.step()
    # (3, 2) -> (2, 0.5) -> (1.75, -0.5)
    found = [utils.safe_get_full_fp32_param(each.module.weight).item() for each in (first, second)]
    assert found == [1.75, -0.5]
    first.destroy()
    second.destroy()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_frozen_for_a_while(stage, world_size):
    """As a GAN's discriminator is in the generator's turn: no update, no decay, no error."""
    model = nn.Sequential(one_weight(2.0), one_weight(3.0))
    engine = zerocore.Engine(model, config(zero_optimization={"stage": stage}))

    def values():
        return [utils.safe_get_full_fp32_param(p).item() for p in model.parameters()]

    model[1].requires_grad_(False)
    train(engine, 1)
    assert values() == [0.5, 3.0]
    model[1].requires_grad_(True)
    train(engine, 1)
    assert values() == [-1.0, 2.75]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_compiled_engine_trains_to_the_same_bits(stage, backend, world_size):
    def trained(compiled):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 70), nn.Tanh(), nn.Linear(70, 3))
        zero_keys = {"stage": stage, "stage3_param_persistence_threshold": 0}
        engine = zerocore.Engine(model, config(zero_optimization=zero_keys))
        if compiled:
            engine.compile(backend)
        assert engine.is_compiled == compiled
        names = list(engine.module.state_dict(keep_vars=True))
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 5) * (1 + rank())).square().mean())
            engine.step()
        assert names == list(engine.state_dict())
        return utils.params_sha256(model)

    torch._dynamo.reset()
    assert trained(compiled=True) == trained(compiled=False)


def test_compiler_passes_of_deepspeed_are_refused():
    engine = zerocore.Engine(one_weight(), config())
    with pytest.raises(UnsupportedError, match=r"\[engine\] compile: got schedule="):
        engine.compile(schedule=[(0, ())])


# Settings


def test_getters():
    engine = zerocore.Engine(one_weight(), config(gradient_clipping=0.25, bf16={"enabled": True}))
    assert engine.zero_optimization() and engine.zero_optimization_stage() == 2
    assert engine.zero_optimization_partition_gradients() and not engine.zero_optimization_partition_weights()
    assert engine.bfloat16_enabled() and not engine.fp16_enabled() and not engine.dynamic_loss_scale()
    assert (engine.gradient_clipping(), engine.optimizer_name(), engine.get_mom()) == (0.25, "sgd", [0.0])
    assert (engine.global_rank, engine.dp_world_size, engine.mp_world_size, engine.local_rank) == (0, 1, 1, 0)
    assert engine.device == torch.device("cpu") and isinstance(engine.local_rank, int)
    assert engine.config.get("zero_optimization")["stage"] == 2
    assert engine.config.get("bf16") == {"enabled": True} and engine.config.get("comms_logger", 5) == 5
    assert engine.scheduler_name() is None and engine.steps_per_print() == engine.config.steps_per_print
    assert engine.get_global_grad_norm() is None and engine.global_samples == 0
    for move in (engine.offload_states, engine.reload_states):
        with pytest.raises(UnsupportedError, match=r"\[engine\] \w+_states: got a call to move states between tiers"):
            move(include=[], device="cpu")


def test_what_the_engine_does_not_have_is_the_modules():
    model = one_weight()
    model.generate = lambda tokens: tokens + 1
    engine = zerocore.Engine(model, config())
    assert engine.generate(4) == 5 and engine.in_features == 1
    assert not hasattr(engine, "no_such_thing")
    with pytest.raises(AttributeError, match="no_such_thing"):
        engine.no_such_thing  # noqa: B018


def test_overflow_is_told_by_the_optimizer_too():
    engine = zerocore.Engine(one_weight(), config(fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1}))
    engine.backward(engine(ones().half()).sum() * float("inf"))
    engine.step()
    assert engine.optimizer.overflow and engine.optimizer.loss_scale == 8 and not engine.was_step_applied()
    engine.backward(engine(ones().half()).sum())
    engine.step()
    assert not engine.optimizer.overflow and engine.was_step_applied()


def test_arguments_for_the_schedulers_step():
    class Told:
        def __init__(self):
            self.calls = []

        def step(self, **arguments):
            self.calls.append(arguments)

    engine = zerocore.Engine(one_weight(), config(), lr_scheduler=Told())
    for arguments in ({"epoch": 3}, None):
        engine.backward(engine(ones()).sum())
        engine.step(lr_kwargs=arguments)
    assert engine.lr_scheduler.calls == [{"epoch": 3}, {}]


# Beside the engine


def test_command_line_arguments(tmp_path):
    parser = zerocore.add_config_arguments(argparse.ArgumentParser())
    path = tmp_path / "ds.json"
    path.write_text(
        '{"train_batch_size": 1, "gradient_clipping": 0.0, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}'
    )
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    engine, *_ = zerocore.initialize(args=args, model=one_weight())
    train(engine, 1)
    assert args.deepspeed and engine.module.weight.item() == 7.5


@pytest.mark.ranks(1, 2)
def test_torch_distributed_after_initialize(world_size):
    """As after DeepSpeed's: barriers, samplers and reductions of the script's own work."""
    engine, *_ = zerocore.initialize(model=one_weight(), config=config())
    assert zerocore.comm.is_initialized() and zerocore.comm.get_world_size() == world_size == dist.get_world_size()
    assert engine.rank == dist.get_rank() == zerocore.comm.get_rank() == int(os.environ["RANK"])
    total = torch.ones(1)
    zerocore.comm.all_reduce(total, op=zerocore.comm.ReduceOp.SUM)
    assert total.item() == world_size
    dist.barrier()
    assert len(torch.utils.data.DistributedSampler(range(4))) == 4 // world_size
    zerocore.init_distributed("nccl", timeout=None)  # there is one already
    with pytest.raises(ConfigError, match=r"init_distributed: world_size: got 7, expected"):
        zerocore.init_distributed(world_size=7)
    with pytest.raises(AttributeError):
        zerocore.comm.no_such_collective  # noqa: B018


def test_adam_under_deepspeeds_names():
    for corrects in (True, False):
        model = nn.Sequential(one_weight(0.0), one_weight(0.0))
        groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}]
        optimizer = FusedAdam(groups, lr=0.25, bias_correction=corrects, betas=(0.5, 0.75), eps=0.0)
        engine = zerocore.Engine(model, {"train_batch_size": 1}, optimizer=optimizer)
        assert engine.optimizer.type == "adamw" and engine.get_lr() == [0.25, 0.5]
        engine.backward(model[0].weight.sum() + model[1].weight.sum())
        engine.step()  # by lr m / sqrt(v) of the first moments 0.5 g and 0.25 g^2, or both corrected: alike
        assert [each.weight.item() for each in model] == [-0.25, -0.5]
        engine.backward(0 * model[0].weight.sum() + model[1].weight.sum())
        engine.step()  # m = 0.25, v = 0.1875
        expected = -0.25 - 0.25 * (1 / 3 / (0.1875 / 0.4375) ** 0.5 if corrects else 0.25 / 0.1875**0.5)
        assert model[0].weight.item() == pytest.approx(expected, abs=1e-6)
    assert DeepSpeedCPUAdam(nn.Linear(1, 1).parameters(), adamw_mode=False).__class__ is torch.optim.Adam
    with pytest.raises(UnsupportedError, match="amsgrad=True"):
        FusedAdam(nn.Linear(1, 1).parameters(), amsgrad=True)
    with pytest.raises(UnsupportedError, match="fp32_optimizer_states=False"):
        DeepSpeedCPUAdam(nn.Linear(1, 1).parameters(), fp32_optimizer_states=False)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("make", "twin"), [(FusedLion, "lion"), (DeepSpeedCPULion, "lion"), (DeepSpeedCPUAdagrad, "adagrad")]
)
def test_lion_and_adagrad_under_deepspeeds_names(make, twin, world_size):
    """Native, in shards, with each group's settings; as their own step() on the whole model."""

    def model_and_optimizer():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 70), nn.Tanh(), nn.Linear(70, 3))
        halves = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02, "weight_decay": 0.3}]
        return model, make(halves, lr=0.01, weight_decay=0.1)

    model, optimizer = model_and_optimizer()
    keys = {"stage": 3, "stage3_param_persistence_threshold": 0}
    settings = config(zero_optimization=keys)
    del settings["optimizer"]
    engine = zerocore.Engine(model, settings, optimizer=optimizer)
    assert (engine.optimizer.type, engine.get_lr()) == (twin, [0.01, 0.02])
    plain, optimizer = model_and_optimizer()
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        engine.backward(engine(x).square().mean())
        engine.step()
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_options_of_lion_and_adagrad_that_there_are_not():
    params = list(nn.Linear(1, 1).parameters())
    for make, options in (
        (DeepSpeedCPULion, {"fp32_optimizer_states": False}),
        (DeepSpeedCPUAdagrad, {"fp32_optimizer_states": False}),
        (DeepSpeedCPUAdagrad, {"amsgrad": True}),
    ):
        with pytest.raises(UnsupportedError, match=rf"{make.__name__}: got {next(iter(options))}="):
            make(params, **options)


@pytest.mark.ranks(1, 2)
def test_who_trains_together(world_size):
    assert (groups.get_data_parallel_world_size(), groups.get_data_parallel_rank()) == (world_size, rank())
    for kind in ("model_parallel", "tensor_model_parallel", "sequence_parallel"):
        assert getattr(groups, f"_get_{kind}_world_size")() == 1 and getattr(groups, f"get_{kind}_rank")() == 0
        with pytest.raises(UnsupportedError, match="groups: got a request for a group of tensor or sequence"):
            getattr(groups, f"_get_{kind}_group")()
    assert groups._get_sequence_data_parallel_world_size() == world_size
    assert groups.get_tensor_model_parallel_src_rank() == rank()
    if not dist.is_initialized():
        with pytest.raises(ConfigError, match="groups: got no process group"):
            groups._get_data_parallel_group()
    zerocore.init_distributed()
    total = torch.ones(1)
    dist.all_reduce(total, group=groups._get_data_parallel_group())
    assert total.item() == world_size


def test_the_accelerator_is_the_cpu():
    device = get_accelerator()
    assert torch.device(device.device_name()) == device.device() == torch.device("cpu")
    assert device.is_available() and device.current_device() == 0 and device.device_count() == 1
    assert device.communication_backend_name() == "gloo" and device.current_device_name() == "cpu"


def test_what_there_is_not_is_refused_by_name():
    for call in (zerocore.init_inference, zerocore.tp_model_init):
        with pytest.raises(UnsupportedError, match=rf"\[initialize\] {call.__name__}: got a call, expected none"):
            call(model=None)
    for key in ("remote_device", "mpu", "data_parallel_group"):
        with pytest.raises(UnsupportedError, match=rf"\[zero\] Init: {key}: got 'nvme'"):
            zero.Init(**{key: "nvme"})


@pytest.mark.ranks(2)
def test_code_that_asks_whether_a_parameter_must_be_gathered(world_size):
    """What adapters' and chat models' scripts do before they save weights."""

    def whole(param):
        if hasattr(param, "ds_id"):
            assert param.ds_status == zero.ZeroParamStatus.NOT_AVAILABLE
            assert (param.ds_shape, param.ds_numel) == (param.shape, param.numel())
            with zero.GatheredParameters([param]):
                return param.data.detach().cpu().clone()
        return param.detach().cpu().clone()

    with zero.Init(remote_device="cpu", pin_memory=False):
        model = nn.Linear(40, 30)
    keys = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = zerocore.Engine(model, config(zero_optimization=keys))
    assert [hasattr(p, "ds_id") for p in model.parameters()] == [True, True]
    found = {name: whole(p) for name, p in model.named_parameters()}
    for name, value in engine.state_dict().items():
        assert torch.equal(found[name], value)


@pytest.mark.ranks(2)
def test_generating_with_a_whole_model(world_size):
    keys = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = zerocore.Engine(nn.Linear(40, 40), config(zero_optimization=keys))
    x = torch.ones(1, 40)
    with torch.no_grad():
        once = engine(x)
        with zero.unwrap_model_for_generation(engine) as model:
            for _ in range(1 + rank()):  # as many as each rank likes
                assert torch.equal(model(x), once)


@pytest.mark.ranks(2)
def test_leaf_modules_are_gathered_as_one(world_size):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.each = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))

        def forward(self, x):
            return self.each[rank()](x)  # other ones on each rank

    model = nn.Sequential(nn.Linear(40, 40), Experts(), nn.Linear(40, 40))
    assert utils.set_z3_leaf_modules(model, ["Experts"]) == utils.get_z3_leaf_modules(model) == [model[1]]
    keys = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_module_granularity_threshold": 1}
    engine = zerocore.Engine(model, config(zero_optimization=keys))
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 40)).mean())
        engine.step()
    assert utils.unset_z3_leaf_modules(model, [Experts]) == [model[1]] and not utils.get_z3_leaf_modules(model)
    with pytest.raises(ConfigError, match="leaf modules: got \\['Expert'\\], which no module of the model is"):
        utils.set_z3_leaf_modules(model, ["Expert"])


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_may_be_replaced_in_bulk(stage, world_size):
    engine = zerocore.Engine(one_weight(), config(zero_optimization={"stage": stage}))
    engine.backward(engine(ones()).sum())
    utils.safe_update_full_grad_vectorized(list(engine.module.parameters()), lambda grad, param: grad * 6)
    engine.step()
    assert utils.safe_get_full_fp32_param(engine.module.weight).item() == 8 - 0.5 * 6


def test_small_helpers(caplog):
    assert list(itertools.islice(utils.RepeatingLoader([1, 2]), 5)) == [1, 2, 1, 2, 1]
    with caplog.at_level(logging.INFO, logger="zerocore"):
        utils.log_dist("seen", ranks=[0])
        utils.log_dist("unseen")
        utils.log_dist("unseen", ranks=[1])
    assert [record.message for record in caplog.records] == ["[rank 0] seen"] and utils.logger.name == "zerocore"
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="zerocore"):
        utils.see_memory_usage("not said")
        utils.see_memory_usage("after init", force=True)
    (record,) = caplog.records
    now, most = map(float, re.fullmatch(r"after init: (\S+) GB of .*, (\S+) GB at most", record.message).groups())
    assert 0.05 < now <= most < 100
    with utils.OnDevice(dtype=torch.bfloat16, device="meta"):
        weight = nn.Linear(2, 2).weight
    assert (weight.device.type, weight.dtype, torch.get_default_dtype()) == ("meta", torch.bfloat16, torch.float32)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", [2, 3])
def test_weights_of_a_checkpoint_for_a_plain_model(stage, folder, world_size):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].to(memory_format=torch.channels_last)
    model[4].weight = model[3].weight
    model[3].bias.requires_grad_(False)
    engine = zerocore.Engine(model, config(zero_optimization={"stage": stage}, bf16={"enabled": True}))
    for _ in range(2):
        engine.backward(engine(torch.rand(2, 3, 4, 4).bfloat16()).float().square().mean())
        engine.step()
    engine.save_checkpoint(folder, tag="mine")
    state = utils.get_fp32_state_dict_from_zero_checkpoint(folder, tag="mine")
    assert state.keys() == model.state_dict(keep_vars=True).keys() and state["0.weight"].dtype == torch.float32
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.requires_grad:
            assert torch.equal(state[name], utils.safe_get_full_fp32_param(param)), name
    assert torch.equal(state["1.running_mean"], model[1].running_mean)
    assert "3.bias" not in utils.get_fp32_state_dict_from_zero_checkpoint(folder, exclude_frozen_parameters=True)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 16), nn.Linear(16, 16))
    assert utils.load_state_dict_from_zero_checkpoint(plain, folder) is plain
    assert all(torch.equal(value.to(state[name].dtype), state[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("limit", ["5GB", 5000, None])
def test_a_checkpoint_becomes_files_of_fp32_weights(limit, safe, tmp_path):
    """bf16, a tied weight, a frozen one, a buffer of integers: in one file, or in several with an index."""
    model = nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40), nn.Linear(40, 40), nn.Linear(40, 40))
    model[3].weight = model[2].weight
    model[0].bias.requires_grad_(False)
    engine = zerocore.Engine(model, config(bf16={"enabled": True}))
    engine.backward(engine(torch.rand(3, 40).bfloat16()).float().square().mean())
    engine.step()
    engine.save_checkpoint(tmp_path / "run", tag="mine")
    engine.close()
    expected = utils.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run")
    for exclude in (False, True):
        out = tmp_path / f"out{exclude}"
        out.mkdir()
        for _ in range(2):  # the second replaces the first
            utils.convert_zero_checkpoint_to_fp32_state_dict(
                tmp_path / "run", out, limit, safe, tag="mine", exclude_frozen_parameters=exclude
            )
        files = sorted(path.name for path in out.iterdir())
        stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
        if limit != 5000:
            assert files == [f"{stem}.{suffix}"]
        else:  # 3 matrices of 6400 bytes each, two names for one of them
            count = len(files) - 1
            parts = [f"{stem}-{i + 1:05}-of-{count:05}.{suffix}" for i in range(count)]
            assert count >= 3 and files == [*parts, f"{stem}.{suffix}.index.json"]
            index = json.loads((out / files[-1]).read_text())
            assert set(index["weight_map"].values()) == set(files[:-1])
        state = {}
        for name in files:
            if name.endswith(".bin"):
                state |= torch.load(out / name, weights_only=True)
            elif name.endswith(".safetensors"):
                state |= safetensors.torch.load_file(out / name)
        if safe:
            state["3.weight"] = state["2.weight"]
        assert state.keys() == expected.keys() - ({"0.bias"} if exclude else set())
        for name, value in state.items():
            as_fp32 = expected[name].float() if expected[name].is_floating_point() else expected[name]
            assert value.dtype == as_fp32.dtype and torch.equal(value, as_fp32), name
        if not safe:
            assert state["3.weight"].data_ptr() == state["2.weight"].data_ptr()


def test_a_conversion_that_is_asked_for_wrongly(tmp_path):
    engine = zerocore.Engine(one_weight(), config())
    engine.save_checkpoint(tmp_path)
    for out, limit, text in (
        ("model.bin", None, "output_dir: got .*model.bin, expected a folder"),
        ("out", "many", "max_shard_size: got 'many', expected bytes, a size like '5GB'"),
    ):
        with pytest.raises(ConfigError, match=text):
            utils.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / out, limit)


@pytest.mark.ranks(2)
def test_what_is_gathered_can_be_released(world_size):
    keys = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = zerocore.Engine(nn.Linear(40, 40), config(zero_optimization=keys))
    with torch.no_grad():
        engine(torch.ones(1, 40))
        once = engine(torch.ones(1, 40))
        engine.empty_partition_cache()
        assert engine._params.core.live_numel() == 0
        assert torch.equal(engine(torch.ones(1, 40)), once)
    engine.backward(engine(torch.ones(1, 40)).sum())
    with pytest.raises(ConfigError, match="empty_partition_cache: got a call between backward"):
        engine.empty_partition_cache()
    engine.step()


def test_a_loader_made_by_the_engine():
    engine = zerocore.Engine(one_weight(), config(train_micro_batch_size_per_gpu=2))
    batches = list(engine.deepspeed_io([torch.full((1,), float(i)) for i in range(6)]))
    assert len(batches) == 3 and sorted(torch.cat(batches).flatten().tolist()) == [0, 1, 2, 3, 4, 5]
    for wrong in ({"batch_size": 3}, {"route": "eval"}, {"data_sampler": [0]}):
        with pytest.raises(UnsupportedError, match=rf"deepspeed_io: {next(iter(wrong))}: got"):
            engine.deepspeed_io([torch.ones(1)], **wrong)


def test_batches_are_processed_as_they_are_dealt():
    """What set_data_post_process_func() is for: to cut sequences to a length that depends on the step."""
    data = [torch.full((3,), float(i)) for i in range(4)]
    engine = zerocore.Engine(one_weight(), config(train_micro_batch_size_per_gpu=2), training_data=data)
    engine.set_data_post_process_func(lambda batch, state: batch[:, : 1 + state["step"]])
    assert [batch.shape for batch in engine.training_dataloader] == [(2, 2), (2, 1)]  # the second ends an epoch
    engine.set_data_post_process_func(None)
    assert [batch.shape for batch in engine.training_dataloader] == [(2, 3), (2, 3)]
    with pytest.raises(ConfigError, match="set_data_post_process_func: got an engine without training_data"):
        zerocore.Engine(one_weight(), config()).set_data_post_process_func(None)


@pytest.mark.ranks(2)
def test_an_engine_stays_where_it_is(world_size):
    keys = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = zerocore.Engine(nn.Linear(40, 40), config(zero_optimization=keys, bf16={"enabled": True}))
    assert (
        engine.to(engine.device) is engine.to(torch.bfloat16) is engine.to(device="cpu", dtype=torch.bfloat16) is engine
    )
    for wrong in ("cuda", torch.float32):
        with pytest.raises(UnsupportedError, match=r"\[engine\] to: got .*, expected cpu and torch.bfloat16"):
            engine.to(wrong)


def test_what_the_parent_had_in_the_environment_is_not_taken_for_the_ranks(mpirun, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, zerocore\n"
        "zerocore.init_distributed()\n"
        "got = [os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')]\n"
        "open(f'{sys.argv[1]}/{os.getpid()}.got', 'w').write(' '.join(got))\n"
    )
    job = mpirun(2, str(script), str(tmp_path), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    assert sorted(path.read_text() for path in tmp_path.glob("*.got")) == ["0 2 0", "1 2 1"], job.stdout
