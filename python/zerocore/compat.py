"""Lets libraries that drive DeepSpeed drive zerocore: Accelerate, Hugging Face's Trainer, and what is built on them.

    import zerocore.compat

    zerocore.compat.install()
    from transformers import Trainer, TrainingArguments

A script that imports DeepSpeed itself needs none of this: `import zerocore as deepspeed`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

import zerocore
from zerocore import _released, accelerator, checkpointing, comm, groups, ops, schedulers, utils, zero
from zerocore._engine import Engine
from zerocore.errors import ConfigError

__all__ = ["VERSION", "install"]

# The version of DeepSpeed whose calls are stood in for: libraries ask.
VERSION = "0.19.8"

_SCHEDULES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")

_KINDS = ("live", "cold")  # of estimates: of a model that is there, and of one that is not

# transformers replaces the first while a model is built, so that torch.arange() keeps its dtype. Here nothing calls it.
_PATCHED_BY_TRANSFORMERS = {
    "zero_wrapper_for_fp_tensor_constructor": lambda fn, *args, **kwargs: fn,
    "_orig_torch_arange": torch.arange,
}

_METADATA = f"""Metadata-Version: 2.1
Name: deepspeed
Version: {VERSION}
Summary: zerocore {zerocore.__version__}, standing in for DeepSpeed
"""


def install() -> None:
    """From now on `import deepspeed`, in this process, gives zerocore; and it is found installed. Collective.

    To be called before Accelerate or transformers is imported, since they look for DeepSpeed when they are. It also
    calls zerocore.init_distributed(), since they use torch.distributed beside the engine; and where there is no
    accelerator it lets Accelerate count the ranks, which it otherwise does on other devices only. A second call does
    nothing.

    Raises:
        ConfigError: DeepSpeed, or a library that has found none, is imported already.
    """
    present = sys.modules.get("deepspeed")
    if isinstance(present, _Deepspeed):
        return
    if present is not None:
        raise ConfigError(
            "[compat] install: got deepspeed imported already, expected install() before. Call it first in the script."
        )
    _check_unimported()
    comm.init_distributed()  # may fail: nothing is there yet
    for name, module in _modules().items():
        sys.modules[name] = module
    sys.meta_path.insert(0, _Installed())
    _released.detach_keeps_refusing = True
    _adapt_accelerate()


class _Deepspeed(types.ModuleType):
    """The module `deepspeed`: everything of zerocore's, and what has another name there."""

    DeepSpeedEngine = Engine
    OnDevice = staticmethod(utils.OnDevice)
    __version__ = VERSION

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []  # what is not in sys.modules is nowhere
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(zerocore, name)


def _check_unimported() -> None:
    for library, looked in (
        ("accelerate", "accelerate.utils.deepspeed"),
        ("transformers", "transformers.integrations.deepspeed"),
    ):
        too_late = looked not in sys.modules if library == "accelerate" else looked in sys.modules
        if library in sys.modules and too_late and importlib.util.find_spec("deepspeed") is None:
            raise ConfigError(
                f"[compat] install: got {library} imported already, which has found no DeepSpeed, expected install() "
                "before. Call it first in the script."
            )


def _modules() -> dict[str, types.ModuleType]:
    """The modules that libraries import by name."""
    schedules = [name for name in _SCHEDULES if hasattr(schedulers, name)]
    found = {
        "deepspeed": _Deepspeed("deepspeed"),
        "deepspeed.accelerator": accelerator,
        "deepspeed.checkpoint": _module("checkpoint"),
        "deepspeed.checkpoint.utils": _module(
            "checkpoint.utils", {"clone_tensors_for_torch_save": clone_tensors_for_torch_save}
        ),
        "deepspeed.checkpointing": checkpointing,
        "deepspeed.comm": comm,
        "deepspeed.ops": ops,
        "deepspeed.ops.adagrad": ops.adagrad,
        "deepspeed.ops.adam": ops.adam,
        "deepspeed.ops.lion": ops.lion,
        "deepspeed.runtime": _module("runtime"),
        "deepspeed.runtime.dataloader": _module("runtime.dataloader", {"RepeatingLoader": utils.RepeatingLoader}),
        "deepspeed.runtime.engine": _module("runtime.engine", {"DeepSpeedEngine": Engine}),
        "deepspeed.runtime.lr_schedules": _module(
            "runtime.lr_schedules", {"VALID_LR_SCHEDULES": schedules, **_named(schedulers, schedules)}
        ),
        "deepspeed.runtime.utils": _module("runtime.utils", {"see_memory_usage": utils.see_memory_usage}),
        "deepspeed.runtime.zero": _module("runtime.zero", _named(zero, zero.__all__)),
        "deepspeed.runtime.zero.partition_parameters": _module(
            "runtime.zero.partition_parameters", {**_named(zero, zero.__all__), **_PATCHED_BY_TRANSFORMERS}
        ),
        "deepspeed.runtime.zero.stage3": _module(
            "runtime.zero.stage3",
            _named(utils, [f"estimate_zero3_model_states_mem_needs_all_{kind}" for kind in _KINDS]),
        ),
        "deepspeed.runtime.zero.stage_1_and_2": _module(
            "runtime.zero.stage_1_and_2",
            _named(utils, [f"estimate_zero2_model_states_mem_needs_all_{kind}" for kind in _KINDS]),
        ),
        "deepspeed.utils": _module("utils", _named(utils, utils.__all__)),
        "deepspeed.utils.groups": groups,
        "deepspeed.utils.logging": utils,
        "deepspeed.utils.zero_to_fp32": utils,
        "deepspeed.zero": zero,
    }
    for name, module in found.items():
        above, _, last = name.rpartition(".")
        if above:
            setattr(found[above], last, module)
    return found


def _module(name: str, contents: dict[str, Any] | None = None) -> types.ModuleType:
    module = types.ModuleType(f"deepspeed.{name}")
    module.__dict__.update(contents or {})
    return module


def _named(module: types.ModuleType, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """A copy of a state dict, or of lists and tuples of tensors, in which each tensor has memory of its own.

    A parameter of an engine is a view of its bucket, all of which torch.save() would write.
    """
    if isinstance(item, torch.Tensor):
        return item.detach().clone().to(device)
    if isinstance(item, dict):
        return type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(value, device) for value in item)
    return item


class _Installed(importlib.abc.MetaPathFinder):
    """Tells importlib.metadata of a distribution `deepspeed`. Finds no modules: they are in sys.modules."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        if context is None or context.name in (None, "deepspeed"):
            yield _Distribution()


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        return _METADATA if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise ConfigError("[compat] got a request for a file of DeepSpeed's, expected none: zerocore stands in for it.")


def _adapt_accelerate() -> None:
    """Lets Accelerate ask torch.distributed for the ranks of a DeepSpeed job where there is no accelerator, too."""
    if importlib.util.find_spec("accelerate") is None:
        return
    state: Any = importlib.import_module("accelerate.state").PartialState
    prepare = state._prepare_backend

    @functools.wraps(prepare)
    def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
            return prepare(self, *args, **kwargs)
        comm.tell_environment()  # where Accelerate looks for the ranks
        backend, kind = prepare(self, *args, **kwargs)
        return comm.BACKEND if backend is None else backend, kind

    state._prepare_backend = prepare_backend
