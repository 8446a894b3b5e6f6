"""engine.all_reduce_mean() between backward() and step(), where ranks are at different points of their reductions."""

from __future__ import annotations

import pytest
import torch
import zerocore
from zerocore.config import Config, OptimizerConfig, ZeroConfig

pytestmark = pytest.mark.usefixtures("one_thread")


class Branching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, branch):
        return (self.sometimes(x) if branch else x).mean() + self.always(x).mean()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2])
def test_a_mean_while_ranks_differ_in_what_they_use(stage):
    """A rank reduces what it has not used at the micro-step's end only, the others in backward()."""
    torch.manual_seed(0)
    config = Config(
        train_batch_size=2,
        micro_batch_size=1,
        zero=ZeroConfig(stage=stage, bucket_numel=20),
        optimizer=OptimizerConfig(),
    )
    engine = zerocore.Engine(Branching(), config)
    for step in range(4):
        loss = engine(torch.ones(1, 4), step == 0 or engine.rank == 0)
        engine.backward(loss)
        assert engine.all_reduce_mean(float(engine.rank)) == 0.5
        engine.step()
    assert engine.global_steps == 4
    engine.close()
