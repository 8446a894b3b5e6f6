"""Translates a DeepSpeed configuration: looks every key up in the table, then builds the native configuration.

All problems are collected, and raised as one ConfigError. What is accepted with a remark is collected too, and warned
of once a kind.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from zerocore.config import _json
from zerocore.config._build import OPTIMIZERS, SCHEDULERS, build
from zerocore.config._keys import Auto, Key, Use
from zerocore.config._native import Config
from zerocore.config._problems import ConfigWarning, config_error, nearest, show_json, unknown_key
from zerocore.config._reading import Reading
from zerocore.config._sections import TORCH_SCHEDULERS
from zerocore.config._table import HINTS, TABLE
from zerocore.config._types import expected, one_of

_KEYS = {key.path: key for key in TABLE}
_SECTIONS = {path[:end] for path in _KEYS for end in range(len(path)) if path[end] == "."}
_EXAMPLES = {
    "optimizer": '{"type": "AdamW", "params": {"lr": 1e-4}}',
    "scheduler": '{"type": "WarmupLR", "params": {"warmup_num_steps": 100}}',
    "zero_optimization": '{"stage": 2}',
    "zero_optimization.offload_optimizer": '{"device": "cpu"}',
    "zero_optimization.offload_param": '{"device": "cpu"}',
    "fp16": '{"enabled": true}',
    "bf16": '{"enabled": true}',
}
_OFFLOAD = ("zero_optimization.offload_optimizer", "zero_optimization.offload_param")
_INVALID = object()


def translate(source: Mapping[str, Any] | str | os.PathLike[str], *, warn: bool) -> Config:
    """See Config.from_deepspeed."""
    try:
        raw, name = _json.read(source)
        config, reading = explain(raw)
        if config is None:
            raise config_error(reading.problems, source=name)
    except RecursionError:
        raise config_error(["config: got blocks nested too deeply to be read, expected at most a dozen."]) from None
    if warn:
        for message in _remarks(reading):
            warnings.warn(message, ConfigWarning, stacklevel=3)
    return config


def explain(raw: Mapping[str, Any]) -> tuple[Config | None, Reading]:
    """The configuration, None where keys are refused, and what became of each key."""
    reading = Reading(
        types={"optimizer": _type(raw, "optimizer", OPTIMIZERS), "scheduler": _type(raw, "scheduler", SCHEDULERS)}
    )
    _walk(raw, "", reading)
    return build(reading), reading


def _type(raw: Mapping[str, Any], section: str, known: Mapping[str, str]) -> str | None:
    block = raw.get(section)
    name = block.get("type") if isinstance(block, Mapping) else None
    return name.lower() if isinstance(name, str) and name.lower() in known else None


def _walk(block: Mapping[str, Any], prefix: str, reading: Reading) -> None:
    for name, value in block.items():
        path = f"{prefix}{name}"
        key = _KEYS.get(path)
        if key is not None and key.use is Use.RENAMED:
            if key.note.rpartition(".")[2] in block:
                reading.problems.append(
                    f"{path}: got both this and its newer name {key.note}, expected one. Remove this."
                )
                continue
            reading.older_names.append(f"{path}: now {key.note}")
            path, key = key.note, _KEYS.get(key.note)
        reading.given.add(path)
        if key is not None:
            _read(key, value, reading)
        elif path in _SECTIONS:
            _read_section(path, value, reading)
        elif str(name).startswith("_"):
            reading.without_effect.append(f"{path}: a name that starts with an underscore is taken for a comment")
        else:
            reading.problems.append(_unknown(path, str(name), reading))


def _read_section(path: str, value: Any, reading: Reading) -> None:
    if path == "zero_optimization" and isinstance(value, bool):
        reading.older_names.append(f'{path}: {show_json(value)} is now {{"stage": {int(value)}}}')
        reading.values["zero_optimization.stage"] = int(value)
    elif path in ("optimizer.params", "scheduler.params") and reading.types[path.partition(".")[0]] is None:
        return  # the type is unknown, which is reported, so nothing can be said of its parameters
    elif path == "scheduler.params" and SCHEDULERS[reading.types["scheduler"] or ""] in TORCH_SCHEDULERS:
        _read_torch_arguments(path, value, reading)
    elif isinstance(value, Mapping):
        said = len(reading.without_effect)
        _walk(value, f"{path}.", reading)
        if path in _OFFLOAD and value.get("device", "none") in ("none", "auto", None):
            del reading.without_effect[said:]  # a block that is off asks for nothing
    elif value is not None:
        reading.problems.append(f"{path}: got {show_json(value)}, expected an object: {_EXAMPLES.get(path, '{...}')}.")


def _read_torch_arguments(path: str, value: Any, reading: Reading) -> None:
    """Those of a schedule of torch, which are torch's to check."""
    if not isinstance(value, Mapping):
        reading.problems.append(f"{path}: got {show_json(value)}, expected an object: {{...}}.")
        return
    for name, each in value.items():
        if each == "auto":
            reading.problems.append(
                f'{path}.{name}: got "auto", expected a value. Nothing fills "auto" in here; write the value.'
            )
    reading.values[path] = dict(value)


def _read(key: Key, value: Any, reading: Reading) -> None:
    type_name = reading.types.get(key.path.partition(".")[0])
    if key.only and type_name not in key.only:
        reading.problems.append(_of_another_type(key, value, str(type_name)))
    elif value == "auto" and key.use is not Use.HONOURED:
        reading.autos.append(key.path)
    elif key.use is Use.UNAVAILABLE:
        if not key.asks_for_nothing(value):
            reading.problems.append(_unavailable(key, value))
    elif key.use is Use.NO_EFFECT:
        if not key.asks_for_nothing(value) and (checked := _checked(key, value, reading)) is not _INVALID:
            reading.without_effect.append(f"{key.path}: {key.note}")
            reading.idle[key.path] = checked
    elif value == "auto":
        reading.autos.append(key.path)
        if key.auto is Auto.MUST_FILL:
            reading.problems.append(
                f'{key.path}: got "auto", expected {_expected(key)}. Nothing fills "auto" in here; write the value.'
            )
    elif (checked := _checked(key, value, reading)) is not _INVALID:
        reading.values[key.path] = checked


def _checked(key: Key, value: Any, reading: Reading) -> Any:
    """The value in its proper type; or _INVALID, and a problem."""
    if key.type is None:
        return value
    try:
        return _adapter(key.path).validate_python(value, strict=True)
    except ValidationError:
        reading.problems.append(f"{key.path}: got {show_json(value)}, expected {_expected(key)}.{_unquote(value)}")
        return _INVALID


@functools.cache
def _adapter(path: str) -> TypeAdapter[Any]:
    return TypeAdapter(_KEYS[path].type)


def _unquote(value: Any) -> str:
    """Advice for "true" and "16", where true and 16 are meant."""
    try:
        plain = json.loads(value.lower()) if isinstance(value, str) else None
    except json.JSONDecodeError:
        plain = None
    return f" Remove the quotes: {json.dumps(plain)}." if isinstance(plain, (bool, int, float)) else ""


def _expected(key: Key) -> str:
    names = {"optimizer.type": OPTIMIZERS, "scheduler.type": SCHEDULERS}.get(key.path)
    return one_of(names.values()) if names else expected(key.type).replace("None", "null")


def _of_another_type(key: Key, value: Any, type_name: str) -> str:
    start = f"{key.path.partition('.')[0]}.params."
    takes = [
        each.path.removeprefix(start)
        for each in TABLE
        if each.path.startswith(start) and each.use is Use.HONOURED and (not each.only or type_name in each.only)
    ]
    return (
        f"{key.path}: got {show_json(value)}, expected a parameter of {(OPTIMIZERS | SCHEDULERS)[type_name]}, which "
        f"takes {', '.join(takes)}. Rename or remove it."
    )


def _unavailable(key: Key, value: Any) -> str:
    fix = f"Remove it, or set it to {show_json(key.off[0])}." if key.off else "Remove it."
    if key.switches:
        fix = f'Remove it, or set "{key.switches[0]}": false in it.'
    return (
        f"{key.path}: got {show_json(value)}, expected it to be off: {key.note} is not available in this version. {fix}"
    )


def _unknown(path: str, name: str, reading: Reading) -> str:
    section = path.removesuffix(name)
    usable = [
        key.path
        for key in TABLE
        if key.use is not Use.RENAMED and (not key.only or reading.types[key.path.partition(".")[0]] in key.only)
    ]
    usable += sorted(_SECTIONS)
    own = [each for each in usable if each.startswith(section) and "." not in each.removeprefix(section)]
    near = HINTS.get(name.strip()) or nearest(name, own) or nearest(name, usable)
    return unknown_key(path, near)


def _remarks(reading: Reading) -> Iterator[str]:
    if reading.without_effect:
        yield "\n  ".join(
            ["[config] these DeepSpeed keys have no effect in zerocore and can be removed:", *reading.without_effect]
        )
    if reading.older_names:
        yield "\n  ".join(["[config] these DeepSpeed keys have newer names:", *reading.older_names])
    if reading.autos:
        yield f'[config] nothing fills "auto" in here, so these keys count as not given: {", ".join(reading.autos)}'
