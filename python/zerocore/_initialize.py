"""`zerocore.initialize`: DeepSpeed's entry point, and the smaller ones beside it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from zerocore import comm
from zerocore._engine import Engine
from zerocore.errors import ConfigError, UnsupportedError


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], Any] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Engine, Any, Any, Any]:
    """Builds an Engine from arguments with DeepSpeed's names and order.

    Args:
        args: an object whose `deepspeed_config` names the JSON file, used when no config is given.
        model, optimizer, model_parameters, training_data, lr_scheduler, collate_fn: as for Engine.
        config, config_params: DeepSpeed's JSON as a dict or a path; config_params is the old name.
        dist_init_required: False: leave torch.distributed alone. Else its process group is made where there is none
            (see zerocore.comm), which training does not need, but scripts after this call may.
        distributed_port: no effect; ranks find each other through MPI.
        mpu, mesh_param: must be None; model parallelism is not available.

    Returns:
        (engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler)

    Raises:
        ConfigError: no model or no config. Further as Engine.
        UnsupportedError: mpu or mesh_param.
    """
    if model is None:
        raise ConfigError("[initialize] model: got None, expected a torch.nn.Module.")
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise UnsupportedError(
                f"[initialize] {name}: got {value!r}, expected None. Model parallelism is not available in this "
                f"version."
            )
    if config is not None and config_params is not None:
        raise ConfigError(
            "[initialize] got both config and config_params, expected one. Leave out config_params, the old name."
        )
    chosen = config if config is not None else config_params
    if chosen is None:
        chosen = getattr(args, "deepspeed_config", None)
    if chosen is None:
        raise ConfigError("[initialize] no config: expected config=, a dict or a path, or args.deepspeed_config.")
    if dist_init_required or (dist_init_required is None and torch.distributed.is_available()):
        comm.init_distributed()
    engine = Engine(
        model,
        chosen,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        training_data=training_data,
        collate_fn=collate_fn,
        model_parameters=model_parameters,
    )
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config FILE`, which initialize(args=...) reads."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="for the script to ask; changes nothing by itself")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the configuration, as JSON")
    return parser


def init_inference(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises UnsupportedError: zerocore trains."""
    raise UnsupportedError(
        "[initialize] init_inference: got a call, expected none: there is no inference engine. Call the module in "
        "evaluation, or export its weights with `zerocore export`."
    )


def tp_model_init(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises UnsupportedError: there is no tensor parallelism."""
    raise UnsupportedError(
        "[initialize] tp_model_init: got a call, expected none: tensor parallelism is not available in this version."
    )
