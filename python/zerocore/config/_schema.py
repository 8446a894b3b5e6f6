"""The decorator behind the native configuration: frozen, keyword-only dataclasses that pydantic validates.

pydantic does the checking; this file turns what it reports into ConfigError with our words and dotted keys.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pydantic.dataclasses
from pydantic import ConfigDict, ValidationError
from typing_extensions import dataclass_transform

from zerocore.config._problems import config_error, nearest, show, unknown_key
from zerocore.config._types import expected

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def schema(prefix: str) -> Callable[[type[T]], type[T]]:
    """Makes a class a frozen, keyword-only dataclass whose values are checked when it is built.

    Args:
        prefix: where the class stands in Config ("zero", or "" for Config itself), for dotted keys in messages.

    A class may define `_contradictions(self) -> Iterator[str]`: problems between keys that are each fine on their own.
    Building it raises ConfigError listing every problem.
    """

    def decorate(cls: type[T]) -> type[T]:
        config = ConfigDict(strict=True, extra="forbid")
        made = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=config)(cls)
        validate = made.__init__

        @functools.wraps(validate)
        def checked_init(self: Any, *args: Any, **values: Any) -> None:
            if args:
                raise config_error([f"{cls.__name__}: got {show(args[0])} by position, expected keys. Name the key."])
            try:
                validate(self, **values)
            except ValidationError as error:
                raise config_error(list(_problems(made, prefix, values, error))) from None
            problems = list(getattr(self, "_contradictions", tuple)())
            if problems:
                raise config_error(problems)

        made.__init__ = checked_init  # type: ignore[method-assign]
        return typing.cast("type[T]", made)

    return decorate


def dotted_keys(cls: type, *, prefix: str = "") -> dict[str, dataclasses.Field[Any]]:
    """Every key of a schema class and of those nested in it, by dotted name, in order of declaration."""
    keys: dict[str, dataclasses.Field[Any]] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        nested = nested_class(hints[field.name])
        if nested is None:
            keys[prefix + field.name] = field
        else:
            keys.update(dotted_keys(nested, prefix=f"{prefix}{field.name}."))
    return keys


def nested_class(hint: Any) -> type | None:
    """The schema class in a type hint such as `ZeroConfig` or `OptimizerConfig | None`, or None."""
    for part in (hint, *typing.get_args(hint)):
        if isinstance(part, type) and dataclasses.is_dataclass(part):
            return part
    return None


def _problems(cls: type, prefix: str, values: dict[str, Any], error: ValidationError) -> Iterator[str]:
    hints = typing.get_type_hints(cls, include_extras=True)
    seen = set()
    for detail in error.errors(include_url=False):
        name = str(detail["loc"][0])
        if name in seen:  # a union reports each of its parts
            continue
        seen.add(name)
        key = f"{prefix}.{name}" if prefix else name
        if name not in hints:
            yield unknown_key(key, _likely(cls, prefix, name))
        elif detail["type"] == "missing":
            yield f"{key}: got nothing, expected {expected(hints[name])}. Set it."
        else:
            yield f"{key}: got {show(values[name])}, expected {expected(hints[name])}."


def _likely(cls: type, prefix: str, name: str) -> str | None:
    """What an unknown key stands for: DeepSpeed's name of a key, or one mistyped in this class, or in the whole."""
    from zerocore.config._native import Config
    from zerocore.config._table import NATIVE_NAMES

    own = [f"{prefix}.{key}" if prefix else key for key in dotted_keys(cls)]
    return NATIVE_NAMES.get(name) or nearest(name, own) or nearest(name, dotted_keys(Config))
