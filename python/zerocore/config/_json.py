"""Reads a DeepSpeed configuration: a dict, strict JSON in a file or as base64, with errors that name the line."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerocore.config._problems import config_error, show
from zerocore.errors import ConfigError


def read(source: Mapping[str, Any] | str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    """The configuration, and what to call it in messages.

    Raises:
        ConfigError: the file cannot be read or is not strict JSON, a key is given twice, or the whole is not an object.
    """
    if isinstance(source, Mapping):
        return dict(source), "this configuration"
    if not isinstance(source, (str, os.PathLike)):
        raise config_error([f"config: got {type(source).__name__}, expected a zerocore.Config, a dict or a path."])
    encoded = _from_base64(source) if isinstance(source, str) else None
    text = _text(source) if encoded is None else encoded
    name = os.fspath(source) if encoded is None else "this base64 configuration"
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise _not_json(name, text, error) from None
    except _DuplicateError as error:
        raise config_error([f"{name}: got the key {error}, expected each key once. Remove one of them."]) from None
    except ValueError:  # Python's limit on the digits of an integer
        raise config_error([f"{name}: got an integer of thousands of digits, expected shorter ones."]) from None
    if not isinstance(value, dict):
        raise config_error([f"{name}: got {show(value)}, expected an object: {{...}}."])
    return value, name


class _DuplicateError(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _DuplicateError(f'"{key}" twice in one object ({json.dumps(values[key])}, then {json.dumps(value)})')
        values[key] = value
    return values


def _from_base64(source: str) -> str | None:
    """The JSON that DeepSpeed's launcher hands over as base64; None where `source` is something else: a path."""
    if len(source) < 4 or os.path.exists(source):
        return None
    try:
        text = base64.b64decode(source, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return text if text.lstrip().startswith("{") else None


def _text(source: str | os.PathLike[str]) -> str:
    try:
        return Path(source).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        why = "it is not UTF-8 text"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or str(error)
    raise config_error(
        [
            f"config: got {show(os.fspath(source))}, expected the path of a JSON file, but it cannot be read: {why}. "
            f"Check the path, which is taken from {os.getcwd()}, or pass the configuration as a dict."
        ]
    )


def _not_json(name: str, text: str, error: json.JSONDecodeError) -> ConfigError:
    position, got, fix = _diagnosis(text, error)
    number = text.count("\n", 0, position) + 1
    lines = text.splitlines()
    line = lines[number - 1].strip() if number <= len(lines) else ""
    return config_error([f"{name}, line {number}: got {got}, expected strict JSON. {fix} The line is: {show(line)}"])


def _diagnosis(text: str, error: json.JSONDecodeError) -> tuple[int, str, str]:
    """Where the fault lies, what it is, and how to mend it."""
    position = error.pos
    here = text[position:]
    before = text[:position].rstrip()
    if here.startswith(("//", "/*", "#")):
        return position, "a comment", "Remove it; JSON has no comments."
    comma = position if here.startswith(",") else len(before) - 1
    if text[comma : comma + 1] == "," and text[comma + 1 :].lstrip().startswith(("}", "]")):
        return comma, "a comma after the last element", "Remove the comma."
    for python, plain in (("True", "true"), ("False", "false"), ("None", "null")):
        if here.startswith(python):
            return position, f"Python's {python}", f"Write {plain}."
    if here.startswith("'"):
        return position, "a single quote", "Strings and keys stand in double quotes."
    if error.msg == "Extra data":
        return position, "text after the configuration's end", "Remove it."
    if not here.strip():
        return max(len(before) - 1, 0), "the end of the file", "A closing brace, bracket or quote is missing."
    return position, f"something else ({error.msg[0].lower()}{error.msg[1:]})", "Correct it."
