"""What a line of the DeepSpeed table says about a key."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


class Use(enum.Enum):
    """What becomes of a key."""

    HONOURED = "it sets something"
    NO_EFFECT = "it is accepted, with one warning that it has no effect"
    UNAVAILABLE = "ConfigError, unless its value asks for nothing"
    RENAMED = "an older name, read with one warning"


class Auto(enum.Enum):
    """What the value "auto" becomes. Nobody but zerocore fills it in."""

    DEFAULT = "as if the key were not given"
    MUST_FILL = "an error: there is no sensible default"


@dataclass(frozen=True)
class Key:
    """One DeepSpeed key.

    Attributes:
        path: dotted.
        use: its class.
        type: what its value must be; None leaves that open.
        note: the native key (honoured), why nothing is lost (no effect), what is missing (unavailable) or the new
            name's path (renamed).
        auto: what "auto" becomes.
        off: values that ask for nothing, so that they are accepted without a word.
        switches: for a block: the names in it that switch it on.
        only: optimizer or scheduler types (lower case) that take this parameter; empty: all.
    """

    path: str
    use: Use
    type: Any
    note: str
    auto: Auto = Auto.DEFAULT
    off: tuple[Any, ...] = ()
    switches: tuple[str, ...] = ()
    only: tuple[str, ...] = ()

    def asks_for_nothing(self, value: Any) -> bool:
        """Whether `value` leaves off what the key is for, so that there is nothing to warn of."""
        if value is None or value == "auto" or any(_same(value, each) for each in self.off):
            return True
        if not self.switches or not isinstance(value, Mapping):
            return False
        found = list(_switch_positions(value, self.switches))
        return not value or (bool(found) and not any(found))


def honoured(path: str, type: Any, note: str, *, auto: Auto = Auto.DEFAULT, only: tuple[str, ...] = ()) -> Key:
    return Key(path, Use.HONOURED, type, note, auto=auto, only=only)


def no_effect(path: str, type: Any, note: str, *, off: tuple[Any, ...] = (), only: tuple[str, ...] = ()) -> Key:
    return Key(path, Use.NO_EFFECT, type, note, off=off, only=only)


def unavailable(path: str, note: str, *, off: tuple[Any, ...] = (False,), only: tuple[str, ...] = ()) -> Key:
    return Key(path, Use.UNAVAILABLE, None, note, off=off, only=only)


def unavailable_block(path: str, note: str, *, switches: tuple[str, ...] = ("enabled",)) -> Key:
    return Key(path, Use.UNAVAILABLE, None, note, off=(False,), switches=switches)


def renamed(path: str, new_path: str) -> Key:
    return Key(path, Use.RENAMED, None, new_path)


def _same(value: Any, other: Any) -> bool:
    """Equality in which True is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _switch_positions(block: Mapping[str, Any], switches: tuple[str, ...]) -> Iterator[bool]:
    """For each switch in a block and the blocks in it: whether it is on. A size or a number of stages of 1 is off."""
    for name, value in block.items():
        if isinstance(value, Mapping):
            yield from _switch_positions(value, switches)
        elif name in switches:
            yield not any(_same(value, off) for off in (False, None, "auto", "none", 0, 1))
