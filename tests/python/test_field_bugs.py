"""What users of sharded trainers run into, one test a symptom, with the numbers of the reports."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path

import pytest
import torch
import zerocore
from one_weight import config, one_weight, train
from torch import nn
from toy_models import SHARD_ALL
from zerocore import _core, utils, zero
from zerocore.config import Config, OptimizerConfig, PrecisionConfig, ZeroConfig
from zerocore.errors import ConfigError, NonFiniteError
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
    scheduler, comm = changes.pop("lr_scheduler", None), changes.pop("comm", None)
    settings = dataclasses.replace(settings, **changes)
    return zerocore.Engine(model, settings, optimizer=optimizer, lr_scheduler=scheduler, comm=comm)


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


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "block", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}]
)
def test_contradictory_errors_about_the_dtype_of_accumulation(block, stage):
    """DeepSpeed 2734: one error asked for a setting that the next one refused. Each combination trains."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(next(iter(block), ""), torch.float32)
    for accumulate in (None, "fp32", "bf16", "fp16"):
        for travel in (None, "fp32", "bf16", "fp16"):
            keys = {"data_types": {"grad_accum_dtype": accumulate}, "communication_data_type": travel}
            settings = config(gradient_accumulation_steps=2, zero_optimization={"stage": stage}, **keys, **block)
            engine = zerocore.Engine(one_weight(), settings)
            for factor in (1, 3):
                engine.backward(engine(torch.full((1, 1), float(factor)).to(dtype)).sum())
                engine.step()
            assert utils.safe_get_full_fp32_param(engine.module.weight).item() == 8 - 0.5 * 2
            engine.close()


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
@pytest.mark.parametrize("stage", [2, 3])
def test_compiling_with_frozen_parameters_is_a_key_error(stage, world_size):
    """DeepSpeed 8214: a compiler pass looked up the gradient of each parameter."""
    torch._dynamo.reset()

    def trained(compiled):
        model = mlp()
        model[0].requires_grad_(False)
        engine = engine_of(model, stage=stage)
        if compiled:
            engine.compile("aot_eager")
        steps(engine)
        return utils.params_sha256(model)

    assert trained(compiled=True) == trained(compiled=False)


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


def test_the_autotuner_is_not_runnable_with_error():
    """DeepSpeed 4759, 7269, transformers 27830: `error = (` and no more. There is none, and it says so."""
    with pytest.raises(ConfigError, match=r"autotuning: got .*autotuning is not available in this version. Remove it"):
        zerocore.Engine(one_weight(), config(autotuning={"enabled": True}))


def test_the_elastic_agent_breaks_with_a_new_torch():
    """DeepSpeed 4459, 3873, 4785. There is none; any number of ranks resumes (test_survival.py)."""
    with pytest.raises(ConfigError, match=r"elasticity: got .*they work for any number of ranks"):
        zerocore.Engine(one_weight(), config(elasticity={"enabled": True}))


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


# Silently wrong numbers


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_gradient_norm_differs_by_stage(dtype, world_size):
    """DeepSpeed 7718, 7837: a third of it in stage 2, too much in stage 0."""
    found = []
    for stage in STAGES:
        engine = engine_of(mlp(), stage=stage, micro_batches=4, precision=PrecisionConfig(dtype=dtype))
        norms = []
        for _ in range(3):
            steps(engine, 1, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
            norms.append(engine.get_global_grad_norm())
        found.append(norms)
    assert found[0][0] > 0 and all(norms == found[0] for norms in found)


@pytest.mark.ranks(2)
def test_losses_differ_by_stage_and_more_so_with_accumulation(world_size):
    """DeepSpeed 966, 1488: the same data, and so the same losses, to the last bit."""
    for micro_batches in (2, 6):
        found = set()
        for stage in STAGES:
            engine = engine_of(mlp(), stage=stage, micro_batches=micro_batches)
            losses = []
            for step in range(4):
                steps(engine, 1)
                with torch.no_grad():
                    losses.append(engine(micro_batch(1000 + step)).square().mean().item())
            found.add(tuple(losses))
        assert len(found) == 1 and len(set(losses)) == 4


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_last_micro_batch_is_not_reduced_and_ranks_diverge(dtype, stage, world_size):
    """DeepSpeed 7985, and 7967, where only the first one was. Each micro-batch of each rank has a bit of its own."""
    block = {"bf16": {"enabled": True}} if dtype == "bf16" else {}
    settings = config(gradient_accumulation_steps=3, zero_optimization={"stage": stage}, **block)
    engine = zerocore.Engine(one_weight(0.0), settings)
    for k in range(3):
        x = torch.full((1, 1), 2.0 ** (3 * rank() + k))
        engine.backward(engine(x.to(torch.bfloat16) if block else x).sum())
        engine.step()
    master = utils.safe_get_full_fp32_param(engine.module.weight)
    assert master.item() == pytest.approx(-0.5 * 63 / 6, rel=1e-6)
    everybodys = engine.comm.gather_bytes(utils.params_sha256(engine.module).encode(), "hash")
    assert everybodys[0] == everybodys[1]


@pytest.mark.parametrize("stage", STAGES)
def test_the_gradient_norm_changes_with_the_release(stage):
    """DeepSpeed 7749: the numbers of a run whose arithmetic is exact, which no release may change."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0]]))
        model.bias.copy_(torch.tensor([2.0, -3.0]))
    settings = config(gradient_accumulation_steps=2, gradient_clipping=4.0, zero_optimization={"stage": stage})
    engine = zerocore.Engine(model, settings)
    for x in ([1.0, 2.0, -1.0], [-2.0, 0.0, 3.0]):
        engine.backward(engine(torch.tensor([x])).square().sum())
        engine.step()
    # outputs (-4, 6.5), (9, -7); gradients 2 y x of weights and 2 y of biases, halved
    gradient = [-22.0, -8.0, 31.0, 20.5, 13.0, -27.5, 5.0, -0.5]
    assert engine.get_global_grad_norm() == sum(g * g for g in gradient) ** 0.5 == 53.66330217196851
    factor = 4 / (53.66330217196851 + 1e-6)
    assert engine.state_dict()["weight"][0, 0].item() == pytest.approx(1 + 0.5 * 22 * factor, rel=1e-6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_the_weights_of_a_gate_are_not_updated(stage, world_size):
    """DeepSpeed 4482: a mixture of experts that ranks use differently; what has a gradient anywhere moves."""

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(40, 3)
            self.experts = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))

        def forward(self, x):
            shares = self.gate(x).softmax(-1)
            if stage == 3:  # where each rank runs what all others run
                return sum(shares[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
            return shares[:, rank() : rank() + 1] * self.experts[rank()](x)

    torch.manual_seed(3)
    engine = engine_of(Mixture(), stage=stage)
    before = engine.state_dict()
    steps(engine, 1, shape=(4, 40))
    used = [name for name in before if stage == 3 or not name.startswith("experts.2")]
    after = engine.state_dict()
    assert [name for name in before if not torch.equal(after[name], before[name])] == used


# Checkpoints


def rounds(engine, first, count):
    """Steps numbered from `first` on."""
    for step in range(first, first + count):
        x = micro_batch(step * 10 + engine.rank)
        engine.backward(engine(x).square().mean())
        engine.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_resume_on_another_number_of_ranks_is_refused(stage, folder, world_size):
    """DeepSpeed 2898, 3810, 6441, 5405: from 1 to 2 and from 2 to 1, in another stage, to the last bit."""

    def made(ranks, stage):
        comm = _core.self_communicator(timeout_ms=60_000) if ranks == 1 else None
        return engine_of(mlp(), stage=stage, comm=comm)

    for before, after in ((1, 2), (2, 1)):
        engine = made(before, stage)
        steps(engine)
        # of two engines of one rank each, rank 0's is the one that is loaded
        engine.save_checkpoint(folder / f"{before}-{rank() if before == 1 else 0}")
        steps(engine)
        expected = utils.params_sha256(engine.module)
        other = made(after, 3 - stage)
        other.comm.gather_bytes(b"", "saved")
        other.load_checkpoint(folder / f"{before}-0")
        steps(other)
        assert utils.params_sha256(other.module) == expected


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_training_hangs_after_a_save_in_its_middle(stage, folder, world_size):
    """DeepSpeedExamples 344: and the saves change no bit."""
    found = []
    for saves in (False, True):
        engine = engine_of(mlp(), stage=stage)
        for step in range(3):
            rounds(engine, step, 1)
            if saves:
                engine.save_checkpoint(folder)
        found.append(utils.params_sha256(engine.module))
        engine.close()
    assert found[0] == found[1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_the_step_of_a_group_is_not_saved(stage, folder, world_size):
    """DeepSpeed 4396, 6691: the bias correction began anew, or all did. A group that was frozen has taken fewer."""

    def made(stage):
        model = mlp()
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.03}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.5, 0.9))
        return engine_of(model, stage=stage, optimizer=optimizer)

    engine = made(stage)
    engine.module[2].requires_grad_(False)
    rounds(engine, 0, 2)
    engine.module[2].requires_grad_(True)
    rounds(engine, 2, 1)
    engine.save_checkpoint(folder)
    rounds(engine, 3, 2)
    expected = utils.params_sha256(engine.module)
    other = made(3 - stage)
    other.load_checkpoint(folder)
    rounds(other, 3, 2)
    assert utils.params_sha256(other.module) == expected


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_frozen_and_tied_weights_are_lost_in_a_checkpoint(stage, folder, world_size):
    """DeepSpeed 3090, 3824, 1896, Lightning 15694: frozen in stage 3; tied ones missing, or there twice and apart."""

    def made():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5))
        model[2].weight = model[0].weight
        model[1].requires_grad_(False)
        return model

    engine = engine_of(made(), stage=stage)
    rounds(engine, 0, 2)
    engine.save_checkpoint(folder)
    state = engine.state_dict()
    plain = made()
    with torch.no_grad():
        for param in plain.parameters():
            param.zero_()
    utils.load_state_dict_from_zero_checkpoint(plain, folder)
    assert plain[2].weight is plain[0].weight
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in state.items())
    other = made()
    for param in other.parameters():
        param.data.zero_()
    other = engine_of(other, stage=3 - stage)
    other.load_checkpoint(folder)
    assert other.module[2].weight is other.module[0].weight
    assert all(torch.equal(other.state_dict()[name], value) for name, value in state.items())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_groups_smaller_than_the_number_of_ranks_and_empty_shards(stage, folder, world_size):
    """DeepSpeed 129, torch 102821: one weight for two ranks, so that one of them has nothing to step, save or load."""

    def made(stage):
        model = nn.Sequential(one_weight(2.0), one_weight(3.0))
        groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.02}]
        return engine_of(model, stage=stage, optimizer=torch.optim.AdamW(groups, lr=0.01))

    def train_on(engine):
        train(engine, 1, steps=2)
        return [utils.safe_get_full_fp32_param(p).item() for p in engine.module.parameters()]

    engine = made(stage)
    train_on(engine)
    engine.save_checkpoint(folder)
    expected = train_on(engine)
    other = made(3 - stage)
    other.load_checkpoint(folder)
    assert train_on(other) == expected != [2.0, 3.0]


# Where each symptom has its test


def test_the_table_of_symptoms_names_tests_that_are_there():
    root = Path(__file__).parents[2]
    rows = re.findall(r"^\| .* \| (`test_\w+\.py`.*) \|$", (root / "docs" / "testing.md").read_text(), re.M)
    assert len(rows) >= 40
    for row in rows:
        file, *names = re.findall(r"`(\w+)(?:\.py)?`", row)
        text = (root / "tests" / "python" / f"{file}.py").read_text()
        for name in names:
            assert f"def {name}(" in text, f"{file}: {name}"
