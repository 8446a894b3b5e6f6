"""nn.Embedding(sparse=True) trains to the bits of sparse=False, on any number of ranks and in every stage."""

from __future__ import annotations

import pytest
import torch
import zerocore
from toy_models import SHARD_ALL
from zerocore.config import OptimizerConfig, PrecisionConfig, ZeroConfig

MICRO_BATCHES = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

pytestmark = pytest.mark.usefixtures("one_thread")


class Recommender(torch.nn.Module):
    """Users and items, most of them in no micro-batch, some several times in one."""

    def __init__(self, *, sparse, bag=False):
        super().__init__()
        torch.manual_seed(3)
        self.users = torch.nn.Embedding(201, 17, sparse=sparse)
        self.items = torch.nn.Embedding(307, 17, sparse=sparse, padding_idx=0)
        self.history = torch.nn.EmbeddingBag(307, 17, sparse=sparse) if bag else None
        self.mix = torch.nn.Linear(17, 1)

    def forward(self, users, items):
        x = self.users(users) * self.items(items).sum(1)
        x = x + self.history(items) if self.history is not None else x
        return self.mix(x).square().mean()


def batch(j):
    random = torch.Generator().manual_seed(j)
    return torch.randint(0, 9, (12,), generator=random), torch.randint(0, 40, (12, 5), generator=random)


def trained(*, sparse, stage, dtype="fp32", twice=False, optimizer="adamw", bag=False):
    config = zerocore.Config(
        train_batch_size=MICRO_BATCHES,
        micro_batch_size=1,
        gradient_clipping=0.1,
        optimizer=OptimizerConfig(type=optimizer, lr=0.05),
        precision=PrecisionConfig(dtype=dtype),
        zero=ZeroConfig(stage=stage, bucket_numel=3000, **SHARD_ALL),
    )
    engine = zerocore.Engine(Recommender(sparse=sparse, bag=bag), config)
    for step in range(3):
        for k in range(engine.gradient_accumulation_steps()):
            j = step * MICRO_BATCHES + min(k * engine.world_size + engine.rank, MICRO_BATCHES - 1)
            engine.backward(engine(*batch(j)))
            if twice:
                engine.backward(engine(*batch(1000 + j)))
            engine.step()
    with engine.unsharded():
        return [p.detach().clone() for p in engine.module.parameters()]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", ["adamw", "adagrad"])
def test_the_bits_are_those_of_dense_gradients(dtype, optimizer, world_size):
    expected = trained(sparse=False, stage=0, dtype=dtype, optimizer=optimizer)
    for stage in (0, 1, 2, 3):
        got = trained(sparse=True, stage=stage, dtype=dtype, optimizer=optimizer)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), f"stage {stage}"


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("setting", [{"twice": True}, {"bag": True}], ids=["two backwards", "EmbeddingBag"])
def test_where_torch_adds_up_in_another_order(setting, world_size):
    """Neither the stage nor the number of ranks matters, and the result is dense gradients' but for rounding.

    Torch adds the rows of a later backward one by one to what is there, and sparse and dense backward of EmbeddingBag
    differ in their order.
    """
    sparse = [trained(sparse=True, stage=stage, optimizer="sgd", **setting) for stage in (0, 2, 3)]
    for other in sparse[1:]:
        assert all(torch.equal(a, b) for a, b in zip(sparse[0], other, strict=True))
    dense = trained(sparse=False, stage=0, optimizer="sgd", **setting)
    for a, b in zip(sparse[0], dense, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_it_is_said_once(caplog):
    trained(sparse=True, stage=2)
    told = [each.getMessage() for each in caplog.records if "sparse" in each.getMessage()]
    assert len(told) == 1
    assert ".weight is sparse: it is made dense as it arrives" in told[0]
    caplog.clear()
    trained(sparse=False, stage=2)
    assert not [each for each in caplog.records if "sparse" in each.getMessage()]
