"""Checkpoints as users' scripts make them: odd folders, schedulers, modules and calls in odd places."""

from __future__ import annotations

import pytest
import torch
import zerocore
from zerocore.config import Config, PrecisionConfig, ZeroConfig
from zerocore.errors import IoError

pytestmark = pytest.mark.usefixtures("one_thread")


def build(model=None, *, optimizer=None, scheduler=None, dtype="fp32", stage=0, samples=2, micro=2, **config):
    if model is None:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
    return zerocore.Engine(
        model,
        Config(
            train_batch_size=samples,
            micro_batch_size=micro,
            zero=ZeroConfig(stage=stage),
            precision=PrecisionConfig(dtype=dtype),
            **config,
        ),
        optimizer=optimizer or (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
        lr_scheduler=scheduler,
    )


def train(engine, steps=1):
    for _ in range(steps):
        dtype = next(engine.module.parameters()).dtype
        engine.backward(engine(torch.full((2, 4), 1.0 + engine.global_steps, dtype=dtype)).float().mean())
        engine.step()


def test_a_folder_of_somebody_elses_is_not_replaced(folder):
    """DeepSpeed's checkpoints have the same names."""
    theirs = folder / "global_step1"
    theirs.mkdir()
    (theirs / "mp_rank_00_model_states.pt").write_text("weights")
    engine = build()
    train(engine)
    with pytest.raises(IoError, match=r"global_step1.*no checkpoint of zerocore") as error:
        engine.save_checkpoint(folder)
    assert error.value.errno == 17
    assert (theirs / "mp_rank_00_model_states.pt").read_text() == "weights"
    (folder / "mine").mkdir()  # an empty one is nobody's loss
    engine.save_checkpoint(folder, tag="mine")
    assert engine.load_checkpoint(folder).path == str(folder / "mine")
    engine.close()
