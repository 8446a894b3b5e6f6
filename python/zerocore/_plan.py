"""What an engine would hold on a rank, in bytes: found by building its core over memory that is addresses only."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from zerocore import _core, _optimizer, zero
from zerocore._other_state import cast_other_state, other_state_bytes
from zerocore._param_specs import DTYPES, ParamsForCore
from zerocore.config import Config
from zerocore.errors import ConfigError, Error

_EXPECTED = "module:function, which returns a model, or the name or folder of a Hugging Face model whose config is here"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes of a rank by the names of Engine.memory_report().

    Attributes:
        kept: what is there between steps, exactly.
        most: what comes to it at most while a step runs.
    """

    kept: dict[str, int]
    most: dict[str, int]

    @property
    def bytes(self) -> int:
        return sum(self.kept.values()) + sum(self.most.values())


def plan(model: torch.nn.Module, config: Config, ranks: int) -> Plan:
    """What Engine(model, config) would hold on each of so many ranks.

    Args:
        model: may be on the meta device. Its frozen parameters and buffers are cast, as an engine would.

    Raises:
        ConfigError, UnsupportedError: as Engine.
    """
    resolved = config.resolve(ranks)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = _optimizer.build(None, resolved.optimizer, trained, model=model)
    params = ParamsForCore(model, optimizer, resolved, zero.units_of(model, resolved))
    core = _core.StepEngine(comm=_core.plan_communicator(ranks), device=_core.plan_device(), **params.core_arguments)
    core.allocate_states()
    precision = resolved.precision
    cast_other_state(
        model, params.params, [DTYPES[precision.dtype], DTYPES[precision.compute_dtype or precision.dtype]]
    )
    most = core.most_while_running()
    kept = {name: count for name, count in core.memory_report().items() if name not in most}
    others = other_state_bytes(model, params.params)
    others["frozen_parameters"] += kept.get("frozen_parameters", 0)
    return Plan(kept | others, most)


def table(plans: Mapping[int, Plan | Error]) -> Iterator[str]:
    """The lines of a table of bytes by name, a column for each stage that is possible."""
    possible = {stage: each for stage, each in plans.items() if not isinstance(each, Error)}
    yield "\nbytes a rank".ljust(33) + "".join(f"stage {stage}".rjust(20) for stage in possible)

    def line(name: str, values: list[int]) -> str:
        return name.ljust(32) + "".join(f"{value:,}".rjust(20) for value in values)

    for name in {name: None for each in possible.values() for name in each.kept}:
        yield line(name, [each.kept.get(name, 0) for each in possible.values()])
    yield line("between steps", [sum(each.kept.values()) for each in possible.values()])
    for name in {name: None for each in possible.values() for name in each.most}:
        yield line(f"{name}, at most", [each.most.get(name, 0) for each in possible.values()])
    yield line("in a step, at most", [each.bytes for each in possible.values()])
    yield "not counted: activations, and gradients before they are reduced"
    yield from (f"stage {stage}: {each}" for stage, each in plans.items() if isinstance(each, Error))


def build_model(spec: str) -> torch.nn.Module:
    """The model that a user names, on the meta device: its shapes, without memory.

    Args:
        spec: module:function, or a Hugging Face model: a folder, or a name whose config is cached.

    Raises:
        ConfigError: there is none, or it cannot be built there.
    """
    module, colon, function = spec.partition(":")
    make = _factory(module, function) if colon and not os.path.exists(spec) else _hugging_face(spec)
    try:
        with torch.device("meta"):
            model = make()
    except Exception as error:
        raise ConfigError(
            f"[plan] --model {spec}: got {type(error).__name__}: {error}, expected it to be built on the meta device. "
            "Name a function that reads no values of tensors while it builds the model."
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"[plan] --model {spec}: got {type(model).__name__}, expected a torch.nn.Module.")
    return model


def _factory(module: str, function: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for name in function.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"[plan] --model {module}:{function}: got {error}, expected {_EXPECTED}. Run it where Python finds the "
            "module."
        ) from error
    finally:
        sys.path.pop(0)
    return found


def _hugging_face(spec: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"[plan] --model {spec}: got no transformers, expected {_EXPECTED}. pip install transformers."
        ) from None
    try:
        config = transformers.AutoConfig.from_pretrained(spec, local_files_only=True)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0].rstrip(".")
        raise ConfigError(
            f"[plan] --model {spec}: got no such model ({first}), expected {_EXPECTED}. Name a folder with a "
            "config.json."
        ) from error
    names = config.architectures or []
    found = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    if found is None:
        return functools.partial(transformers.AutoModel.from_config, config)
    return functools.partial(found, config)
