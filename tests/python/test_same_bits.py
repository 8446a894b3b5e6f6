"""The promise: any stage, number of ranks, bucket size and accumulation gives the bits of one plain sequential loop."""

from __future__ import annotations

import itertools

import pytest
import torch
import zerocore
from reference import Reference
from toy_models import MODELS, batch, make
from zerocore import _comm
from zerocore._random import named_generator
from zerocore.config import LossScaleConfig, OptimizerConfig, PrecisionConfig, ZeroConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SGD = {"weight_decay": 0.01, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
OPTIMIZERS = {
    "adamw": {"type": "adamw", "lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    "adam": {"type": "adam", "lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1},
    "sgd": {"type": "sgd", "lr": 0.05} | SGD,
    "momentum": {"type": "sgd", "lr": 0.05} | SGD | {"momentum": 0.9, "dampening": 0.5},
    "nesterov": {"type": "sgd", "lr": 0.05} | SGD | {"momentum": 0.9, "nesterov": True},
}
STEPS = 3
SEED = 1234
SCALE = 8.0


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def reference(name, *, dtype, hyper, micro_batches, max_norm):
    model = make(name)
    masters = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    model.to(DTYPES[dtype])
    loop = Reference(model, masters, hyper=hyper, max_norm=max_norm, scale=SCALE if dtype == "fp16" else 1.0)
    for step in range(STEPS):

        def loss(j, step=step):
            with named_generator(SEED, step, j, 0):
                return model(*batch(name, step * micro_batches + j, DTYPES[dtype]))

        loop.step([lambda j=j: loss(j) for j in range(micro_batches)])
    return [p.detach() for p in model.parameters()]


def trained(name, *, stage, dtype, hyper, micro_batches, max_norm, bucket_numel):
    config = zerocore.Config(
        micro_batch_size=1,
        train_batch_size=micro_batches,
        seed=SEED,
        gradient_clipping=max_norm,
        zero=ZeroConfig(stage=stage, bucket_numel=bucket_numel),
        optimizer=OptimizerConfig(**hyper),
        precision=PrecisionConfig(dtype=dtype, loss_scale=LossScaleConfig(static_scale=SCALE)),
    )
    engine = zerocore.Engine(make(name), config)
    for step in range(STEPS):
        for k in range(engine.gradient_accumulation_steps()):
            j = min(k * engine.world_size + engine.rank, micro_batches - 1)  # the last again where there is none
            engine.backward(engine(*batch(name, step * micro_batches + j, DTYPES[dtype])))
            engine.step()
    return [p.detach().clone() for p in engine.module.parameters()]


def check(name, *, stages=(0, 1, 2), **setting):
    bucket_numels = (1, 3000, 1 << 20)
    shared = {"dtype": "fp32", "hyper": OPTIMIZERS["adamw"], "micro_batches": 4, "max_norm": 0.05} | setting
    expected = reference(name, **shared)
    for stage, bucket_numel in zip(stages, itertools.cycle(bucket_numels)):
        got = trained(name, stage=stage, bucket_numel=bucket_numel, **shared)
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert torch.equal(a, b), f"{name}, stage {stage}, bucket {bucket_numel}, {setting}: parameter {i} differs"


RANKS = (1, 2, 3, 4)


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
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 8])
def test_micro_batches_that_ranks_do_not_divide(micro_batches, world_size):
    check("wide", micro_batches=micro_batches, stages=(0, 1, 2, 2))


@pytest.mark.ranks(2)
def test_the_reference_can_tell(world_size):
    """A sum in another order has other bits: what the tests above compare is not trivially equal."""
    expected = reference("wide", dtype="fp32", hyper=OPTIMIZERS["adamw"], micro_batches=3, max_norm=0.0)
    other = reference("wide", dtype="fp32", hyper=OPTIMIZERS["adamw"] | {"eps": 1.1e-8}, micro_batches=3, max_norm=0.0)
    assert not all(torch.equal(a, b) for a, b in zip(expected, other, strict=True))
    assert _comm.world().size == world_size
