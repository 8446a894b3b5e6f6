"""zerocore trains PyTorch models with their states sharded over ranks (ZeRO): the same bits on any number of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zerocore import _channel, _departure

if TYPE_CHECKING:
    from zerocore import accelerator, checkpointing, comm, compat, errors, ops, utils, zero
    from zerocore._device import capabilities
    from zerocore._engine import Engine
    from zerocore._initialize import add_config_arguments, init_inference, initialize, tp_model_init
    from zerocore._outcome import GradNorm
    from zerocore.comm import init_distributed
    from zerocore.config import Config
    from zerocore.schedulers import WarmupCosineLR, WarmupDecayLR, WarmupLR

__version__ = "0.1.0"

# Where each public name lives: loaded on first use, so that `import zerocore` is quick and touches no device.
_HOMES = {
    "Config": "zerocore.config",
    "Engine": "zerocore._engine",
    "GradNorm": "zerocore._outcome",
    "WarmupCosineLR": "zerocore.schedulers",
    "WarmupDecayLR": "zerocore.schedulers",
    "WarmupLR": "zerocore.schedulers",
    "add_config_arguments": "zerocore._initialize",
    "capabilities": "zerocore._device",
    "init_distributed": "zerocore.comm",
    "init_inference": "zerocore._initialize",
    "initialize": "zerocore._initialize",
    "tp_model_init": "zerocore._initialize",
    "accelerator": "zerocore",
    "checkpointing": "zerocore",
    "comm": "zerocore",
    "compat": "zerocore",
    "errors": "zerocore",
    "ops": "zerocore",
    "utils": "zerocore",
    "zero": "zerocore",
}

__all__ = [
    "Config",
    "Engine",
    "GradNorm",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "accelerator",
    "add_config_arguments",
    "capabilities",
    "checkpointing",
    "comm",
    "compat",
    "errors",
    "init_distributed",
    "init_inference",
    "initialize",
    "ops",
    "tp_model_init",
    "utils",
    "zero",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'zerocore' has no attribute {name!r}")
        value = (
            importlib.import_module(f"zerocore.{name}")
            if home == "zerocore"
            else getattr(importlib.import_module(home), name)
        )
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)


_channel.write_whole_lines()
_departure.watch()
