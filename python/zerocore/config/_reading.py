"""What was found in a DeepSpeed configuration, passed from the reader (_deepspeed.py) to the builder (_build.py)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reading:
    """All by dotted DeepSpeed path.

    Attributes:
        types: "optimizer" and "scheduler": their type in lower case, None where there is none or none that is known.
        given: every key and section that was there, right or wrong.
        values: the checked values of honoured keys.
        idle: the checked values of keys without effect.
        autos: keys whose value is "auto".
        problems: what becomes a ConfigError.
        without_effect, older_names: what becomes a warning.
    """

    types: dict[str, str | None]
    given: set[str] = field(default_factory=set)
    values: dict[str, Any] = field(default_factory=dict)
    idle: dict[str, Any] = field(default_factory=dict)
    autos: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)
    older_names: list[str] = field(default_factory=list)
