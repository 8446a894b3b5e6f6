"""The engines that bench_step.py compares, each as a function that makes a training step of a model.

All train the same way: AdamW with the same hyperparameters, the mean gradient over the ranks, not clipped.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

Step = Callable[[torch.Tensor, torch.Tensor], float]  # (tokens, targets) -> this rank's loss

LR, BETAS, EPS, WEIGHT_DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1
BARE = "bare torch"


def make_bare(model: Any, micro_batch: int, world_size: int) -> Step:
    """Torch alone, every rank for itself but for a barrier: the time that no engine can beat.

    The barrier is MPI's, which takes microseconds; gloo's takes a millisecond, and would make everybody look good.
    """
    from mpi4py import MPI

    alone = _torch_step(model, model)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = alone(tokens, targets)
        MPI.COMM_WORLD.Barrier()
        return loss

    return step


def make_ddp(model: Any, micro_batch: int, world_size: int) -> Step:
    """torch.nn.parallel.DistributedDataParallel."""
    return _torch_step(torch.nn.parallel.DistributedDataParallel(model), model)


def make_fsdp2(model: Any, micro_batch: int, world_size: int) -> Step:
    """torch.distributed.fsdp.fully_shard, a unit a block."""
    for block in model.blocks:
        fully_shard(block)
    return _torch_step(fully_shard(model), model)


def _torch_step(wrapped: Any, model: Any) -> Step:
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = wrapped(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _block_numel(model: Any) -> int:
    return max(sum(p.numel() for p in block.parameters()) for block in model.blocks)


def make_zerocore(stage: int, **zero: Any) -> Callable[[Any, int, int], Step]:
    """The engine of zerocore, with a ZeRO stage; zero: more keys of its ZeroConfig.

    Stage 3 does what fully_shard does here: every parameter is sharded, a unit is a block or what is around the blocks,
    blocks are released after their forward and gathered again, one of them ahead, and the root is kept in between.
    """

    def make(model: Any, micro_batch: int, world_size: int) -> Step:
        import zerocore
        from zerocore.config import Config, OptimizerConfig, ZeroConfig

        config = Config(
            micro_batch_size=micro_batch,
            gradient_clipping=0.0,
            optimizer=OptimizerConfig(type="adamw", lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY),
            zero=ZeroConfig(
                stage=stage,
                unit_classes=("Block",),
                persistent_param_numel=0,
                max_reuse_numel=1,
                prefetch_numel=_block_numel(model) * 3 // 2,  # padding included
                **zero,
            ),
        )
        return EngineStep(zerocore.Engine(model, config))

    return make


def make_deepspeed(stage: int) -> Callable[[Any, int, int], Step]:
    """DeepSpeed with a ZeRO stage and the optimizer that its configuration names.

    In stage 3 all parameters are sharded, and released after their use, as above.
    """

    def make(model: Any, micro_batch: int, world_size: int) -> Step:
        # Without LOCAL_SIZE its shared-memory collectives are not set up; the launcher of its own sets it.
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(world_size)}
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        adamw = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": WEIGHT_DECAY}
        sharding = {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": _block_numel(model),
        }
        config = {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage} | (sharding if stage == 3 else {}),
            "optimizer": {"type": "AdamW", "params": adamw},
            "steps_per_print": 10**9,
        }
        deepspeed.init_distributed("gloo")
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        return EngineStep(engine)

    return make


class EngineStep:
    """A step of an engine as zerocore's and DeepSpeed's are used."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __call__(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        """This rank's loss."""
        loss = self.engine(tokens, targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()


def engines() -> dict[str, Callable[[Any, int, int], Step]]:
    """The makers by name, of what is installed: (model, micro_batch, world_size) -> step."""
    found: dict[str, Callable[[Any, int, int], Step]] = {BARE: make_bare}
    found |= {f"zerocore stage {stage}": make_zerocore(stage) for stage in (0, 1, 2, 3)}
    found |= {"zerocore stage 2, shared parameters": make_zerocore(2, share_parameters=True)}
    found |= {"DDP": make_ddp, "FSDP2": make_fsdp2}
    if importlib.util.find_spec("deepspeed"):
        found |= {f"DeepSpeed stage {stage}": make_deepspeed(stage) for stage in (1, 2, 3)}
    return found
