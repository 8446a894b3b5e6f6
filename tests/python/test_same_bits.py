"""The promise: any stage, number of ranks, bucket size and accumulation gives the bits of one plain sequential loop."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import zerocore
from reference import Reference
from toy_models import MODELS, SHARD_ALL, batch, make
from zerocore import _comm
from zerocore._random import named_generator
from zerocore.config import (
    ActivationCheckpointingConfig,
    LossScaleConfig,
    OptimizerConfig,
    PrecisionConfig,
    ZeroConfig,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SGD = {"weight_decay": 0.01, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
OPTIMIZERS = {
    "adamw": {"type": "adamw", "lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    "adam": {"type": "adam", "lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1},
    "sgd": {"type": "sgd", "lr": 0.05} | SGD,
    "momentum": {"type": "sgd", "lr": 0.05} | SGD | {"momentum": 0.9, "dampening": 0.5},
    "nesterov": {"type": "sgd", "lr": 0.05} | SGD | {"momentum": 0.9, "nesterov": True},
    "lion": {"type": "lion", "lr": 0.003, "betas": (0.9, 0.99), "weight_decay": 0.1},
    "adagrad": {
        "type": "adagrad",
        "lr": 0.05,
        "lr_decay": 0.1,
        "eps": 1e-10,
        "weight_decay": 0.1,
        "initial_accumulator_value": 0.25,
    },
    "muon": {
        "type": "muon",
        "lr": 0.01,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "muon_lr": 0.02,
        "muon_momentum": 0.95,
        "muon_nesterov": True,
        "muon_ns_steps": 5,
    },
}
STEPS = 3
SEED = 1234
SCALE = 8.0


pytestmark = pytest.mark.usefixtures("one_thread")


def reference(
    name, *, dtype, hyper, micro_batches, max_norm, compute_dtype=None, reduce_dtype=None, accumulate_dtype="fp32"
):
    model = make(name)
    masters = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    compute_dtype = compute_dtype or dtype
    model.to(DTYPES[dtype]).to(DTYPES[compute_dtype])
    loop = Reference(
        model,
        masters,
        hyper=hyper,
        max_norm=max_norm,
        scale=SCALE if compute_dtype == "fp16" else 1.0,
        kept=DTYPES[dtype],
        reduced=DTYPES.get(reduce_dtype),
        accumulated=DTYPES[accumulate_dtype],
        matrices=matrices(model) if hyper["type"] == "muon" else (),
    )
    for step in range(STEPS):

        def loss(j, step=step):
            with named_generator(SEED, step, j, 0):
                return model(*batch(name, step * micro_batches + j, DTYPES[compute_dtype]))

        loop.step([lambda j=j: loss(j) for j in range(micro_batches)])
    return [p.detach() for p in model.parameters()]


def matrices(model):
    """What Muon orthogonalises of the toy models: all matrices but the weights of embeddings."""
    embeddings = [id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    params = [p for p in model.parameters() if p.requires_grad]
    return [i for i, p in enumerate(params) if p.dim() >= 2 and p.numel() and id(p) not in embeddings]


def trained(
    name,
    *,
    stage,
    dtype,
    hyper,
    micro_batches,
    max_norm,
    bucket_numel,
    init=False,
    checkpointing=None,
    zero=None,
    **precision,
):
    config = zerocore.Config(
        micro_batch_size=1,
        train_batch_size=micro_batches,
        seed=SEED,
        gradient_clipping=max_norm,
        zero=ZeroConfig(stage=stage, bucket_numel=bucket_numel, **(SHARD_ALL if zero is None else zero)),
        optimizer=OptimizerConfig(**hyper),
        precision=PrecisionConfig(dtype=dtype, loss_scale=LossScaleConfig(static_scale=SCALE), **precision),
        activation_checkpointing=ActivationCheckpointingConfig(**(checkpointing or {})),
    )
    with zerocore.zero.Init(enabled=init):
        model = make(name)
    engine = zerocore.Engine(model, config)
    inputs = DTYPES[precision.get("compute_dtype") or dtype]
    for step in range(STEPS):
        for k in range(engine.gradient_accumulation_steps()):
            j = min(k * engine.world_size + engine.rank, micro_batches - 1)  # the last again where there is none
            engine.backward(engine(*batch(name, step * micro_batches + j, inputs)))
            engine.step()
    with engine.unsharded():
        return [p.detach().clone() for p in engine.module.parameters()]


def check(name, *, stages=(0, 1, 2, 3), **setting):
    bucket_numels = (1, 3000, 1 << 20, 5000)
    shared = {"dtype": "fp32", "hyper": OPTIMIZERS["adamw"], "micro_batches": 4, "max_norm": 0.05} | setting
    of_meaning = {key: value for key, value in shared.items() if key not in ("init", "checkpointing", "zero")}
    expected = reference(name, **of_meaning)
    for stage, bucket_numel in zip(stages, itertools.cycle(bucket_numels)):
        got = trained(name, stage=stage, bucket_numel=bucket_numel, **shared)
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert torch.equal(a, b), f"{name}, stage {stage}, bucket {bucket_numel}, {setting}: parameter {i} differs"


# Four ranks on two cores take as long as all others together: `make soak` runs them.
RANKS = (1, 2, 3, 4) if os.environ.get("ZC_TEST_FOUR_RANKS") else (1, 2, 3)


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_models_and_dtypes(name, dtype, world_size):
    check(name, dtype=dtype)


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [0.0, 0.05])
def test_optimizers_and_clipping(optimizer, max_norm, world_size):
    check("odd", hyper=OPTIMIZERS[optimizer], max_norm=max_norm)


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["lion", "adagrad", "muon"])
def test_optimizers_in_16_bits(optimizer, dtype, world_size):
    check("wide", hyper=OPTIMIZERS[optimizer], dtype=dtype)


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize("name", ["cnn", "lstm", "t5"])
def test_muon_on_matrices_of_all_shapes(name, world_size):
    check(name, hyper=OPTIMIZERS["muon"])


@pytest.mark.ranks(2, 3)
def test_muon_on_shared_and_on_released_parameters(world_size):
    check("wide", hyper=OPTIMIZERS["muon"], stages=(1, 2), dtype="bf16", zero={"share_parameters": True})
    check("wide", hyper=OPTIMIZERS["muon"], stages=(3,), init=True)
    check("wide", hyper=OPTIMIZERS["muon"], stages=(3, 0), accumulate_dtype="bf16")


@pytest.mark.ranks(2, 3)
def test_muon_without_nesterov_and_with_few_iterations(world_size):
    check("wide", hyper=OPTIMIZERS["muon"] | {"muon_nesterov": False, "muon_ns_steps": 2})


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 8])
def test_micro_batches_that_ranks_do_not_divide(micro_batches, world_size):
    check("wide", micro_batches=micro_batches, stages=(0, 1, 2, 3, 2))


STAGE3 = {
    "all kept by default": {"zero": {}},
    "init": {"init": True},
    "init, all kept by default": {"init": True, "zero": {}},
    "prefetch": {"zero": SHARD_ALL | {"prefetch_numel": 1 << 30}},
    "prefetch and reuse": {"zero": SHARD_ALL | {"prefetch_numel": 1 << 30, "max_reuse_numel": 10_000}},
    "one unit": {"zero": SHARD_ALL | {"unit_numel": 1 << 30}},
    "units by class": {"zero": SHARD_ALL | {"unit_numel": 1 << 30, "unit_classes": ("Linear",)}},
    "small ones persistent": {"zero": SHARD_ALL | {"persistent_param_numel": 200}},
    "few persistent": {"zero": SHARD_ALL | {"persistent_param_numel": 200, "persistent_total_numel": 100}},
    "checkpointing": {"checkpointing": {"enabled": True}},
    "checkpointing, reentrant": {"checkpointing": {"enabled": True, "reentrant": True}},
    "checkpointing to the host, init": {"init": True, "checkpointing": {"enabled": True, "cpu_checkpointing": True}},
}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("setting", STAGE3)
@pytest.mark.parametrize("name", ["odd", "wide", "t5"])
def test_stage_3_however_it_is_set(name, setting, world_size):
    check(name, stages=(3,), **STAGE3[setting])


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["odd", "t5"])
def test_shared_parameters(name, dtype, world_size):
    check(name, stages=(1, 2), dtype=dtype, zero={"share_parameters": True})


PRECISIONS = {
    "bf16 kept, fp32 used": {"dtype": "bf16", "compute_dtype": "fp32"},
    "fp32 kept, bf16 used": {"dtype": "fp32", "compute_dtype": "bf16"},
    "fp16 kept, bf16 used": {"dtype": "fp16", "compute_dtype": "bf16"},
    "fp32 kept, fp16 used": {"dtype": "fp32", "compute_dtype": "fp16"},
    "reduced in bf16": {"dtype": "fp32", "reduce_dtype": "bf16"},
    "reduced in fp32": {"dtype": "bf16", "reduce_dtype": "fp32"},
    "accumulated in bf16": {"dtype": "bf16", "accumulate_dtype": "bf16"},
    "accumulated in fp16": {"dtype": "fp32", "accumulate_dtype": "fp16", "reduce_dtype": "bf16"},
}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["odd", "wide"])
def test_precision_by_policy(name, precision, world_size):
    check(name, **PRECISIONS[precision])


@pytest.mark.ranks(2)
def test_the_reference_can_tell(world_size):
    """A sum in another order has other bits: what the tests above compare is not trivially equal."""
    expected = reference("wide", dtype="fp32", hyper=OPTIMIZERS["adamw"], micro_batches=3, max_norm=0.0)
    other = reference("wide", dtype="fp32", hyper=OPTIMIZERS["adamw"] | {"eps": 1.1e-8}, micro_batches=3, max_norm=0.0)
    assert not all(torch.equal(a, b) for a, b in zip(expected, other, strict=True))
    assert _comm.world().size == world_size
