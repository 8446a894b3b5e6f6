"""What users of sharded trainers run into, one test a symptom, with the numbers of the reports."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
import zerocore
from one_weight import config, one_weight, train
from torch import nn
from toy_models import SHARD_ALL
from zerocore import utils, zero
from zerocore.config import Config, OptimizerConfig, PrecisionConfig, ZeroConfig
from zerocore.errors import NonFiniteError
from zerocore.schedulers import WarmupLR

STAGES = [0, 1, 2, 3]


def rank():
    return zerocore.comm.get_rank()


def engine_of(model, *, stage, micro_batches=2, **changes):
    """Stage 3 keeps nothing whole between uses."""
    settings = Config(
        micro_batch_size=1,
        train_batch_size=micro_batches,
        optimizer=OptimizerConfig(type="adamw", lr=0.01, weight_decay=0.1),
        zero=ZeroConfig(stage=stage, bucket_numel=2000, **(SHARD_ALL if stage == 3 else {})),
    )
    optimizer = changes.pop("optimizer", None)
    scheduler = changes.pop("lr_scheduler", None)
    return zerocore.Engine(model, dataclasses.replace(settings, **changes), optimizer=optimizer, lr_scheduler=scheduler)


def mlp(width=70):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def micro_batch(number, shape=(2, 5)):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(number))


def steps(engine, count=2, *, dtype=torch.float32, shape=(2, 5)):
    """The same micro-batches on any number of ranks."""
    for step in range(count):
        for k in range(engine.gradient_accumulation_steps()):
            x = micro_batch(step * 100 + k * engine.world_size + engine.rank, shape).to(dtype)
            engine.backward(engine(x).float().square().mean())
            engine.step()


# Accumulation, several backwards (DeepSpeed 6793, Accelerate 3481)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_context_manager_is_incompatible_with_gradient_partitioning(stage, world_size):
    engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=2, zero_optimization={"stage": stage}))
    engine.set_gradient_accumulation_boundary(False)
    with engine.no_sync():
        engine.backward(engine(torch.ones(1, 1)).sum())
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(torch.full((1, 1), 3.0)).sum())
    engine.step()
    assert utils.safe_get_full_fp32_param(engine.module.weight).item() == 8 - 0.5 * 2


# Precision and schedule


def test_current_loss_scale_already_at_minimum_and_no_hint_why():
    """DeepSpeedExamples 418: now the parameters, the loss and ways out are named."""
    engine = zerocore.Engine(one_weight(), config(fp16={"enabled": True, "initial_scale_power": 0, "hysteresis": 1}))
    engine.backward(engine(torch.ones(1, 1).half()).sum() * float("inf"))
    with pytest.raises(NonFiniteError, match=r"first weight; loss on rank 0 was inf.*at its minimum.*use bf16"):
        engine.step()


@pytest.mark.parametrize("own", [False, True])
def test_skipped_steps_desync_the_learning_rate_schedule(own):
    """DeepSpeed 5779, transformers 10330, 11144."""
    model = one_weight()
    source = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(source, lambda step: 1 / (1 + step))
    if own:
        schedule = lambda optimizer: WarmupLR(optimizer, warmup_max_lr=0.5, warmup_num_steps=4)  # noqa: E731
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    engine = zerocore.Engine(model, config(fp16=fp16) | {"optimizer": None}, optimizer=source, lr_scheduler=schedule)
    first = engine.lr_scheduler.get_last_lr()  # at once: DeepSpeed's fails an assertion before its first step
    assert first == engine.get_lr()
    for factor in (float("inf"), float("inf"), 1.0):
        assert engine.get_lr() == first
        engine.backward(engine(torch.ones(1, 1).half()).sum() * factor)
        engine.step()
        assert engine.optimizer.overflow == (factor != 1.0)
    train_state = engine.lr_scheduler.state_dict()
    assert (train_state.get("last_epoch"), train_state.get("last_batch_iteration")) in ((1, None), (None, 0))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", STAGES)
def test_bf16_accumulates_in_bf16(stage, world_size):
    """DeepSpeed 1800, 2352: 256 + 1 is 256 in bf16, so that small gradients after a large one would be lost."""
    settings = config(gradient_accumulation_steps=8, bf16={"enabled": True}, zero_optimization={"stage": stage})
    engine = zerocore.Engine(one_weight(0.0), settings)
    for factor in (256, 1, 1, 1, 1, 1, 1, 2):
        engine.backward(engine(torch.full((1, 1), float(factor)).bfloat16()).sum())
        engine.step()
    assert utils.safe_get_full_fp32_param(engine.module.weight).item() == -0.5 * 264 / 8


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_stage_0_reduces_stale_16_bit_gradients(dtype, world_size):
    """DeepSpeed 5154: every stage, dtype and accumulation has the bits of every other stage."""
    for micro_batches in (2, 4, 6):
        hashes = set()
        for stage in STAGES:
            model = mlp()
            engine = engine_of(model, stage=stage, micro_batches=micro_batches, precision=PrecisionConfig(dtype=dtype))
            steps(engine, dtype={"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
            assert engine.was_step_applied()
            hashes.add(utils.params_sha256(model))
        assert len(hashes) == 1


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", STAGES)
def test_bf16_optimizer_has_no_attribute_fp16_groups_on_save(stage, folder, world_size):
    """gpt-neox 991: each combination of stage and dtype saves and loads."""
    for dtype in ("bf16", "fp16"):
        engine = engine_of(mlp(), stage=stage, precision=PrecisionConfig(dtype=dtype))
        steps(engine, dtype=torch.bfloat16 if dtype == "bf16" else torch.float16)
        engine.save_checkpoint(folder / dtype)
        saved = utils.params_sha256(engine.module)
        other = engine_of(mlp(), stage=3 - stage, precision=PrecisionConfig(dtype=dtype))
        other.load_checkpoint(folder / dtype)
        assert utils.params_sha256(other.module) == saved


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_bf16_in_stage_3_never_skips_a_nan(stage, world_size):
    """One policy in all stages, whatever rank has the NaN."""
    model = mlp()
    engine = engine_of(model, stage=stage, precision=PrecisionConfig(dtype="bf16", on_nonfinite="skip"))
    before = utils.params_sha256(model)
    x = torch.full((2, 5), float("nan") if rank() == 1 else 1.0).bfloat16()
    engine.backward(engine(x).square().mean())
    engine.step()
    assert engine.skipped_steps == 1 and not engine.was_step_applied() and utils.params_sha256(model) == before


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradient_clipping_does_not_work(stage):
    """DeepSpeed 7220, 6480: the logged norm was the one before clipping; both are told, and the factor."""
    engine = zerocore.Engine(one_weight(), config(gradient_clipping=0.5, zero_optimization={"stage": stage}))
    train(engine, 2)
    report = engine.grad_norm_report()
    assert engine.get_global_grad_norm() == report.before == 2
    assert report.after == pytest.approx(0.5) and report.factor == pytest.approx(0.25)
    assert engine.module.weight.item() == pytest.approx(8 - 0.5 * 0.5)


# Odd parameters, groups, frozen ones, adapters


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 70)
        self.nothing = nn.Parameter(torch.zeros(0, 7))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(70, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))) * self.scale + self.nothing.sum()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_of_no_element_and_of_no_dimension(stage, folder, world_size):
    """DeepSpeed 8279, 8297, 7686: KeyError, assertion, a lost shape, a narrow() on 0-dim."""
    torch.manual_seed(3)
    model = Odd()
    engine = engine_of(model, stage=stage)
    steps(engine)
    assert utils.safe_get_full_fp32_param(model.scale).shape == () != utils.safe_get_full_fp32_param(model.scale)
    engine.save_checkpoint(folder)
    state = engine.state_dict()
    assert state["nothing"].shape == (0, 7) and state["scale"].item() != 1.5
    other = engine_of(Odd(), stage=3 - stage)
    other.load_checkpoint(folder)
    assert utils.params_sha256(other.module) == utils.params_sha256(model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_frozen_layers_and_layers_frozen_later(stage, world_size):
    """DeepSpeed 4055."""
    model = mlp()
    model[0].bias.requires_grad_(False)
    engine = engine_of(model, stage=stage)
    first = engine.state_dict()
    for frozen in (False, True, False):
        model[2].requires_grad_(not frozen)
        before = engine.state_dict()
        steps(engine, 1)
        after = engine.state_dict()
        assert torch.equal(after["0.bias"], first["0.bias"]) and not torch.equal(after["0.weight"], before["0.weight"])
        assert torch.equal(after["2.weight"], before["2.weight"]) == frozen


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_adapters_with_checkpointing_recompute_tensors_of_shape_0(reentrant, world_size):
    """transformers 47254, DeepSpeed 8130: stage 3, PEFT's LoRA on a frozen model, and non-reentrant checkpointing."""
    peft = pytest.importorskip("peft", reason="needs PEFT: pip install peft")
    transformers = pytest.importorskip("transformers", "5", reason="needs Hugging Face: pip install 'transformers>=5'")

    def trained(stage, checkpointing):
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
        with zero.Init(enabled=stage == 3):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        engine = engine_of(model.train(), stage=stage)
        for step in range(3):
            tokens = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank()))
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
        return {name: value for name, value in engine.state_dict().items() if "lora_" in name}

    found, expected = trained(3, checkpointing=True), trained(2, checkpointing=False)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_different_learning_rates_per_group_are_lost(stage, world_size):
    """DeepSpeed 6873, 6878: in stage 3, and with a scheduler."""
    model = nn.ModuleList([one_weight(0.0) for _ in range(3)])
    model.forward = lambda x: sum(each(x).sum() for each in model)
    groups = [{"params": [each.weight], "lr": lr} for each, lr in zip(model, (0.5, 0.25, 0.0), strict=True)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine = engine_of(model, stage=stage, optimizer=optimizer, lr_scheduler=schedule)
    for _ in range(2):
        engine.backward(engine(torch.ones(1, 1)))
        engine.step()
    assert [utils.safe_get_full_fp32_param(each.weight).item() for each in model] == [-0.75, -0.375, 0.0]
    assert engine.get_lr() == pytest.approx([0.5 / 3, 0.25 / 3, 0.0])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_empty_group_is_dropped_and_the_scheduler_miscounts(stage):
    """Soup 336: `zip() argument 2 is longer than argument 1`, since a model had nothing without decay."""
    model = one_weight()
    optimizer = torch.optim.AdamW([{"params": model.parameters()}, {"params": [], "weight_decay": 0.0}], lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5])
    engine = engine_of(model, stage=stage, micro_batches=1, optimizer=optimizer, lr_scheduler=schedule)
    train(engine, 1, steps=2)
    assert engine.get_lr() == [0.5, 0.25] and len(engine.optimizer.param_groups) == 2


@pytest.mark.ranks(2)
def test_third_party_code_reads_a_shape_of_0(world_size):
    """PEFT 2916, transformers 45313: a sharded parameter has its shape, whoever asks."""
    with zero.Init():
        model = nn.Linear(40, 30)
    assert (model.weight.shape, model.weight.numel(), model.bias.size(0)) == ((30, 40), 1200, 30)
    engine = engine_of(model, stage=3)
    assert torch.empty_like(model.weight).shape == (30, 40) and model.weight.ndim == 2
    steps(engine, 1, shape=(2, 40))
    assert sum(p.numel() for p in engine.parameters()) == 1230


# Batch sizes, integration


@pytest.mark.ranks(2)
def test_batch_size_unknown_with_a_custom_sampler(world_size):
    """Accelerate 841, 2298: the configured size counts micro-batches; batches may have any size, another each time."""
    engine = engine_of(mlp(), stage=2)
    for size in (1, 7, 3):
        engine.backward(engine(torch.ones(size + rank(), 5)).square().mean())
        engine.step()
    assert engine.global_steps == 3 and engine.was_step_applied()


def test_accumulation_set_in_two_places(caplog):
    """Lightning 19891: who says where boundaries are is followed, and the mean is over what there was."""
    engine = zerocore.Engine(one_weight(), config(gradient_accumulation_steps=4))
    with caplog.at_level(logging.WARNING, logger="zerocore"):
        for j, factor in enumerate((1, 3, 2, 2)):
            engine.set_gradient_accumulation_boundary(j % 2 == 1)
            train(engine, factor)
    assert engine.global_steps == 2 and engine.module.weight.item() == 8 - 0.5 * 2 - 0.5 * 2
    assert not caplog.records


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapped", [False, True])
def test_torch_compile_and_stage_3(wrapped, world_size):
    """DeepSpeed 7228, 7487, torch 115484: compiled by the engine, or before the engine got it."""
    torch._dynamo.reset()

    def trained(compiled):
        model = mlp()
        if compiled and wrapped:
            model = torch.compile(model, backend="aot_eager")
        engine = engine_of(model, stage=3)
        if compiled and not wrapped:
            engine.compile("aot_eager")
        steps(engine, 3)
        return {name.removeprefix("_orig_mod."): value for name, value in engine.state_dict().items()}

    found, expected = trained(compiled=True), trained(compiled=False)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_clipping_needs_a_backend_for_the_device_of_the_shards(stage, world_size):
    """torchtune 2420, torch 148532: the norm of sharded gradients is one number on all ranks, exact in every stage."""
    engine = engine_of(mlp(), stage=stage, gradient_clipping=1e-3)
    steps(engine, 1)
    norm = engine.get_global_grad_norm()
    plain = mlp()
    sum(plain(x).square().mean() for x in map(micro_batch, range(2))).div(2).backward()
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in plain.parameters()]))
    assert norm == pytest.approx(expected.item(), rel=1e-6) and engine.grad_norm_report().after == pytest.approx(
        1e-3, rel=1e-5
    )
