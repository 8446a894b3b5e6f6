"""What configuration errors and warnings have in common: their form, and the nearest key to an unknown one."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence

from zerocore.errors import ConfigError

_LONGEST_NAME = 200


class ConfigWarning(UserWarning):
    """Something in a configuration has no effect here, has a newer name, or was filled in."""


def config_error(problems: Sequence[str], *, source: str = "this configuration") -> ConfigError:
    """One error for all problems found, so that a user fixes them in one go.

    Args:
        problems: each `key: got X, expected Y. How to fix it.`
        source: where they were found, for a message that lists several.
    """
    if len(problems) == 1:
        return ConfigError(f"[config] {problems[0]}")
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return ConfigError(f"[config] {len(problems)} problems in {source}:{lines}")


def show_json(value: object) -> str:
    """A value as it stands in JSON: short."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):  # not a JSON value
        return show(value)
    return _short(text)


def show(value: object) -> str:
    """A value as an error message quotes it: short."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = f"a {type(value).__name__} too long to print"
    return _short(text)


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The dotted key that a mistyped or misplaced key most likely stands for, or None.

    A candidate counts with its last part as well as with its full path: `max_lr` finds `scheduler.warmup_max_lr`.
    """

    def plain(text: str) -> str:
        return text.strip().lower().replace(".", "_").replace("-", "_")

    wanted = plain(name)
    if len(wanted) > _LONGEST_NAME:
        return None  # comparing takes the square of its length
    best, best_score = None, 0.65
    for candidate in candidates:
        for form in {plain(candidate), plain(candidate.rpartition(".")[2])}:
            score = difflib.SequenceMatcher(None, wanted, form).ratio()
            if score > best_score:
                best, best_score = candidate, score
    return best


def unknown_key(key: str, near: str | None) -> str:
    """The problem text for a dotted key that nothing reads. `near`: what it probably stands for."""
    hint = f" Did you mean {near}?" if near else ""
    return f"{key}: got an unknown key, expected one of those in docs/configuration.md.{hint} Rename or remove it."
